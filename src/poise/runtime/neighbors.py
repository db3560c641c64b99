"""Processes of other workers on this machine: whether they live, by what the kernel says."""

import os
import select
import socket
from contextlib import suppress
from pathlib import Path

from poise.core.liveness import Process, Sign
from poise.runtime.termination import SIGNAL

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_place() -> str:
    """Return where process numbers have a meaning, and life is enough to be reached.

    That is one boot of one machine, and there one container and one network: the process of a
    worker whose link is cut lives on. Empty where that cannot be told, so that nobody's process
    is looked for at the wrong place; two machines may well have the same name.
    """
    try:
        spaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
        return " ".join([_BOOT.read_text().strip(), *map(str, spaces)])
    except OSError:
        return ""


class Neighbors:
    """The processes of workers that run here, and the wait for one of them to end."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.ended: set[int] = set()
        """Workers whose process is gone."""
        self._handles: dict[int, int] = {}
        """Of each worker: what the kernel reports the end of its process by."""
        self._seen: dict[int, tuple[str, int]] = {}
        """Of each worker that was silent: state and CPU time of its process at the last look."""
        self._poll = select.poll()
        self._woken, self.waker = socket.socketpair()
        for end in (self._woken, self.waker):
            end.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)

    def meet(self, peer: Sign) -> None:
        """Watch a worker's process, if it runs here and is another than this one."""
        here = self._place and peer.place == self._place and peer.pid != os.getpid()
        if not here or peer.worker in self._handles or peer.worker in self.ended:
            return
        try:
            handle = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            self.ended.add(peer.worker)
        except OSError:  # an old kernel, or one that forbids it: then silence tells
            return
        else:
            self._handles[peer.worker] = handle
            self._poll.register(handle, select.POLLIN)

    def wait(self, limit_s: float) -> bool:
        """Wait until a process ends, `wake` is called, or the limit passes.

        Returns whether SIGTERM came, whose number the interpreter writes to `waker`.
        """
        terminated = False
        ready = {number for number, _ in self._poll.poll(max(0.0, limit_s) * 1000)}
        if self._woken.fileno() in ready:
            with suppress(BlockingIOError):
                terminated = bytes([SIGNAL]) in self._woken.recv(4096)
        for worker, handle in list(self._handles.items()):
            if handle in ready:
                self.ended.add(worker)
                self._let_go(worker)
        return terminated

    def wake(self) -> None:
        """End a wait; may be called from any thread, and after `close`."""
        with suppress(OSError):  # it is awake already, or closed
            self.waker.send(b"\0")

    def process_of(self, peer: Sign, *, silent: bool) -> Process:
        """Say what is known of a worker's process; of a silent one, also what it does.

        A process that computes and gives no sign of life, since something holds the lock of the
        interpreter, is alive. One that neither computes nor gives a sign is not called so.
        """
        if peer.worker in self.ended:
            return "ended"
        if peer.worker not in self._handles:
            return "unknown"
        if not silent:
            self._seen.pop(peer.worker, None)
            return "alive"
        state, ticks = _state_of(peer.pid)
        before = self._seen.setdefault(peer.worker, (state, ticks))
        if state in "Tt":
            return "stopped"
        return "alive" if ticks > before[1] else "idle"

    def close(self) -> None:
        """Let go of everything."""
        for worker in list(self._handles):
            self._let_go(worker)
        self._woken.close()
        self.waker.close()

    def _let_go(self, worker: int) -> None:
        handle = self._handles.pop(worker)
        self._poll.unregister(handle)
        os.close(handle)


def _state_of(pid: int) -> tuple[str, int]:
    """Return the state of a process, and the CPU time that it has used, in ticks."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "?", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])

"""The TCP connections that torch opens for us, so that a wait in torch can be ended from outside.

Gloo's groups cannot be aborted, and a call of a TCPStore whose host is stopped does not return:
torch's own limits do not reach that far. What does is to shut down their sockets: whoever waits
for one is told at once that the other end is gone. Which sockets these are is seen by looking at
this process's descriptors before and after torch opens them. Those that other threads open at the
same time are told apart: Python's own are closed when another program is run, and gloo's are not;
a store's are known by its port.
"""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

_DESCRIPTORS = Path("/proc/self/fd")
_known: "WeakSet[Sockets]" = WeakSet()
_watching: list[bool] = []


class Sockets:
    """Connections of this process, known by descriptor and inode, which together are unique."""

    def __init__(self, store_port: int | None = None) -> None:
        """Know none yet; of those that are opened, a store with this port has some."""
        self._inodes: dict[int, int] = {}
        self._opened_port = store_port
        self._store_port: int | None = None
        self._spared: Sockets | None = None
        _known.add(self)
        if not _watching:
            _watching.append(True)
            os.register_at_fork(after_in_child=_keep_from_child)

    @contextmanager
    def opening(self, limit_s: float | None = None) -> Iterator[None]:
        """Count what is opened in here among these; cut it if that takes longer than a limit."""
        before = _sockets()

        def look() -> None:
            opened = _sockets().items() - before.items()
            self._inodes.update((n, inode) for n, inode in opened if self._is_torchs(n))

        def give_up() -> None:
            look()
            self.cut()

        deadline = None if limit_s is None else threading.Timer(limit_s, give_up)
        if deadline is not None:
            deadline.name, deadline.daemon = "poise-deadline", True
            deadline.start()
        try:
            yield
        finally:
            if deadline is not None:
                deadline.cancel()
                deadline.join()
            look()

    def count_store(self, port: int | None, *, spared: "Sockets") -> None:
        """Count the connections with the store at this port, whenever they come, but for some."""
        self._store_port, self._spared = port, spared

    def cut(self) -> None:
        """Shut them down: whoever waits for one is woken up, on both ends. From any thread.

        The store's own ends, if it is hosted here, stay open: others learn there what happened.
        """
        spared = {} if self._spared is None else self._spared._inodes
        for number, inode in self._ours().items() - spared.items():
            try:
                # A second handle, since torch may close the first one at any moment.
                end = socket.socket(fileno=os.dup(number))
            except OSError:
                continue
            with end, suppress(OSError):  # it listens, or is shut down already
                if os.fstat(end.fileno()).st_ino != inode:
                    continue
                if self._store_port is None or end.getsockname()[1] != self._store_port:
                    end.getpeername()
                    end.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Know none any more."""
        self._inodes.clear()
        self._store_port = None

    def keep_from_child(self) -> None:
        """In a process that was just forked: let go of them, in favor of nothing.

        Else they would stay open after the end of the parent until the child ends, and nobody
        would notice the end of the parent by them. The numbers stay taken, since objects of torch
        that were copied, too, may close them.
        """
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in self._ours():
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)

    def _is_torchs(self, number: int) -> bool:
        ports = _ports(number)
        try:
            return bool(ports) and (self._opened_port in ports or os.get_inheritable(number))
        except OSError:  # it is closed already
            return False

    def _ours(self) -> dict[int, int]:
        """Return those that are open now, and the store's, by descriptor."""
        return {
            number: inode
            for number, inode in _sockets().items()
            if self._inodes.get(number) == inode or self._store_port in _ports(number)
        }


def _keep_from_child() -> None:
    for sockets in list(_known):
        with suppress(OSError):
            sockets.keep_from_child()


def _sockets() -> dict[int, int]:
    """Return the inode of each descriptor that is a socket; none where that cannot be seen."""
    found = {}
    with suppress(OSError):
        for entry in os.scandir(_DESCRIPTORS):
            with suppress(OSError, ValueError):
                number = int(entry.name)
                status = os.fstat(number)
                if stat.S_ISSOCK(status.st_mode):
                    found[number] = status.st_ino
    return found


def _ports(number: int) -> set[int | None]:
    """Return the ports of both ends of a TCP socket; none of another."""
    ports: set[int | None] = set()
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
        if end.family in (socket.AF_INET, socket.AF_INET6):
            ports.add(end.getsockname()[1])
            with suppress(OSError):
                ports.add(end.getpeername()[1])
    return ports

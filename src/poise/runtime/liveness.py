"""Heartbeats at the rendezvous, and the search for the worker that is lost.

A collective that takes long proves nothing: worker 0 may evaluate for ten minutes. A worker is
lost when its connection broke, when it said so itself, or when the hang limit has passed.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from poise.core.liveness import Blame, Sign, find_culprit
from poise.errors import WorkerLost
from poise.runtime.clocks import Waits, host_stamp
from poise.runtime.collectives import Disconnected
from poise.runtime.events import Events, Lost
from poise.runtime.generation import Generation
from poise.runtime.rendezvous import Rendezvous, RendezvousLost

_BEAT_S = 0.5
_POLL_S = 0.1
_SEARCH_S = 6.0
"""How long to look for the culprit before giving up on a name."""
_LINGER_S = 3.0
"""How long worker 0, which may host the rendezvous, leaves it to the others after a loss."""


class Heart(threading.Thread):
    """Calls a function twice a second, as long as that returns True."""

    def __init__(self, beat: Callable[[], bool]) -> None:
        super().__init__(name="poise-heartbeat", daemon=True)
        self._beat = beat
        self._ended = threading.Event()

    def run(self) -> None:
        """Beat."""
        while not self._ended.wait(_BEAT_S) and self._beat():
            pass

    def end(self) -> None:
        """Beat no more."""
        self._ended.set()
        if self.is_alive():
            self.join()


class Liveness:
    """This worker's heartbeat, and its view of the others."""

    def __init__(
        self, generation: Generation, rendezvous: Rendezvous, waits: Waits, events: Events
    ) -> None:
        self.step = 0
        """The step this worker is at; whoever hears of steps keeps it."""
        self.reductions = 0
        """Gradient reductions it has entered; kept likewise."""
        self._calls = 0
        self._said = Sign(
            worker=generation.worker,
            host=socket.gethostname(),
            namespace=_process_namespace(),
            pid=os.getpid(),
        )
        self._generation = generation
        self._rendezvous = rendezvous
        self._waits = waits
        self._events = events
        self._telling = threading.Lock()
        self._lost: set[int] | None = None
        """Workers that were found lost; None: nothing was found to be wrong."""
        self._heart = Heart(self._beat)
        self._say()
        if generation.workers > 1:
            self._heart.start()

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a call that all workers make together, and count it."""
        self._calls += 1
        with self.watch(doing):
            yield

    @contextmanager
    def watch(self, doing: str) -> Iterator[None]:
        """Run something that waits for others; a failure names the worker that is lost."""
        start_s = time.perf_counter()
        try:
            with self.naming(doing):
                yield
        finally:
            self._waits.seconds += time.perf_counter() - start_s

    @contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """Run something that fails if others are gone; a failure names the worker that is lost."""
        try:
            yield
        except Disconnected as error:
            raise self.lost(doing, error) from error

    def lost(self, doing: str, error: Disconnected) -> WorkerLost:
        """Find out who is lost, say so on stderr and to the others, and return the error."""
        blame = self._search(timed_out=error.timed_out)
        if blame is None:
            cause = str(error).splitlines()[0]
            reason = message = f"{doing} failed, and no worker could be found at fault: {cause}"
        else:
            reason, message = blame.reason, f"{blame.reason} ({doing} cannot go on)"
        self._leave(reason, lost=blame.worker if blame else None)
        sys.stderr.write(f"poise: worker {self._said.worker}: {message}\n")
        sys.stderr.flush()
        if blame is not None:
            stamp = host_stamp(self._waits)
            self._events.tell(Lost(self.step, stamp, blame.worker, blame.reason))
        self._lost = {blame.worker} if blame else set()
        return WorkerLost(message)

    def fail(self, why: str) -> None:
        """Tell the others that this worker stops because of an error of its own."""
        if self._said.state == "running":
            self._leave(why, lost=None)
        self.end()

    def linger(self) -> None:
        """On worker 0, which may host the rendezvous: let others find the same culprit first.

        To be called when this worker has left its groups, from which they see that it is so far.
        """
        if self._said.worker != 0 or self._lost is None:
            return
        deadline = time.monotonic() + _LINGER_S
        with suppress(RendezvousLost):
            while time.monotonic() < deadline and any(
                peer.state == "running" and not self._gone(peer)
                for peer in self._signs().values()
                if peer.worker not in self._lost
            ):
                time.sleep(_POLL_S)

    def finish(self) -> None:
        """Say that this worker is done, and wait until every other one is done or lost.

        A process that ends while others still talk can abort them. The wait ends as soon as a
        peer is found waiting for something that this worker will never do.
        """
        with suppress(RendezvousLost):  # it ends with the worker that hosts it, which is done too
            self._say(state="done")
            self._await_peers()
        self.end()

    def _await_peers(self) -> None:
        before, since = self._signs(), time.monotonic()
        while True:
            now = self._signs()
            if all(peer.state != "running" for peer in now.values()):
                return
            if any(peer.reached > self._mine().reached for peer in now.values()):
                return
            if any(now[peer].beat != before[peer].beat for peer in now):
                before, since = now, time.monotonic()
            if time.monotonic() - since > 10 * _BEAT_S:
                return
            time.sleep(_POLL_S / 2)

    def _search(self, *, timed_out: bool) -> Blame | None:
        start = time.monotonic()
        try:
            before = now = self._signs()
            while (waited_s := time.monotonic() - start) < _SEARCH_S:
                blame = find_culprit(
                    self._mine(),
                    before,
                    now,
                    waited_s=waited_s,
                    timed_out=timed_out,
                    gone=frozenset(peer.worker for peer in now.values() if self._gone(peer)),
                )
                if blame is not None:
                    return blame
                time.sleep(_POLL_S)
                now = self._signs()
        except RendezvousLost:
            gone = "the store that it or its launcher hosts is gone"
            return Blame(0, f"worker 0 died at step {self.step}: {gone}")
        return None

    def _beat(self) -> bool:
        """Give a sign of life; False: nobody can hear it any more."""
        try:
            self._say(beat=self._said.beat + 1)
        except RendezvousLost:  # the search for the culprit says so
            return False
        return True

    def end(self) -> None:
        """Give no more signs of life."""
        self._heart.end()

    def _leave(self, why: str, *, lost: int | None) -> None:
        with suppress(RendezvousLost):  # then nobody is left to be told
            self._say(state="left", why=why, lost=lost)

    def _say(self, **changes: Any) -> None:
        with self._telling:  # one at a time, so that no older sign follows a newer one
            self._said = replace(self._mine(), **changes)
            self._rendezvous.set(self._key(self._said.worker), self._said.to_json())

    def _mine(self) -> Sign:
        """This worker's sign as of now."""
        return replace(self._said, step=self.step, reductions=self.reductions, calls=self._calls)

    def _signs(self) -> dict[int, Sign]:
        """What the others last said."""
        peers = [each for each in range(self._generation.workers) if each != self._said.worker]
        texts = self._rendezvous.get([self._key(peer) for peer in peers]) if peers else []
        return {peer: Sign.from_json(text) for peer, text in zip(peers, texts, strict=True)}

    def _key(self, worker: int) -> str:
        return f"sign/{self._generation.number}/{worker}"

    def _gone(self, peer: Sign) -> bool:
        """Whether a peer's process on this machine has ended; False where that cannot be seen."""
        here = (self._said.host, self._said.namespace)
        if (peer.host, peer.namespace) != here or peer.state != "running":
            return False
        try:
            status = Path(f"/proc/{peer.pid}/stat").read_text()
        except FileNotFoundError:
            return Path("/proc/self/stat").exists()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "ZX"


def _process_namespace() -> int:
    """Number the space in which process ids have a meaning; 0 where there is only one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0

"""Whether the other workers live, and who is lost when they do not.

A collective that takes long proves nothing: worker 0 may evaluate for ten minutes. A worker is
lost when it says so itself, when its process has ended, when it gives no sign of life for
`silent_s`, or when others wait for it for `hang_s`. Whoever finds that out first says so at the
rendezvous, and that word is everybody's: later guesses do not replace it.

Two threads see to it: the heartbeat, which the host of the rendezvous may stop, and the lookout,
which nothing stops.
"""

import os
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from poise.core.liveness import Blame, Limits, Sign, leaving
from poise.errors import WorkerLost
from poise.runtime.clocks import Waits, host_stamp
from poise.runtime.collectives import Disconnected
from poise.runtime.events import Events, Lost
from poise.runtime.generation import Generation
from poise.runtime.heartbeat import Heartbeat
from poise.runtime.lookout import Lookout
from poise.runtime.neighbors import this_place
from poise.runtime.rendezvous import Rendezvous


@dataclass(eq=False)
class Whereabouts:
    """How far this worker is, for the others to see."""

    step: int = 0
    """The step it is at."""
    reductions: int = 0
    """Gradient reductions it has entered,"""
    reduced: int = 0
    """and of these, those that are over."""
    calls: int = 0
    """Other calls that all workers make together it has entered."""
    doing: list[str] = field(default_factory=list)
    """What it waits for others in."""


class Liveness:
    """This worker's signs of life, and its view of the others."""

    def __init__(
        self,
        generation: Generation,
        rendezvous: Rendezvous,
        waits: Waits,
        events: Events,
        limits: Limits,
    ) -> None:
        self.here = Whereabouts()
        """Whoever hears of steps and reductions keeps it."""
        self._generation = generation
        self._waits = waits
        self._events = events
        self._limits = limits
        host, worker = socket.gethostname(), generation.worker
        self._stderr = sys.stderr
        self._failed = ""
        """Why this worker stops because of an error of its own."""
        self._said = Sign(worker=worker, host=host, place=this_place(), pid=os.getpid())
        self._heartbeat = Heartbeat(rendezvous, generation, self.sign, limits)
        self._lookout = Lookout(self, self._heartbeat, rendezvous.launcher, limits)
        if generation.workers > 1:
            self._heartbeat.start()
            self._lookout.start()
            self._heartbeat.settle(limits.silent_s)  # so that a worker that is lost is known

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a call that all workers make together, and count it."""
        self.here.calls += 1
        with self.watch(doing):
            yield

    @contextmanager
    def watch(self, doing: str) -> Iterator[None]:
        """Run something that waits for others; a failure names the worker that is lost."""
        start_s = time.perf_counter()
        self.here.doing.append(doing)
        try:
            with self.naming(doing):
                yield
        finally:
            self.here.doing.remove(doing)
            self._waits.seconds += time.perf_counter() - start_s

    @contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """Run something that fails if others are gone; a failure names the worker that is lost."""
        try:
            if self._lookout.verdict is not None:
                raise Disconnected("a worker is lost")
            yield
        except Disconnected as error:
            raise self.lost(doing, error) from error

    def lost(self, doing: str, error: Disconnected) -> WorkerLost:
        """Find out who is lost, and return the error; it is said on stderr and to the others."""
        blame = self._lookout.find("timed out" if error.timed_out else "broken")
        self.here.reduced = self.here.reductions
        if blame is None:
            cause = str(error).splitlines()[0]
            message = f"{doing} failed, and no worker could be found at fault: {cause}"
            self.say(message)
            return WorkerLost(message)
        self._events.tell(Lost(self.here.step, host_stamp(self._waits), blame.worker, blame.reason))
        return WorkerLost(f"{blame.reason} ({doing} cannot go on)")

    def fail(self, why: str) -> None:
        """Tell the others that this worker stops because of an error of its own."""
        if self._said.state != "running":
            return
        self._failed = why
        if self._lookout.verdict is None:
            last = replace(self.sign(), why=why)
            self._lookout.confess(Blame(last.worker, leaving(last)))
        # Not earlier: if this comes of the loss of another, that one is to be named first.
        self._leave_sign(state="left", why=why)

    def finish(self) -> None:
        """Say that this worker is done, and wait until every other one is done or lost.

        A process that ends while others still talk can abort them. The wait ends as soon as a
        peer is found waiting for something that this worker will never do.
        """
        self._leave_sign(state="done")
        reached = self.sign().reached

        def over(peers: Collection[Sign]) -> bool:
            waiting = any(peer.reached > reached for peer in peers)
            return waiting or all(peer.knows or peer.state != "running" for peer in peers)

        self._lookout.await_others(over, self._limits.hang_s)
        self._lookout.await_blame()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Let go of connections in here; should that wait for a lost worker, it is ended, too."""
        self.here.reduced = self.here.reductions
        self.here.doing.append("the end of the training")
        try:
            yield
        finally:
            self.here.doing.pop()

    def leave(self) -> None:
        """Give no more signs of life; to be called when this worker has left its groups.

        Worker 0 may host the rendezvous, so it goes last: the others hear first who is to blame.
        """
        self._leave_sign(knows=True)
        if self._said.worker:
            if not self._lookout.deaf:
                self._heartbeat.settle(self._limits.broken_s)
        else:
            limit_s = self._limits.silent_s
            self._lookout.await_others(lambda peers: all(peer.knows for peer in peers), limit_s)
        self.end()

    def note(self, text: str) -> None:
        """Let the others know something of this worker, before it meets them again."""
        self._leave_sign(note=text)
        self._heartbeat.settle(self._limits.broken_s)

    def notes(self) -> dict[int, str]:
        """Return what the others let everybody know, as far as they can be heard."""
        self._heartbeat.watch_all()
        self._heartbeat.settle(self._limits.broken_s)
        return {worker: sign.note for worker, sign in self._heartbeat.heard.signs.items()}

    def end(self) -> None:
        """Give no more signs of life, at once."""
        self._lookout.end()
        self._heartbeat.end()

    def sign(self) -> Sign:
        """What this worker says of itself."""
        here = self.here
        return replace(
            self._said,
            beat=self._heartbeat.rounds + 1,
            step=here.step,
            reductions=here.reductions,
            calls=here.calls,
        )

    def waits(self) -> bool:
        """Whether this worker waits for others, as far as is known."""
        return bool(self.here.doing) or self.here.reductions > self.here.reduced

    def cut(self) -> None:
        """End everything in which this worker waits for others."""
        self._generation.collectives.cut()

    def report(self, blame: Blame) -> None:
        """Say who is lost, unless that is this worker itself, or its own error says the same."""
        failed = self._failed
        if failed and (failed in blame.reason or blame.reason.startswith(self.sign().address)):
            return
        self._leave_sign(knows=True)
        if failed or self._said.state == "done":
            self.say(blame.reason)
            return
        doing = self.here.doing[-1:] or [
            f"the reduction of step {self.here.step}"
            for _ in range(self.here.reduced, self.here.reductions)
        ]
        self.say(blame.reason + "".join(f" ({each} cannot go on)" for each in doing))

    def say(self, message: str) -> None:
        """Say something to people, wherever standard error went when this worker began."""
        # Torch's hook for uncaught errors collects what is written to sys.stderr while it runs, and
        # the process may be ended before it passes that on.
        for stream in dict.fromkeys((self._stderr, sys.stderr)):
            with suppress(Exception):  # closed, or on a full disk: it is in the error, too
                stream.write(f"poise: worker {self._said.worker}: {message}\n")
                stream.flush()
                return

    def _leave_sign(self, **changes: Any) -> None:
        self._said = replace(self._said, **changes)
        self._heartbeat.request()

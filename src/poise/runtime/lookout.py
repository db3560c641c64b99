"""The thread that finds out which worker is lost. It talks with nobody, so nothing stops it.

It reads what the heartbeat brings, looks at the processes of this machine, and counts how long the
rendezvous has not answered. Once it is known who is lost, it ends what this worker waits in.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

from poise.core.liveness import Blame, Limits, Process, Sign, Trouble, View, find_culprit
from poise.runtime.heartbeat import Heartbeat
from poise.runtime.neighbors import Neighbors
from poise.runtime.termination import Termination, end_by_signal

_FAILED = 1
"""The exit code of a process that has to be ended."""


class Lookout(threading.Thread):
    """Looks out for one worker."""

    def __init__(
        self, worker: "OnDuty", heartbeat: Heartbeat, launcher: str | None, limits: Limits
    ) -> None:
        """Prepare; `start` begins.

        Args:
            worker: for whom to look.
            heartbeat: brings what the others say.
            launcher: what hosts the rendezvous, in words; None: worker 0 does.
            limits: says how long to wait for what.
        """
        super().__init__(name="poise-lookout", daemon=True)
        self.verdict: Blame | None = None
        """The worker that is lost; None: nothing is known to be wrong."""
        self._worker = worker
        self._heartbeat = heartbeat
        self._launcher = launcher
        self._limits = limits
        self._neighbors = Neighbors(worker.sign().place)
        self._termination: Termination | None = None
        self._terminated = False
        """Whether SIGTERM came while this thread was at something else."""
        self._search = _Search()
        self._changed = threading.Condition()
        self._over = False

    def start(self) -> None:
        """Begin, and hear of SIGTERM from now on."""
        self._termination = Termination(self._neighbors.waker)
        super().start()

    def run(self) -> None:
        """Look, until the end."""
        beat_s, rounds, looked_s = self._limits.beat_s, 0, time.monotonic()
        while not self._over:
            pending_s = 0.0 if self._terminated else beat_s
            terminated = self._neighbors.wait(pending_s) or self._terminated
            self._terminated = False
            if terminated and self._termination and self._termination.counts:
                self._terminate()
            # Time in which this thread did not run, as in a stopped process, does not count.
            now_s = time.monotonic()
            passed_s, looked_s = min(now_s - looked_s, 2 * beat_s), now_s
            if self._heartbeat.rounds != rounds:
                rounds, self._search.deaf_s = self._heartbeat.rounds, 0.0
            else:
                self._search.deaf_s += passed_s
            with suppress(Exception):  # nothing ends this thread: the others' waits end by it
                if self.verdict is None:
                    self._look()
            with suppress(Exception):
                if self.verdict is not None:
                    self._press(passed_s)

    @property
    def deaf(self) -> bool:
        """Whether the rendezvous does not answer, so that there is nothing to wait for at it."""
        return self._search.deaf_s >= self._limits.silent_s

    def find(self, trouble: Trouble) -> Blame | None:
        """Return who is to blame for what this worker saw; None: nobody can be found."""
        self._search.trouble = self._search.trouble or trouble
        self._heartbeat.watch_all()
        self._heartbeat.request()
        self._neighbors.wake()
        with self._changed:
            if self.is_alive():
                self._changed.wait_for(lambda: self.verdict is not None, self._limits.search_s)
        return self.verdict

    def confess(self, blame: Blame) -> None:
        """Tell the others that this worker is to blame, unless another is known to be.

        Its error may come of the loss of another: a launcher then ends its loader processes, too.
        """
        self._search.confession = blame
        self._neighbors.wake()
        with self._changed:
            if self.is_alive():
                limit_s = 2 * self._limits.silent_s + self._limits.doubt_s
                self._changed.wait_for(lambda: self.verdict is not None, limit_s)
        self._adopt(blame)

    def await_others(self, over: Callable[[Collection[Sign]], bool], limit_s: float) -> None:
        """Wait until enough is known of those that live, for so long at the most."""
        deadline_s = time.monotonic() + limit_s
        heartbeat, silent_s = self._heartbeat, self._limits.silent_s
        heartbeat.watch_all()
        while time.monotonic() < deadline_s and not self.deaf and heartbeat.settle(silent_s):
            heard, ended = heartbeat.heard, self._neighbors.ended
            living = [
                peer
                for peer in heard.signs.values()
                if peer.worker not in ended and heard.silent_s[peer.worker] < silent_s
            ]
            if over(living):
                return
            with self._changed:
                self._changed.wait(self._limits.beat_s / 10)

    def await_blame(self) -> None:
        """If a worker was lost before its end, wait until it is known who."""
        self._heartbeat.settle(self._limits.broken_s)  # it may have come to its end since
        heard, silent_s = self._heartbeat.heard, self._limits.silent_s
        if any(
            peer.worker in self._neighbors.ended or heard.silent_s[peer.worker] >= silent_s
            for peer in heard.signs.values()
            if peer.state == "running"
        ):
            with self._changed:
                self._changed.wait_for(lambda: self.verdict is not None, self._limits.doubt_s)

    def end(self) -> None:
        """Look no more; a SIGTERM that nobody has answered ends the process."""
        self._over = True
        counts = self._termination is not None and self._termination.counts
        if self._termination is not None:
            self._termination.release()
        self._neighbors.wake()
        if self.is_alive():
            self.join(self._limits.silent_s)
        if counts and not self.is_alive() and (self._neighbors.wait(0.0) or self._terminated):
            end_by_signal()
        self._neighbors.close()

    def _look(self) -> None:
        """See whether somebody is lost."""
        heartbeat, search = self._heartbeat, self._search
        if search.confession is not None:
            limit_s = max(self._limits.silent_s - search.deaf_s, self._limits.beat_s)
            self._conclude(search.confession, search.trouble, limit_s)
            return
        self._meet_neighbors()
        if heartbeat.heard.cause is not None:
            self._adopt(heartbeat.heard.cause)
            return
        found = find_culprit(self._view(search.trouble))
        if found is None:
            search.suspect = None
        elif heartbeat.lost is not None or self.deaf:
            self._adopt(found)  # nobody can be asked
        else:
            self._weigh(found)

    def _weigh(self, found: Blame) -> None:
        """Look again before it is said: what was heard of somebody may be a moment old."""
        search, heartbeat = self._search, self._heartbeat
        if search.suspect is None:
            search.suspect, search.confirmed_by = found, heartbeat.request()
            heartbeat.watch_all()
        elif heartbeat.rounds >= search.confirmed_by:
            heartbeat.propose(found)
            heartbeat.request()

    def _view(self, trouble: Trouble | None) -> View:
        heartbeat = self._heartbeat
        gone = heartbeat.lost is not None
        return View(
            self._worker.sign(),
            heartbeat.heard,
            self._processes(),
            "broken" if gone else trouble,
            self._launcher,
            self._search.deaf_s,
            gone,
            self._limits,
        )

    def _meet_neighbors(self) -> None:
        for peer in self._heartbeat.heard.signs.values():
            self._neighbors.meet(peer)

    def _processes(self) -> dict[int, Process]:
        heard, some_s = self._heartbeat.heard, self._limits.doubt_s
        return {
            worker: self._neighbors.process_of(peer, silent=heard.silent_s[worker] >= some_s)
            for worker, peer in heard.signs.items()
        }

    def _adopt(self, blame: Blame) -> None:
        """Take somebody for lost: say so, and end what this worker waits in."""
        with self._changed:
            if self.verdict is not None:
                return
            self.verdict = blame
        try:
            self._worker.report(blame)
        finally:
            with self._changed:
                self._changed.notify_all()

    def _press(self, passed_s: float) -> None:
        """End what this worker waits in; if it does not end, end the process."""
        waits = self._worker.waits()
        leaves = self._search.confession is not None or self._worker.sign().state != "running"
        if waits or not leaves:  # perhaps in a call of the script's own
            self._worker.cut()
        self._search.pressed_s = self._search.pressed_s + passed_s if waits else 0.0
        if self._search.pressed_s > self._limits.silent_s:
            try:
                self._worker.say(
                    f"{self.verdict and self.verdict.reason} (the wait of this worker cannot be "
                    "ended, so its process ends here)"
                )
                faulthandler.dump_traceback()
            finally:
                os._exit(_FAILED)

    def _terminate(self) -> None:
        """SIGTERM came: say why, if another worker is lost, and end."""
        mine = self._worker.sign()
        if self.verdict is None:
            self._search.deaf_s = 0.0  # a launcher that ends its workers is alive
            why = f"{mine.address} was terminated by SIGTERM at step {mine.step}"
            own = self._search.confession or Blame(mine.worker, why)
            with suppress(Exception):
                at_fault = None if mine.state == "done" else own
                self._conclude(at_fault, "broken", self._limits.broken_s)
        with suppress(Exception):
            self._go_last()
        end_by_signal()

    def _go_last(self) -> None:
        """Leave word that this worker knows; the host of the rendezvous waits for the others'."""

        def all_know(peers: Collection[Sign]) -> bool:
            self._neighbors.wait(0.0)  # nobody else notes who has ended
            return all(peer.knows or peer.state == "done" for peer in peers)

        if self._worker.sign().worker == 0 and self._launcher is None:
            self.await_others(all_know, self._limits.broken_s)
        else:
            self._heartbeat.settle(self._limits.beat_s)

    def _conclude(self, own: Blame | None, trouble: Trouble | None, limit_s: float) -> None:
        """Settle it now: blame whoever was lost before, or else this worker itself."""
        heartbeat = self._heartbeat
        heartbeat.watch_all()
        answers = heartbeat.settle(limit_s)
        if not answers:
            self._search.deaf_s += limit_s
        self._meet_neighbors()
        self._terminated |= self._neighbors.wait(0.0)
        found = heartbeat.heard.cause or find_culprit(self._view(trouble)) or own
        if found is None:
            return
        heartbeat.propose(found)
        if answers:
            heartbeat.settle(limit_s)
        self._adopt(heartbeat.heard.cause or found)


class OnDuty(Protocol):
    """The worker for whom somebody looks out; called from the lookout's thread."""

    def sign(self) -> Sign:
        """What it says of itself."""

    def waits(self) -> bool:
        """Whether it waits for others."""

    def cut(self) -> None:
        """End everything in which it waits for others."""

    def report(self, blame: Blame) -> None:
        """Say who is lost."""

    def say(self, message: str) -> None:
        """Say something to people."""


class _Search:
    """What is suspected so far."""

    def __init__(self) -> None:
        self.trouble: Trouble | None = None
        self.suspect: Blame | None = None
        self.confession: Blame | None = None
        """What this worker says of itself when it stops because of an error of its own."""
        self.confirmed_by = 0
        """The round of the heartbeat that began after there was a suspect."""
        self.deaf_s = 0.0
        """Since the rendezvous answered last,"""
        self.pressed_s = 0.0
        """and since this worker waits in vain, in time that this thread saw pass."""

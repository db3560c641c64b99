"""The thread that finds out which worker is lost. It talks with nobody, so nothing stops it.

It reads what the heartbeat brings, looks at the processes of this machine, and counts how long the
rendezvous has not answered. Once it is known who is lost, it ends what this worker waits in.
"""

import faulthandler
import os
import sys
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

    def __init__(self, worker: "OnDuty", heartbeat: Heartbeat, host: str, limits: Limits) -> None:
        """Prepare; `start` begins.

        Args:
            worker: for whom to look.
            heartbeat: brings what the others say.
            host: whose end is the end of the rendezvous, in words.
            limits: says how long to wait for what.
        """
        super().__init__(name="poise-lookout", daemon=True)
        self.verdict: Blame | None = None
        """The worker that is lost; None: nothing is known to be wrong."""
        self._worker = worker
        self._heartbeat = heartbeat
        self._host = host
        self._limits = limits
        self._neighbors = Neighbors(worker.sign().place)
        self._termination: Termination | None = None
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
            if self._neighbors.wait(beat_s) and self._termination and self._termination.counts:
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
                    self._look(passed_s)
            with suppress(Exception):
                if self.verdict is not None:
                    self._press(passed_s)

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
        """Tell the others that this worker is to blame, unless another is known to be."""
        self._heartbeat.propose(blame)
        self._heartbeat.settle(self._limits.silent_s)
        self._adopt(self._heartbeat.heard.cause or blame)

    def await_others(self, over: Callable[[Collection[Sign]], bool], limit_s: float) -> None:
        """Wait until enough is known of those that live, for so long at the most."""
        deadline_s = time.monotonic() + limit_s
        heartbeat, silent_s = self._heartbeat, self._limits.silent_s
        heartbeat.watch_all()
        while time.monotonic() < deadline_s and heartbeat.settle(silent_s):
            heard, ended = heartbeat.heard, self._neighbors.ended
            living = [
                peer
                for peer in heard.signs.values()
                if peer.worker not in ended and heard.silent_s[peer.worker] < silent_s
            ]
            if over(living):
                return
            self._pause()

    def end(self) -> None:
        """Look no more."""
        self._over = True
        if self._termination is not None:
            self._termination.release()
        self._neighbors.wake()
        if self.is_alive():
            self.join(self._limits.silent_s)
        self._neighbors.close()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait(self._limits.beat_s / 10)

    def _look(self, passed_s: float) -> None:
        """See whether somebody is lost."""
        heartbeat, search, limits = self._heartbeat, self._search, self._limits
        heard, mine = heartbeat.heard, self._worker.sign()
        self._meet_neighbors()
        if heard.cause is not None:
            self._adopt(heard.cause)
            return
        cut_off = heartbeat.lost is not None or search.deaf_s >= limits.silent_s
        trouble = "broken" if heartbeat.lost is not None else search.trouble
        found = find_culprit(View(mine, heard, self._processes(), trouble, limits))
        if cut_off:
            found = found or self._host_lost(mine)
            if found is not None:
                self._adopt(found)
        elif found is None:
            search.suspect = None
        else:
            self._weigh(found, passed_s)

    def _weigh(self, found: Blame, passed_s: float) -> None:
        """Look again before it is said: what was heard of somebody may be a moment old."""
        search, heartbeat = self._search, self._heartbeat
        if search.suspect is None:
            search.suspect, search.confirmed_by = found, heartbeat.request()
            search.weighed_s = 0.0
            heartbeat.watch_all()
            return
        search.weighed_s += passed_s
        if heartbeat.rounds >= search.confirmed_by:
            heartbeat.propose(found)
            heartbeat.request()
        if search.weighed_s > 4 * self._limits.beat_s:  # the host does not answer
            self._adopt(found)

    def _meet_neighbors(self) -> None:
        for peer in self._heartbeat.heard.signs.values():
            self._neighbors.meet(peer)

    def _processes(self) -> dict[int, Process]:
        heard, some_s = self._heartbeat.heard, 4 * self._limits.beat_s
        return {
            worker: self._neighbors.process_of(peer, silent=heard.silent_s[worker] >= some_s)
            for worker, peer in heard.signs.items()
        }

    def _host_lost(self, mine: Sign) -> Blame | None:
        """Blame whoever hosts the rendezvous, which is gone or does not answer."""
        worker_0 = self._heartbeat.heard.signs.get(0)
        if mine.worker == 0 or mine.state != "running":
            return None
        if worker_0 is not None and worker_0.state == "done":
            return None  # it came to its end, and so will this one
        who = "worker 0" if worker_0 is None else worker_0.address
        if self._heartbeat.lost is not None:
            return Blame(0, f"{who} died at step {mine.step}: the store of {self._host} is gone")
        return Blame(
            0,
            f"{who} has given no sign of life for {self._limits.silent_s:g} s at step "
            f"{mine.step}: the store of {self._host} does not answer; its process is stopped, or "
            "its machine or link is gone",
        )

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
        if waits or self._worker.sign().state == "running":  # perhaps in a call of the script's own
            self._worker.cut()
        self._search.pressed_s = self._search.pressed_s + passed_s if waits else 0.0
        if self._search.pressed_s > self._limits.silent_s:
            try:
                sys.stderr.write(
                    f"poise: worker {self._worker.sign().worker} waits for a lost worker and "
                    "cannot be woken up; its process ends here:\n"
                )
                faulthandler.dump_traceback()
            finally:
                os._exit(_FAILED)

    def _terminate(self) -> None:
        """SIGTERM came: say why, if another worker is lost, and end."""
        self._search.trouble = self._search.trouble or "broken"
        if self.verdict is None and self._worker.sign().state == "running":
            self._heartbeat.watch_all()
            self._heartbeat.settle(self._limits.broken_s)
            self._meet_neighbors()
            self._neighbors.wait(0.0)
            heard, mine = self._heartbeat.heard, self._worker.sign()
            view = View(mine, heard, self._processes(), "broken", self._limits)
            found = find_culprit(view)
            if self._heartbeat.lost is not None:
                found = found or self._host_lost(mine)
            why = f"{mine.address} was terminated by SIGTERM at step {mine.step}"
            self._heartbeat.propose(heard.cause or found or Blame(mine.worker, why))
            self._heartbeat.settle(self._limits.broken_s)
            with suppress(Exception):
                self._adopt(self._heartbeat.heard.cause or found or Blame(mine.worker, why))
        end_by_signal()


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


class _Search:
    """What is suspected so far."""

    def __init__(self) -> None:
        self.trouble: Trouble | None = None
        self.suspect: Blame | None = None
        self.confirmed_by = 0
        """The round of the heartbeat that began after there was a suspect."""
        self.weighed_s = 0.0
        """Since then,"""
        self.deaf_s = 0.0
        """since the rendezvous answered last,"""
        self.pressed_s = 0.0
        """and since this worker waits in vain, in time that this thread saw pass."""

"""One worker's part of the watch: its rows go to worker 0, which sums up."""

import time
from collections.abc import Callable, Sequence

from poise.watch.findings import Findings, find
from poise.watch.post import Inbox, Outbox, Store
from poise.watch.recorder import Recorder
from poise.watch.table import Steps

Show = Callable[[Findings], None]

_PACKS_IN_A_PERIOD = 4
_SHORTEST_S, _LONGEST_S = 0.2, 2.5
"""Bounds of the time between two packs."""


class Monitor:
    """Sends rows now and then; on worker 0 it also shows what they tell."""

    def __init__(
        self,
        recorder: Recorder,
        show: Show,
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorder = recorder
        self._show = show
        self._every_s = every_s
        self._pack_s = min(max(every_s / _PACKS_IN_A_PERIOD, _SHORTEST_S), _LONGEST_S)
        self._clock = clock
        self._store: Store | None = None
        self._outbox: Outbox | None = None
        self._inbox: Inbox | None = None
        self._steps: Steps | None = None
        self._sent_at = self._shown_at = clock()
        self.finished = False

    @property
    def joined(self) -> bool:
        """Whether a model was ever watched."""
        return self._outbox is not None

    @property
    def connected(self) -> bool:
        """Whether rows can be sent now."""
        return self._store is not None

    @property
    def sums_up(self) -> bool:
        """Whether this is the worker that shows."""
        return self._steps is not None

    def join(self, store: Store, worker: int, workers: Sequence[int]) -> None:
        """Meet the other workers; the first of them sums up."""
        self._store = store
        if self.joined:
            return
        self._outbox = Outbox(worker)
        if worker == workers[0]:
            self._inbox, self._steps = Inbox(workers), Steps(workers)
        self._sent_at = self._shown_at = self._clock()

    def tick(self) -> None:
        """Send and show if it is time; called by the training's own thread between two steps."""
        if self.finished or self._store is None:
            return
        now = self._clock()
        if now - self._sent_at < self._pack_s:
            return
        complete = self.recorder.complete
        self._sent_at = now
        self._send(self._store)
        if complete and not self.sums_up:
            self.finished = True
        if self.sums_up and (complete or now - self._shown_at >= self._every_s):
            self._shown_at = now
            self._sum_up(self._store, complete)

    def leave(self) -> None:
        """Send the rest, before the group of workers is gone."""
        if self._store is None:
            return
        self._send(self._store, last=True)
        if self._inbox is not None and self._steps is not None and not self.finished:
            self._steps.add(self._inbox.look_last(self._store))
        self._store = None  # a store that is kept would hold its port

    def findings(self) -> Findings | None:
        """Return what is known on the worker that sums up; None: nothing."""
        table = self._steps.table() if self._steps is not None else None
        return None if table is None else find(table)

    def _send(self, store: Store, *, last: bool = False) -> None:
        assert self._outbox is not None
        self._outbox.add(self.recorder.take())
        self._outbox.send(store, last=last)

    def _sum_up(self, store: Store, complete: bool) -> None:
        """Show what has arrived; when all asked for has, for the last time."""
        assert self._inbox is not None
        assert self._steps is not None
        self.recorder.disturbed()
        self._steps.add(self._inbox.look(store))
        if complete:
            last = self.recorder.last_number
            assert last is not None
            self.finished = self._steps.reaches(last)
        found = None if complete and not self.finished else self.findings()
        if found is not None:
            self._show(found)

"""One worker's part of the watch: its rows go to worker 0, which sums up."""

import time
from collections.abc import Callable, Sequence

from torch.distributed import Store

from poise.watch.findings import Findings, find
from poise.watch.post import Inbox, Outbox
from poise.watch.recorder import Recorder
from poise.watch.table import Steps

_PACKS_IN_A_PERIOD = 4
_SHORTEST_S, _LONGEST_S = 0.2, 2.5
"""Bounds of the time between two packs."""


class Summary:
    """What worker 0 knows of all workers."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._inbox = Inbox(workers)
        self.steps = Steps(workers)

    def look(self, store: Store, *, last: bool = False) -> None:
        """Take in what has arrived; at last, also what arrives within a moment."""
        self.steps.add(self._inbox.look(store, last=last))

    def findings(self) -> Findings | None:
        """Return what is known; None: nothing."""
        table = self.steps.table()
        return None if table is None else find(table)


class Monitor:
    """Sends rows now and then; on worker 0 it also shows what they tell."""

    def __init__(
        self,
        recorder: Recorder,
        show: Callable[[Findings], None],
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder = recorder
        self._show = show
        self._every_s = every_s
        self._pack_s = min(max(every_s / _PACKS_IN_A_PERIOD, _SHORTEST_S), _LONGEST_S)
        self._clock = clock
        self.store: Store | None = None
        """Where rows are sent; None: they cannot be sent now."""
        self._outbox: Outbox | None = None
        self.summary: Summary | None = None
        """On the worker that shows."""
        self._sent_at = self._shown_at = clock()
        self.finished = False

    @property
    def joined(self) -> bool:
        """Whether a model was ever watched."""
        return self._outbox is not None

    def join(self, store: Store, worker: int, workers: Sequence[int]) -> None:
        """Meet the other workers; the first of them sums up."""
        self.store = store
        if self.joined:
            return
        self._outbox = Outbox(worker)
        if worker == workers[0]:
            self.summary = Summary(workers)
        self._sent_at = self._shown_at = self._clock()

    def tick(self) -> None:
        """Send and show if it is time; called by the training's own thread between two steps."""
        if self.finished or self.store is None:
            return
        now = self._clock()
        if now - self._sent_at < self._pack_s:
            return
        complete = self._recorder.complete
        self._sent_at = now
        self._send(self.store)
        if self.summary is None:
            self.finished = complete
        elif complete or now - self._shown_at >= self._every_s:
            self._shown_at = now
            self._sum_up(self.summary, self.store, complete)

    def leave(self) -> None:
        """Send the rest, before the group of workers is gone."""
        if self.store is None:
            return
        self._send(self.store, last=True)
        if self.summary is not None and not self.finished:
            self.summary.look(self.store, last=True)
        self.store = None  # a store that is kept would hold its port

    def findings(self) -> Findings | None:
        """Return what is known on the worker that sums up; None: nothing."""
        return None if self.summary is None else self.summary.findings()

    def _send(self, store: Store, *, last: bool = False) -> None:
        assert self._outbox is not None
        self._outbox.send(store, self._recorder.take(), last=last)

    def _sum_up(self, summary: Summary, store: Store, complete: bool) -> None:
        """Show what has arrived; when all asked for has, for the last time."""
        self._recorder.disturbed()
        summary.look(store)
        if complete:
            last = self._recorder.last_number
            assert last is not None
            self.finished = summary.steps.reaches(last)
        found = None if complete and not self.finished else summary.findings()
        if found is not None:
            self._show(found)

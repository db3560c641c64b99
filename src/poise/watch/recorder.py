"""From what happens in a training process to rows: where each step ends, and what it spent."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from poise.runtime.clocks import Clock, HostClock
from poise.watch.rows import Row

FIRST_STEPS = 3
"""Steps that are left out at the beginning: DDP rebuilds its buckets after the first, or after
the second if the graph is static, and workers meet while it does."""


@dataclass
class _Step:
    """What is known of a step."""

    number: int = 0
    begin: Any = None
    """When the reduction before it ended; nothing of the first step."""
    batch: int = 0
    """Samples of the backwards before the present one, which were not reduced."""
    forward_batch: int = 0
    """The largest of the forwards since: calls for one backward see the same samples."""
    eval_batch: int = 0
    """The same of a model in evaluation mode, which may be trained, too."""
    reduced: bool = False
    """Whether this backward ends in a reduction."""
    local: Any = None
    spent_s: dict[str, float] = field(default_factory=lambda: {"input": 0.0, "sync": 0.0})
    prefetched: bool = False
    evaluated: bool = False
    disturbed: bool = False


class Recorder:
    """Is told what happens, in the order in which it happens on this worker."""

    def __init__(
        self,
        *,
        steps: int | None = None,
        timer: Clock | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.timer: Clock = timer or HostClock()
        self._clock = clock
        self.last_number = None if steps is None else FIRST_STEPS + steps - 1
        """The last step to record; None: there is none."""
        self._step = _Step()
        self._ended: deque[tuple[_Step, Any]] = deque()
        """Steps with stamps of their ends, which may still lie in the future of an accelerator."""
        self._inside = False

    @property
    def complete(self) -> bool:
        """Whether all steps asked for are recorded."""
        return self.last_number is not None and self._step.number > self.last_number

    def forward(self, batch: int, *, training: bool, grad: bool, reduced: bool) -> None:
        """The model is called with so many samples; its backward will be reduced or not."""
        step = self._step
        if not grad:
            step.evaluated = True
            return
        step.reduced = reduced
        if training:
            step.forward_batch = max(step.forward_batch, batch)
        else:
            step.evaluated = True
            step.eval_batch = batch

    def evaluating(self) -> None:
        """The model is put into evaluation mode."""
        self._step.evaluated = True

    def disturbed(self) -> None:
        """The watch itself takes time in this step, which then does not count."""
        self._step.disturbed = True

    def gradient(self) -> None:
        """A local gradient is there."""
        if self.timer.cheap:
            self._step.local = self.timer.mark()

    def gradients_done(self) -> None:
        """All local gradients of a backward are there."""
        if not self.timer.cheap:
            self._step.local = self.timer.mark()

    def backward_done(self) -> None:
        """A backward is over, and so is its reduction if there was one."""
        step = self._step
        step.batch += step.forward_batch or step.eval_batch
        step.forward_batch = step.eval_batch = 0
        if not step.reduced:
            return
        end = self.timer.mark()
        if step.number >= FIRST_STEPS and not (self.complete or step.disturbed):
            self._ended.append((step, end))
        self._step = _Step(step.number + 1, begin=end)

    def loading(self, *, prefetched: bool) -> AbstractContextManager[None]:
        """Time that is spent in a data loader."""
        self._step.prefetched |= prefetched
        return self._timed("input")

    def meeting(self) -> AbstractContextManager[None]:
        """Time that is spent in an exchange with other workers, outside of the reduction."""
        return self._timed("sync")

    def take(self) -> list[Row]:
        """Return the rows that are new."""
        rows = []
        while self._ended and self.timer.passed(self._ended[0][1]):
            rows.append(self._row(*self._ended.popleft()))
        return rows

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """Add the time of the block, unless it is inside another one."""
        if self._inside:
            yield
            return
        self._inside = True
        step, begin = self._step, self._clock()
        try:
            yield
        finally:
            self._inside = False
            step.spent_s[kind] += self._clock() - begin

    def _row(self, step: _Step, end: Any) -> Row:
        local = end if step.local is None else step.local
        until_local_s = self.timer.between_s(step.begin, local)
        input_s, sync_s = step.spent_s["input"], step.spent_s["sync"]
        return Row(
            step=step.number,
            batch=step.batch,
            local_s=max(until_local_s - input_s - sync_s, 0.0),
            input_s=input_s,
            sync_s=sync_s,
            end_s=self.timer.between_s(step.begin, end),
            prefetched=step.prefetched,
            evaluated=step.evaluated,
        )

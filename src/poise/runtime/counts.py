"""Counts: the denominator of each worker's loss, from which its weight follows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from poise.core.batch import Batch
from poise.core.timing import Floats
from poise.core.weight import weights
from poise.errors import InvalidSetting
from poise.runtime.collectives import Collectives, Pending
from poise.runtime.liveness import Liveness
from poise.runtime.slicing import sizes

CountFunction = Callable[[Any], Any]
"""Takes a batch, returns what its loss is divided by: a number from 0 up."""


class Counts:
    """Every worker's count of the batch under way.

    Without a function the counts are samples and known from the batch's split. With one, each
    worker finds its own when the batch is handed out, and a small sum collects them while forward
    runs.
    """

    def __init__(
        self, collectives: Collectives, liveness: Liveness, function: CountFunction | None
    ) -> None:
        self._collectives = collectives
        self._liveness = liveness
        self._function = function
        self._step = 0
        self._counts: Sequence[float] = ()
        self._collecting: tuple[Pending, Floats] | None = None

    def begin(self, batch: Batch, contents: Any) -> None:
        """A batch is handed out to this worker."""
        self._step = batch.step
        samples = batch.split[self._collectives.worker]
        if self._function is None:
            _check_samples(batch.step, samples, contents)
            self._counts = batch.split
            return
        table = np.zeros(self._collectives.workers)
        table[self._collectives.worker] = self.of(contents) if samples else 0.0
        with self._liveness.watch(self._doing):
            self._collecting = self._collectives.sum(table), table

    def of(self, contents: Any) -> float:
        """Return the count of a batch or a part of one, by the user's function."""
        assert self._function is not None
        found = self._function(contents)
        try:
            count = float(found)
        except (TypeError, ValueError, RuntimeError):
            count = -1.0
        if not 0 <= count < float("inf"):
            raise InvalidSetting(
                f"count={getattr(self._function, '__name__', self._function)!r} returned "
                f"{found!r} for the batch of step {self._step}; it must return a number from 0 up"
            )
        return count

    @property
    def by_function(self) -> bool:
        """Whether the user says what counts."""
        return self._function is not None

    @property
    def own(self) -> float:
        """This worker's count."""
        return self._all()[self._collectives.worker]

    def weights(self) -> tuple[float, ...]:
        """Return every worker's weight."""
        try:
            return weights(self._all())
        except ZeroDivisionError:
            raise InvalidSetting(
                f"count gave 0 on every worker in step {self._step}, so the mean loss has no "
                "meaning; leave such samples out of the data set, or raise global_batch"
            ) from None

    def _all(self) -> Sequence[float]:
        if self._collecting is not None:
            pending, table = self._collecting
            with self._liveness.watch(self._doing):
                pending.wait()
            self._counts, self._collecting = table.tolist(), None
        return self._counts

    @property
    def _doing(self) -> str:
        return f"the counts of step {self._step}"


def _check_samples(step: int, samples: int, contents: Any) -> None:
    """Raise if nothing in a batch has the size of this worker's share."""
    if samples == 0 or any(size == samples for size in sizes(contents)):
        return
    found = sorted(set(sizes(contents)))
    if found:
        raise InvalidSetting(
            f"this worker's share of step {step} is {samples} samples, but nothing in the batch "
            f"has that size (found {found}); if collate_fn leaves samples out, or the loss is a "
            "mean over something else, pass Balancer(..., count=function), where function(batch) "
            "returns what the loss is divided by"
        )

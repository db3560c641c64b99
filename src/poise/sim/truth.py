"""What virtual workers truly take, which no policy is told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from poise.core.limits import Limits
from poise.core.split import Optimum, optimal_split
from poise.core.timing import Curves, Floats, Ints, SpeedModel, StepTimes


class Truth(StepTimes, Protocol):
    """A cluster as it is."""

    @property
    def bucket_s(self) -> Floats:
        """Reduction times."""

    @property
    def input_s(self) -> Floats:
        """Seconds per sample in the loaders."""

    def ready_s(self, batches: ArrayLike) -> Floats:
        """Workers x buckets: when they are handed over, without noise."""

    def step_s(self, split: ArrayLike) -> float:
        """The step time, without noise."""


@dataclass(frozen=True, eq=False)
class Bent:
    """Lines in a function of the local batch: times that no line can represent.

    >>> tiles = Bent(SpeedModel.of([0.0], [0.01]), lambda b: np.ceil(b / 8) * 8)
    >>> tiles.local_s([9])
    array([0.16])
    """

    model: SpeedModel
    bend: Callable[[Floats], Floats]
    jumps = True

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.model.workers

    @property
    def bucket_s(self) -> Floats:
        """Reduction times."""
        return self.model.bucket_s

    @property
    def input_s(self) -> Floats:
        """Seconds per sample in the loaders."""
        return self.model.input_s

    def ready_s(self, batches: ArrayLike) -> Floats:
        """Workers x buckets: when they are handed over, without noise."""
        return self.model.ready_s(self.bend(np.asarray(batches, dtype=np.float64)))

    def local_s(self, batches: ArrayLike, workers: Ints | None = None) -> Floats:
        """Return tau_i(b)."""
        return self.model.local_s(self.bend(np.asarray(batches, dtype=np.float64)), workers)

    def step_s(self, split: ArrayLike) -> float:
        """The step time, without noise."""
        return float(self.local_s(split).max())

    def near_s(self, global_batch: float) -> float:
        """Return the mean time of an even split."""
        return self._curves.near_s(global_batch)

    def capacity(self, step_s: float) -> tuple[Floats, Floats]:
        """Return the largest local batches that end in time, and no slopes."""
        return self._curves.capacity(step_s)

    @property
    def _curves(self) -> Curves:
        return Curves(self.workers, lambda workers, b: self.local_s(b, workers), most=2**24)


def slowed(model: SpeedModel, factors: ArrayLike) -> SpeedModel:
    """Return the cluster with each worker's compute times multiplied."""
    each = np.asarray(factors, dtype=np.float64)[:, None]
    return SpeedModel(
        model.fixed_s * each,
        model.per_sample_s * each,
        model.bucket_s,
        model.input_s,
        model.micro_batch,
    )


def oracle(truth: Truth, global_batch: int, limits: Limits | None = None) -> Optimum:
    """Return the split that one who knows the truth would choose."""
    return optimal_split(truth, global_batch, limits)

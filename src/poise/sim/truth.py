"""What virtual workers truly take, which no policy is told."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from poise.core.timing import Curves, Floats, Ints, SpeedModel, StepTimes


class Truth(StepTimes, Protocol):
    """How long workers compute and load, and what reductions add."""

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
class Bend:
    """How many samples a local batch feels like: times that no line can represent.

    Each field is one number for all workers or one for each. First a batch is filled up to whole
    tiles, then samples beyond a knee count several times, then a power is taken that leaves one
    local batch as it is.

    >>> Bend.of(tile=8)(np.array([9.0])), Bend.of(knee=(80, 2.5))(np.array([100.0]))
    (array([16.]), array([130.]))
    >>> Bend.of(power=(0.5, 16))(np.array([16.0, 64.0]))
    array([16., 32.])
    """

    tile: Floats
    knee_at: Floats
    knee: Floats
    """What a sample beyond the knee counts."""
    power: Floats
    power_at: Floats
    """The local batch that the power leaves as it is."""

    @staticmethod
    def of(
        *,
        tile: ArrayLike = 1.0,
        knee: tuple[ArrayLike, ArrayLike] = (0.0, 1.0),
        power: tuple[ArrayLike, ArrayLike] = (1.0, 1.0),
    ) -> "Bend":
        """Make a bend; what is not given bends nothing."""
        numbers = (tile, *knee, *power)
        return Bend(*(np.asarray(each, dtype=np.float64) for each in numbers))

    @property
    def is_straight(self) -> bool:
        """Whether nothing is bent."""
        return bool((self.tile == 1).all() and (self.knee == 1).all() and (self.power == 1).all())

    def take(self, workers: Ints) -> "Bend":
        """Return the bend of some of the workers."""
        return Bend(*(_some(values, workers) for values in self._fields))

    def __call__(self, batches: Floats, workers: Ints | None = None) -> Floats:
        """Return what local batches feel like, of the workers with these numbers."""
        tile, knee_at, knee, power, power_at = (_some(each, workers) for each in self._fields)
        b = np.ceil(batches / tile) * tile
        b = b + (knee - 1) * np.maximum(b - knee_at, 0.0)
        return np.asarray(power_at ** (1 - power) * b**power)

    @property
    def _fields(self) -> tuple[Floats, ...]:
        return self.tile, self.knee_at, self.knee, self.power, self.power_at


@dataclass(frozen=True, eq=False)
class Bent:
    """Lines in what a local batch feels like.

    >>> Bent(SpeedModel.of([0.0], [0.01]), Bend.of(tile=8)).local_s([9])
    array([0.16])
    """

    model: SpeedModel
    bend: Bend
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
        b = np.asarray(batches, dtype=np.float64)
        return self.model.handed_over(b, self.bend(b))

    def local_s(self, batches: ArrayLike, workers: Ints | None = None) -> Floats:
        """Return tau_i(b); the loader does not feel what computing does."""
        b = np.asarray(batches, dtype=np.float64)
        ready_s = self.model.handed_over(b, self.bend(b, workers), workers)
        computing = (ready_s + self.model.tail_s).max(axis=1)
        loading = self.input_s if workers is None else self.input_s[workers]
        return np.asarray(np.maximum(computing, loading * b))

    def step_s(self, split: ArrayLike) -> float:
        """The step time, without noise."""
        return float(self.local_s(split).max())

    def near_s(self, global_batch: float) -> float:
        """Return the mean time of an even split."""
        return self._curves.near_s(global_batch)

    def capacity(self, step_s: float) -> tuple[Floats, Floats]:
        """Return the largest local batches that end in time, and no slopes."""
        return self._curves.capacity(step_s)

    @cached_property
    def _curves(self) -> Curves:
        return Curves(self.workers, lambda workers, b: self.local_s(b, workers), most=2**24)


def slowed(model: SpeedModel, factors: ArrayLike) -> SpeedModel:
    """Return the cluster with each worker's compute times multiplied."""
    each = np.asarray(factors, dtype=np.float64)[:, None]
    return replace(model, fixed_s=model.fixed_s * each, per_sample_s=model.per_sample_s * each)


def _some(values: Floats, workers: Ints | None) -> Floats:
    return values if workers is None or values.ndim == 0 else values[workers]

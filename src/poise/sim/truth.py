"""What virtual workers truly take, which no policy is told."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from poise.core.timing import Curves, Floats, Ints, SpeedModel


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
        return Bend(*(each[workers] if each.ndim else each for each in vars(self).values()))

    def __call__(self, batches: Floats, workers: Ints | None = None) -> Floats:
        """Return what local batches feel like, of the workers with these numbers."""
        bend = self if workers is None else self.take(workers)
        b = np.ceil(batches / bend.tile) * bend.tile
        b = b + (bend.knee - 1) * np.maximum(b - bend.knee_at, 0.0)
        return np.asarray(bend.power_at ** (1 - bend.power) * b**bend.power)


@dataclass(frozen=True, eq=False)
class Bent(Curves):
    """Lines in what a local batch feels like.

    >>> Bent(SpeedModel.of([0.0], [0.01]), Bend.of(tile=8)).local_s([9])
    array([0.16])
    """

    model: SpeedModel
    bend: Bend
    most = 2**24

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


Truth = SpeedModel | Bent
"""How long workers compute and load, and what reductions add."""


def slowed(model: SpeedModel, factors: ArrayLike) -> SpeedModel:
    """Return the cluster with each worker's compute times multiplied."""
    each = np.asarray(factors, dtype=np.float64)[:, None]
    return replace(model, fixed_s=model.fixed_s * each, per_sample_s=model.per_sample_s * each)

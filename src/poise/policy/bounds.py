"""Bounds of the local batches, as a user states them for a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from poise.core.limits import UNLIMITED, Limits
from poise.core.split import Split, even_split, optimal_split
from poise.core.timing import Floats, SpeedModel
from poise.errors import InvalidSetting
from poise.numbers import check_whole


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Smallest and largest local batches and their multiples: one number, or one per worker."""

    min_batch: int | tuple[int, ...] = 1
    max_batch: int | tuple[int, ...] | None = None
    multiple_of: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        for name in ("min_batch", "max_batch", "multiple_of"):
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            if value is None and name == "max_batch":
                continue
            for each in value if isinstance(value, tuple) and value else (value,):
                check_whole("Bounds", name, each, int(name == "multiple_of"), UNLIMITED)

    def limits(self, workers: int) -> Limits:
        """Return them for a number of workers, or say what does not fit."""
        return _limits(self, workers)

    def even(self, workers: int, global_batch: int) -> Split:
        """Return the split that is as even as the bounds allow."""
        if self == NO_BOUNDS:
            return even_split(workers, global_batch)
        return self.proportional(np.ones(workers), global_batch)

    def proportional(
        self, speeds: Sequence[float] | Floats, global_batch: int, most: Floats | None = None
    ) -> Split:
        """Return shares in proportion to speeds, b_k = B X_k / sum X, in whole samples.

        Exact: of all splits within the bounds the one whose largest b_k / X_k is smallest. No
        local batch exceeds most, if all of those together can take the global batch.
        """
        limits = self.limits(len(speeds))
        if most is not None:
            limits = limits.capped_for(global_batch, most)
        return optimal_split(SpeedModel.proportional(speeds), global_batch, limits).split


def check_bounds(who: str, bounds: object) -> None:
    """Raise unless a policy's bounds are some."""
    if not isinstance(bounds, Bounds):
        raise InvalidSetting(f"{who} has bounds={bounds!r}; give Bounds(...)")


@lru_cache(maxsize=8)
def _limits(bounds: Bounds, workers: int) -> Limits:
    return Limits.of(workers, **vars(bounds))


NO_BOUNDS = Bounds()
"""At least one sample for every worker, and nothing else."""

"""What each worker's local batch may be: bounds and multiples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from poise.core.timing import Floats, Ints
from poise.errors import InfeasibleSplit, InvalidSetting

_NEAR = 1e-9
UNLIMITED = 2**40
"""No local batch is larger; the sum over 10,000 workers still fits into 64 bits."""


@dataclass(frozen=True, eq=False)
class Limits:
    """Bounds and multiples of the local batches, one of each per worker.

    >>> limits = Limits.of(3, min_batch=[1, 5, 0], multiple_of=[1, 4, 1])
    >>> limits.low.tolist(), limits.multiple.tolist()
    ([1, 8, 0], [1, 4, 1])
    """

    low: Ints
    """Smallest local batches, multiples already."""
    high: Ints
    """Largest local batches, multiples already."""
    multiple: Ints
    names: tuple[str, ...] = ()
    """What errors call the workers; their numbers by default."""

    @staticmethod
    def of(
        workers: int,
        *,
        min_batch: ArrayLike = 1,
        max_batch: ArrayLike | None = None,
        multiple_of: ArrayLike = 1,
        names: Sequence[str] = (),
    ) -> "Limits":
        """Make limits from one number for all workers or one for each; None: no upper bound."""
        if workers < 1:
            raise InvalidSetting(f"there are {workers} workers; a cluster needs at least 1")
        multiple = _spread("multiple_of", multiple_of, workers, at_least=1)
        low = _spread("min_batch", min_batch, workers, at_least=0)
        high = _spread("max_batch", UNLIMITED if max_batch is None else max_batch, workers, 0)
        high = np.minimum(high, UNLIMITED)
        limits = Limits(
            -(-low // multiple) * multiple, high // multiple * multiple, multiple, tuple(names)
        )
        crossed = np.flatnonzero(limits.low > limits.high)
        if crossed.size:
            worker = int(crossed[0])
            raise InfeasibleSplit(
                f"{limits.name(worker)} has min_batch={low[worker]} and "
                f"max_batch={high[worker]} with multiple_of={multiple[worker]}, and no local "
                "batch is all of that; change one of them"
            )
        return limits

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.low)

    @cached_property
    def least(self) -> int:
        """All smallest local batches together."""
        return int(self.low.sum())

    @cached_property
    def most(self) -> int:
        """All largest local batches together."""
        return int(self.high.sum())

    @cached_property
    def unit(self) -> int | None:
        """The multiple that all workers have in common; None if they have different ones."""
        first = int(self.multiple[0])
        return first if (self.multiple == first).all() else None

    @cached_property
    def real(self) -> tuple[Floats, Floats]:
        """The bounds as real numbers."""
        return self.low.astype(np.float64), self.high.astype(np.float64)

    @cached_property
    def inner(self) -> tuple[Floats, Floats]:
        """The bounds moved inwards a little: between them a worker is at neither."""
        low, high = self.real
        return low + _NEAR, high - _NEAR

    def name(self, worker: int) -> str:
        """Return what people call a worker."""
        return self.names[worker] if self.names else f"worker {worker}"

    def capped(self, most: Floats) -> "Limits":
        """Return limits that also keep each local batch within most; low bounds hold still."""
        whole = np.floor(np.minimum(most, UNLIMITED) / self.multiple).astype(np.int64)
        high = np.maximum(np.minimum(self.high, whole * self.multiple), self.low)
        return Limits(self.low, high, self.multiple, self.names)

    def capped_for(self, global_batch: int, most: Floats) -> "Limits":
        """Return capped limits, if those can take the global batch; else these."""
        capped = self.capped(most)
        return capped if capped.most >= global_batch else self

    def at_least(self, least: Ints) -> "Limits":
        """Return limits that also keep each local batch from falling below least."""
        low = np.maximum(self.low, np.minimum(least, self.high) // self.multiple * self.multiple)
        return Limits(low, self.high, self.multiple, self.names)

    def allow(self, split: Sequence[int]) -> bool:
        """Whether every local batch lies within its bounds."""
        return bool((self.low <= split).all() and (split <= self.high).all())

    def take(self, workers: Sequence[int]) -> "Limits":
        """Return the limits of some of the workers."""
        index = np.asarray(workers, dtype=np.int64)
        names = tuple(self.names[worker] for worker in workers) if self.names else ()
        return Limits(self.low[index], self.high[index], self.multiple[index], names)

    def check(self, global_batch: int) -> None:
        """Raise, naming the bound, if the global batch lies outside of what the workers take."""
        least, most = self.least, self.most
        if global_batch < least:
            worker = int(self.low.argmax())
            raise InfeasibleSplit(
                f"global_batch={global_batch} is less than all min_batch together, {least} "
                f"(the largest: {self.name(worker)} with {self.low[worker]}); "
                f"raise global_batch to at least {least}, lower min_batch or remove workers"
            )
        if global_batch > most:
            worker = int(self.high.argmin())
            raise InfeasibleSplit(
                f"global_batch={global_batch} is more than all workers may take, {most} "
                f"(the smallest: {self.name(worker)} with {self.high[worker]}); "
                f"lower global_batch to at most {most}, let workers take more, or add some"
            )


def _spread(name: str, value: ArrayLike, workers: int, at_least: int) -> Ints:
    """Return one whole number per worker."""
    found = np.asarray(value)
    if found.ndim and len(found) != workers:
        raise InvalidSetting(
            f"{name} has {len(found)} entries for {workers} workers; give one number, or one each"
        )
    if found.dtype.kind not in "iu" or np.any(found < at_least):
        raise InvalidSetting(
            f"{name}={np.asarray(value).tolist()} is not made of whole numbers from {at_least} up"
        )
    return np.broadcast_to(found.astype(np.int64), (workers,))

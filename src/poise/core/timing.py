"""How long a step takes, as a function of the split: ready lines, buckets and input limits.

Notation: worker i, bucket j of K, b samples on a worker.

    r_ij(b) = fixed_s[i, j] + per_sample_s[i, j] b    ready line: seconds from the end of worker
                                                      i's previous reduction until it hands over
                                                      its gradient bucket j
    u_j     = bucket_s[j]                             seconds that the reduction of bucket j adds
    tail_j  = u_j + ... + u_K
    l_i     = input_s[i]                              seconds a sample takes in the data loader
    tau_i(b) = max( max_j (r_ij(b) + tail_j), l_i b )
    T        = max_i tau_i(b_i)                       the step time

A collective starts when the last worker reaches it, and buckets go one after another: hence the
maximum. Cannikin (arXiv 2402.05302, section 3) is the case K = 2;
`poise.core.cluster.Worker.lines` makes it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from poise.errors import InvalidSetting

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bound = Literal["compute", "communication", "input", "min", "max"]

_FLAT = 1e-12
"""A line that does not rise gets this part of the worker's steepest slope, to be invertible."""
_ROUNDING = 1e-12


class StepTimes(Protocol):
    """What the solver needs of a cluster: each worker's tau, increasing, and its inverse."""

    @property
    def workers(self) -> int:
        """How many there are."""

    @property
    def jumps(self) -> bool:
        """Whether some tau jumps, so that a capacity stands still while the step grows longer."""

    def local_s(self, batches: ArrayLike, workers: Ints | None = None) -> Floats:
        """Return tau_i(b) for each of the workers, all by default."""

    def near_s(self, global_batch: float) -> float:
        """Return a step time in which about so many samples fit, from 0 up; any number will do."""

    def capacity(self, step_s: float) -> tuple[Floats, Floats]:
        """Return for each worker the largest b with tau_i(b) <= step_s, and its slope in step_s.

        Below zero or any number less than 1 where not even an empty batch ends in time.
        """


@dataclass(frozen=True, eq=False)
class SpeedModel:
    """The ready lines of all workers, the reduction, and the loaders, as arrays.

    >>> model = SpeedModel.of([[0.02, 0.03]], [[0.002, 0.003]], (0.02, 0.004))
    >>> model.local_s([20])  # 90 ms until the last bucket is handed over, 4 ms for its reduction
    array([0.094])
    >>> model.bounds([20]), model.bounds([2])
    (('compute',), ('communication',))
    """

    fixed_s: Floats
    """Workers x buckets: where the ready lines start."""
    per_sample_s: Floats
    """Workers x buckets: how they rise."""
    bucket_s: Floats
    """Seconds that the reduction of each bucket adds."""
    input_s: Floats
    """Seconds per sample that each worker's loader needs at least; 0: no limit."""
    micro_batch: Floats
    """The most samples each worker computes at once; infinity: all of them.

    A local batch of p passes pays its fixed cost p times and hands over its gradient, all
    buckets, at the end of the last pass.
    """

    @staticmethod
    def of(
        fixed_s: ArrayLike,
        per_sample_s: ArrayLike,
        bucket_s: ArrayLike = (0.0,),
        *,
        input_s: ArrayLike = 0.0,
        micro_batch: ArrayLike = np.inf,
    ) -> "SpeedModel":
        """Make a model from anything array-like, or say what is wrong with it."""
        fixed, rise = _matrix("fixed_s", fixed_s), _matrix("per_sample_s", per_sample_s)
        buckets = np.atleast_1d(np.asarray(bucket_s, dtype=np.float64))
        if fixed.shape != rise.shape or fixed.shape[1] != len(buckets):
            raise InvalidSetting(
                f"fixed_s is {fixed.shape}, per_sample_s {rise.shape} and bucket_s "
                f"{buckets.shape}; give workers x buckets, and one reduction time per bucket"
            )
        workers = len(fixed)
        limits = _one_each("input_s", input_s, workers)
        most = _one_each("micro_batch", micro_batch, workers)
        _check_times("fixed_s", fixed)
        _check_times("per_sample_s", rise)
        _check_times("bucket_s", buckets)
        _check_times("input_s", limits)
        if not np.all(most >= 1):
            raise InvalidSetting(f"micro_batch is {most.min()}; give at least 1 sample")
        early = (fixed[:, -1:] < fixed).any(axis=1) | (rise[:, -1:] < rise).any(axis=1)
        if (early & np.isfinite(most)).any():
            raise InvalidSetting(
                f"worker {np.flatnonzero(early & np.isfinite(most))[0]} has a micro_batch and "
                "hands over its last bucket before another one; give lines that rise"
            )
        flat = np.flatnonzero((rise.max(axis=1) <= 0) & (limits <= 0))
        if flat.size:
            raise InvalidSetting(
                f"worker {flat[0]} takes no time per sample, so its share has no end; "
                "give it a per_sample_s above 0"
            )
        return SpeedModel(fixed, rise, buckets, limits, most)

    @staticmethod
    def proportional(speeds: ArrayLike) -> "SpeedModel":
        """Return workers that take 1 / speed per sample and nothing else."""
        rates = np.atleast_1d(np.asarray(speeds, dtype=np.float64))
        if rates.size == 0 or not np.all((rates > 0) & np.isfinite(rates)):
            raise InvalidSetting(f"speeds {rates.tolist()} are not all above 0; give such numbers")
        return SpeedModel.of(np.zeros(len(rates)), 1 / rates)

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.fixed_s)

    @property
    def jumps(self) -> bool:
        """Whether some worker takes several passes, each with its fixed cost."""
        return self._in_passes.size > 0

    @cached_property
    def tail_s(self) -> Floats:
        """Seconds from the moment all workers handed over bucket j until the reduction ends."""
        return np.asarray(np.cumsum(self.bucket_s[::-1])[::-1])

    def ready_s(self, batches: ArrayLike) -> Floats:
        """Return workers x buckets: when each worker hands over each bucket."""
        b = np.asarray(batches, dtype=np.float64)
        return self.handed_over(b, b)

    def handed_over(self, b: Floats, felt: Floats, workers: Ints | None = None) -> Floats:
        """Return the ready lines at what local batches feel like; passes are those of b itself."""
        every: Ints | slice = slice(None) if workers is None else workers
        fixed = self.fixed_s[every]
        lines: Floats = fixed + self.per_sample_s[every] * felt[:, None]
        passes = np.ceil(b / self.micro_batch[every])
        late = passes > 1
        if late.any():
            lines[late] = (lines[:, -1] + (passes - 1) * fixed[:, -1])[late, None]
        return lines

    def local_s(self, batches: ArrayLike, workers: Ints | None = None) -> Floats:
        """Return tau_i(b): how long a step takes at least because of worker i."""
        b = np.asarray(batches, dtype=np.float64)
        starts, slopes = self._lines
        if workers is not None:
            starts, slopes = starts[:, workers], slopes[:, workers]
        tau: Floats = slopes[0] * b + starts[0]
        end = np.empty_like(tau)  # arithmetic in place: at 10,000 workers this is half the time
        for start, slope in zip(starts[1:], slopes[1:], strict=True):
            np.multiply(slope, b, out=end)
            np.add(end, start, out=end)
            np.maximum(tau, end, out=tau)
        if self._in_passes.size:
            self._add_passes(tau, b, workers)
        return tau

    def step_s(self, split: ArrayLike) -> float:
        """Return the step time T of a split.

        >>> SpeedModel.proportional([10, 20]).step_s([5, 5])
        0.5
        """
        return float(self.local_s(split).max())

    def near_s(self, global_batch: float) -> float:
        """Return the step time if one bucket decided everywhere, the one that makes it longest."""
        offsets, rates = self._inverses
        return float(((global_batch + offsets.sum(axis=1)) / rates.sum(axis=1)).max())

    def capacity(self, step_s: float) -> tuple[Floats, Floats]:
        """Return the largest local batches that end within step_s, and their slopes in it."""
        offsets, rates = self._inverses
        b: Floats = rates[0] * step_s - offsets[0]
        slope = rates[0].copy()
        other, less = np.empty_like(b), np.empty(len(b), dtype=bool)
        for offset, rate in zip(offsets[1:], rates[1:], strict=True):
            np.multiply(rate, step_s, out=other)
            np.subtract(other, offset, out=other)
            np.less(other, b, out=less)
            np.copyto(slope, rate, where=less)
            np.minimum(b, other, out=b)
        if self._in_passes.size:
            self._in_several_passes(step_s, b, slope)
        return b, slope

    def bounds(self, split: ArrayLike) -> tuple[Bound, ...]:
        """Return what decides each worker's tau: compute, communication or input.

        Compute: the last bucket, whose reduction never overlaps. Communication: an earlier one,
        after which the reduction of the others takes longer than the rest of backward.
        """
        b = np.asarray(split, dtype=np.float64)
        ends = self.ready_s(b) + self.tail_s
        last = ends.shape[1] - 1
        # Several passes hand over everything at once: that is compute, not waiting for buckets.
        bucket = np.where(np.ceil(b / self.micro_batch) > 1, last, ends.argmax(axis=1))
        loading = self.input_s * b > ends.max(axis=1)
        return tuple(
            "input" if slow else "compute" if j == last else "communication"
            for slow, j in zip(loading.tolist(), bucket.tolist(), strict=True)
        )

    def take(self, workers: ArrayLike) -> "SpeedModel":
        """Return the model of some of the workers, with the same reduction."""
        index = np.asarray(workers, dtype=np.int64)
        names = ("fixed_s", "per_sample_s", "input_s", "micro_batch")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    @cached_property
    def _lines(self) -> tuple[Floats, Floats]:
        """(starts, slopes), each lines x workers: one per bucket, then the loader's."""
        starts = np.ascontiguousarray((self.fixed_s + self.tail_s).T)
        slopes = np.ascontiguousarray(self.per_sample_s.T)
        if self.input_s.any():
            starts = np.vstack([starts, np.zeros(self.workers)])
            slopes = np.vstack([slopes, self.input_s])
        return starts, np.maximum(slopes, _FLAT * slopes.max(axis=0))

    @cached_property
    def _inverses(self) -> tuple[Floats, Floats]:
        """(offsets, rates) of the lines turned around: b = rate T - offset."""
        starts, slopes = self._lines
        rates = 1 / slopes
        return starts * rates, rates

    @cached_property
    def _in_passes(self) -> Ints:
        """The workers with a micro-batch."""
        return np.flatnonzero(np.isfinite(self.micro_batch))

    def _add_passes(self, tau: Floats, b: Floats, workers: Ints | None) -> None:
        """Raise tau where a local batch needs several passes."""
        every = np.arange(self.workers) if workers is None else workers
        passes = np.ceil(b / self.micro_batch[every] * (1 - _ROUNDING))
        late = passes > 1
        which = every[late]
        end = passes[late] * self.fixed_s[which, -1] + self.per_sample_s[which, -1] * b[late]
        tau[late] = np.maximum(end + self.tail_s[0], self.input_s[which] * b[late])

    def _in_several_passes(self, step_s: float, b: Floats, slope: Floats) -> None:
        """Put in the capacities of workers with a micro-batch."""
        which = self._in_passes
        most = self.micro_batch[which]
        fixed, rise = self.fixed_s[which, -1], np.maximum(self.per_sample_s[which, -1], 1e-300)
        time = max(step_s - float(self.tail_s[0]), 0.0)
        whole = fixed + rise * most
        full = np.floor(time / whole * (1 + _ROUNDING))
        rest = np.clip((time - full * whole - fixed) / rise, 0, most)
        several = full * most + rest
        one = np.minimum(b[which], most)
        loader = self.input_s[which]
        cap = np.divide(step_s, loader, out=np.full(len(which), np.inf), where=loader > 0)
        multi = (full >= 1) & (several > most)
        stalled = (~multi & (b[which] >= most)) | (multi & (rest <= 0))
        computed = np.where(multi, several, one)
        own = np.where(stalled, 0.0, np.where(multi, 1 / rise, slope[which]))
        slope[which] = np.where(cap < computed, cap / step_s, own)
        b[which] = np.minimum(computed, cap)


class Curves(StepTimes):
    """Any increasing tau: a subclass tells it, and its inverse is found by halving.

    >>> class Powers(Curves):
    ...     workers = 2
    ...
    ...     def local_s(self, batches, workers=(0, 1)):
    ...         return (1 + np.array(workers)) * np.array(batches) ** 0.8
    >>> Powers().capacity(16.1)[0]
    array([32., 13.])
    """

    most = 2**32
    """No local batch is larger."""
    jumps = True

    def near_s(self, global_batch: float) -> float:
        """Return the mean time of an even split."""
        return float(self.local_s(np.full(self.workers, global_batch / self.workers)).mean())

    def capacity(self, step_s: float) -> tuple[Floats, Floats]:
        """Return the largest local batches, in whole samples, and no slopes."""
        low = np.full(self.workers, -1.0)
        high = np.full(self.workers, float(self.most))
        while np.any(high - low > 1):
            middle = np.floor((low + high) / 2)
            fits = self.local_s(middle) <= step_s
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low, np.zeros(self.workers)


def _one_each(name: str, values: ArrayLike, workers: int) -> Floats:
    """Return one number per worker."""
    found = np.asarray(values, dtype=np.float64)
    if found.shape not in ((), (workers,)):
        raise InvalidSetting(
            f"{name} is {found.shape} for {workers} workers; give one number, or one each"
        )
    return np.broadcast_to(found, (workers,))


def _matrix(name: str, values: ArrayLike) -> Floats:
    """Return workers x buckets; a plain list has one bucket.

    Each bucket lies in one piece, since sums over workers are what takes time.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.ndim not in (1, 2):
        raise InvalidSetting(f"{name} has {found.ndim} dimensions; give workers x buckets")
    return np.asfortranarray(found[:, None] if found.ndim == 1 else found)


def _check_times(name: str, values: Floats) -> None:
    wrong = ~(np.isfinite(values) & (values >= 0))
    if values.size == 0:
        raise InvalidSetting(f"{name} is empty; give at least one worker and one bucket")
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise InvalidSetting(
            f"{name} has {values[place]} at {place}; times are finite numbers from 0 up"
        )

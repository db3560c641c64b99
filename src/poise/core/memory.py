"""How much memory a local batch takes, and how large it may be.

    peak(b) = m0 + m1 b              bytes on a worker, least squares over measured peaks
    cap     = floor( (limit (1 - MARGIN) - m0) / m1 )

A line from few sizes is trusted only near them. Between sizes lo and hi with an error of e each,
its error at hi + 2 (hi - lo) is at most 3 e: up to there it is used. Any measured peak p at b
samples also says, since m0 >= 0, that peak(x) <= p x / b for every x >= b: that much is safe
whatever the slope, and all there is as long as only one size has been seen. Caps are never
learned from throughput.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from poise.core.entries import BATCHES, MOST_BYTES, Entries
from poise.core.limits import UNLIMITED
from poise.core.rows import refuse, with_rows_of
from poise.core.timing import Floats
from poise.errors import InvalidSetting

MARGIN = 0.1
"""The part of a worker's memory that is never planned for."""

REACH = 2.0
"""How far beyond its largest size a line is trusted, in units of the range it was seen on."""
STEP_BACK = 0.9
"""The part of a local batch that did not fit which may be tried again."""


@dataclass(frozen=True, eq=False)
class MemoryLine:
    """The memory lines of all workers: running least-squares sums, one entry per worker.

    >>> line = MemoryLine.unknown(2).update([8, 16], [3e9, 6e9])
    >>> line.bytes_per_sample, line.cap(10e9)  # one size: m0 may be 0
    (array([nan, nan]), array([24., 24.]))
    >>> line = line.update([16, np.nan], [4e9, np.nan])
    >>> line.fixed_bytes.tolist(), line.bytes_per_sample.tolist()
    ([2000000000.0, nan], [125000000.0, nan])
    >>> line.cap(6e9)
    array([27., 14.])
    >>> line.out_of_memory(0, 20).cap(6e9)
    array([18., 14.])
    """

    count: Floats
    """How many peaks were measured."""
    mean_batch: Floats
    """The average local batch of those."""
    mean_peak: Floats
    """The average peak, in bytes."""
    batch_sq: Floats
    """The sum of squared deviations of local batches."""
    batch_peak: Floats
    """The sum of products of deviations of local batches and peaks."""
    smallest: Floats
    """The smallest local batch seen; infinity: none yet."""
    largest: Floats
    """The largest local batch seen; minus infinity: none yet."""
    ceiling: Floats
    """The largest local batch allowed after running out of memory; infinity: has not happened."""

    @staticmethod
    def unknown(workers: int) -> "MemoryLine":
        """Return lines of which nothing is known."""
        if workers < 1:
            raise InvalidSetting(f"workers={workers} is below 1; give at least one worker")
        zero, inf = np.zeros(workers), np.full(workers, np.inf)
        return MemoryLine(zero, zero, zero, zero, zero, inf, -inf, inf)

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.count)

    def update(self, batches: ArrayLike, peak_bytes: ArrayLike) -> "MemoryLine":
        """Return the lines with one more measured peak per worker; NaN: not measured."""
        b, p = self._per_worker("batches", batches), self._per_worker("peak_bytes", peak_bytes)
        refuse((b < 0) | np.isinf(b), b, "batches", "samples from 0 up, or NaN")
        refuse((p < 0) | np.isinf(p), p, "peak_bytes", "bytes from 0 up, or NaN")
        measured = ~(np.isnan(b) | np.isnan(p))
        count = self.count + measured
        share = measured / np.maximum(count, 1)
        b_off = np.where(measured, b - self.mean_batch, 0.0)
        p_off = np.where(measured, p - self.mean_peak, 0.0)
        b_left = (1 - share) * b_off  # from the new mean; Welford 1962
        return replace(
            self,
            count=count,
            mean_batch=self.mean_batch + share * b_off,
            mean_peak=self.mean_peak + share * p_off,
            batch_sq=self.batch_sq + b_left * b_off,
            batch_peak=self.batch_peak + b_left * p_off,
            smallest=np.where(measured, np.minimum(self.smallest, b), self.smallest),
            largest=np.where(measured, np.maximum(self.largest, b), self.largest),
        )

    def check_loaded(self) -> None:
        """Raise unless these can be sums over measured peaks."""
        ranges = {
            "count": Entries(),
            "mean_batch": BATCHES,
            "mean_peak": Entries(most=MOST_BYTES),
            "batch_sq": Entries(most=1e36),
            "batch_peak": Entries(least=-1e42, most=1e42),
            "smallest": Entries(most=np.inf),
            "largest": Entries(least=-np.inf, most=float(UNLIMITED)),
            "ceiling": Entries(most=np.inf),
        }
        for name, entries in ranges.items():
            entries.check(name, getattr(self, name), self.workers)
        refuse(
            (self.count > 0) & (self.smallest > self.largest),
            self.smallest,
            "smallest",
            "no local batch above the largest",
        )

    def take(self, origin: Sequence[int | None]) -> "MemoryLine":
        """Return the lines of another set of workers; None stands for one that is new."""
        names = [field.name for field in fields(self)]
        return with_rows_of(self, MemoryLine.unknown(1), origin, names)

    def out_of_memory(self, worker: int, batch: int) -> "MemoryLine":
        """Return the lines after a worker ran out of memory with that many samples at once.

        From now on its cap is at most nine tenths of them, rounded down, whatever is measured.
        """
        if not 0 <= worker < self.workers:
            raise InvalidSetting(
                f"worker={worker} is not one of {self.workers}; count workers from 0"
            )
        if batch < 1:
            raise InvalidSetting(f"batch={batch} is below 1; give the samples that did not fit")
        ceiling = self.ceiling.copy()
        ceiling[worker] = min(ceiling[worker], np.floor(STEP_BACK * batch))
        return replace(self, ceiling=ceiling)

    @property
    def bytes_per_sample(self) -> Floats:
        """m1 of each worker; NaN where not known: one size only, or peaks that do not grow."""
        return self._line[1]

    @property
    def fixed_bytes(self) -> Floats:
        """m0 of each worker, at least 0; NaN where not known."""
        return self._line[0]

    @property
    def safe_growth(self) -> Floats:
        """The local batch up to which each line is trusted; minus infinity where there is none."""
        reach = self.largest + REACH * (self.largest - self.smallest)
        return np.where(np.isnan(self._line[1]), -np.inf, reach)

    def cap(self, limit_bytes: ArrayLike) -> Floats:
        """Return the largest local batch of each worker, whole numbers or infinity.

        Infinity where nothing limits it: no limit is known (NaN or infinity), or nothing was
        measured with samples. 0 where not even an empty batch fits. A limit may be one number
        for all workers.
        """
        every = np.full(self.workers, limit_bytes) if np.ndim(limit_bytes) == 0 else limit_bytes
        limit = self._per_worker("limit_bytes", every)
        refuse(limit < 0, limit, "limit_bytes", "bytes from 0 up, or NaN where not known")
        limited = np.isfinite(limit) & (self.count > 0)
        room = np.where(limited, limit * (1 - MARGIN), 0.0)
        fixed, rise = self._line
        empty = np.where(self.mean_peak > room, 0.0, np.inf)
        near = np.where(
            self.mean_batch > 0, _quotient(room * self.mean_batch, self.mean_peak), empty
        )
        full = _quotient(room - fixed, rise)
        most = np.maximum(np.minimum(full, np.maximum(near, self.safe_growth)), 0.0)
        known = np.floor(most * (1 + 1e-9))
        return np.minimum(np.where(limited, known, np.inf), self.ceiling)

    @cached_property
    def _line(self) -> tuple[Floats, Floats]:
        """(m0, m1), NaN where not known."""
        rise = np.where(self.batch_peak > 0, _quotient(self.batch_peak, self.batch_sq), np.nan)
        fixed = self.mean_peak - rise * self.mean_batch
        below = fixed < 0  # then the line through the origin: a model takes no negative memory
        origin = _quotient(self.mean_peak, self.mean_batch)
        return np.where(below, 0.0, fixed), np.where(below, origin, rise)

    def _per_worker(self, name: str, values: ArrayLike) -> Floats:
        found = np.asarray(values, dtype=np.float64)
        if found.shape != (self.workers,):
            raise InvalidSetting(
                f"{name} has shape {found.shape}, but there are {self.workers} workers; "
                "give one number per worker, NaN where not known"
            )
        return found


def _quotient(numerator: Floats, denominator: Floats) -> Floats:
    """Return the quotient; infinity where the denominator is 0 or not known."""
    out = np.full(len(numerator), np.inf)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out

"""Learning the speed model online, from each step's measurements.

Every worker's ready lines are fitted by weighted least squares with a weak prior, in units of
the worker's first sample (b1, t1): y = t / t1 and x = b / b1 are pooled, and

    y = c + beta x,   c ~ 0.3 +- 0.3,   beta ~ 0.7 +- 0.5,   noise cv y,   c >= 0, beta >= 0.03.

The prior keeps a fit from one batch size from claiming to know the slope: without it 13 to 40 %
of runs with a high fixed cost and noisy times never find the optimum. A slowdown is
multiplicative, so that in these units it changes t1 and nothing else.

All arrays run over workers, or workers x buckets, and nothing loops over workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from poise.core.entries import ANY, BATCHES, SHORTEST_S, TIMES, Entries, check_local_batches
from poise.core.entries import check_within as check
from poise.core.observation import Observation
from poise.core.revised import revised
from poise.core.rows import with_rows_of
from poise.core.split import Split
from poise.core.timing import Flags, Floats, Ints, SpeedModel
from poise.errors import InvalidSetting

FIXED_PRIOR = (0.3, 0.3)
SLOPE_PRIOR = (0.7, 0.5)
LEAST_SLOPE = 0.03
WINSOR = 1.6
"""A time counts as at most so many times what was predicted."""
CLIP, SLACK, ALARM = 3.0, 0.5, 12.0
"""CUSUM: deviations are clipped, lose the slack, and add up to an alarm."""
FIRST_CV, FIRST_CV_COUNT, LEAST_CV = 0.15, 5.0, 0.005
"""Noise is taken to be so, as if so many observations had shown it, and never to be less."""
FIRST_CORRELATION_COUNT, MOST_CORRELATION = 20.0, 0.95
NOISE_MEMORY = 100.0
MEMORY = 200.0
"""A window counts as at most so many observations."""
REDUCTIONS = 20.0
"""And the mean of the reduction times as one of so many,"""
EARLIER_REDUCTIONS = 2.0
"""those before a change of the split as few: where they take the workers' own processor they
change with it."""
FORGET = 0.9
"""What older windows keep of their weight at each change of the split."""
DOUBT = 0.2
"""What they keep when the worker's speed changed."""
RECENT = 8
"""How many of the last deviations tell by how much."""
FEWEST = 4
"""In so many an alarm can be reached by a worker that seemed to change a little before."""
MOVED = 0.02
"""Another local batch is one that differs by more than this part."""
BENT = 0.3
"""And the logarithm of a time may be off by so much where no line fits."""
TRIM = 2.0
"""Standard errors from which a window's mean overrules the line."""


@dataclass(frozen=True, eq=False)
class Fit:
    """What is known of the speeds of all workers. Frozen: `update` returns the next one."""

    first_batch: Floats
    """b1 of each worker; NaN before its first measurement."""
    first_s: Floats
    """t1, workers x buckets."""
    pool: Floats
    """Earlier windows, workers x (w, wx, wxx): weights w = 1 / y^2 and their moments."""
    pool_y: Floats
    """wy, workers x buckets."""
    pool_xy: Floats
    """wxy, workers x buckets."""
    split: Split
    """The split of the window: the steps since it last changed."""
    moved: Floats
    """How much larger each worker's local batch is than in the window before, as the logarithm of
    their ratio; 0: it is the same one."""
    level_before: Floats
    """The mean of that window, in the last bucket; 0: there was none."""
    seen: Floats
    """Observations of each worker in the window."""
    mean_y: Floats
    """Mean over the window, workers x buckets."""
    deviations: Floats
    """Deviations of log t from its window's mean, workers x 3: the sum of their squares, of the
    products of neighbors, and how many."""
    last_deviation: Floats
    rising: Floats
    """CUSUM of slowing down."""
    falling: Floats
    """CUSUM of getting faster."""
    recent: Floats
    """The last deviations, log(t / predicted), workers x RECENT, the newest last."""
    changed_by: Floats
    """By what factor each worker's times changed at its last alarm; 1 if there was none."""
    run: Ints
    """For how many observations the larger CUSUM has been above zero."""
    bucket_s: Floats
    """Mean reduction time of each bucket, and over how many steps it is taken."""
    bucket_count: float
    input_s: Floats
    """Seconds per sample in the loader; 0: no limit was ever seen."""

    @staticmethod
    def start(workers: int, buckets: int = 1) -> "Fit":
        """Return a fit that knows nothing."""
        per_worker, per_bucket = np.zeros(workers), _table(workers, buckets)
        return Fit(
            first_batch=np.full(workers, np.nan),
            first_s=per_bucket + np.nan,
            pool=_table(workers, 3),
            pool_y=per_bucket,
            pool_xy=per_bucket,
            split=(),
            moved=per_worker,
            level_before=per_worker,
            seen=per_worker,
            mean_y=per_bucket,
            deviations=_table(workers, 3),
            last_deviation=per_worker,
            rising=per_worker,
            falling=per_worker,
            recent=_table(workers, RECENT),
            changed_by=np.ones(workers),
            run=np.zeros(workers, dtype=np.int64),
            bucket_s=np.zeros(buckets),
            bucket_count=0.0,
            input_s=per_worker,
        )

    def check_loaded(self) -> None:
        """Raise unless these can be sums over measured steps: what follows is finite then."""
        workers, buckets = len(self.first_batch), self.first_s.shape[-1] if self.first_s.ndim else 0
        for name, (entries, *columns) in _SAVED.items():
            shape = (workers, *(buckets if each < 0 else each for each in columns))
            entries.check(name, getattr(self, name), *shape)
        TIMES.check("bucket_s", self.bucket_s, buckets)
        check("bucket_count", self.bucket_count, 0, REDUCTIONS)
        check_local_batches("split", self.split, workers)
        if not workers or not buckets:
            raise InvalidSetting("first_s has no entries; at least one worker is required")
        if (np.isnan(self.first_s) != np.isnan(self.first_batch)[:, None]).any():
            raise InvalidSetting("first_s and first_batch are not known of the same workers")
        w, wx, wxx = self.pool.T
        if (wx * wx > w * wxx * (1 + 1e-6)).any():  # Cauchy and Schwarz
            raise InvalidSetting("pool has moments that no measurements have")

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.first_batch)

    @property
    def known(self) -> bool:
        """Whether every worker was measured at least once."""
        return not np.isnan(self.first_batch).any()

    @cached_property
    def cv(self) -> Floats:
        """Each worker's noise: standard deviation of a time, relative to it.

        Before much is seen of a worker, its noise is taken to be that of all.
        """
        squares, _, count = self.deviations.T
        first = FIRST_CV_COUNT * FIRST_CV**2
        common = (first + squares.sum()) / (FIRST_CV_COUNT + count.sum())
        variance: Floats = (FIRST_CV_COUNT * common + squares) / (FIRST_CV_COUNT + count)
        return np.maximum(np.sqrt(variance), LEAST_CV)

    @cached_property
    def noise(self) -> Floats:
        """The same, as if times were independent: a mean of n has an error of noise / sqrt(n).

        Where neighbors correlate by rho, cv sqrt((1 + rho) / (1 - rho)).
        """
        squares, products, _ = self.deviations.T
        doubt = FIRST_CORRELATION_COUNT * self.cv**2
        correlation = np.clip(products / (squares + doubt), 0.0, MOST_CORRELATION)
        return np.asarray(self.cv * np.sqrt((1 + correlation) / (1 - correlation)))

    @property
    def evidence(self) -> Floats:
        """How many observations each worker's line stands on, older ones counting less."""
        w, _, _ = self._window
        level = np.maximum(np.where(self.seen > 0, self.mean_y[:, -1], 1.0), LEAST_SLOPE)
        return np.asarray((self.pool[:, 0] + w) * level**2)

    @property
    def suspected(self) -> bool:
        """Whether some worker's speed seems to have changed of late, and an alarm is half-way.

        What lingers there for longer is a line that fits badly, and no change.
        """
        half_way = np.maximum(self.rising, self.falling) > ALARM / 2
        return bool((half_way & (self.run <= RECENT)).any())

    def update(self, *observations: Observation) -> tuple["Fit", Ints]:
        """Learn from steps; return the next fit and the workers whose speed changed.

        Steps that are given together and had the same split are judged by the lines before all
        of them, which takes less time than one by one.
        """
        fit, alarms = self, np.zeros(0, dtype=np.int64)
        for alike in _alike(observations):
            fit, found = fit._learned(alike)
            alarms = np.union1d(alarms, found)
        return fit, alarms

    def _learned(self, alike: Sequence[Observation]) -> tuple["Fit", Ints]:
        """Learn from steps with the same split and buckets."""
        fit, first = self, alike[0]
        times = np.stack([observation.times("the speed model") for observation in alike])
        if times.shape[2] != self.first_s.shape[1]:
            fit = Fit.start(self.workers, times.shape[2])  # buckets were rebuilt: other lines
        if first.split != fit.split:
            fit = fit._new_window(first.split)
        batches = first.batches
        usable = (batches > 0) & ~np.isnan(times).any(axis=2) & (times[:, :, -1] >= SHORTEST_S)
        for number, observation in enumerate(alike):
            usable[number, list(observation.compiling)] = False
        fit = fit._first_samples(batches, times, usable)
        measured = np.where(usable, times[:, :, -1] / fit.first_s[:, -1], 1.0)
        fit, excess, alarms = fit._watched(batches, measured, usable)
        fit = fit._averaged(times, excess, usable)
        fit = fit._reductions(alike)
        for observation in alike:
            fit = fit._loaders(observation)
        return fit, alarms

    def model(self, *, steeper: float = 0.0) -> SpeedModel:
        """Return the lines as they are believed to be, shifted to the window's means.

        Args:
            steeper: turns each line about its window's mean, its slope rising by so many standard
                errors: what if the slope is not what it seems.

        A worker that was never measured gets the mean of the others' lines.
        """
        fixed, slope = self._all_lines
        fixed = fixed + self._shift(fixed, slope)
        if steeper:
            x = self._window_x[:, None]
            turn = steeper * self._slope_error()[:, None]
            turn = np.clip(turn, LEAST_SLOPE - slope, fixed / np.maximum(x, 1e-9))
            fixed, slope = fixed - turn * x, slope + turn
        fixed_s = fixed * self.first_s
        per_sample_s = slope * self.first_s / self.first_batch[:, None]
        unknown = np.isnan(self.first_batch)
        if unknown.any():
            fixed_s[unknown] = fixed_s[~unknown].mean(axis=0)
            per_sample_s[unknown] = per_sample_s[~unknown].mean(axis=0)
        return SpeedModel(
            np.maximum(fixed_s, 0.0),
            per_sample_s,
            self.bucket_s,
            self.input_s,
            np.full(self.workers, np.inf),
        )

    def error(self, split: Split) -> Floats:
        """Return the standard error of each worker's predicted last ready time, relative to it.

        Where the window's mean overrules the line, it is as sure as that mean.
        """
        x = np.array(split) / self.first_batch
        fixed, slope = self._lines(slice(-1, None))
        y = np.maximum(fixed[:, 0] + slope[:, 0] * x, LEAST_SLOPE)
        shifted = self._shift(fixed, slope, slice(-1, None))[:, 0] != 0
        of_mean = self.noise / np.sqrt(np.maximum(self.seen, 1))
        return np.where(shifted, of_mean, np.sqrt(self._variance(x)) / y)

    def rescaled(self, workers: Ints, factors: Floats) -> "Fit":
        """Return the fit after workers became slower by factors; confidence in it drops."""
        first_s, pool = self.first_s.copy(order="F"), self.pool.copy(order="F")
        pool_y, pool_xy = self.pool_y.copy(order="F"), self.pool_xy.copy(order="F")
        seen, mean_y = self.seen.copy(), self.mean_y.copy(order="F")
        changed = np.isin(np.arange(self.workers), workers)
        first_s[workers] *= factors[:, None]
        for sums in (pool, pool_y, pool_xy):
            sums[workers] *= DOUBT
        mean_y[workers] = self._levels()[workers]
        seen[workers] = np.minimum(self.run[workers], RECENT)
        changed_by = self.changed_by.copy()
        changed_by[workers] = factors
        return revised(
            self._cleared(changed),
            first_s=first_s,
            pool=pool,
            pool_y=pool_y,
            pool_xy=pool_xy,
            seen=seen,
            mean_y=mean_y,
            changed_by=changed_by,
        )

    def take(self, origin: tuple[int | None, ...]) -> "Fit":
        """Return the fit of another set of workers; None stands for one that is new.

        Where several have the lines of one, a loader's limit is that of the first of them alone:
        it belongs to a machine and not to a kind of device, and on one that is faster it would
        keep the local batch too small to be ever measured again.
        """
        fresh = Fit.start(1, self.first_s.shape[1])
        taken = with_rows_of(self._new_window(()), fresh, origin, _PER_WORKER)
        first = {number: place for place, number in reversed(list(enumerate(origin)))}
        own = np.array([first[number] == place for place, number in enumerate(origin)])
        return revised(taken, input_s=np.where(own, taken.input_s, 0.0))

    def _new_window(self, split: Split) -> "Fit":
        """Pool the window and begin another one."""
        w, wx, wxx = self._window
        moved = np.zeros(self.workers)
        if split and len(split) == len(self.split):
            before, now = np.array(self.split), np.array(split)
            larger = np.log(np.maximum(now, 0.5) / np.maximum(before, 0.5))
            moved = np.where(np.abs(now - before) > MOVED * before, larger, 0.0)
        return revised(
            self,
            split=split,
            moved=moved,
            level_before=np.where(self.seen > 0, self.mean_y[:, -1], 0.0),
            pool=np.asfortranarray(FORGET * (self.pool + np.stack([w, wx, wxx], axis=1))),
            pool_y=FORGET * (self.pool_y + w[:, None] * self.mean_y),
            pool_xy=FORGET * (self.pool_xy + wx[:, None] * self.mean_y),
            seen=np.zeros(self.workers),
            mean_y=_table(*self.mean_y.shape),
            bucket_count=min(self.bucket_count, EARLIER_REDUCTIONS),
        )

    def _first_samples(self, batches: Floats, times: Floats, usable: Flags) -> "Fit":
        """Take first measurements as the units of those workers."""
        fit = self
        for each, there in zip(times, usable, strict=True):
            new = there & np.isnan(fit.first_batch)
            if new.any():
                first_s = np.where(new[:, None], each, fit.first_s)
                fit = revised(
                    fit,
                    first_batch=np.where(new, batches, fit.first_batch),
                    first_s=np.asfortranarray(np.maximum(first_s, 1e-9)),
                )
        return fit

    def _watched(
        self, batches: Floats, measured: Floats, usable: Flags
    ) -> tuple["Fit", Floats, Ints]:
        """Compare the last buckets with the prediction: noise, CUSUM, and on an alarm the rescale.

        Returns by how much each worker's times exceed what counts, too.
        """
        x = np.where(np.isnan(self.first_batch), 1.0, batches / self.first_batch)
        fixed, slope = self._lines(slice(-1, None))
        predicted = np.maximum(fixed[:, 0] + slope[:, 0] * x, LEAST_SLOPE)
        gap = np.where(usable, np.log(measured / predicted), 0.0)
        spread = np.sqrt(self.noise**2 + self._variance(x) / predicted**2)
        z = np.clip(gap / spread, -CLIP, CLIP)
        rising, falling, run, recent = self.rising, self.falling, self.run, self.recent
        off = np.zeros(self.workers, dtype=bool)
        for deviation, each, there in zip(z, gap, usable, strict=True):
            rising = np.where(there, np.maximum(0, rising + deviation - SLACK), rising)
            falling = np.where(there, np.maximum(0, falling - deviation - SLACK), falling)
            run = np.where(there, np.where((rising > 0) | (falling > 0), run + 1, 0), run)
            shifted = np.column_stack([recent[:, 1:], each])
            recent = np.where(there[:, None], shifted, recent)
            off |= (rising > ALARM) | (falling > ALARM)
        fit = revised(
            self._scatter(measured, usable),
            rising=rising,
            falling=falling,
            run=run,
            recent=np.asfortranarray(recent),
        )
        excess = np.maximum(gap - np.log(WINSOR), 0.0)
        misfits = fit._misfits(off, self.seen + usable.sum(axis=0))
        if misfits.size:
            fit = fit._moved_off(misfits)
            off[misfits] = False
        alarms = np.flatnonzero(off)
        if alarms.size:
            factors = fit._recent_changes(alarms)
            fit = fit.rescaled(alarms, factors)
            excess[:, alarms] = np.maximum(gap[:, alarms] - np.log(factors * WINSOR), 0.0)
        return fit, np.exp(excess), alarms

    def _misfits(self, off: Flags, seen: Floats) -> Ints:
        """Return the workers that are off because their line does not fit, at the same speed.

        Their times lie off from the first step with another local batch on, and are as long as
        they may be: more samples take longer, and at most as much longer as they are more.
        """
        new = (self.moved != 0) & (self.level_before > 0) & (np.abs(self.run - seen) <= 1)
        workers = np.flatnonzero(off & new)
        if not workers.size:
            return workers
        level = self._levels()[workers, -1] * self._recent_changes(workers)
        grown, moved = np.log(level / self.level_before[workers]), self.moved[workers]
        explained = (grown > np.minimum(moved, 0) - BENT) & (grown < np.maximum(moved, 0) + BENT)
        return np.asarray(workers[explained])

    def _cleared(self, workers: Flags) -> "Fit":
        """Begin to watch some workers anew."""
        return revised(
            self,
            rising=np.where(workers, 0.0, self.rising),
            falling=np.where(workers, 0.0, self.falling),
            run=np.where(workers, 0, self.run),
        )

    def _moved_off(self, workers: Ints) -> "Fit":
        """Return the fit where windows of some workers lie off their lines, which stay."""
        seen, mean_y = self.seen.copy(), self.mean_y.copy(order="F")
        mean_y[workers] = self._levels()[workers] * self._recent_changes(workers)[:, None]
        seen[workers] = FEWEST
        changed = np.isin(np.arange(self.workers), workers)
        return revised(self._cleared(changed), seen=seen, mean_y=mean_y)

    def _recent_changes(self, workers: Ints) -> Floats:
        """Return by what factor the times of workers lie off since their CUSUM began to rise.

        An alarm takes a few observations at least. Where those lie far off, others were before
        the change; where they do not, all since the CUSUM began to rise count.
        """
        found = []
        for worker in workers.tolist():
            few = float(np.median(self.recent[worker, -FEWEST:]))
            since = min(int(self.run[worker]), RECENT)
            far = abs(few) > CLIP * self.noise[worker]
            found.append(few if far else float(np.median(self.recent[worker, -since:])))
        return np.exp(found)

    def _scatter(self, measured: Floats, usable: Flags) -> "Fit":
        """Add how far these steps' times lie from their window's means."""
        # While a speed seems to change, distances from the old mean are not noise.
        steady = np.maximum(self.rising, self.falling) < ALARM / 3
        again = usable & (self.seen >= 1) & steady
        level = np.maximum(np.where(self.seen >= 1, self.mean_y[:, -1], 1.0), LEAST_SLOPE)
        gap = np.where(again, np.log(measured / level), 0.0)
        gap = np.clip(gap, -CLIP * self.cv, CLIP * self.cv)
        before = np.vstack([self.last_deviation, gap[:-1]])
        count = again.sum(axis=0).astype(np.float64)
        fair = (gap**2).sum(axis=0) * self.seen / (self.seen + 1)  # the mean is of seen ones itself
        kept = (1 - 1 / NOISE_MEMORY) ** count[:, None] * self.deviations
        new = np.column_stack([fair, (gap * before).sum(axis=0), count])
        last = self.last_deviation
        for each, there in zip(gap, usable, strict=True):
            last = np.where(there, each, last)
        return revised(self, deviations=np.asfortranarray(kept + new), last_deviation=last)

    def _averaged(self, times: Floats, excess: Floats, usable: Flags) -> "Fit":
        """Put the times into the window's means, without what exceeds the winsor limit."""
        count = usable.sum(axis=0)
        seen = np.minimum(self.seen + count, MEMORY)
        moved = times / (self.first_s * excess[:, :, None]) - self.mean_y
        if not usable.all():
            moved[~usable] = 0.0
        part = np.where(count > 0, 1 / np.maximum(seen, 1), 0.0)
        mean_y = self.mean_y + np.asfortranarray(moved.sum(axis=0) * part[:, None])
        return revised(self, seen=seen, mean_y=mean_y)

    def _reductions(self, alike: Sequence[Observation]) -> "Fit":
        """Learn the reduction times.

        done - ready contains waiting for slower workers and queueing behind the bucket before.
        The worker that arrives last waits for nobody: u_j is the least of done_j - max(ready_j,
        done_(j-1)) over the workers.
        """
        bucket_s, count = self.bucket_s, self.bucket_count
        for took in (each for step in alike if (each := _reduced_s(step)) is not None):
            least = np.maximum(np.fmin.reduce(took), 0.0)
            if np.isnan(least).any():
                continue
            if count:
                # One bad reduction (a page fault, a busy network) is not the network's speed.
                least = np.minimum(least, 3 * np.maximum(bucket_s, bucket_s.mean()))
            count = min(count + 1, REDUCTIONS)
            bucket_s = bucket_s + (least - bucket_s) / count
        return revised(self, bucket_s=bucket_s, bucket_count=count)

    def _loaders(self, observation: Observation) -> "Fit":
        """Learn the loaders' limits.

        A loader that should have been the limit and was not is faster than it seemed.
        """
        seen = observation.input_s
        if seen is None or (np.isnan(seen).all() and not self.input_s.any()):
            return self
        old = np.where(self.input_s > 0, self.input_s, seen)
        moved = old + 0.2 * (seen - old)
        faster = self.input_s * observation.batches > (observation.length_s or np.inf)
        kept = np.where(faster, 0.99 * self.input_s, self.input_s)
        return revised(self, input_s=np.where(np.isnan(seen), kept, moved))

    @cached_property
    def _window_x(self) -> Floats:
        """The window's local batches in units of the first; 1 where there is none."""
        if not self.split:
            return np.ones(self.workers)
        return np.array(self.split, dtype=np.float64) / self.first_batch

    @cached_property
    def _window(self) -> tuple[Floats, Floats, Floats]:
        """The window as sums (w, wx, wxx): its mean counts as often as it was seen."""
        x = np.where(self.seen > 0, self._window_x, 0.0)
        level = np.where(self.seen > 0, self.mean_y[:, -1], 1.0)
        w = self.seen / np.maximum(level, LEAST_SLOPE) ** 2
        return w, w * x, w * x * x

    @cached_property
    def _precision(self) -> tuple[Floats, Floats, Floats]:
        """The posterior precision of (c, beta), a symmetric 2 x 2 matrix per worker."""
        w, wx, wxx = self._window
        over = 1 / self.noise**2
        return (
            1 / FIXED_PRIOR[1] ** 2 + (self.pool[:, 0] + w) * over,
            (self.pool[:, 1] + wx) * over,
            1 / SLOPE_PRIOR[1] ** 2 + (self.pool[:, 2] + wxx) * over,
        )

    @cached_property
    def _all_lines(self) -> tuple[Floats, Floats]:
        """The lines of all buckets; not to be written to."""
        return self._lines()

    def _lines(self, buckets: slice = slice(None)) -> tuple[Floats, Floats]:
        """Return (c, beta), workers x buckets, in units of the first sample."""
        a, b, d = self._precision
        w, wx, _ = self._window
        over = 1 / self.noise**2
        prior_c = FIXED_PRIOR[0] / FIXED_PRIOR[1] ** 2
        prior_s = SLOPE_PRIOR[0] / SLOPE_PRIOR[1] ** 2
        determinant = a * d - b * b
        sums = self.pool_y[:, buckets], self.pool_xy[:, buckets], self.mean_y[:, buckets]
        fixed = _combined(sums, (d * over, -b * over, (d * w - b * wx) * over), determinant)
        slope = _combined(sums, (-b * over, a * over, (a * wx - b * w) * over), determinant)
        fixed += ((d * prior_c - b * prior_s) / determinant)[:, None]
        slope += ((a * prior_s - b * prior_c) / determinant)[:, None]
        # At a bound of one of the two, the other is what fits best given that.
        if (below := fixed < 0).any():
            slope += below * fixed * (b / d)[:, None]
            np.maximum(fixed, 0.0, out=fixed)
        if (flat := slope < LEAST_SLOPE).any():
            fixed += flat * (slope - LEAST_SLOPE) * (b / a)[:, None]
            np.maximum(slope, LEAST_SLOPE, out=slope)
            np.maximum(fixed, 0.0, out=fixed)
        return fixed, slope

    def _levels(self) -> Floats:
        """Return what the lines say of the window's local batches, workers x buckets."""
        fixed, slope = self._lines()
        return fixed + slope * self._window_x[:, None]

    def _variance(self, x: Floats) -> Floats:
        """Return the posterior variance of y at x."""
        a, b, d = self._precision
        variance: Floats = (d - 2 * b * x + a * x * x) / (a * d - b * b)
        return variance

    def _slope_error(self) -> Floats:
        """Return the standard error of beta, the level at the window's batch being known."""
        a, b, d = self._precision
        return np.sqrt(a / (a * d - b * b))

    def _shift(self, fixed: Floats, slope: Floats, buckets: slice = slice(None)) -> Floats:
        """Return how far each window's mean lies from its line, if too far to be noise."""
        level = fixed + slope * self._window_x[:, None]
        gap = self.mean_y[:, buckets] - level
        error = np.where(self.seen > 1, self.noise / np.sqrt(np.maximum(self.seen, 1)), np.inf)
        level *= TRIM * error[:, None]
        return gap * (np.abs(gap) > level)


def _reduced_s(step: Observation) -> Floats | None:
    """Return how long each worker saw each reduction last, the wait for others included."""
    if step.done_s is None or step.ready_s is None:
        return None
    begun = step.ready_s.copy()
    if step.wait_s is not None:
        begun += np.where(np.isnan(step.wait_s), 0.0, step.wait_s)[:, None]
    np.maximum(begun[:, 1:], step.done_s[:, :-1], out=begun[:, 1:])
    return np.asarray(step.done_s - begun)


def _alike(observations: Sequence[Observation]) -> Iterator[list[Observation]]:
    """Yield runs of measured steps with the same split and the same buckets."""
    known = [
        (observation, times.shape)
        for observation in observations
        if not np.isnan(times := observation.times("the speed model")).all()
    ]
    for _, group in groupby(known, key=lambda pair: (pair[0].split, pair[1])):
        yield [observation for observation, _ in group]


_PER_WORKER = (
    "first_batch",
    "first_s",
    "pool",
    "pool_y",
    "pool_xy",
    "moved",
    "level_before",
    "seen",
    "mean_y",
    "deviations",
    "last_deviation",
    "rising",
    "falling",
    "recent",
    "changed_by",
    "run",
    "input_s",
)


_SAVED: dict[str, tuple[Any, ...]] = {
    "first_batch": (Entries(least=1.0, most=BATCHES.most, unknown=True),),
    "first_s": (Entries(least=SHORTEST_S, unknown=True), -1),
    "pool": (Entries(most=1e20), 3),
    "pool_y": (Entries(most=1e20), -1),
    "pool_xy": (Entries(most=1e20), -1),
    "moved": (ANY,),
    "level_before": (Entries(),),
    "seen": (Entries(most=MEMORY),),
    "mean_y": (Entries(), -1),
    "deviations": (ANY, 3),
    "last_deviation": (ANY,),
    "rising": (Entries(),),
    "falling": (Entries(),),
    "recent": (ANY, RECENT),
    "changed_by": (Entries(least=1e-12),),
    "run": (Entries(),),
    "input_s": (TIMES,),
}
"""What a saved fit may hold, and how many columns besides workers: -1 is one per bucket."""


def _combined(tables: Sequence[Floats], factors: Sequence[Floats], over: Floats) -> Floats:
    """Return the sum of tables times factors of each row, divided by another one."""
    total: Floats = tables[0] * (factors[0] / over)[:, None]
    part = np.empty_like(total)
    for table, factor in zip(tables[1:], factors[1:], strict=True):
        np.multiply(table, (factor / over)[:, None], out=part)
        total += part
    return total


def _table(workers: int, columns: int) -> Floats:
    """Return zeros with each column in one piece: arithmetic runs along workers."""
    return np.zeros((workers, columns), order="F")

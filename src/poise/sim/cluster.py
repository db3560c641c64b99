"""A virtual cluster at some moment, and one step of it, bucket by bucket."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from poise.core.limits import Limits
from poise.core.split import Split, optimal_split
from poise.core.timing import Floats, SpeedModel
from poise.sim.reduction import Reduction, Together
from poise.sim.truth import Truth

_TRIES = 8
"""Workers that samples are moved to, of those that are there first, to find a better split."""


@dataclass(frozen=True, eq=False)
class Passage:
    """One step as it went, in arrays over workers; seconds from its begin."""

    ready_s: Floats
    """Workers x buckets: when they were handed over, without waiting for input."""
    done_s: Floats
    """Workers x buckets: when their sums were there."""
    wait_s: Floats
    """How long each worker waited for input."""

    @property
    def lasts_s(self) -> float:
        """The step time."""
        return float(self.done_s[:, -1].max())

    @property
    def arrived_s(self) -> Floats:
        """When each worker handed over its last bucket."""
        return self.ready_s[:, -1] + self.wait_s

    @property
    def idle_s(self) -> Floats:
        """How long each worker then waited for the last one."""
        arrived = self.arrived_s
        return np.asarray(arrived.max() - arrived)


@dataclass(frozen=True, eq=False)
class Cluster:
    """Workers, how their gradients are summed, and what that costs them."""

    truth: Truth
    reduction: Reduction
    drag: float = 0.0
    """By how much computing is slower while a bucket is reduced: 0.2 means 1.2 times as slow."""

    @staticmethod
    def of(truth: Truth) -> "Cluster":
        """Return a cluster whose collectives take what the truth says, once all are there."""
        return Cluster(truth, Together(truth.bucket_s))

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.truth.workers

    @property
    def is_plain(self) -> bool:
        """Whether step times are the largest of the workers' own, as the core takes them."""
        return isinstance(self.reduction, Together) and not self.drag

    def passage(
        self, split: Split, factor: Floats | float = 1.0, wait_s: Floats | None = None
    ) -> Passage:
        """Return how a step goes.

        Args:
            split: local batches.
            factor: what each worker's computing is multiplied by.
            wait_s: how long each worker waits for input first; none by default.
        """
        batches = np.array(split, dtype=np.float64)
        ready = self.truth.ready_s(batches) * np.reshape(factor, (-1, 1))
        wait = np.zeros(len(batches)) if wait_s is None else wait_s
        if self.drag:
            return self._dragged(ready, wait)
        done, free = [], np.zeros(len(batches))
        for bucket, handed_over in enumerate(ready.T):
            free = self.reduction.done_s(bucket, handed_over + wait, free)
            done.append(free)
        return Passage(ready, np.stack(done, axis=1), wait)

    def usual_wait_s(self, split: Split, factor: Floats) -> Floats:
        """Return how long workers wait for loaders that cannot keep up, once queues are empty."""
        loading = self.truth.input_s * np.array(split)
        return np.asarray(np.maximum(loading - self.passage(split, factor).lasts_s, 0.0))

    def step_s(self, split: Split) -> float:
        """Return the step time without noise, loaders that cannot keep up included."""
        if self.is_plain:
            return self.truth.step_s(split)
        loading = float((self.truth.input_s * np.array(split)).max())
        return max(self.passage(split).lasts_s, loading)

    def best(self, global_batch: int, limits: Limits) -> tuple[Split, float]:
        """Return the split that one who knows all of this would choose, and its step time.

        Exact where step times are the largest of the workers' own. Elsewhere the best that is
        found by moving samples from the split that would be best without what cannot be
        represented: what a policy does better than that counts as no regret.
        """
        if self.is_plain:
            best = optimal_split(self.truth, global_batch, limits)
            return best.split, best.step_s
        split = optimal_split(self._alike, global_batch, limits).split
        return self._improved(split, limits)

    @cached_property
    def _alike(self) -> Truth:
        """The truth with what the reduction takes if all arrive together."""
        truth = self.truth
        if not isinstance(truth, SpeedModel):
            return truth
        return replace(truth, bucket_s=self.reduction.bucket_s)

    def _improved(self, split: Split, limits: Limits) -> tuple[Split, float]:
        best_s = self.step_s(split)
        unit = limits.unit or 1
        count = max(unit, sum(split) // 32 // unit * unit)
        while True:
            moved = self._moved(split, best_s, count, limits)
            if moved is not None:
                split, best_s = moved
            elif count == unit:
                return split, best_s
            else:
                count = max(unit, count // 2 // unit * unit)

    def _moved(
        self, split: Split, best_s: float, count: int, limits: Limits
    ) -> tuple[Split, float] | None:
        """Return a split that is faster by moving some samples from one worker to another."""
        local_s = self.passage(split).arrived_s
        order = np.argsort(local_s)
        for late in order[::-1][:2].tolist():
            for early in order[:_TRIES].tolist():
                if early == late:
                    continue
                tried = list(split)
                tried[late] -= count
                tried[early] += count
                if tried[late] < limits.low[late] or tried[early] > limits.high[early]:
                    continue
                found_s = self.step_s(tuple(tried))
                if found_s < best_s * (1 - 1e-9):
                    return tuple(tried), found_s
        return None

    def _dragged(self, clean: Floats, wait: Floats) -> Passage:
        """Return a step in which reductions slow the workers' computing down.

        What a worker computes until it hands over a bucket overlaps with the reductions of
        earlier buckets only, so that buckets can be gone through in order.
        """
        work = np.diff(clean, axis=1, prepend=0.0)
        now, free = wait.astype(np.float64), np.zeros(len(wait))
        busy: list[tuple[float, float]] = []
        ready, done = [], []
        for bucket, seconds in enumerate(work.T):
            now = _worked(now, np.maximum(seconds, 0.0), busy, self.drag)
            begin = max(float(now.max()), float(free.max()))
            free = self.reduction.done_s(bucket, now, free)
            busy.append((begin, float(free.max())))
            ready.append(now - wait)
            done.append(free)
        return Passage(np.stack(ready, axis=1), np.stack(done, axis=1), wait)


def _worked(now: Floats, work: Floats, busy: list[tuple[float, float]], drag: float) -> Floats:
    """Return when work is done that goes on more slowly in busy times, which are in order."""
    left, time = work, now
    for begin, end in busy:
        before = np.clip(begin - time, 0.0, left)
        left, time = left - before, time + before
        inside = np.clip((end - time) / (1 + drag), 0.0, left)
        inside = np.where(time >= begin, inside, 0.0)
        left, time = left - inside, time + inside * (1 + drag)
    return np.asarray(time + left)

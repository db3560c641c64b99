"""Smoothed compute times since the split last changed, for policies without a speed model."""

from dataclasses import dataclass, replace

import numpy as np

from poise.core.entries import SHORTEST_S, TIMES, Entries, check_local_batches
from poise.core.observation import Change, Observation
from poise.core.split import Split
from poise.core.timing import Floats
from poise.errors import InvalidSetting

_LONG = 20
"""Observations of others after which a silent worker is not waited for."""


@dataclass(frozen=True, eq=False)
class Window:
    """The steps since the split last changed."""

    split: Split
    """The split decided last; measurements of others are left out."""
    speeds: Floats
    """Samples per second of each worker from before; all 1 if nothing was measured."""
    mean_s: Floats
    """Exponentially weighted mean of each worker's compute time."""
    seen: Floats
    """How many observations of each worker it holds."""

    def check_loaded(self) -> None:
        """Raise unless these can be means over steps."""
        workers = len(self.split)
        check_local_batches("split", self.split)
        Entries(least=1e-12, most=1e30).check("speeds", self.speeds, workers)
        TIMES.check("mean_s", self.mean_s, workers)
        Entries().check("seen", self.seen, workers)
        if ((self.seen > 0) & (self.mean_s < SHORTEST_S)).any():
            raise InvalidSetting("mean_s is 0 for a worker that was seen")

    @staticmethod
    def begin(split: Split, speeds: Floats | None = None) -> "Window":
        """Return the empty window of a split."""
        none = np.zeros(len(split))
        return Window(split, np.ones(len(split)) if speeds is None else speeds, none, none)

    @property
    def length(self) -> int:
        """Observations of the worker with the fewest.

        One that stays silent while others are seen often is not waited for.
        """
        if float(self.seen.max()) < _LONG:
            return int(self.seen.min())
        return int(self.seen[self.seen > 0].min())

    @property
    def times_s(self) -> Floats:
        """The mean times; a worker that was never measured counts as the mean of the others."""
        known = self.seen > 0
        return np.where(known, self.mean_s, self.mean_s[known].mean())

    def add(self, observation: Observation, who: str, weight: float) -> "Window":
        """Smooth a step's compute times in; the first ones count alike until weight is reached."""
        measured = observation.times(who)[:, -1]
        if observation.split != self.split:
            return self
        valid = measured >= SHORTEST_S
        seen = self.seen + valid
        part = np.maximum(1 / np.maximum(seen, 1), weight)
        moved = self.mean_s + part * (np.where(valid, measured, self.mean_s) - self.mean_s)
        return replace(self, mean_s=moved, seen=seen)

    def throughput(self) -> Floats:
        """Return samples per second of each worker, b_k / mu_k; an idle one counts as 1 sample.

        Before anything is measured, what was known before.
        """
        if self.length == 0:
            return self.speeds
        return np.asarray(np.maximum(self.split, 1) / self.times_s)


def resized(speeds: Floats, change: Change) -> Floats:
    """Return the speeds of other workers; a new one counts as the mean of the others."""
    mean = float(speeds.mean())
    return np.array([mean if number is None else speeds[number] for number in change.origin])

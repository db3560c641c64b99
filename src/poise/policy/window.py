"""Smoothed compute times since the split last changed, for policies without a speed model."""

from dataclasses import dataclass, replace

import numpy as np

from poise.core.observation import Change, Observation
from poise.core.split import Split
from poise.core.timing import Floats


@dataclass(frozen=True, eq=False)
class Window:
    """The steps since the split last changed."""

    split: Split
    """The split decided last; measurements of others are left out."""
    mean_s: Floats
    """Exponentially weighted mean of each worker's compute time."""
    seen: Floats
    """How many observations of each worker it holds."""

    @staticmethod
    def begin(split: Split) -> "Window":
        """Return the empty window of a split."""
        return Window(split, np.zeros(len(split)), np.zeros(len(split)))

    @property
    def length(self) -> int:
        """Observations of the worker with the fewest."""
        return int(self.seen.min())

    def add(self, observation: Observation, who: str, weight: float) -> "Window":
        """Smooth a step's compute times in; the first ones count alike until weight is reached."""
        measured = observation.times(who)[:, -1]
        if observation.split != self.split:
            return self
        valid = ~np.isnan(measured)
        seen = self.seen + valid
        part = np.maximum(1 / np.maximum(seen, 1), weight)
        moved = self.mean_s + part * (np.where(valid, measured, self.mean_s) - self.mean_s)
        return replace(self, mean_s=moved, seen=seen)

    def throughput(self) -> Floats:
        """Return samples per second of each worker: b_k / mu_k."""
        return np.array(self.split) / self.mean_s


def resized(window: Window, change: Change) -> Floats:
    """Return each worker's speed as far as it is known; a new one counts as the mean of the others.

    Without any measurement all are alike.
    """
    if window.length == 0:
        return np.ones(len(change.origin))
    speeds = window.throughput()
    mean = float(speeds.mean())
    return np.array([mean if number is None else speeds[number] for number in change.origin])

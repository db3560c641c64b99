"""Steps under way, with a bound: pushes are averaged until all of a step are there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.messages import Push
from poise.torch.asynchronous.parameters import Parameters, Versions


@dataclass
class _Open:
    mean: Flat
    """Of the pushes so far, each weighted by its count."""
    counts: dict[int, float] = field(default_factory=dict)
    """Of each worker."""
    present: list[bool] = field(default_factory=list)
    versions: dict[int, Versions] = field(default_factory=dict)
    """Of the weights that each worker computed with."""

    @property
    def count(self) -> float:
        """All together."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class AppliedStep:
    """What became of a step."""

    staleness: Mapping[int, int]
    """Of each worker's part; empty if there was nothing to apply."""
    factor: float = 1.0
    """What the learning rate was multiplied by."""


class OpenSteps:
    """The means of pushes, each weighted by its count, of steps that are not complete."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._open: dict[int, _Open] = {}

    @torch.no_grad()
    def add(self, step: int, worker: int, pushed: Flat, push: Push) -> None:
        """Add a push."""
        if step not in self._open:
            self._open[step] = _Open(
                self._parameters.buffer(), present=[False] * len(self._parameters.trained)
            )
        whole = self._open[step]
        whole.counts[worker] = push.count
        part_of_all = push.count / whole.count if whole.count else 0.0
        for mean, part in zip(whole.mean.views, pushed.views, strict=True):
            if mean.is_floating_point():
                mean.lerp_(part, part_of_all)  # a sum would overflow where types are small
            else:
                torch.maximum(mean, part, out=mean)
        whole.present = [
            known or new == "1" for known, new in zip(whole.present, push.present, strict=True)
        ]
        whole.versions[worker] = push.versions

    @torch.no_grad()
    def apply(self, step: int, factor: Callable[[float], float]) -> AppliedStep:
        """Make the update of a complete step, at a rate by the mean staleness of its samples."""
        whole = self._open.pop(step, None)
        if whole is None or not whole.count:
            return AppliedStep({})
        staleness = {
            worker: self._parameters.staleness(versions)
            for worker, versions in whole.versions.items()
        }
        late = sum(staleness[worker] * count for worker, count in whole.counts.items())
        mean = late / whole.count
        multiplied = factor(mean)
        with torch.enable_grad():
            self._parameters.apply(
                whole.mean,
                whole.present,
                since=self._parameters.versions,
                factor=lambda _: multiplied,
                late=mean,
                part=1.0,
            )
        return AppliedStep(staleness, multiplied)

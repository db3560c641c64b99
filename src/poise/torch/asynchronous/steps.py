"""Steps under way, with a bound: pushes are added up until all of a step are there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.messages import Push
from poise.torch.asynchronous.parameters import Parameters, Versions


@dataclass
class _Sum:
    total: Flat
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
    """The sums of pushes, each weighted by its count, of steps that are not complete."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._sums: dict[int, _Sum] = {}

    @torch.no_grad()
    def add(self, step: int, worker: int, pushed: Flat, push: Push) -> None:
        """Add a push."""
        if step not in self._sums:
            self._sums[step] = _Sum(
                self._parameters.buffer(), present=[False] * len(self._parameters.trained)
            )
        whole = self._sums[step]
        for total, part in zip(whole.total.views, pushed.views, strict=True):
            if total.is_floating_point():
                total.add_(part, alpha=push.count)
            else:
                torch.maximum(total, part, out=total)
        whole.counts[worker] = push.count
        whole.present = [
            known or new == "1" for known, new in zip(whole.present, push.present, strict=True)
        ]
        whole.versions[worker] = push.versions

    @torch.no_grad()
    def apply(self, step: int, factor: Callable[[float], float]) -> AppliedStep:
        """Make the update of a complete step, at a rate by the mean staleness of its samples."""
        whole = self._sums.pop(step, None)
        if whole is None or not whole.count:
            return AppliedStep({})
        for total in whole.total.views:
            if total.is_floating_point():
                total.div_(whole.count)
        staleness = {
            worker: self._parameters.staleness(versions)
            for worker, versions in whole.versions.items()
        }
        late = sum(staleness[worker] * count for worker, count in whole.counts.items())
        mean = late / whole.count
        multiplied = factor(mean)
        with torch.enable_grad():
            self._parameters.apply(
                whole.total,
                whole.present,
                since=self._parameters.versions,
                factor=lambda _: multiplied,
                late=mean,
                part=1.0,
            )
        return AppliedStep(staleness, multiplied)

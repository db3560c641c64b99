"""How pushes become updates: each by itself, or with a bound averaged until a step is complete."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from poise.engine.modes import Stale
from poise.torch.asynchronous.course import Course
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.messages import Push
from poise.torch.asynchronous.parameters import Applied, Parameters, Versions


class Updates:
    """Makes updates of the workers' pushes."""

    def __init__(self, course: Course, parameters: Parameters) -> None:
        self._course = course
        self._parameters = parameters
        self._steps = OpenSteps(parameters)
        self._factors: dict[int, float] = {}
        """Of the workers that are here."""

    def join(self, worker: int) -> None:
        """A worker is here."""
        self._factors[worker] = 1.0

    def leave(self, worker: int) -> None:
        """A worker is gone, and no step waits for it any more."""
        del self._factors[worker]
        self.apply_complete()

    def factor(self, worker: int) -> float:
        """Return what the rate of a worker's last push was multiplied by."""
        return self._factors[worker]

    def push(self, worker: int, push: Push, gradient: Flat, *, finite: bool) -> float:
        """Take a push, whose gradient counts if it is finite; return the seconds of waiting."""
        if isinstance(self._course.engine.mode, Stale):
            return self._push_to_step(worker, push, gradient, finite=finite)
        return self._push_alone(worker, push, gradient, finite=finite)

    def skip(self, worker: int, numbers: Sequence[int]) -> None:
        """Account for local batches that a worker computed in vain."""
        course = self._course
        if numbers:
            with course.changing():
                course.engine = course.engine.pushed(worker, numbers, finite=False)
                self.apply_complete()

    def apply_complete(self) -> None:
        """With a bound: make the updates of all steps that are complete."""
        course = self._course
        with course.changing():
            while (step := course.engine.complete()) is not None:
                with course.own_errors():
                    applied = self._steps.apply(step, course.engine.step_factor)
                course.engine = course.engine.applied(step, applied.staleness)
                for worker in applied.staleness.keys() & self._factors.keys():
                    self._factors[worker] = applied.factor

    def _push_alone(self, worker: int, push: Push, gradient: Flat, *, finite: bool) -> float:
        start_s = time.perf_counter()
        course, applied = self._course, Applied(0, 0.0)
        with course.updating():
            queued_s = time.perf_counter() - start_s
            engine = course.engine
            share = engine.shares(worker, push.numbers)[-1]
            if finite:
                with course.own_errors():
                    applied = self._parameters.apply(
                        gradient,
                        [each == "1" for each in push.present],
                        since=push.versions,
                        factor=partial(engine.factor, share),
                        late=engine.usual_staleness,
                        part=share.part,
                    )
            with course.changing():  # not where that failed: what was not applied does not count
                course.engine = course.engine.pushed(
                    worker, push.numbers, finite=finite, staleness=applied.staleness
                )
        self._factors[worker] = engine.factor(share, applied.staleness)
        return queued_s + applied.waited_s

    def _push_to_step(self, worker: int, push: Push, gradient: Flat, *, finite: bool) -> float:
        start_s = time.perf_counter()
        course = self._course
        with course.changing():
            queued_s = time.perf_counter() - start_s
            (share, *_) = course.engine.shares(worker, push.numbers)
            if finite:
                self._steps.add(share.step, worker, gradient, push)
            course.engine = course.engine.pushed(worker, push.numbers, finite=finite)
            self.apply_complete()
        return queued_s


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

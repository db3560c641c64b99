"""How pushes become updates: each by itself, or with a bound averaged until a step is complete."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from poise.engine.modes import Stale
from poise.errors import PoiseWarning
from poise.torch.asynchronous.course import Course
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.messages import Push
from poise.torch.asynchronous.parameters import Parameters


class Updates:
    """Makes updates of the workers' pushes."""

    def __init__(self, course: Course, parameters: Parameters) -> None:
        self._course = course
        self._parameters = parameters
        self._steps = OpenSteps(parameters)
        self.factors: dict[int, float] = {}
        """What the rate of each worker's last push was multiplied by."""
        self._told = False
        """Whether it was said that a push was dropped."""

    def push(self, worker: int, push: Push, gradient: Flat, *, finite: bool) -> float:
        """Take a push, whose gradient counts if it is finite; return the seconds of waiting."""
        if not finite:
            self._tell(worker, push)
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
                    staleness, factor = self._steps.apply(step, course.engine.step_factor)
                course.engine = course.engine.applied(step, staleness)
                self.factors.update(dict.fromkeys(staleness, factor))

    def _tell(self, worker: int, push: Push) -> None:
        """Say once that a push is dropped: whose it is, and of which step."""
        if self._told:
            return
        self._told = True
        step = self._course.engine.member(worker).shares(push.numbers)[-1].step
        warnings.warn(
            f"the gradient that worker {worker} pushed for its step {step} is not finite (NaN or "
            "infinite) and is dropped; its samples count as trained on, and balancer.skipped "
            "counts it and all later ones. Look at the loss and the samples of that worker, clip "
            "gradients, or lower the learning rate",
            PoiseWarning,
            stacklevel=2,
        )

    def _push_alone(self, worker: int, push: Push, gradient: Flat, *, finite: bool) -> float:
        start_s = time.perf_counter()
        course, staleness, waited_s = self._course, 0, 0.0
        with course.updating():
            queued_s = time.perf_counter() - start_s
            engine = course.engine
            share = engine.member(worker).shares(push.numbers)[-1]
            if finite:
                with course.own_errors():
                    staleness, waited_s = self._parameters.apply(
                        gradient,
                        [each == "1" for each in push.present],
                        since=push.versions,
                        factor=partial(engine.factor, share),
                        late=engine.usual_staleness,
                        part=share.part,
                    )
            with course.changing():  # not where that failed: what was not applied does not count
                course.engine = course.engine.pushed(
                    worker, push.numbers, finite=finite, staleness=staleness
                )
        self.factors[worker] = engine.factor(share, staleness)
        return queued_s + waited_s

    def _push_to_step(self, worker: int, push: Push, gradient: Flat, *, finite: bool) -> float:
        start_s = time.perf_counter()
        course = self._course
        with course.changing():
            queued_s = time.perf_counter() - start_s
            (share, *_) = course.engine.member(worker).shares(push.numbers)
            if finite:
                self._steps.add(share.step, worker, gradient, push)
            course.engine = course.engine.pushed(worker, push.numbers, finite=finite)
            self.apply_complete()
        return queued_s


class OpenSteps:
    """The means of pushes, each weighted by its count, of steps that are not complete."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._open: dict[int, _Open] = {}

    @torch.no_grad()
    def add(self, step: int, worker: int, pushed: Flat, push: Push) -> None:
        """Add a push."""
        if step not in self._open:
            self._open[step] = _Open(self._parameters.buffer())
        whole = self._open[step]
        whole.pushes[worker] = push
        part_of_all = push.count / whole.count if whole.count else 0.0
        for mean, part in zip(whole.mean.views, pushed.views, strict=True):
            if mean.is_floating_point():
                mean.lerp_(part, part_of_all)  # a sum would overflow where types are small
            else:
                torch.maximum(mean, part, out=mean)

    def apply(self, step: int, factor: Callable[[float], float]) -> tuple[dict[int, int], float]:
        """Make the update of a complete step, at a rate by the mean staleness of its samples.

        Returns the staleness of each worker's part, of none if there was nothing to apply, and what
        the learning rate was multiplied by.
        """
        whole = self._open.pop(step, None)
        if whole is None or not whole.count:
            return {}, 1.0
        pushes = whole.pushes
        staleness = {
            worker: self._parameters.staleness(push.versions) for worker, push in pushes.items()
        }
        late = sum(staleness[worker] * push.count for worker, push in pushes.items()) / whole.count
        multiplied = factor(late)
        self._parameters.apply(
            whole.mean,
            ["1" in each for each in zip(*(push.present for push in pushes.values()), strict=True)],
            since=self._parameters.versions,
            factor=lambda _: multiplied,
            late=late,
            part=1.0,
        )
        return staleness, multiplied


@dataclass(frozen=True)
class _Open:
    mean: Flat
    """Of the pushes so far, each weighted by its count."""
    pushes: dict[int, Push] = field(default_factory=dict)
    """Of each worker."""

    @property
    def count(self) -> float:
        """All together."""
        return sum(push.count for push in self.pushes.values())

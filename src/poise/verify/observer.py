"""Notes on a training, taken from the inside: batches, gradients and weights of its first steps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from poise.engine.modes import Sync
from poise.environment import launched_as
from poise.numbers import is_number
from poise.policy import Even, Fixed
from poise.runtime.events import (
    Applied,
    Applying,
    Begun,
    BucketReady,
    Events,
    HandedOut,
    Prepared,
    Reduced,
)
from poise.torch.settings import TorchSettings
from poise.torch.torch_private import BatchNormBase, DropoutBase
from poise.verify.course import Course
from poise.verify.observation import Observation, StepSeen, Values, Variant, kept
from poise.verify.samples import digest, samples_of
from poise.verify.split import unequal_split


class Enough(BaseException):
    """Leaves the script; no `except Exception` of the script catches it."""


class Refused(BaseException):
    """The script cannot be verified; the message says why."""


class Observer:
    """Takes notes of the first steps of one training on one worker, then leaves the script."""

    def __init__(self, steps: int, variant: Variant, course: Course) -> None:
        self.seen: Observation | None = None
        """What was seen; None until the script prepares a Balancer."""
        self.balancers: list[Any] = []
        """All that the script made."""
        self._steps = steps
        self._variant = variant
        self._course = course
        self._stated: TorchSettings | None = None
        """What the script stated for the Balancer that is watched; until then, for its last."""
        self._watched: Events | None = None
        """Of the training that is watched."""
        self._names: dict[Tensor, str] = {}
        self._optimizers: list[Optimizer] = []
        self._generators: tuple[Any, ...] = ()

    def settings(self, stated: TorchSettings) -> TorchSettings:
        """Return a Balancer's settings, with shares that suit the comparison.

        The global batch stays: both sides would have to move it alike.
        """
        workers = _workers()
        if self._watched is None:
            self._stated = stated
        shared = self._variant.arrangement == "shared"
        limit = stated.micro_batch
        if isinstance(limit, list | tuple) and limit:  # as many limits as there are workers here
            limit = [limit[worker % len(limit)] for worker in range(workers)]
        return replace(
            stated,
            policy=Fixed(unequal_split(workers, stated.global_batch)) if shared else Even(),
            mode=Sync(),
            adapt=None,
            rule=None,
            inner=None,
            micro_batch=limit,
        )

    def listen(self, events: Events) -> None:
        """Hear of a training; only the first that is prepared is watched."""
        made, stated = len(self.balancers), self._stated

        def of_the_watched(call: Callable[[Any], None]) -> Callable[[Any], None]:
            return lambda event: call(event) if self._watched is events else None

        def prepared(event: Prepared) -> None:
            self._prepared(events, event, self.balancers[made], stated)

        events.on(Begun, lambda event: self.balancers.append(event.balancer))
        events.on(Prepared, prepared)
        events.on(HandedOut, of_the_watched(self._handed_out))
        events.on(BucketReady, of_the_watched(self._bucket))
        events.on(Reduced, of_the_watched(self._weighted))
        events.on(Applying, of_the_watched(self._before_update))
        events.on(Applied, of_the_watched(self._after_update))

    def _prepared(
        self, events: Events, event: Prepared, balancer: Any, stated: TorchSettings | None
    ) -> None:
        """Begin to watch a training; a second one in the same script is left alone."""
        if event.streams:
            balancer.close()
            raise Refused(
                "the data set is a stream, of which every worker reads its own part, so one "
                "process has other global batches than several; verify with a map-style data set"
            )
        if self._watched is not None:
            return
        assert stated is not None
        self._watched, self._stated = events, stated
        self._names = _names([model.module for model in event.models])
        self._optimizers = list(event.optimizers)
        self.seen = Observation(
            worker=balancer.worker,
            split=balancer.plan.split,
            counted=stated.count is not None,
            compressed=stated.inner is not None,
        )
        for model in event.models:
            model.register_forward_pre_hook(self._before_forward)
            model.register_forward_hook(self._after_forward)

    def _handed_out(self, event: HandedOut) -> None:
        """The training loader is about to yield a batch: a step begins, or it is enough."""
        assert self.seen is not None
        assert self._stated is not None
        if self._step is not None and self._step.after:
            self._after_update()  # the script may have changed weights by itself since then
        if len(self.seen.steps) == self._steps:
            for balancer in self.balancers:
                balancer.close()
            raise Enough
        parameters = {name: parameter for parameter, name in self._names.items()}
        self._course.begin(len(self.seen.steps), parameters)
        slicer, share = self._stated.slicer, event.samples
        samples = samples_of(event.contents, share, slicer) if share else []
        self.seen.steps.append(StepSeen(samples, before=self._weights()))
        self._generators = _generator_states()

    def _bucket(self, event: BucketReady) -> None:
        """Part of this worker's own gradient is there, and not yet weighted.

        A later backward of the same step finds what earlier ones left in the bucket, so the last
        one has all of it.
        """
        step, bucket = self._step, event.bucket
        if step is None:
            return
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names.get(parameter)
            if name is not None and name not in step.used:
                step.local[name] = kept(gradient)

    def _weighted(self, event: Reduced) -> None:
        """The weights of the step are known."""
        if self._step is not None and self.seen is not None:
            self._step.weight = event.weights[self.seen.worker]

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if self._variant.stilled:
            _still(model)
        if self._is_training(model):
            self._look_at(model)
            self._look_for_draws()

    def _after_forward(self, model: nn.Module, *_: Any) -> None:
        if self._is_training(model):
            self._look_for_draws(in_model=True)

    def _is_training(self, model: nn.Module) -> bool:
        return self._step is not None and model.training and torch.is_grad_enabled()

    def autocast(self) -> None:
        """Something runs in 16-bit precision."""
        if self.seen is not None:
            self.seen.autocast = True

    @property
    def _step(self) -> StepSeen | None:
        """The step under way."""
        return self.seen.steps[-1] if self.seen is not None and self.seen.steps else None

    def _before_update(self, event: Applying) -> None:
        step, optimizer = self._step, event.optimizer
        if step is None:
            return
        self._look_for_draws()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(parameter)
                if name is not None and parameter.grad is not None:
                    step.used.setdefault(name, kept(parameter.grad))
        which = f" of optimizer {self._optimizers.index(optimizer)}"
        step.settings.update(_numbers(optimizer, which if len(self._optimizers) > 1 else ""))

    def _after_update(self, *_: Any) -> None:
        step = self._step
        if step is None:
            return
        step.after = self._weights()
        step.digests = {
            name: digest(parameter.detach().cpu().flatten())
            for parameter, name in self._names.items()
        }

    def _weights(self) -> Values:
        return {name: kept(parameter) for parameter, name in self._names.items()}

    def _look_at(self, model: nn.Module) -> None:
        assert self.seen is not None
        for name, layer in model.named_modules():
            if _normalizes_by_batch(layer) and name not in self.seen.batch_norms:
                self.seen.batch_norms.append(name)
            if self._drops(layer) and name not in self.seen.dropouts:
                self.seen.dropouts.append(name)

    def _drops(self, layer: nn.Module) -> bool:
        active = isinstance(layer, DropoutBase) and layer.training and layer.p > 0
        return active and not self._variant.stilled

    def _look_for_draws(self, *, in_model: bool = False) -> None:
        """Note whether random numbers were drawn since the last look."""
        assert self.seen is not None
        before, self._generators = self._generators, _generator_states()
        if before != self._generators:
            self.seen.draws_in_model |= in_model
            self.seen.draws_in_loop |= not in_model


def _still(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, BatchNormBase) and layer.running_mean is not None:
            layer.eval()
        if isinstance(layer, nn.RNNBase):
            layer.dropout = 0.0


def _normalizes_by_batch(layer: nn.Module) -> bool:
    return isinstance(layer, BatchNormBase) and (layer.training or layer.running_mean is None)


def _workers() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    launch = launched_as()
    return launch.workers if launch else 1


def _names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    return {
        parameter: f"models[{number}].{name}" if len(models) > 1 else name
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _numbers(optimizer: Optimizer, which: str) -> dict[str, float]:
    """Return the numbers that an optimizer is set to."""
    groups = optimizer.param_groups
    return {
        f"{key}{f' of group {number}' if len(groups) > 1 else ''}{which}": float(value)
        for number, group in enumerate(groups)
        for key, value in group.items()
        if is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _generator_states() -> tuple[Any, ...]:
    """Return the states of the global random generators."""
    numpy_state: Any = np.random.get_state()
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state().cpu().numpy().tobytes())
    return (*states, numpy_state[1].tobytes(), *numpy_state[2:])

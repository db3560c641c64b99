"""Pacing: workers that sleep inside forward and backward, for clusters larger than the machine.

Gradients and the traffic between workers are real; only the time that computing takes is made up.
One step of a worker takes (per_sample_s * local batch + fixed_s) / speed, a third of it in
forward, the rest in backward. What the real computation takes counts as a part of it.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poise.errors import InvalidSetting

if TYPE_CHECKING:
    from torch import Tensor, nn

FORWARD_PART = 1 / 3
"""Backward takes about twice as long as forward."""

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"(?P<number>\d+\.?\d*|\.\d+)(?P<unit>us|ms|s)")


@dataclass(frozen=True)
class Pace:
    """How long a worker of speed 1 computes."""

    per_sample_s: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_sample_s", "fixed_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidSetting(f"{name}={value!r}; give seconds from 0 up")

    def step_s(self, local_batch: int, speed: float) -> float:
        """Return the seconds of forward and backward.

        >>> Pace(per_sample_s=0.004, fixed_s=0.02).step_s(local_batch=10, speed=0.5)
        0.12
        """
        return (self.per_sample_s * local_batch + self.fixed_s) / speed


def parse_pace(text: str) -> Pace:
    """Return the pace written as PER_SAMPLE or PER_SAMPLE+FIXED, with units.

    >>> parse_pace("4ms+20ms")
    Pace(per_sample_s=0.004, fixed_s=0.02)
    """
    per_sample, plus, fixed = text.partition("+")
    return Pace(_seconds(per_sample, text), _seconds(fixed, text) if plus else 0.0)


class Pacer:
    """Stretches the forward and backward of a module to what a worker of some speed would take.

    `speed` can be changed at any time; a step keeps the speed it began with.
    """

    def __init__(
        self,
        per_sample_s: float,
        fixed_s: float,
        speed: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.pace = Pace(per_sample_s, fixed_s)
        self.speed = speed
        self._clock = clock
        self._sleep = sleep
        self._forward_began_s = 0.0
        self._step_s = 0.0
        self._owed_s = 0.0
        """Of forwards whose backward has not begun."""
        self._backward = _Backward(began_s=0.0, lasts_s=0.0)

    def attach(self, module: "nn.Module") -> None:
        """Pace a module; for DistributedDataParallel, the model inside it.

        Gradients of a bucket become ready when all its parameters have slept: a parameter's own
        hook runs before that of DistributedDataParallel.
        """
        from torch.nn.parallel import DistributedDataParallel

        model = module.module if isinstance(module, DistributedDataParallel) else module
        parameters = [each for each in model.parameters() if each.requires_grad]
        total = sum(each.numel() for each in parameters)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._after_gradient_of(total))

    def _before_forward(self, _: "nn.Module", args: Any, kwargs: Any) -> None:
        self._forward_began_s = self._clock()
        self._step_s = self.pace.step_s(local_batch((args, kwargs)), self.speed)

    def _after_forward(self, _: "nn.Module", __: Any, output: Any) -> None:
        self._sleep_until(self._forward_began_s + FORWARD_PART * self._step_s)
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if outputs:
            self._owed_s += (1 - FORWARD_PART) * self._step_s
        for tensor in outputs:
            tensor.register_hook(self._at_backward)

    def _at_backward(self, _: "Tensor") -> None:
        """Begin to spend what the forwards left; their other outputs find nothing to begin."""
        if self._owed_s > 0:
            self._backward = _Backward(began_s=self._clock(), lasts_s=self._owed_s)
            self._owed_s = 0.0

    def _after_gradient_of(self, total: int) -> "Callable[[Tensor], None]":
        def sleep(parameter: "Tensor") -> None:
            backward = self._backward
            backward.done += parameter.numel() / total
            self._sleep_until(backward.began_s + backward.lasts_s * min(1.0, backward.done))

        return sleep

    def _sleep_until(self, target_s: float) -> None:
        left_s = target_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)


@dataclass
class _Backward:
    """The backward under way."""

    began_s: float
    lasts_s: float
    done: float = 0.0
    """The part of the parameters whose gradients are there."""


def local_batch(inputs: Any) -> int:
    """Return the length of the first tensor among a module's inputs."""
    for tensor in tensors(inputs):
        if tensor.dim() > 0:
            return len(tensor)
    raise InvalidSetting(
        "a paced model was called without any tensor that has a length; pass it the batch"
    )


def tensors(value: Any) -> "Iterator[Tensor]":
    """Yield the tensors in nested lists, tuples and mappings, in order."""
    if hasattr(value, "register_hook"):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def _seconds(text: str, whole: str) -> float:
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidSetting(
            f"--pace {whole!r} is not PER_SAMPLE or PER_SAMPLE+FIXED; give times with units, "
            "as in 4ms+20ms"
        )
    return float(found["number"]) * _UNITS_S[found["unit"]]

"""Whether this worker's own part of a gradient is finite, looked at before it is summed.

One number says it: the sum over a bucket, which is NaN or infinite if anything in the bucket is.
It takes as long as the weighting does, one pass over the bucket. On the CPU it is known at once;
on an accelerator it is read when the device has got there, so that nobody waits for it.
"""

import cmath
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from poise.runtime.clocks import Stamp
from poise.runtime.events import NotFinite
from poise.runtime.session import Session

_HALF = (torch.float16, torch.bfloat16)


class OwnPart:
    """Looks at the buckets of one model on one worker."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session = session
        self._model = model
        self._on_device: deque[tuple[int, Stamp, Tensor]] = deque()
        """Numbers of buckets that the device may not have computed yet."""

    def look(self, step: int, gradient: Tensor) -> None:
        """Tell if a bucket of gradients, handed over and not weighted yet, is not finite."""
        total = gradient.sum(dtype=torch.float32) if gradient.dtype in _HALF else gradient.sum()
        if gradient.device.type == "cpu":
            # A sum can overflow where no number of the bucket does.
            if not cmath.isfinite(total.item()) and not _is_finite(gradient):
                stamp, finite = self._session.stopwatch.stamp(), self._weights_are_finite()
                self._session.events.tell(NotFinite(step, stamp, weights=finite, used=False))
            return
        self._read()
        number = total.detach().to("cpu", non_blocking=True)
        stamp = self._session.stopwatch.stamp()
        self._on_device.append((step, stamp, number))

    def _read(self) -> None:
        """Look at the numbers of earlier buckets that are there.

        Weights that are not finite by then are so because an optimizer used the gradient.
        """
        clock = self._session.stopwatch.clock
        while self._on_device and clock.passed(self._on_device[0][1].mark):
            step, stamp, number = self._on_device.popleft()
            if not cmath.isfinite(number.item()):
                used = not self._weights_are_finite()
                self._session.events.tell(NotFinite(step, stamp, weights=True, used=used))

    def _weights_are_finite(self) -> bool:
        return all(_is_finite(parameter.detach()) for parameter in self._model.parameters())


def is_used(optimizer: Any) -> bool:
    """Whether an optimizer that stepped has used its gradient.

    A fused one is called by a GradScaler with what it found, and leaves the step out by itself.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is None or not float(found)


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())

"""Whether this worker's own part of a gradient is finite, looked at before it is summed.

A pass over all gradients would cost a tenth of our own code, and any operation of torch's or
NumPy's about 3 % of it. But a loss that is NaN reaches nearly all gradients, and what goes wrong
in backward reaches those of all layers below. So some numbers of a bucket are read as they lie in
memory, in about 20 microseconds. The first bucket, of the layers at the top, can be left out. On an
accelerator the device adds the numbers up, and nobody waits for it.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket

from poise.runtime.clocks import Stamp
from poise.runtime.events import NotFinite
from poise.runtime.session import Session

_SMALLEST, _SPACED = 8, 4
"""One number is read of each of so many parameters: the smallest, such as biases, to which every
sample contributes. And so many more, evenly spaced over the bucket."""
_READABLE = (torch.float32, torch.float64)
"""What Python reads from memory by itself."""

Numbers = memoryview | Tensor
Look = tuple[Numbers, Sequence[int]]
"""The numbers of a bucket, and which of them to look at."""


class OwnPart:
    """Looks at the buckets of one model on one worker."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session = session
        self._model = model
        self._looks: dict[int, Look] = {}
        """At DDP's buckets, which stay, by their addresses."""
        self._asked: deque[tuple[int, Stamp, Tensor]] = deque()
        """Sums that the device may not have computed yet."""

    def look(self, step: int, bucket: GradBucket, gradient: Tensor, *, on_cpu: bool) -> None:
        """Tell if the gradients of a bucket, handed over and not summed yet, are not finite."""
        if not on_cpu:
            self.read()
            self.ask(step, bucket, gradient)
            return
        total = 0.0
        if gradient.is_sparse:  # it lies in no flat memory, and is small
            total = float(torch.sparse.sum(gradient))
        else:
            found = self._looks.get(gradient.data_ptr())
            numbers, places = self._begin(bucket, gradient) if found is None else found
            for place in places:
                total += numbers[place]  # type: ignore[assignment] # a number, or a tensor of one
        if not math.isfinite(total):
            stamp, weights = self._session.stopwatch.stamp(), self._weights_are_finite()
            self._session.events.tell(NotFinite(step, stamp, weights=weights, used=False))

    def ask(self, step: int, bucket: GradBucket, gradient: Tensor) -> None:
        """Have the device look."""
        some = gradient[torch.tensor(_places(bucket, gradient), device=gradient.device)]
        number = some.sum(dtype=torch.float32).to("cpu", non_blocking=True)
        self._asked.append((step, self._session.stopwatch.stamp(), number))

    def read(self) -> None:
        """Tell of earlier buckets, of which the device has answered.

        Weights that are not finite by then are so because an optimizer used the gradient.
        """
        clock = self._session.stopwatch.clock
        while self._asked and clock.passed(self._asked[0][1].mark):
            step, stamp, number = self._asked.popleft()
            if not math.isfinite(number.item()):
                used = not self._weights_are_finite()
                self._session.events.tell(NotFinite(step, stamp, weights=True, used=used))

    def _begin(self, bucket: GradBucket, gradient: Tensor) -> Look:
        """Choose where to look; this is kept if the bucket is, as those of DDP are."""
        numbers: Numbers = gradient
        if gradient.dtype in _READABLE:
            numbers = memoryview(gradient.numpy())  # type: ignore[arg-type] # NumPy's stubs lack it
        look = numbers, _places(bucket, gradient)
        if type(bucket) is GradBucket:
            if bucket.index() <= 1:  # the first step, or DDP has made all its buckets anew
                self._looks.clear()
            self._looks[gradient.data_ptr()] = look
        return look

    def _weights_are_finite(self) -> bool:
        weights = (parameter.detach() for parameter in self._model.parameters())
        return all(bool(torch.isfinite(weight).all()) for weight in weights)


def is_used(optimizer: Any) -> bool:
    """Whether an optimizer that stepped has used its gradient.

    A fused one is called by a GradScaler with what it found, and leaves the step out by itself.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is None or not float(found)


def _places(bucket: GradBucket, gradient: Tensor) -> tuple[int, ...]:
    """Return where in a flat bucket to look."""
    size, start, middles = gradient.numel(), 0, []
    for each in bucket.gradients():
        middles.append((each.numel(), start + each.numel() // 2))
        start += each.numel()
    spaced = range(0, size, max(1, size // _SPACED))
    return tuple(sorted({*spaced, *(place for _, place in sorted(middles)[:_SMALLEST])}))

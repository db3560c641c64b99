"""What a worker's script is told once: that something of its own does not reach the server."""

import warnings
from collections.abc import Sequence

from torch import Tensor, nn

from poise.errors import PoiseWarning
from poise.torch.asynchronous.parameters import statistics
from poise.torch.torch_private import changes_in_place

_LOOKS = 3
"""Pushes after which it is clear which buffers training changes."""


class Notices:
    """Warns of what a script does in vain, each once."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._others = _OtherBuffers(models)
        self._looks = _LOOKS
        self._warned = False

    def of_buffers(self) -> None:
        """Say that the server does not have what a model keeps in buffers of its own."""
        if not self._looks:
            return
        self._looks -= 1
        changed = self._others.changed()
        if changed:
            self._looks = 0
            warnings.warn(
                f"training changes the buffers {', '.join(changed[:3])}, of which only running "
                "statistics of normalization layers travel: the server evaluates and saves them "
                'as they were at the start; use mode="sync" for this model',
                PoiseWarning,
                stacklevel=5,
            )

    def of_rates(self, stated: Sequence[float], now: Sequence[float]) -> None:
        """Say that a rate that changes with this process's batches reaches nobody."""
        if self._warned or now == stated:
            return
        self._warned = True
        warnings.warn(
            f"the learning rate changed from {stated} to {now} between two batches of this "
            "worker, and the optimizer steps on the server: step the scheduler once per epoch, "
            "or by samples with BySamples, which the server follows too",
            PoiseWarning,
            stacklevel=5,
        )


class _OtherBuffers:
    """Buffers that do not travel: all but the running statistics of normalization layers."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._then = self._now()

    def changed(self) -> list[str]:
        """Return the names of those that training has changed since."""
        return sorted(
            name
            for name, (tensor, version) in self._now().items()
            if name not in self._then
            or self._then[name][0] is not tensor
            or self._then[name][1] != version
        )

    def _now(self) -> dict[str, tuple[Tensor, int]]:
        """Return each buffer with the number of changes that were made in place."""
        travel = {id(tensor) for tensor in statistics(self._models)}
        return {
            name: (tensor, changes_in_place(tensor))
            for model in self._models
            for name, tensor in model.named_buffers()
            if id(tensor) not in travel
        }

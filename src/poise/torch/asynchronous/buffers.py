"""Buffers that do not travel: all but the running statistics of normalization layers."""

from collections.abc import Sequence

from torch import Tensor, nn

from poise.torch.asynchronous.parameters import statistics


class OtherBuffers:
    """The buffers of models that stay on the server as they were at the start."""

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
            name: (tensor, tensor._version)
            for model in self._models
            for name, tensor in model.named_buffers()
            if id(tensor) not in travel
        }

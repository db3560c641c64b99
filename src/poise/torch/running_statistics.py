"""The running mean and variance of normalization layers, merged by share in every step."""

import torch
from torch import Tensor, nn

from poise.torch.torch_private import NormBase


class RunningStatistics:
    """The statistics of one model.

    Each worker normalizes with its own local batch; merged, their running statistics are equal
    everywhere, so that any worker's state_dict is the model's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, NormBase)]

    def read(self) -> list[Tensor]:
        """Return the statistics of the layers in training mode as one tensor, or nothing."""
        tensors = self._tensors()
        if not tensors:
            return []
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        return [torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors])]

    def write(self, merged: list[Tensor]) -> None:
        """Take merged statistics over."""
        tensors = self._tensors()
        for whole in merged:
            parts = torch.split(whole, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _tensors(self) -> list[Tensor]:
        return [
            statistic
            for layer in self._layers
            if layer.training
            for statistic in (layer.running_mean, layer.running_var)
            if statistic is not None
        ]

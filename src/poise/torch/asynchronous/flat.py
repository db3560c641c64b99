"""Tensors as one stretch of bytes, in which they travel."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poise.torch.torch_private import copy_all

_ALIGNED = 64


class Flat:
    """A buffer with a place for each of some tensors."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        """Make a buffer for tensors of the same shapes and types; it holds zeros."""
        starts, end = [], 0
        for tensor in like:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        self.bytes = torch.zeros(max(end, 1), dtype=torch.uint8)
        self.views = [
            self.bytes[start : start + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for start, tensor in zip(starts, like, strict=True)
        ]

    def read(self, tensors: Sequence[Tensor], first: int = 0) -> None:
        """Take over the values of tensors, which stand from a place on."""
        copy_all(tensors, self.views[first : first + len(tensors)])

    def write(self, tensors: Sequence[Tensor], first: int = 0) -> None:
        """Give tensors the values that stand from a place on."""
        copy_all(self.views[first : first + len(tensors)], tensors)

    def is_finite(self, tensors: int) -> bool:
        """Whether the first so many tensors have neither NaN nor infinity."""
        return all(
            math.isfinite(view.sum(dtype=torch.float64))  # which itself cannot overflow
            for view in self.views[:tensors]
            if view.is_floating_point()
        )

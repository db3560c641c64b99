"""Backwards that reach a model, and what they leave in its gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass
class Tally:
    """The backwards of one model since the last batch was handed out."""

    backwards: int = 0
    """Those that reached the model's parameters."""
    reduced: int = 0
    """Those whose gradient is summed over the workers."""

    def clear(self) -> None:
        """A batch is handed out."""
        self.backwards = self.reduced = 0


def count_backwards(parameters: Sequence[nn.Parameter], tally: Tally) -> RemovableHandle:
    """Count the backwards that reach a model, of which DDP passes some over in silence."""

    def count(_: Tensor) -> None:
        tally.backwards += 1

    last = [parameter for parameter in parameters if parameter.requires_grad][-1]
    handle: RemovableHandle = last.register_post_accumulate_grad_hook(count)
    return handle


def is_usable(gradients: Sequence[Tensor | None]) -> bool:
    """Whether there is a gradient that an optimizer could still use: finite, and not cleared."""
    present = [gradient for gradient in gradients if gradient is not None]
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in present)
    return finite and any(bool(gradient.any()) for gradient in present)

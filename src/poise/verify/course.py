"""The weights at the start of each step in one process, from which all runs start that step.

Rounding differs from run to run, and training amplifies it: AdamW makes it as large as any other
step where the true gradient is 0. Runs that start every step from the same weights can be compared
sharply in each. And if every step leads from equal weights to equal weights, so do all together.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from poise.verify.observation import Variant

_SEED = 0


class Course:
    """Leads a run along the weights of one process; that one marks them."""

    def __init__(self, directory: Path, variant: Variant) -> None:
        self._directory = directory
        self._variant = variant
        self._chance = torch.Generator().manual_seed(_SEED)

    def begin(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """A step is about to start with these weights: mark them, or set them."""
        mark = self._directory / f"{Variant('alone', self._variant.stilled)}-weights-{step}.pt"
        values = {name: weight.data for name, weight in weights.items()}  # unseen by autograd
        if self._variant.arrangement == "alone":
            torch.save({name: value.cpu() for name, value in values.items()}, mark)
            return
        if step and mark.exists():  # the weights of step 0 are the script's own, in every run
            marked = torch.load(mark, weights_only=True)
            for name, value in values.items():
                value.copy_(marked[name])
        if self._variant.arrangement == "reordered":
            for value in values.values():
                self._nudge(value)

    def _nudge(self, value: Tensor) -> None:
        """Change every number in its last bit, up or down at random."""
        signs = torch.randint(0, 2, value.shape, generator=self._chance).to(value.device) * 2 - 1
        value.add_(value * signs, alpha=torch.finfo(value.dtype).eps)

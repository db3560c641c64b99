"""What torch.compile needs from the loader, and how to notice that it is at work."""

from typing import Any

from torch import Tensor

from poise.runtime.slicing import parts
from poise.torch.torch_private import graphs_compiled, let_length_vary


class Graphs:
    """Notices when torch.compile is at work."""

    def __init__(self) -> None:
        self._seen = 0

    def changed(self) -> bool:
        """Whether it was at work since this was last asked."""
        before, self._seen = self._seen, graphs_compiled()
        return self._seen != before


def let_size_vary(batch: Any) -> None:
    """Tell torch.compile that the number of samples changes, so that one graph serves them all."""
    if isinstance(batch, Tensor) and batch.ndim:
        let_length_vary(batch)
    for part in parts(batch):
        let_size_vary(part)

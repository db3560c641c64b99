"""What torch.compile needs from the loader, and how to notice that it is at work."""

import sys
from typing import Any

from torch import Tensor, nn

from poise.runtime.slicing import parts


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or a part of it runs through torch.compile."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in model.modules()
    )


def graphs_compiled() -> int:
    """Return how many graphs torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded: nothing can be compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


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
    from torch._dynamo import maybe_mark_dynamic

    if isinstance(batch, Tensor) and batch.ndim:
        maybe_mark_dynamic(batch, 0)
    for part in parts(batch):
        let_size_vary(part)

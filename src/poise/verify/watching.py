"""Let an observer see what a script does with Poise.

The script is the user's own and stays as it is. What is computed stays the same, except that the
shares are fixed, and that a comm_hook, which would round the gradients, is left out. Some functions
of torch are replaced while the script runs, by others that also take notes, or drop nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from poise.patching import Patch, patched, preceded
from poise.runtime.batches import Cut, MapBatches
from poise.runtime.instruments import Instrument, instrumented
from poise.torch.settings import TorchSettings
from poise.torch.torch_private import is_enabled
from poise.verify.observation import Variant
from poise.verify.observer import Observer

_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


@contextmanager
def watching(observer: Observer, variant: Variant) -> Iterator[None]:
    """Let an observer see what scripts do with Poise, until the block is left."""

    def settings(stated: TorchSettings) -> TorchSettings:
        chosen = observer.settings(stated)
        return replace(chosen, source=Reversed) if variant.arrangement == "reordered" else chosen

    def entering(autocast: torch.autocast) -> None:
        if is_enabled(autocast):
            observer.autocast()

    patches = [Patch(torch.autocast, "__enter__", preceded(entering))]
    if variant.stilled:
        patches += [Patch(nn.functional, name, lambda _: _unchanged) for name in _DROPOUTS]
        patches.append(Patch(nn.functional, "scaled_dot_product_attention", _without_dropout))
    instrument = Instrument(listen=observer.listen, settings=settings)
    with patched(patches), instrumented(instrument):
        yield


class Reversed(MapBatches):
    """Batches whose shares come in reversed order."""

    def begin(self) -> Iterator[Cut]:
        """Reverse the samples of each share."""
        return (replace(each, samples=each.samples[::-1]) for each in super().begin())


def _unchanged(values: Tensor, *_: Any, **__: Any) -> Tensor:
    return values


def _without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def calm(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG001 (what is left out)
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return calm

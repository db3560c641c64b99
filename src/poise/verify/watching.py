"""Let an observer see what a script does with Poise.

The script is the user's own and stays as it is. What it calls of Poise is replaced while it runs
by calls that also take notes. What is computed stays the same, except that the shares are fixed,
and that a comm_hook, which would round the gradients, is left out.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.utils.data import DataLoader

from poise.core.batch import Batch
from poise.torch.balancer import Balancer
from poise.torch.checks import as_list, is_stream
from poise.torch.loader import ShareLoader, TrainingSource
from poise.torch.module import SharedModule
from poise.torch.reduction import Reduction
from poise.torch.run import Run
from poise.torch.seeding import Wanted
from poise.verify.observation import Variant
from poise.verify.observer import Observer, Refused
from poise.watch.patching import replaced

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
    with ExitStack() as replacing:

        def put(owner: Any, name: str, call: Callable[..., Any]) -> None:
            replacing.enter_context(replaced(owner, name, call))

        put(Balancer, "__init__", _making(observer, Balancer.__init__))
        put(Balancer, "prepare", _preparing(observer, Balancer.prepare))
        put(Run, "hand_out", _handing_out(observer, Run.hand_out))
        put(Reduction, "hook", _reducing(observer, Reduction.hook))
        put(SharedModule, "forward", _running(observer, SharedModule.forward))
        put(torch.autocast, "__enter__", _entering(observer, torch.autocast.__enter__))
        if variant.arrangement == "reordered":
            put(ShareLoader, "_wanted", _reversing(ShareLoader._wanted))
        if variant.stilled:
            for name in _DROPOUTS:
                put(nn.functional, name, _unchanged)
            attention = nn.functional.scaled_dot_product_attention
            put(nn.functional, "scaled_dot_product_attention", _without_dropout(attention))
        yield


def _making(observer: Observer, original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Balancer, global_batch: int, **stated: Any) -> None:
        original(self, global_batch, **observer.settings(global_batch, stated))
        observer.balancers.append(self)

    return init


def _preparing(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(self: Balancer, model: Any, optimizer: Any, loader: DataLoader[Any]) -> Any:
        prepared = original(self, model, optimizer, loader)
        if is_stream(loader):
            self.close()
            raise Refused(
                "the data set is a stream, of which every worker reads its own part, so one "
                "process has other global batches than several; verify with a map-style data set"
            )
        observer.prepared(self, as_list(model), as_list(optimizer))
        return prepared

    return prepare


def _handing_out(observer: Observer, original: Callable[..., None]) -> Callable[..., None]:
    def hand_out(self: Run, batch: Batch, contents: Any) -> None:
        observer.handed_out(self, batch, contents)
        original(self, batch, contents)

    return hand_out


def _reducing(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Reduction, state: None, bucket: GradBucket) -> Future[Tensor]:
        observer.bucket(bucket)
        future: Future[Tensor] = original(self, state, bucket)
        observer.weighted()
        return future

    return hook


def _running(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: SharedModule, *args: Any, **kwargs: Any) -> Any:
        with observer.forward(self.module):
            return original(self, *args, **kwargs)

    return forward


def _entering(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: torch.autocast) -> Any:
        if self._enabled:
            observer.autocast()
        return original(self)

    return enter


def _reversing(original: Callable[..., Iterator[Wanted]]) -> Callable[..., Iterator[Wanted]]:
    def wanted(self: ShareLoader) -> Iterator[Wanted]:
        training = isinstance(self._source, TrainingSource)
        for each in original(self):
            yield replace(each, samples=each.samples[::-1]) if training else each

    return wanted


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

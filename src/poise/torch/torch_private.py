"""Every private name of torch that Poise uses, and nowhere else.

Each has a test that fails when torch changes it (tests/test_torch_private.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Store, distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "BatchNormBase",
    "DropoutBase",
    "LoaderIterator",
    "NormBase",
    "default_store",
    "is_enabled",
    "loader_processes",
    "queue_callback",
    "with_batch_sampler",
]


def default_store() -> Store:
    """Return the store of the default group; there is no public name for it."""
    store: Store = distributed_c10d._get_default_store()
    return store


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Have a loader of a stream take batches of changing size.

    DataLoader refuses that for streams, though its fetcher takes as many samples as it is asked
    for.
    """
    object.__setattr__(loader, "batch_sampler", batch_sampler)
    return loader


def is_enabled(context: torch.autocast) -> bool:
    """Whether entering an autocast changes the precision."""
    return bool(context._enabled)


def loader_processes(iterator: Any) -> int:
    """Return how many processes load for an iterator of a DataLoader, or for the loader."""
    return getattr(iterator, "_num_workers", 0) or getattr(iterator, "num_workers", 0)


def queue_callback(call: Callable[[], None]) -> None:
    """Have a function called when the backward under way has computed everything."""
    torch.autograd.Variable._execution_engine.queue_callback(call)

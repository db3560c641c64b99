"""Every private name of torch that Poise uses; no other file touches one.

Each is here because torch 2.13 has no public way to the same thing, and each has a test that fails
when torch changes it (tests/test_torch_private.py).
"""

import sys
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo, Store
from torch.nn.modules import batchnorm, dropout
from torch.optim import Optimizer
from torch.utils.data import DataLoader, dataloader

BatchNormBase = batchnorm._BatchNorm
"""The class of all layers that normalize by batch, SyncBatchNorm and other people's included."""
NormBase = batchnorm._NormBase
"""The class of all layers that keep running statistics: those above and InstanceNorm."""
DropoutBase = dropout._DropoutNd
"""The class of all layers that drop values by chance."""
LoaderIterator = dataloader._BaseDataLoaderIter
"""What iterating over a DataLoader gives, with or without processes that load."""
BUFFER_BROADCAST = "_sync_buffers"
"""The method in which DistributedDataParallel sends worker 0's buffers, and may wait for others."""


def gloo_pair(store: Store, place: int, host: str, timeout: timedelta) -> Any:
    """Return a ProcessGroupGloo of two that listens at an address of this machine.

    The public constructor takes the address of the machine's name, which another machine may not
    reach. Torch's stubs know little of the class, hence no type.
    """
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timeout
    return gloo(store, place, 2, options)


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Have a loader of a stream take batches of changing size.

    DataLoader refuses that for streams, though its fetcher takes as many samples as it is asked
    for.
    """
    object.__setattr__(loader, "batch_sampler", batch_sampler)
    return loader


def loader_processes(iterator: Any) -> int:
    """Return how many processes load for an iterator of a DataLoader, or for the loader."""
    return getattr(iterator, "_num_workers", 0) or getattr(iterator, "num_workers", 0)


def is_enabled(context: torch.autocast) -> bool:
    """Whether entering an autocast changes the precision."""
    return bool(context._enabled)


def queue_callback(call: Callable[[], None]) -> None:
    """Have a function called when the backward under way has computed everything."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def changes_in_place(tensor: Tensor) -> int:
    """Return how often a tensor was written to, which is cheaper than to compare its values."""
    return tensor._version


@torch.no_grad()
def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors to others of the same types, all of a type in one call."""
    for kind in {source.dtype for source in sources}:
        pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s.dtype == kind]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def is_compiled_itself(module: nn.Module) -> bool:
    """Whether torch.compile made this module, or its `compile` was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def graphs_compiled() -> int:
    """Return how many graphs torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded: nothing can be compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def let_length_vary(tensor: Tensor) -> None:
    """Tell torch.compile that the first dimension changes, so that one graph serves all sizes."""
    from torch._dynamo import maybe_mark_dynamic  # takes long, and few programs compile

    maybe_mark_dynamic(tensor, 0)


def optimizer_of(optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> Optimizer:
    """Return an optimizer of some of the parameters that shares its state with the whole.

    A copy by torch's own means would lose the hooks of the user's, and a constructor's arguments
    are not known.
    """
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)  # a scheduler's, which steps the whole
    own = {id(parameter) for parameter in parameters}
    part.param_groups = [
        {**group, "params": [p for p in group["params"] if id(p) in own]}
        for group in optimizer.param_groups
    ]
    return part


def mark_stepped(optimizer: Optimizer) -> None:
    """Note that an optimizer stepped in parts, or its scheduler warns that it never did."""
    optimizer.__dict__["_opt_called"] = True


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a scheduler of torch's was made for an optimizer: it wraps `step`."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")

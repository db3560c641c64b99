"""What a user may hand in, checked before training starts."""

from collections.abc import Sized
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from poise.core.batch import steps_per_epoch
from poise.errors import InvalidSetting
from poise.torch.module import SharedModule


def check_model(model: object) -> None:
    """Raise unless the model is a bare module with something to train."""
    if not isinstance(model, nn.Module):
        raise InvalidSetting(
            f"prepare got a {type(model).__name__} as model; it takes (model, optimizer, loader)"
        )
    if isinstance(model, SharedModule):
        raise InvalidSetting("the model is prepared already; pass the model itself")
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise InvalidSetting(
            f"the model is already wrapped in {type(model).__name__}, whose averaging is wrong "
            "for unequal shares; pass the bare model, and options for DistributedDataParallel "
            "as Balancer(..., ddp={...})"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidSetting("the model has no parameter that requires a gradient")


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise unless the optimizer trains this model and nothing else."""
    if not isinstance(optimizer, Optimizer):
        raise InvalidSetting(
            f"prepare got a {type(optimizer).__name__} as optimizer; "
            "it takes (model, optimizer, loader)"
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        raise InvalidSetting(
            f"the optimizer holds {foreign} tensors that are not parameters of the model, so "
            "their gradients would not be reduced; make it from model.parameters(), after any "
            "change of the model"
        )


def check_loader(loader: object) -> int:
    """Return the length of the data set, or raise if the loader cannot be split exactly."""
    if not isinstance(loader, DataLoader):
        raise InvalidSetting(
            f"the loader is a {type(loader).__name__}; pass a torch.utils.data.DataLoader"
        )
    if type(loader).__iter__ is not DataLoader.__iter__ or not getattr(loader, "in_order", True):
        raise InvalidSetting(
            f"the loader ({type(loader).__name__}) yields batches in a way of its own, which "
            "Poise would not follow; pass a plain DataLoader with in_order=True"
        )
    _check_sampling(loader)
    dataset = loader.dataset
    if not isinstance(dataset, Sized):
        raise InvalidSetting(
            f"{type(dataset).__name__} has no length, so an epoch has no end that workers could "
            "agree on; give the data set a __len__"
        )
    if len(dataset) == 0:
        raise InvalidSetting("the data set is empty; training needs at least one sample")
    return len(dataset)


def check_epoch(length: int, global_batch: int, *, drop_last: bool) -> None:
    """Raise if an epoch would have no step at all."""
    if steps_per_epoch(length, global_batch, drop_last=drop_last) == 0:
        raise InvalidSetting(
            f"the data set has {length} samples, fewer than global_batch={global_batch}, and "
            "drop_last=True drops them all; use drop_last=False or a smaller global_batch"
        )


def _check_sampling(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise InvalidSetting(
            "the loader streams an IterableDataset, which cannot be cut at a position; "
            "use a map-style data set (with __getitem__ and __len__)"
        )
    if loader.batch_sampler is None:
        raise InvalidSetting(
            "the loader has batch_size=None, so it yields samples and not batches; "
            "give it any batch_size: Poise sets the real one from global_batch"
        )
    if loader.batch_size is None:
        raise InvalidSetting(
            f"the loader has a batch_sampler ({type(loader.batch_sampler).__name__}) that fixes "
            "the batches; pass shuffle=True or False, and Poise cuts the global batches itself"
        )
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise InvalidSetting(
            "the loader has a DistributedSampler, which gives every worker the same number of "
            "samples; remove it (shuffle=True): Poise gives each worker its share"
        )
    if type(sampler) is SequentialSampler:
        return
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return
    raise InvalidSetting(
        f"the loader has a sampler of its own ({type(sampler).__name__}), which this version "
        "cannot split; use shuffle=True or False, and torch.utils.data.Subset to leave samples out"
    )


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Whether the loader was made with shuffle=True."""
    return isinstance(loader.sampler, RandomSampler)


def model_facts(model: nn.Module) -> dict[str, str]:
    """Describe what must be alike on all workers for gradients to be summed."""
    parameters = {
        f"parameter {name}": f"{tensor.dtype} {tuple(tensor.shape)}"
        + ("" if tensor.requires_grad else " frozen")
        for name, tensor in model.named_parameters()
    }
    buffers = {
        f"buffer {name}": f"{tensor.dtype} {tuple(tensor.shape)}"
        for name, tensor in model.named_buffers()
    }
    return {**parameters, **buffers}

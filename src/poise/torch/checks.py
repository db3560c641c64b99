"""What a user may hand in, checked before training starts."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from poise.errors import InvalidSetting, OutOfOrder, PoiseWarning
from poise.runtime.checks import check_epoch, check_models_fit, check_range
from poise.runtime.orders import Orders
from poise.runtime.session import Session
from poise.torch.module import SharedModule
from poise.torch.orders import orders_of
from poise.torch.settings import TorchSettings
from poise.torch.torch_private import BatchNormBase

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class HandedIn:
    """What a script hands to prepare, checked."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    loader: DataLoader[Any]
    orders: Orders | None
    """The orders of the epochs; None for a stream."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all models."""
        return [parameter for model in self.models for parameter in model.parameters()]


def handed_in(
    session: Session, settings: TorchSettings, model: Any, optimizer: Any, loader: Any
) -> HandedIn:
    """Check what a script hands in, and see that all workers have the same."""
    models, optimizers = as_list(model), as_list(optimizer)
    check_models(models)
    stateful = settings.inner is not None and settings.inner.state is not None
    check_models_fit(len(models), stateful_hook=stateful, adapts=settings.adapt is not None)
    check_optimizers(optimizers, models)
    check_loader(loader)
    found = HandedIn(models, optimizers, loader, _orders(session, loader))
    if settings.adapt is not None:
        check_all_used((p for p in found.parameters if p.requires_grad), optimizers)
    session.peers.control.agree(_facts(session, settings, found), "prepare")
    if session.generation.worker == 0:
        warn_of_batch_size(loader.batch_size, settings.global_batch)
        if session.generation.workers > 1:
            warn_of_normalization(models)
    return found


def check_model(model: object) -> nn.Module:
    """Return a bare module with something to train, or raise."""
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
    sharded = {"FullyShardedDataParallel", "FSDPModule"}
    if any(sharded & {kind.__name__ for kind in type(part).__mro__} for part in model.modules()):
        raise InvalidSetting(
            "the model is wrapped by FSDP, which gathers and scatters parameters by itself "
            "and averages gradients with equal weights; pass the bare model: Poise holds "
            "all of it on every worker"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidSetting("the model has no parameter that requires a gradient")
    return model


def as_list(value: Any) -> list[Any]:
    """Return what prepare takes one or several of, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def check_models(models: Sequence[object]) -> None:
    """Raise unless each model can be prepared, and they have nothing in common."""
    if not models:
        raise InvalidSetting("prepare got an empty list of models; pass at least one")
    seen: set[int] = set()
    for model in models:
        own = {id(parameter) for parameter in check_model(model).parameters()}
        if own & seen:
            raise InvalidSetting(
                "two of the models share parameters, whose gradients would be reduced twice; "
                "join these models in one nn.Module"
            )
        seen |= own


def check_optimizers(optimizers: Sequence[object], models: Sequence[nn.Module]) -> None:
    """Raise unless the optimizers train these models and nothing else."""
    own = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidSetting(
                f"prepare got a {type(optimizer).__name__} as optimizer; "
                "it takes (model, optimizer, loader)"
            )
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in own for parameter in held)
        if foreign:
            raise InvalidSetting(
                f"the optimizer holds {foreign} tensors that are not parameters of the model, so "
                "their gradients would not be reduced; make it from model.parameters(), after "
                "any change of the model, and prepare all models that it trains: "
                "prepare([model, other], optimizer, loader)"
            )


def check_loader(loader: object) -> None:
    """Raise if the loader's batches cannot be split."""
    if isinstance(loader, list | tuple | dict):
        raise InvalidSetting(
            f"prepare got {len(loader)} loaders, but a step is one batch of one loader; join the "
            "data sets (torch.utils.data.StackDataset for pairs, ConcatDataset for one after the "
            "other) and pass one DataLoader"
        )
    if not isinstance(loader, DataLoader):
        raise InvalidSetting(
            f"the loader is a {type(loader).__name__}; pass a torch.utils.data.DataLoader"
        )
    if type(loader).__iter__ is not DataLoader.__iter__ or not loader.in_order:
        raise InvalidSetting(
            f"the loader ({type(loader).__name__}) yields batches in a way of its own, which "
            "Poise would not follow; pass a plain DataLoader with in_order=True"
        )
    if loader.batch_size is None and (loader.batch_sampler is None or is_stream(loader)):
        raise InvalidSetting(
            "the loader has batch_size=None, so Poise cannot choose how many samples a batch "
            "has; give it any batch_size: Poise sets the real one from global_batch"
        )
    if is_stream(loader):
        return
    if loader.batch_size is None:
        raise InvalidSetting(
            f"the loader has a batch_sampler ({type(loader.batch_sampler).__name__}) that fixes "
            "the batches; pass shuffle=True or False or a sampler, and Poise cuts the global "
            "batches itself"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise InvalidSetting(
            "the loader has a DistributedSampler, which gives every worker the same number of "
            "samples; remove it (shuffle=True): Poise gives each worker its share"
        )


def prepared(built: T | None, call: str) -> T:
    """Return what prepare builds, or raise if it was not called yet."""
    if built is None:
        raise OutOfOrder(f"{call} needs the data set; call prepare first")
    return built


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether the loader reads a stream."""
    return isinstance(loader.dataset, IterableDataset)


def check_all_used(parameters: Iterable[nn.Parameter], optimizers: Iterable[Optimizer]) -> None:
    """Raise if gradients would pile up that no optimizer uses."""
    used = {p for each in optimizers for group in each.param_groups for p in group["params"]}
    if any(parameter not in used for parameter in parameters):
        raise InvalidSetting(
            "some parameters have a gradient that no optimizer uses, and adapt would measure it "
            "too; freeze them with requires_grad_(False), or give them to an optimizer"
        )


def _orders(session: Session, loader: DataLoader[Any]) -> Orders | None:
    if is_stream(loader):
        return None
    settings = session.settings
    orders = orders_of(loader, settings.seed, session.peers.control.drawn)
    if loader.drop_last:
        check_epoch(len(orders), settings.global_batch)
    if settings.adapt is not None:
        check_range(len(orders), settings.adapt.highest)
    return orders


def _facts(session: Session, settings: TorchSettings, handed: HandedIn) -> dict[str, object]:
    """Describe what must be the same on all workers."""
    identity = {} if handed.orders is None else handed.orders.identity()
    return {
        "global_batch": settings.global_batch,
        "adapt": settings.adapt,
        "rate": settings.rule,
        "the use of scaler": settings.scaler is not None,
        "seed": settings.seed,
        "idle": settings.idle,
        "the policy": type(settings.policy).__name__,
        "the policy's first plans": [
            (plan.start_step, plan.split) for plan in session.first_plans.plans
        ],
        "the use of count": settings.count is not None,
        "the use of comm_hook": settings.inner is not None,
        "the use of record": settings.record is not None,
        "the kind of data set": "a stream" if handed.orders is None else "a map",
        **{f"the {name} of the data set": value for name, value in identity.items()},
        "drop_last": handed.loader.drop_last,
        "the number of models": len(handed.models),
        **model_facts(handed.models),
    }


def model_facts(models: Sequence[nn.Module]) -> dict[str, str]:
    """Describe what must be alike on all workers for gradients to be summed."""
    facts = {}
    for number, model in enumerate(models):
        which = f" of model {number}" if len(models) > 1 else ""
        for name, tensor in model.named_parameters():
            frozen = "" if tensor.requires_grad else " frozen"
            facts[f"parameter {name}{which}"] = f"{tensor.dtype} {tuple(tensor.shape)}{frozen}"
        for name, buffer in model.named_buffers():
            facts[f"buffer {name}{which}"] = f"{buffer.dtype} {tuple(buffer.shape)}"
    return facts


def warn_of_normalization(models: Sequence[nn.Module]) -> None:
    """Say what layers that normalize by the batch do when that is split."""
    layers = [layer for model in models for layer in model.modules()]
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in layers):
        _warn(
            "the model has SyncBatchNorm, whose statistics are those of the global batch, "
            "but whose gradients are exact for equal shares only (docs/limits.md)"
        )
    elif any(isinstance(layer, BatchNormBase) for layer in layers):
        _warn(
            "the model has BatchNorm, which normalizes each worker's local batch by itself, "
            "so the training is not the same as on one machine; running statistics are "
            "merged by share in every step. A local batch of one sample can be too small for "
            "it: drop_last=True leaves small last batches out"
        )


def warn_of_batch_size(batch_size: int | None, global_batch: int) -> None:
    """Say that the loader's own batch size is not used."""
    if batch_size != global_batch:
        _warn(
            f"the loader's batch_size={batch_size} is not used: each step takes "
            f"global_batch={global_batch} samples over all workers"
        )


def _warn(text: str) -> None:
    """Warn where the script calls prepare."""
    warnings.warn(text, PoiseWarning, stacklevel=6)

"""What is alike on a server and its workers, and what does not go with a server."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from poise.core.noise import NoiseTrack
from poise.errors import InvalidSetting, OutOfOrder
from poise.runtime.clocks import host_stamp
from poise.runtime.control import checked_mean
from poise.runtime.events import Events, Preparing
from poise.runtime.orders import Orders
from poise.runtime.settings import Settings
from poise.torch.checks import (
    as_list,
    check_loader,
    check_models,
    check_optimizers,
    is_stream,
    model_facts,
)
from poise.torch.orders import orders_of
from poise.torch.settings import TorchSettings


def check_alone(settings: TorchSettings) -> None:
    """Raise if a setting has no meaning without a step that all workers take together."""
    stated = {
        "adapt": settings.adapt is not None,
        "comm_hook": settings.inner is not None,
        "ddp": bool(settings.ddp),
        "micro_batch": settings.micro_batch is not None,
    }
    wrong = [name for name, given in stated.items() if given]
    if wrong:
        raise InvalidSetting(
            f"with a server there is no {' and no '.join(wrong)}, which belong to steps that all "
            'workers take together; leave it out, or use mode="sync"'
        )


def check_servable(optimizers: Sequence[Optimizer], loader: DataLoader[Any]) -> None:
    """Raise for what a server can neither apply nor hand out."""
    if len(optimizers) > 1:
        raise InvalidSetting(
            f"prepare got {len(optimizers)} optimizers, and a server applies one; join their "
            "parameters in one optimizer with several groups"
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise InvalidSetting(
            "LBFGS computes gradients inside its step, and a server has no data; use another "
            'optimizer, or mode="sync"'
        )
    parameters = [p for group in optimizers[0].param_groups for p in group["params"]]
    if any(parameter.is_complex() for parameter in parameters):
        raise InvalidSetting(
            'the model has complex parameters, which do not travel; use mode="sync", or hold real '
            "and imaginary parts apart"
        )
    if is_stream(loader):
        raise InvalidSetting(
            "the loader reads a stream, whose samples have no numbers, and a server hands samples "
            'out by their number; use a map-style data set, or mode="sync"'
        )
    if not isinstance(loader.sampler, Sized):
        raise InvalidSetting(
            f"the sampler ({type(loader.sampler).__name__}) has no length, and a server must know "
            'when an epoch is over; give it __len__, or use mode="sync"'
        )


def drawn_alone(draw: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Draw where workers would draw an order together: the server does it by itself."""
    return draw()


@dataclass(frozen=True)
class Given:
    """What a script gives to prepare."""

    models: Sequence[nn.Module]
    optimizer: Optimizer
    loader: DataLoader[Any]
    settings: Settings
    orders: Orders
    facts: Mapping[str, str]
    """What all processes must say of it alike."""

    @staticmethod
    def checked(model: Any, optimizer: Any, loader: DataLoader[Any], settings: Settings) -> "Given":
        """Return what was given, or raise for what does not go with a server."""
        models, optimizers = as_list(model), as_list(optimizer)
        check_models(models)
        check_optimizers(optimizers, models)
        check_loader(loader)
        check_servable(optimizers, loader)
        (trains,) = optimizers
        orders = orders_of(loader, settings.seed, drawn_alone)
        facts: dict[str, object] = {
            "global_batch": settings.global_batch,
            "seed": settings.seed,
            "the use of count": settings.count is not None,
            "the optimizer": type(trains).__name__,
            "the parameters of the optimizer's groups": [
                len(group["params"]) for group in trains.param_groups
            ],
            "the kind of the data set": type(loader.dataset).__qualname__,
            **{f"the {name} of the data set": value for name, value in orders.identity().items()},
            "drop_last": loader.drop_last,
            "the number of models": len(models),
            **model_facts(models),
        }
        texts = {key: str(value) for key, value in facts.items()}
        return Given(models, trains, loader, settings, orders, texts)

    @property
    def device(self) -> torch.device:
        """Where the first trained parameter is."""
        return next(p.device for m in self.models for p in m.parameters() if p.requires_grad)


class ServedTraining:
    """What the training of a server and that of its workers have in common."""

    noise: NoiseTrack | None = None

    def __init__(self, settings: TorchSettings, events: Events) -> None:
        check_alone(settings)
        self._settings = settings
        self._events = events

    def mean(self, value: float | Tensor, count: float) -> float:
        """Return a process's own value, NaN where nothing counts: nothing is called together."""
        number, counted = checked_mean(value, count)
        return number if counted else float("nan")

    def _first_given(
        self, before: object, model: Any, optimizer: Any, loader: DataLoader[Any]
    ) -> Given:
        """Return what prepare was given, or raise if something was prepared before."""
        if before is not None:
            raise OutOfOrder("prepare was called before; make one Balancer per training")
        self._events.train_here()
        self._events.tell(Preparing(0, host_stamp()))
        return Given.checked(model, optimizer, loader, self._settings)

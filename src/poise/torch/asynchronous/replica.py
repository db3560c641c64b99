"""A worker's copy of what the server trains: gradients leave it, and weights arrive in it."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poise.errors import OutOfOrder, PoiseWarning
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.messages import Weights
from poise.torch.asynchronous.parameters import statistics, trained_parameters
from poise.torch.torch_private import changes_in_place

_LOOKS = 3
"""Pushes after which it is clear which buffers training changes."""


class Replica:
    """The trained parameters, the running statistics and the learning rates on one worker."""

    def __init__(self, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        self.trained = trained_parameters(optimizer)
        self._statistics = statistics(models)
        self._optimizer = optimizer
        self.gradient = Flat([*self.trained, *self._statistics])
        """From where a push leaves."""
        self.weights = Flat([*self.trained, *self._statistics])
        """Where new weights arrive, before they are taken over."""
        self.versions: tuple[int, ...] = ()
        """Of the weights that were taken over last."""
        self.stated_rates: list[float] = []
        """The learning rates that came with them."""
        self._kept: list[Tensor | None] = []
        """The gradients, while the optimizer steps without them."""

    @property
    def rates(self) -> list[float]:
        """The learning rates of now, by group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def check(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer trains what the server does not know."""
        known = {id(parameter) for parameter in self.trained}
        if any(id(parameter) not in known for parameter in trained_parameters(optimizer)):
            raise OutOfOrder(
                "the optimizer has parameters to train that it did not have in prepare, and the "
                "server does not know them; unfreeze or add them before prepare"
            )

    @torch.no_grad()
    def read_gradient(self) -> str:
        """Let the gradient be what leaves; return for each parameter 1 or 0: whether it has one."""
        gradients = [parameter.grad for parameter in self.trained]
        if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
            raise OutOfOrder(
                "a gradient is sparse, and only dense ones travel to a server; use "
                "sparse=False in the embedding"
            )
        for view, gradient in zip(self.gradient.views, gradients, strict=False):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        self.gradient.read(self._statistics, len(self.trained))
        return "".join("0" if gradient is None else "1" for gradient in gradients)

    def take(self, said: Weights) -> None:
        """Take over weights that have arrived, and the rates that go with them."""
        self.weights.write([*self.trained, *self._statistics])
        self.versions = said.versions
        for group, rate in zip(self._optimizer.param_groups, said.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.stated_rates = self.rates

    def put_gradients_aside(self) -> None:
        """Let the optimizer step without gradients, which changes nothing."""
        self._kept = [parameter.grad for parameter in self.trained]
        for parameter in self.trained:
            parameter.grad = None

    def put_gradients_back(self) -> None:
        """Give the loop its gradients back, which it may look at."""
        for parameter, gradient in zip(self.trained, self._kept, strict=True):
            parameter.grad = gradient
        self._kept = []


class Notices:
    """Warns of what a script does in vain, since it does not reach the server; each once."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._before = _other_buffers(models)
        self._looks = _LOOKS
        self._warned = False

    def of_buffers(self) -> None:
        """Say that the server does not have what a model keeps in buffers of its own."""
        if not self._looks:
            return
        self._looks -= 1
        changed = sorted(
            name
            for name, (tensor, version) in _other_buffers(self._models).items()
            if name not in self._before
            or self._before[name][0] is not tensor
            or self._before[name][1] != version
        )
        if changed:
            self._looks = 0
            warnings.warn(
                f"training changes the buffers {', '.join(changed[:3])}, of which only running "
                "statistics of normalization layers travel: the server evaluates and saves them "
                'as they were at the start; use mode="sync" for this model',
                PoiseWarning,
                stacklevel=5,
            )

    def of_rates(self, stated: Sequence[float], now: Sequence[float]) -> None:
        """Say that a rate that changes with this process's batches reaches nobody."""
        if self._warned or now == stated:
            return
        self._warned = True
        warnings.warn(
            f"the learning rate changed from {stated} to {now} between two batches of this "
            "worker, and the optimizer steps on the server: step the scheduler once per epoch, "
            "or by samples with BySamples, which the server follows too",
            PoiseWarning,
            stacklevel=5,
        )


def _other_buffers(models: Sequence[nn.Module]) -> dict[str, tuple[Tensor, int]]:
    """Return the buffers that do not travel, each with how often it was changed in place.

    Those are all but the running statistics of normalization layers.
    """
    travel = {id(tensor) for tensor in statistics(models)}
    return {
        name: (tensor, changes_in_place(tensor))
        for model in models
        for name, tensor in model.named_buffers()
        if id(tensor) not in travel
    }

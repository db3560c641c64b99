"""A worker's copy of what the server trains: gradients leave it, and weights arrive in it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poise.errors import OutOfOrder
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.messages import Weights
from poise.torch.asynchronous.parameters import statistics, trained_parameters


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

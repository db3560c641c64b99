"""The learning rate that goes with the global batch, while an optimizer steps and no longer.

Before an optimizer's step its settings are multiplied as the rule says, in each parameter group by
itself, and afterwards they are the user's again. So schedulers, checkpoints and whoever reads
`param_groups` see what the user chose, for the global batch of the start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from poise.core.learning_rate import Adjustment, adjustment, ramp
from poise.core.plan import Plan
from poise.errors import StateMismatch

_DIVIDES = ("betas", "eps", "etas")
"""Settings of optimizers that divide a gradient by its usual size, or take its sign alone: the
families of Adam, RMSprop, Adagrad, Adafactor, Muon, Lion and Rprop."""
_USUAL_MOMENTUM = 0.9
"""A change that meets another one is taken to be as far as with this."""


def rule_for(optimizer: Optimizer) -> str:
    """Return the rule for an optimizer's kind.

    >>> weights = [torch.nn.Parameter(torch.zeros(1))]
    >>> rule_for(torch.optim.SGD(weights, lr=0.1)), rule_for(torch.optim.AdamW(weights))
    ('adascale', 'sqrt')
    """
    return "sqrt" if any(name in optimizer.defaults for name in _DIVIDES) else "adascale"


@dataclass(frozen=True)
class Ramp:
    """A batch and a gain on their way from old to new ones, as momentum forgets the old."""

    old: tuple[float, float]
    new: tuple[float, float]
    """Global batch and gain."""
    steps: int = 0
    """Steps since the change."""

    def at(self, momentum: float) -> tuple[float, float]:
        """Return global batch and gain as they count now."""
        batch, gain = (
            ramp(old, new, self.steps, momentum)
            for old, new in zip(self.old, self.new, strict=True)
        )
        return batch, gain

    def rests_at(self, place: tuple[float, float]) -> bool:
        """Whether it comes from there and goes nowhere else."""
        return self.old == self.new == place

    def towards(self, plan: Plan) -> "Ramp":
        """Return the ramp in the next step, under this plan."""
        new = (float(plan.global_batch), plan.gain)
        if new == self.new:
            return Ramp(self.old, new, self.steps + 1)
        return Ramp(self.at(_USUAL_MOMENTUM), new)


class Rates:
    """Multiplies the learning rates of one optimizer."""

    def __init__(
        self, optimizer: Optimizer, rule: str | None, start: int, plan: Callable[[], Plan]
    ) -> None:
        """Follow the plans.

        Args:
            optimizer: the user's.
            rule: its name; None: by the optimizer's kind.
            start: the global batch that the user's learning rate is for.
            plan: returns the plan of the batch under way.
        """
        self.rule = rule or rule_for(optimizer)
        self._optimizer = optimizer
        self._start = start
        self._plan = plan
        self._ramp = Ramp((start, 1.0), (start, 1.0))
        self._users: list[dict[str, Any]] | None = None
        """The user's settings while they are replaced."""

    def hooks(self) -> list[RemovableHandle]:
        """Put hooks around the optimizer's step."""
        return [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def factor(self) -> float:
        """What the first parameter group's learning rate was last multiplied by."""
        return self._adjustment(self._optimizer.param_groups[0]).factor

    def state_dict(self) -> dict[str, Any]:
        """Return how far a change has come."""
        return {"old": self._ramp.old, "new": self._ramp.new, "steps": self._ramp.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        try:
            old, new = ((float(batch), float(gain)) for batch, gain in (state["old"], state["new"]))
            self._ramp = Ramp(old, new, int(state["steps"]))
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(
                f"what the state says of learning rates is damaged: {error!r}; load another one"
            ) from error

    def _before_step(self, *_: Any) -> None:
        self._restore()  # a step that raised left its settings behind
        self._ramp = self._ramp.towards(self._plan())
        if not self._ramp.rests_at((self._start, 1.0)):
            self._users = [_replaced(group, self._adjustment(group)) for group in self._groups]

    def _after_step(self, *_: Any) -> None:
        self._restore()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _adjustment(self, group: Mapping[str, Any]) -> Adjustment:
        batch, gain = self._ramp.at(_momentum(group))
        return adjustment(self.rule, batch=batch, start=self._start, gain=gain)

    def _restore(self) -> None:
        if self._users is None:
            return
        for group, values in zip(self._groups, self._users, strict=True):
            for name, value in values.items():
                _put(group, name, value)
        self._users = None


def _momentum(group: Mapping[str, Any]) -> float:
    """Return how much of the velocity is kept in a step."""
    found = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return min(max(float(found), 0.0), 0.999)


def _replaced(group: dict[str, Any], change: Adjustment) -> dict[str, Any]:
    """Adjust a parameter group; return what was there before."""
    adjusted: dict[str, Any] = {"lr": group["lr"] * change.factor}
    if "eps" in group and isinstance(group["eps"], float):
        adjusted["eps"] = change.eps(group["eps"])
    if "betas" in group:
        adjusted["betas"] = tuple(_remembered(beta, change) for beta in group["betas"])
    if "alpha" in group and "eps" in group:
        adjusted["alpha"] = _remembered(group["alpha"], change)
    before = {name: _copy(group[name]) for name in adjusted}
    for name, value in adjusted.items():
        _put(group, name, value)
    return before


def _remembered(beta: Any, change: Adjustment) -> Any:
    if isinstance(beta, Tensor):
        return torch.clamp(1 - change.forgetting * (1 - beta), min=0.0)
    return change.beta(beta)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting; a tensor stays the same object, since compiled steps know it."""
    if isinstance(value, Tensor) and isinstance(group[name], Tensor):
        group[name].copy_(value)
    else:
        group[name] = value

"""The learning rate that goes with the global batch, while an optimizer steps and no longer.

Before an optimizer's step its settings are multiplied as the rule says, in each parameter group by
itself, and afterwards they are the user's again. So schedulers, checkpoints and whoever reads
`param_groups` see what the user chose, for the global batch of the start.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from poise.core.learning_rate import Adjustment, adjustment, ramp
from poise.core.limits import UNLIMITED
from poise.core.plain import whole_in
from poise.core.plan import Plan
from poise.errors import InvalidSetting, StateMismatch
from poise.numbers import is_number

_DIVIDES = ("betas", "eps", "etas")
"""Settings of optimizers that divide a gradient by its usual size, or take its sign alone: the
families of Adam, RMSprop, Adagrad, Adafactor, Muon, Lion and Rprop."""
_MOST = 1e12
"""No gain is larger."""
_LEAST_SECOND = 0.9
"""What remembers the size of gradients never forgets faster: with a beta of 2/3 RAdam stops
dividing by it."""


def rule_for(optimizer: Optimizer) -> str:
    """Return the rule for an optimizer's kind.

    >>> weights = [torch.nn.Parameter(torch.zeros(1))]
    >>> rule_for(torch.optim.SGD(weights, lr=0.1)), rule_for(torch.optim.AdamW(weights))
    ('adascale', 'sqrt')
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return "none"  # a step of Newton's kind has the right length at any batch
    return "sqrt" if any(name in optimizer.defaults for name in _DIVIDES) else "adascale"


@dataclass(frozen=True)
class Ramp:
    """A global batch and a gain on their way up, as fast as momentum forgets the old ones.

    Down they go at once: a learning rate that is too high for its batch does harm.
    """

    old: tuple[float, float]
    new: tuple[float, float]
    """Global batch and gain."""
    steps: int = 0
    """Steps since the change."""

    def at(self, momentum: float) -> tuple[float, float]:
        """Return global batch and gain as they count now."""
        batch, gain = (
            ramp(min(old, new), new, self.steps, momentum)
            for old, new in zip(self.old, self.new, strict=True)
        )
        return batch, gain

    def towards(self, new: tuple[float, float], momentum: float) -> "Ramp":
        """Return the ramp in the next step, when this is where to go."""
        if new == self.new:
            return Ramp(self.old, new, self.steps + 1)
        return Ramp(self.at(momentum), new)


class _Replaced(NamedTuple):
    """One setting of a parameter group while it is not the user's."""

    group: dict[str, Any]
    name: str
    users: Any
    ours: Any


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
        if any("lr" not in group for group in optimizer.param_groups):
            raise InvalidSetting(
                f"{type(optimizer).__name__} has no learning rate 'lr' that could follow the "
                "global batch; leave adapt out, or use an optimizer with one"
            )
        self.rule = rule or rule_for(optimizer)
        self._optimizer = optimizer
        self._start = start
        self._plan = plan
        self._rest = (float(start), 1.0)
        self._ramps: list[Ramp] = []
        """One for each parameter group."""
        self._replaced: list[_Replaced] = []

    def hooks(self) -> list[RemovableHandle]:
        """Put hooks around the optimizer's step."""
        return [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self.restore),
        ]

    @property
    def factor(self) -> float:
        """What the first parameter group's learning rate was last multiplied by."""
        group = self._optimizer.param_groups[0]
        return self._adjustment(group, self._ramps[0]).factor if self._ramps else 1.0

    def restore(self, *_: Any) -> None:
        """Give the user's settings back after a step, also after one that raised."""
        for group, name, users, ours in self._replaced:
            now = group[name]
            same = torch.equal(now, ours) if isinstance(now, Tensor) else now == ours
            if same:  # else there is a newer one already
                _put(group, name, users)
        self._replaced = []

    def saved(self) -> list[dict[str, Any]]:
        """Return how far changes have come, as plain values."""
        return [{"old": each.old, "new": each.new, "steps": each.steps} for each in self._ramps]

    def resume(self, ramps: Sequence[Ramp]) -> None:
        """Go on with changes that `saved_ramps` read."""
        self._ramps = list(ramps)

    def _before_step(self, *_: Any) -> None:
        self.restore()
        plan, groups = self._plan(), self._optimizer.param_groups
        new = (float(plan.global_batch), plan.gain)
        known = [*self._ramps, *[Ramp(self._rest, self._rest)] * len(groups)]
        self._ramps = [
            each.towards(new, _momentum(group)) for each, group in zip(known, groups, strict=False)
        ]
        if all(each.old == each.new == self._rest for each in self._ramps):
            return
        # All are read before one is replaced: groups may share the tensor of their rate.
        self._replaced = [
            setting
            for group, each in zip(groups, self._ramps, strict=True)
            for setting in _settings(group, self._adjustment(group, each))
        ]
        for group, name, _, ours in self._replaced:
            _put(group, name, ours)

    def _adjustment(self, group: Mapping[str, Any], way: Ramp) -> Adjustment:
        batch, gain = way.at(_momentum(group))
        return adjustment(self.rule, batch=batch, start=self._start, gain=gain)


def saved_ramps(state: Mapping[str, Any]) -> list[list[Ramp]]:
    """Read what a balancer's state says of each optimizer's rates, or raise if it is damaged."""
    try:
        ramps = [
            [Ramp(_place(way["old"]), _place(way["new"]), whole_in(way, "steps")) for way in each]
            for each in state.get("rates", [])
        ]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StateMismatch(
            f"what the state says of learning rates (rates) is damaged: {error!r}; load another one"
        ) from error
    return ramps


def _place(values: Any) -> tuple[float, float]:
    batch, gain = values
    if not (is_number(batch) and 0 < batch <= UNLIMITED and is_number(gain) and 0 < gain < _MOST):
        raise ValueError(f"global batch {batch!r} and gain {gain!r}")
    return float(batch), float(gain)


def _momentum(group: Mapping[str, Any]) -> float:
    """Return how much of the velocity is kept in a step."""
    found = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return min(max(float(found), 0.0), 0.999)


def _settings(group: dict[str, Any], change: Adjustment) -> list[_Replaced]:
    """Return what a rule makes of a parameter group."""
    adjusted: dict[str, Any] = {"lr": group["lr"] * change.factor}
    if isinstance(group.get("eps"), float):
        adjusted["eps"] = change.eps(group["eps"])
    if "betas" in group:
        first, *others = group["betas"]
        least = [_remembered(first, change, 0.0)]
        least += [_remembered(beta, change, _LEAST_SECOND) for beta in others]
        adjusted["betas"] = type(group["betas"])(least)
    for name in ("alpha", "rho"):
        if name in group and "eps" in group:
            adjusted[name] = _remembered(group[name], change, _LEAST_SECOND)
    return [_Replaced(group, name, _copy(group[name]), value) for name, value in adjusted.items()]


def _remembered(beta: Any, change: Adjustment, least: float) -> Any:
    """Return a beta that forgets faster, but not so fast that nothing is averaged any more."""
    if isinstance(beta, Tensor):
        return torch.maximum(1 - change.forgetting * (1 - beta), beta.clamp(max=least))
    return max(change.beta(beta), min(beta, least))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting; a tensor stays the same object, since compiled steps know it."""
    if isinstance(value, Tensor) and isinstance(group[name], Tensor):
        group[name].copy_(value)
    else:
        group[name] = value

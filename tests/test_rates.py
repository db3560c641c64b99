"""Learning rates that follow the global batch while an optimizer steps."""

import json
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from poise.core.plan import Plan
from poise.errors import InvalidSetting
from poise.torch.rates import Rates, rule_for, saved_ramps


class Seeing:
    """Notes an optimizer's settings as each step finds them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps: list[list[dict[str, Any]]] = []
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.steps.append(
            [
                {
                    name: float(group[name]) if name != "betas" else group[name]
                    for name in ("lr", "eps", "betas", "alpha")
                    if name in group
                }
                for group in self._optimizer.param_groups
            ]
        )


class Course:
    """An optimizer of two parameter groups under plans that change."""

    def __init__(self, make: Any, rule: str | None = None, start: int = 64) -> None:
        layers = nn.Linear(2, 1), nn.Linear(2, 1)
        groups = [
            {"params": list(layers[0].parameters())},
            {"params": list(layers[1].parameters()), "lr": 0.4},
        ]
        self.optimizer = make(groups)
        self.parameters = [p for layer in layers for p in layer.parameters()]
        self.plan = Plan((start,))
        self.rates = Rates(self.optimizer, rule, start, lambda: self.plan)
        self.hooks = self.rates.hooks()
        self.seen = Seeing(self.optimizer)

    def step(self, batch: int, gain: float = 1.0) -> list[dict[str, Any]]:
        """Return the settings that a step used."""
        self.plan = Plan((batch,), gain=gain)
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        return self.seen.steps[-1]


def sgd(groups: Any, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=momentum)


def test_the_rule_goes_by_the_optimizers_kind() -> None:
    weights = [nn.Parameter(torch.zeros(1))]
    for name in ("SGD", "ASGD"):
        assert rule_for(getattr(torch.optim, name)(weights, lr=0.1)) == "adascale"
    for name in ("AdamW", "NAdam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Rprop"):
        assert rule_for(getattr(torch.optim, name)(weights, lr=0.1)) == "sqrt", name


def test_sgd_follows_the_gain_in_each_group_and_nobody_else_sees_it() -> None:
    course = Course(sgd)
    scheduler = StepLR(course.optimizer, step_size=2, gamma=0.5)
    assert [group["lr"] for group in course.step(64)] == [0.1, 0.4]
    scheduler.step()
    used = course.step(256, gain=2.5)
    assert [group["lr"] for group in used] == pytest.approx([0.25, 1.0])
    assert [group["lr"] for group in course.optimizer.param_groups] == [0.1, 0.4]
    assert course.rates.factor == 2.5
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05, 0.2]
    assert [group["lr"] for group in course.step(256, gain=2.5)] == pytest.approx([0.125, 0.5])
    saved = course.optimizer.state_dict()["param_groups"]
    assert [group["lr"] for group in saved] == [0.05, 0.2]


def test_momentum_makes_a_change_gradual() -> None:
    course = Course(lambda groups: sgd(groups, momentum=0.75))
    course.step(64)
    factors = [course.step(256, gain=3.0)[0]["lr"] / 0.1 for _ in range(6)]
    assert factors == pytest.approx([1.5, 2.0, 2.5, 3.0, 3.0, 3.0])
    assert course.step(64)[0]["lr"] == 0.1, "down it goes at once"
    course.step(256, gain=3.0)
    assert course.step(256, gain=3.2)[0]["lr"] == pytest.approx(0.1 * (1.5 + 1.7 / 4))


def test_slow_momentum_stays_slow_when_a_change_meets_another() -> None:
    course = Course(lambda groups: sgd(groups, momentum=0.99))
    factors = [course.step(256, gain=3.0)[0]["lr"] / 0.1 for _ in range(20)]
    factors += [course.step(256, gain=3.3)[0]["lr"] / 0.1 for _ in range(20)]
    assert max(after - before for before, after in pairwise(factors)) < 0.03


def test_adam_follows_the_square_root_with_betas_and_eps() -> None:
    make = lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.0, 0.99), eps=1e-4)  # noqa: E731
    course = Course(make)
    first, second = course.step(256, gain=2.0)
    assert (first["lr"], second["lr"]) == pytest.approx((0.2, 0.8))
    assert first["betas"] == pytest.approx((0.0, 0.96))
    assert first["eps"] == pytest.approx(5e-5)
    group = course.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.0, 0.99), 1e-4)


def test_rmsprop_forgets_faster_too() -> None:
    course = Course(lambda groups: torch.optim.RMSprop(groups, lr=0.1, alpha=0.99))
    assert course.step(128)[0]["alpha"] == pytest.approx(0.98)
    assert course.optimizer.param_groups[0]["alpha"] == 0.99


@pytest.mark.parametrize(
    ("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("legw", 2.0), ("none", 1.0)]
)
def test_a_stated_rule_overrules_the_kind(rule: str, factor: float) -> None:
    course = Course(sgd, rule)
    assert course.step(256, gain=3.0)[0]["lr"] == pytest.approx(0.1 * factor)


def test_a_learning_rate_in_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    course = Course(lambda groups: torch.optim.SGD(groups, lr=rate))
    kept = course.optimizer.param_groups[0]["lr"]
    assert course.step(128, gain=1.5)[0]["lr"] == pytest.approx(0.15)
    assert course.optimizer.param_groups[0]["lr"] is kept
    assert float(kept) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_groups_may_share_the_tensor_of_their_rate(kind: str) -> None:
    layers = nn.Linear(2, 1), nn.Linear(2, 1)
    shared = torch.tensor(0.1)
    groups = [{"params": list(layer.parameters())} for layer in layers]
    optimizer = getattr(torch.optim, kind)(groups, lr=shared)
    plan = Plan((256,), gain=2.0)
    hooks = Rates(optimizer, None, 64, lambda: plan).hooks()
    seen = Seeing(optimizer)
    for _ in range(30):
        for layer in layers:
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert [group["lr"] for group in seen.steps[-1]] == pytest.approx([0.2, 0.2])
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])
    for hook in hooks:
        hook.remove()


def test_what_remembers_sizes_is_kept_from_forgetting_all() -> None:
    """RAdam with a second beta of 2/3 or less stops dividing by the size of gradients."""
    make = lambda groups: torch.optim.RAdam(groups, lr=0.1, betas=(0.0, 0.99))  # noqa: E731
    assert Course(make).step(64 * 64)[0]["betas"] == (0.0, 0.9)


def test_a_second_order_step_keeps_its_length_and_a_rate_is_needed() -> None:
    assert rule_for(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])) == "none"
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(InvalidSetting, match="SGD has no learning rate 'lr'"):
        Rates(optimizer, None, 8, lambda: Plan((8,)))


def test_a_rate_that_the_user_sets_after_a_failed_step_stays() -> None:
    course = Course(sgd)
    course.step(64)
    hook = course.optimizer.register_step_pre_hook(mock.Mock(side_effect=RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        course.step(256, gain=2.0)
    hook.remove()
    course.optimizer.param_groups[0]["lr"] = 0.01
    course.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert [g["lr"] for g in course.step(256, gain=2.0)] == pytest.approx([0.02, 0.8, 0.2])
    course.rates.restore()
    assert [g["lr"] for g in course.optimizer.param_groups] == pytest.approx([0.01, 0.4, 0.1])


def test_a_step_that_raises_leaves_nothing_behind_for_the_next() -> None:
    course = Course(sgd)
    course.step(64)

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    hook = course.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        course.step(256, gain=2.0)
    hook.remove()
    assert course.step(256, gain=2.0)[0]["lr"] == pytest.approx(0.2)
    assert course.optimizer.param_groups[0]["lr"] == 0.1


def test_a_change_goes_on_after_a_resume() -> None:
    course, other = (Course(lambda groups: sgd(groups, momentum=0.9)) for _ in range(2))
    for _ in range(4):
        course.step(256, gain=3.0)
    (ramps,) = saved_ramps(json.loads(json.dumps({"rates": [course.rates.saved()]})))
    other.rates.resume(ramps)
    for _ in range(8):
        assert other.step(256, gain=3.0) == course.step(256, gain=3.0)

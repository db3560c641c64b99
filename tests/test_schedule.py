"""Schedules that count samples."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.utils.data import DataLoader

from poise.errors import InvalidSetting, StateMismatch
from poise.policy import Fixed
from poise.torch import Balancer, BySamples
from tests.cluster import Workers
from tests.training import Recipe, build, dataset

RECIPE = Recipe(samples=50, global_batch=10)


def rates(split: list[int], samples_per_step: int, calls: int) -> list[tuple[int, float]]:
    """Return (samples, learning rate) after each step, however often the scheduler is called."""
    model, optimizer, _ = build(RECIPE)
    with Balancer(sum(split), policy=Fixed(split)) as balancer:
        loader = DataLoader(dataset(RECIPE), sum(split))
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        scheduler = BySamples(CosineAnnealingLR(optimizer, 10), balancer, samples_per_step)
        course = []
        for _ in balancer.epochs(2):
            for inputs, targets, _ in shares:
                nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                for _ in range(calls):
                    scheduler.step()
                course.append((balancer.samples, scheduler.get_last_lr()[0]))
        return course


def test_the_rate_follows_samples_and_not_workers_or_calls(workers: Workers) -> None:
    alone = workers.run(rates, [10], 10, 1, workers=1)[0]
    for course in workers.run(rates, [7, 1, 2], 10, 3, workers=3):
        assert course == alone
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.05)
    plain = CosineAnnealingLR(optimizer, 10)
    for samples, rate in alone:
        plain.step()
        assert rate == plain.get_last_lr()[0]
        assert samples % 10 == 0


def test_the_rate_at_a_number_of_samples_does_not_depend_on_the_global_batch(
    workers: Workers,
) -> None:
    small = dict(workers.run(rates, [5], 10, 1, workers=1)[0])
    large = dict(workers.run(rates, [20], 10, 1, workers=1)[0])
    assert large[40] == pytest.approx(small[40], rel=1e-12)
    assert large[50] == pytest.approx(small[50], rel=1e-12)
    assert large[90] == pytest.approx(small[90], rel=1e-12)


def resumed() -> tuple[list[float], list[float], list[float]]:
    """Rates of a whole run, and of one that stops in the middle and goes on."""

    def run(state: Any, steps: int) -> tuple[list[float], Any]:
        model, optimizer, _ = build(RECIPE)
        with Balancer(10) as balancer:
            loader = DataLoader(dataset(RECIPE), 10)
            shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
            scheduler = BySamples(StepLR(optimizer, 2), balancer, 10)
            if state:
                balancer.load_state_dict(state[0])
                with pytest.raises(StateMismatch, match="samples_per_step=10 and is 20 now"):
                    BySamples(StepLR(optimizer, 2), balancer, 20).load_state_dict(state[1])
                scheduler.load_state_dict(state[1])
                optimizer.load_state_dict(state[2])
            course = []
            for inputs, targets, _ in shares:
                nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                scheduler.step()
                course.append(scheduler.get_last_lr()[0])
                if len(course) == steps:
                    break
            return course, (balancer.state_dict(), scheduler.state_dict(), optimizer.state_dict())

    whole, _ = run(None, 5)
    first, state = run(None, 3)
    rest, _ = run(state, 5)
    return whole, first, rest


def test_a_schedule_is_resumed(workers: Workers) -> None:
    whole, first, rest = workers.run(resumed, workers=1)[0]
    assert whole == first + rest
    assert len(rest) == 2


def by_progress() -> list[float]:
    model, optimizer, _ = build(RECIPE)
    with Balancer(10) as balancer:
        loader = DataLoader(dataset(RECIPE), 10)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        scheduler = LambdaLR(optimizer, lambda _: 1 - balancer.samples / 50)
        found = []
        for inputs, targets, _ in shares:
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            found.append(float(scheduler.get_last_lr()[0]))
        return found


def test_a_schedule_of_ones_own_sees_progress(workers: Workers) -> None:
    for found in workers.run(by_progress, workers=2):
        assert found == pytest.approx([0.04, 0.03, 0.02, 0.01, 0.0])


def wrong_schedules() -> list[str]:
    messages = []
    with Balancer(10) as balancer:
        scheduler = StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), 2)
        for given, samples in ((scheduler, 0), (scheduler, 1.5), (object(), 10)):
            with pytest.raises(InvalidSetting) as caught:
                BySamples(given, balancer, samples)  # type: ignore[arg-type]
            messages.append(str(caught.value))
    return messages


def test_wrong_schedules_are_refused(workers: Workers) -> None:
    none, half, no_scheduler = workers.run(wrong_schedules, workers=1)[0]
    assert "samples_per_step=0 is not a number of samples" in none
    assert "samples_per_step=1.5" in half
    assert "takes a scheduler of torch" in no_scheduler

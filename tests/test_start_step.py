"""A plan takes effect on the same step everywhere, however far the loaders run ahead."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from poise.core.observation import Event, Observation
from poise.core.order import Order
from poise.core.split import Split, even_split
from poise.engine.rhythm import SETTLING
from poise.policy import Decision
from poise.torch import Balancer
from tests.cluster import Workers
from tests.test_exactness import EXACT, random_splits
from tests.training import Log, Recipe, build, dataset, distance, train_balanced, train_plain

RECIPE = Recipe(samples=803, global_batch=8, epochs=2, seed=4)
STEPS_PER_EPOCH = 101
STEPS = 2 * STEPS_PER_EPOCH


@dataclass(frozen=True)
class Restless:
    """An online policy that draws a new split after nearly every observation.

    Its draws depend on the process, so workers agree only if worker 0 alone decides.
    """

    online = True
    state_type = tuple[int, int]

    def init(self, workers: int, global_batch: int) -> tuple[dict[int, Split], tuple[int, int]]:
        return {0: even_split(workers, global_batch)}, (workers, global_batch)

    def update(
        self, state: tuple[int, int], events: Sequence[Event]
    ) -> tuple[Decision | None, tuple[int, int]]:
        workers, global_batch = state
        last = events[-1]
        step = last.step if isinstance(last, Observation) else None
        chance = random.Random(os.getpid() * 1_000_003 + (step or 0))
        if step is not None and chance.random() < 0.1:
            return None, state
        drawn = [chance.randrange(workers) for _ in range(global_batch)]
        return Decision(tuple(drawn.count(worker) for worker in range(workers))), state


@dataclass(frozen=True)
class Calm(Restless):
    """One that leaves its splits alone for long, so that workers exchange seldom."""

    def update(
        self, state: tuple[int, int], events: Sequence[Event]
    ) -> tuple[Decision | None, tuple[int, int]]:
        steps = [event.step for event in events if isinstance(event, Observation)]
        due = [step for step in steps if step % 41 == 40]
        if not due:
            return None, state
        workers, global_batch = state
        split = [1] * workers
        split[due[0] % workers] += global_batch - workers
        return Decision(tuple(split)), state


def train_with_leads(policy: Any, leads: tuple[tuple[int, int], ...]) -> Log:
    """Leads are (loader processes, prefetch factor) by worker."""
    return train_balanced(
        RECIPE,
        policy,
        loader_workers=tuple(processes for processes, _ in leads),
        prefetch=tuple(factor for _, factor in leads),
    )


def check_every_sample_once_in_order(logs: list[Log], recipe: Recipe) -> None:
    """The joined slices of all workers are the global order, epoch by epoch."""
    for epoch in range(recipe.epochs):
        per_worker = [[seen for seen in log.seen if seen[0] == epoch] for log in logs]
        assert len({len(rows) for rows in per_worker}) == 1
        joined = [
            sample
            for rows in zip(*per_worker, strict=True)
            for _, _, samples in rows
            for sample in samples
        ]
        order = Order(length=recipe.samples, seed=recipe.seed, epoch=epoch)
        assert joined == order.at(0, recipe.samples).tolist()


def check_sizes(logs: list[Log], splits: list[Split]) -> None:
    """Every batch has the size that the plan of its own step says."""
    for step, split in enumerate(splits):
        if (step + 1) % STEPS_PER_EPOCH:  # the last global batch of an epoch is smaller
            assert tuple(len(log.seen[step][2]) for log in logs) == split, step


LEADS = [
    ((0, 2), (0, 2), (0, 2)),  # no lead
    ((1, 2), (0, 2), (1, 2)),  # 2, 0, 2
    ((0, 2), (4, 2), (1, 2)),  # 0, 8, 2
    ((2, 16), (0, 2), (1, 8)),  # 32, 0, 8
]


@pytest.mark.parametrize(
    "leads",
    [LEADS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in LEADS[1:3]), LEADS[3]],
)
def test_online_plans_start_together_at_any_lead(workers: Workers, leads: Any) -> None:
    logs = workers.run(train_with_leads, Restless(), leads, workers=3)
    assert logs[0].splits == logs[1].splits == logs[2].splits
    changes = sum(before != after for before, after in pairwise(logs[0].splits))
    assert changes > 100
    check_every_sample_once_in_order(logs, RECIPE)
    check_sizes(logs, logs[0].splits)
    assert distance(logs[1].weights, train_plain(RECIPE)) < EXACT


def test_plans_start_together_where_workers_exchange_seldom(workers: Workers) -> None:
    logs = workers.run(train_with_leads, Calm(), LEADS[2], workers=3)
    assert logs[0].splits == logs[1].splits == logs[2].splits
    changes = [s for s, (a, b) in enumerate(pairwise(logs[0].splits), 1) if a != b]
    assert len(changes) >= 3
    assert min(later - sooner for sooner, later in pairwise(changes)) > SETTLING
    check_every_sample_once_in_order(logs, RECIPE)
    check_sizes(logs, logs[0].splits)


@pytest.mark.parametrize("leads", LEADS[3:])
def test_stated_plans_start_at_their_step_at_any_lead(workers: Workers, leads: Any) -> None:
    policy = random_splits(9, 3, 8, steps=STEPS)
    assert len(policy.splits) > 50
    logs = workers.run(train_with_leads, policy, leads, workers=3)
    schedule = dict(policy.splits)
    expected = schedule[0]
    splits = [expected := schedule.get(step, expected) for step in range(STEPS)]
    assert logs[0].splits == logs[1].splits == logs[2].splits == splits
    check_sizes(logs, splits)
    check_every_sample_once_in_order(logs, RECIPE)
    assert distance(logs[2].weights, train_plain(RECIPE)) < EXACT


def stop_and_restart_passes(policy: Any) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Break out of the loader again and again; take one batch too many each time."""
    model, optimizer, _ = build(RECIPE)
    splits, seen = [], []
    with Balancer(8, policy=policy, seed=RECIPE.seed) as balancer:
        loader = DataLoader(dataset(RECIPE), 8, shuffle=True, num_workers=balancer.worker)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        while balancer.state_dict()["epoch"] == 0:
            for number, (inputs, targets, samples) in enumerate(shares):
                if number == 45:
                    break  # handed out, never trained on: it comes again
                splits.append(balancer.plan.split)
                seen.append(samples.tolist())
                torch.nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    return splits, seen


def test_leaving_the_loader_early_loses_and_doubles_nothing(workers: Workers) -> None:
    results = workers.run(stop_and_restart_passes, Restless(), workers=3)
    assert results[0][0] == results[1][0] == results[2][0]
    steps = zip(*(seen for _, seen in results), strict=True)
    joined = [sample for slices in steps for samples in slices for sample in samples]
    assert joined == Order(length=803, seed=4).at(0, 803).tolist()


def rewind(policy: Any) -> list[tuple[int, tuple[int, ...], list[int]]]:
    """Train 60 steps, go back to step 20, and train on; (step, split, samples) of each step."""
    model, optimizer, _ = build(RECIPE)
    log = []
    with Balancer(8, policy=policy, seed=RECIPE.seed) as balancer:
        loader = DataLoader(dataset(RECIPE), 8, shuffle=True, num_workers=balancer.worker)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        early: dict[str, Any] = {}
        for stop in (60, RECIPE.samples):
            for inputs, targets, samples in shares:
                step = int(balancer.state_dict()["step"])
                log.append((step, balancer.plan.split, samples.tolist()))
                torch.nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 20:
                    early = balancer.state_dict()
                if step == stop:
                    break
            balancer.load_state_dict(early)
    return log


def test_plans_stay_together_when_training_goes_back(workers: Workers) -> None:
    logs = workers.run(rewind, Restless(), workers=3)
    places = [[(step, split) for step, split, _ in log] for log in logs]
    assert places[0] == places[1] == places[2]
    again = [[samples for _, _, samples in log[61:]] for log in logs]
    joined = [sample for step in zip(*again, strict=True) for part in step for sample in part]
    assert joined == Order(length=803, seed=4).at(21 * 8, 803).tolist()


def evaluate_under_changing_plans(policy: Any) -> list[tuple[tuple[int, ...], list[int]]]:
    """Evaluate after every step; (plan, samples) of each evaluation."""
    model, optimizer, _ = build(RECIPE)
    held_out = TensorDataset(torch.arange(23))
    found = []
    with Balancer(8, policy=policy, seed=RECIPE.seed) as balancer:
        loader = DataLoader(dataset(RECIPE), 8, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        evaluation = balancer.evaluation(DataLoader(held_out, 10))
        for inputs, targets, _ in shares:
            torch.nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen = [int(sample) for (batch,) in evaluation for sample in batch]
            found.append((balancer.plan.split, seen))
    return found


def test_evaluation_is_exact_while_plans_change(workers: Workers) -> None:
    results = workers.run(evaluate_under_changing_plans, Restless(), workers=3)
    for rows in zip(*results, strict=True):
        assert len({split for split, _ in rows}) == 1
        assert sorted(sample for _, seen in rows for sample in seen) == list(range(23))

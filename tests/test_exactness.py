"""The central law: for any split, training equals one process on the joined batch."""

import math
import random
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from poise.torch import Balancer, Fixed
from tests.cluster import Workers
from tests.training import (
    Log,
    Recipe,
    build,
    dataset,
    distance,
    plain_batches,
    plain_gradient,
    train_balanced,
    train_plain,
    weights,
)

# Theory: float64 weights within 1e-12 after 50 steps.
LONG = Recipe(samples=122, global_batch=12, epochs=5)
EXACT = 1e-12


def random_splits(seed: int, workers: int, global_batch: int, steps: int = 60) -> Fixed:
    """A new random split every few steps; idle workers among them."""
    chance = random.Random(seed)
    splits, step = {}, 0
    while step < steps:
        cuts = sorted(chance.randint(0, global_batch) for _ in range(workers - 1))
        bounds = [0, *cuts, global_batch]
        splits[step] = [stop - start for start, stop in pairwise(bounds)]
        step += chance.randint(1, 6)
    return Fixed(splits)


def many_trainings(jobs: list[tuple[Recipe, Any]]) -> list[Log]:
    return [train_balanced(recipe, policy) for recipe, policy in jobs]


RECIPES = [
    replace(LONG, model="mlp", optimizer="sgd", clip=0.05),
    replace(LONG, model="mlp", optimizer="adamw", scheduler=True),
    replace(LONG, model="cnn", optimizer="sgd", scheduler=True),
    replace(LONG, model="cnn", optimizer="adamw", clip=0.1),
    replace(LONG, model="transformer", optimizer="sgd"),
    replace(LONG, model="transformer", optimizer="adamw", clip=0.1, scheduler=True),
]

# The bias of attention's keys has a true gradient of 0. AdamW divides the rounding that is left
# there by its own size, so the bound is what one process does to itself by reordering a batch.
AMPLIFIED = RECIPES[-1:]


def rounding(recipe: Recipe) -> float:
    """Distance between one-process runs that differ in the order of samples inside the batch."""
    plain = train_plain(recipe)
    return max(
        distance(plain, train_plain(replace(recipe, shuffled_inside=seed))) for seed in range(1, 6)
    )


@pytest.mark.parametrize(
    "count",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), 4],
)
def test_any_split_gives_the_weights_of_one_process(workers: Workers, count: int) -> None:
    jobs = [(recipe, random_splits(count * 10 + i, count, 12)) for i, recipe in enumerate(RECIPES)]
    logs = workers.run(many_trainings, jobs, workers=count)
    for number, (recipe, _) in enumerate(jobs):
        expected = train_plain(recipe)
        bound = max(EXACT, 3 * rounding(recipe)) if recipe in AMPLIFIED else EXACT
        for worker in range(count):
            assert distance(logs[worker][number].weights, expected) < bound, (recipe, worker)


def test_the_even_split_gives_the_weights_of_one_process(workers: Workers) -> None:
    recipe = LONG
    logs = workers.run(train_balanced, recipe, workers=3)
    assert distance(logs[1].weights, train_plain(recipe)) < EXACT


def float32_training(recipe: Recipe, policy: Fixed) -> Log:
    return train_balanced(recipe, policy, keep_gradients=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "model", ["mlp", "cnn", pytest.param("transformer", marks=pytest.mark.slow)]
)
def test_float32_stays_within_the_noise_of_rounding(
    workers: Workers, model: str, optimizer: str
) -> None:
    recipe = replace(LONG, model=model, optimizer=optimizer, dtype="float32")
    log = workers.run(float32_training, recipe, random_splits(3, 3, 12), workers=3)[0]
    batches = list(plain_batches(recipe))
    assert len(log.gradients) == len(batches)
    for (before, gradient), samples in zip(log.gradients, batches, strict=True):
        expected = plain_gradient(recipe, before, samples)
        size = max(float(tensor.abs().max()) for tensor in expected.values())
        assert distance(gradient, expected) <= 1e-6 * size
    assert distance(log.weights, train_plain(recipe)) <= 3 * rounding(recipe)


def mean_of_means(recipe: Recipe, policy: Fixed) -> Log:
    """The usual mistake: every worker's mean counts the same."""
    with patch("poise.runtime.counts.weights", lambda counts: (1 / len(counts),) * len(counts)):
        return train_balanced(recipe, policy)


def test_the_law_notices_a_mean_of_means(workers: Workers) -> None:
    recipe = LONG
    logs = workers.run(mean_of_means, recipe, Fixed([2, 3, 7]), workers=3)
    assert distance(logs[0].weights, train_plain(recipe)) > 1e-3


def buckets_of_one_layer(recipe: Recipe) -> Log:
    return train_balanced(
        replace(recipe, extra={"ddp": {"bucket_cap_mb": 0.0001}}), Fixed([9, 0, 3])
    )


def test_the_law_holds_with_many_buckets_and_an_idle_worker(workers: Workers) -> None:
    recipe = replace(LONG, model="transformer")
    logs = workers.run(buckets_of_one_layer, recipe, workers=3)
    assert distance(logs[2].weights, train_plain(recipe)) < EXACT


def repeating_idle_worker(recipe: Recipe) -> Log:
    return train_balanced(replace(recipe, extra={"idle": "repeat"}), Fixed([12, 0]))


def test_an_idle_worker_that_repeats_a_sample_changes_nothing(workers: Workers) -> None:
    recipe = LONG
    logs = workers.run(repeating_idle_worker, recipe, workers=2)
    assert distance(logs[0].weights, train_plain(recipe)) < EXACT
    samples_per_step = {len(samples) for _, _, samples in logs[1].seen}
    assert samples_per_step == {2}


def poisoned_idle_worker() -> dict[str, torch.Tensor]:
    """The idle worker's gradient and running statistics are NaN."""
    recipe = replace(LONG, model="batchnorm")
    model, optimizer, _ = build(recipe)
    with (
        warnings.catch_warnings(),
        Balancer(12, policy=Fixed([0, 12]), idle="repeat") as balancer,
    ):
        warnings.simplefilter("ignore")
        loader = DataLoader(dataset(recipe), 12, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for inputs, targets, _ in shares:
            poison = math.nan if balancer.worker == 0 else 1.0
            (nn.functional.cross_entropy(shared(inputs * poison), targets) * poison).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(shared)


def test_nan_on_an_idle_worker_stays_there(workers: Workers) -> None:
    idle, busy = workers.run(poisoned_idle_worker, workers=2)
    expected = train_plain(replace(LONG, model="batchnorm", epochs=1))
    assert distance(idle, busy) == 0
    assert distance(busy, expected) < EXACT

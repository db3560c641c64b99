"""Means, evaluation and running statistics that stay true with unequal shares."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poise.errors import InvalidSetting, PoiseWarning
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Workers
from tests.training import Recipe, build, dataset, distance, weights


def means() -> list[float]:
    with Balancer(6) as balancer:
        mine = balancer.worker
        values = [
            balancer.mean([1.0, 2.0, 4.0][mine], [1, 2, 5][mine]),
            balancer.mean(torch.tensor([3.0, math.nan, 5.0][mine]), [1, 0, 3][mine]),
            balancer.mean(7, 0.5),
        ]
        with pytest.raises(InvalidSetting, match="count=0 from every worker"):
            balancer.mean(1.0, 0)
        with pytest.raises(InvalidSetting, match="count=-1"):
            balancer.mean(1.0, -1)
    return values


def test_a_mean_is_the_true_global_mean(workers: Workers) -> None:
    for values in workers.run(means, workers=3):
        assert values == pytest.approx([25 / 8, 18 / 4, 7.0])


def evaluations(split: list[int], samples: int, batch_size: int) -> tuple[int, list[list[int]]]:
    """Return the announced length and the samples of each batch."""
    data = TensorDataset(torch.arange(samples))
    with Balancer(sum(split), policy=Fixed(split)) as balancer:
        shares = balancer.evaluation(DataLoader(data, batch_size, shuffle=False))
        return len(shares), [batch.tolist() for (batch,) in shares]


@pytest.mark.parametrize(("samples", "batch_size"), [(50, 16), (17, 16), (2, 16), (48, 4)])
def test_evaluation_sees_every_sample_once_in_equal_steps(
    workers: Workers, samples: int, batch_size: int
) -> None:
    results = workers.run(evaluations, [5, 0, 9, 2], samples, batch_size)
    steps = -(-samples // batch_size)
    assert all(length == len(batches) == steps for length, batches in results)
    joined = [
        sample
        for slices in zip(*(batches for _, batches in results), strict=True)
        for part in slices
        for sample in part
    ]
    assert joined == list(range(samples))


def accuracy_on_all_workers(split: list[int]) -> float:
    recipe = Recipe(samples=53)
    model, optimizer, _ = build(recipe)
    data = dataset(recipe)
    with Balancer(sum(split), policy=Fixed(split)) as balancer:
        training = DataLoader(data, sum(split), shuffle=True)
        model, optimizer, _ = balancer.prepare(model, optimizer, training)
        model.eval()
        right = seen = 0
        with torch.no_grad():
            for inputs, targets, _ in balancer.evaluation(DataLoader(data, 10)):
                right += int((model(inputs).argmax(1) == targets).sum())
                seen += len(targets)
        return balancer.mean(right / seen if seen else math.nan, seen)


def test_accuracy_is_that_of_one_process(workers: Workers) -> None:
    model, _, _ = build(Recipe(samples=53))
    inputs, targets, _ = dataset(Recipe(samples=53)).tensors  # type: ignore[attr-defined]
    expected = float((model(inputs).argmax(1) == targets).double().mean())
    for found in workers.run(accuracy_on_all_workers, [1, 0, 9], workers=3):
        assert found == pytest.approx(expected, abs=1e-12)


BN = Recipe(model="batchnorm", samples=40, global_batch=10)


def train_batchnorm(split: list[int], idle: str) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Return the state after each step, and the warnings."""
    model, optimizer, _ = build(BN)
    states = []
    with (
        warnings.catch_warnings(record=True) as caught,
        Balancer(10, policy=Fixed(split), idle=idle) as balancer,  # type: ignore[arg-type]
    ):
        warnings.simplefilter("always")
        loader = DataLoader(dataset(BN), 10, shuffle=False)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for inputs, targets, _ in shares:
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(weights(shared))
    return states, [str(w.message) for w in caught if issubclass(w.category, PoiseWarning)]


@pytest.mark.parametrize(
    ("split", "idle"), [([2, 8], "empty"), ([0, 10], "empty"), ([0, 10], "repeat")]
)
def test_running_statistics_are_merged_by_share_in_every_step(
    workers: Workers, split: list[int], idle: str
) -> None:
    results = workers.run(train_batchnorm, split, idle, workers=2)
    for left, right in zip(results[0][0], results[1][0], strict=True):
        assert distance(left, right) == 0
    inputs, _, _ = dataset(BN).tensors  # type: ignore[attr-defined]
    model, _, _ = build(BN)
    hidden = model[0](inputs[:10]).detach()  # type: ignore[index]
    parts = [part for part in hidden.split(split) if len(part)]
    means = sum(len(part) / 10 * part.mean(0) for part in parts)
    variances = sum(len(part) / 10 * part.var(0) for part in parts)
    first = results[0][0][0]
    assert torch.allclose(first["1.running_mean"], 0.1 * torch.as_tensor(means), atol=1e-12)
    assert torch.allclose(
        first["1.running_var"], 0.9 + 0.1 * torch.as_tensor(variances), atol=1e-12
    )


def test_batchnorm_is_warned_of_once(workers: Workers) -> None:
    results = workers.run(train_batchnorm, [5, 5], "empty", workers=2)
    assert sum("normalizes each worker's local batch" in text for text in results[0][1]) == 1
    assert results[1][1] == []

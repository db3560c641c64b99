"""Losses whose denominator is not the number of samples."""

import math
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from poise.core.order import Order
from poise.core.weight import averaged, weights
from poise.errors import InvalidSetting
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Workers
from tests.test_exactness import EXACT
from tests.training import Weights, distance
from tests.training import weights as copied

SAMPLES, CLASSES, LONGEST, PAD = 50, 7, 6, -100


class Sentences(Dataset[Any]):
    """Sequences of unequal length; some have no token that counts."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.lengths = torch.randint(1, LONGEST + 1, (SAMPLES,), generator=generator).tolist()
        self.tokens = torch.randint(0, CLASSES, (SAMPLES, LONGEST + 1), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.tokens[index, : self.lengths[index] + 1]
        targets = row[1:] if index % 4 else torch.full((self.lengths[index],), PAD)
        return row[:-1], targets


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs = torch.zeros(len(samples), LONGEST, dtype=torch.long)
    targets = torch.full((len(samples), LONGEST), PAD)
    for row, (given, wanted) in enumerate(samples):
        inputs[row, : len(given)], targets[row, : len(wanted)] = given, wanted
    return inputs, targets


def without_sevenths(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Leaves some samples out, sometimes all of them."""
    kept = [(given, wanted) for given, wanted in samples if len(given) < LONGEST]
    return padded(kept)


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)).double()
    return model, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over tokens, whose gradient is NaN where there is none."""
    counts = (targets != PAD).double()
    logits = model(inputs).transpose(1, 2)
    losses = cross_entropy(logits, targets.clamp(min=0), reduction="none")
    loss: Tensor = (losses * counts).sum() / counts.sum()
    return loss


def sample_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over the samples that are left."""
    loss: Tensor = model(inputs).pow(2).mean((1, 2)).sum() / torch.tensor(len(targets))
    return loss


def tokens(batch: Any) -> int:
    return int((batch[1] != PAD).sum())


def rows(batch: Any) -> int:
    return len(batch[1])


CASES: dict[str, tuple[Any, Any, Any]] = {
    "tokens": (padded, token_loss, tokens),
    "filtered": (without_sevenths, sample_loss, rows),
}


def train_counted(case: str, split: dict[int, list[int]], with_count: bool) -> Weights:
    collate, loss_of, count = CASES[case]
    model, optimizer = new_model()
    with Balancer(10, policy=Fixed(split), count=count if with_count else None) as balancer:
        loader = DataLoader(Sentences(), 10, shuffle=True, collate_fn=collate)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(4):
            for inputs, targets in shares:
                loss_of(shared, inputs, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        return copied(shared)


def train_alone(case: str) -> Weights:
    collate, loss_of, _ = CASES[case]
    model, optimizer = new_model()
    data = Sentences()
    for epoch in range(4):
        order = Order(length=SAMPLES, epoch=epoch)
        for start in range(0, SAMPLES, 10):
            inputs, targets = collate([data[i] for i in order.at(start, start + 10).tolist()])
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return copied(model)


SPLITS = {0: [5, 2, 3], 4: [0, 9, 1], 9: [1, 1, 8], 12: [7, 2, 1]}


@pytest.mark.parametrize("case", list(CASES))
def test_counts_give_the_weights_of_one_process(workers: Workers, case: str) -> None:
    results = workers.run(train_counted, case, SPLITS, True, workers=3)
    expected = train_alone(case)
    assert all(distance(found, expected) < EXACT for found in results)


def test_tokens_weighted_by_samples_are_noticed(workers: Workers) -> None:
    results = workers.run(train_counted, "tokens", SPLITS, False, workers=3)
    assert not distance(results[0], train_alone("tokens")) < 1e-3


def filter_without_count() -> str:
    with pytest.raises(InvalidSetting) as caught:
        train_counted("filtered", {0: [10]}, False)
    return str(caught.value)


def test_a_batch_that_lost_samples_needs_a_count(workers: Workers) -> None:
    message = workers.run(filter_without_count, workers=1)[0]
    assert "is 10 samples, but nothing in the batch has that size" in message
    assert "count=function" in message


def count_wrongly(counts: list[Any]) -> list[str]:
    messages = []
    for found in counts:
        model, optimizer = new_model()
        with Balancer(10, count=partial(lambda answer, _: answer, found)) as balancer:
            loader = DataLoader(Sentences(), 10, collate_fn=padded)
            shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
            with pytest.raises(InvalidSetting) as caught:
                token_loss(shared, *next(iter(shares))).backward()
            messages.append(str(caught.value))
    return messages


def test_counting_nothing_anywhere_is_an_error_on_every_worker(workers: Workers) -> None:
    for messages in workers.run(count_wrongly, [0, 0.0], workers=2):
        assert all("count gave 0 on every worker in step 0" in text for text in messages)


def test_a_count_is_a_number(workers: Workers) -> None:
    messages = workers.run(count_wrongly, [-1, math.nan, None, [1, 2]], workers=1)[0]
    assert all("it must return a number from 0 up" in text for text in messages)


def zero_times_nan(split: list[int]) -> Weights:
    """Break it on purpose: weight 0 multiplies instead of overwriting."""
    with patch("poise.torch.gradient_sum._scale", lambda part, factor: part.mul_(factor)):
        return train_counted("tokens", {0: split}, True)


def test_the_tests_notice_zero_times_nan(workers: Workers) -> None:
    found = workers.run(zero_times_nan, [1, 1, 8], workers=3)[0]
    assert any(bool(tensor.isnan().any()) for tensor in found.values())


def test_weights_add_up_and_scaling_around_an_average_gives_them_back() -> None:
    for counts in [(5, 0, 3), (1.0,), (0, 0, 7, 2), (1e-9, 1.0)]:
        found = weights(counts)
        assert sum(found) == pytest.approx(1)
        for worker, weight in enumerate(found):
            scaling = averaged(found, worker)
            assert 0 <= scaling.before <= 1
            assert scaling.before * scaling.after / len(counts) == pytest.approx(weight)
    with pytest.raises(ZeroDivisionError):
        weights((0, 0))

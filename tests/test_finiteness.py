"""Gradients that are not finite: one worker's NaN is said once, with worker and step."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from poise.core.finiteness import UNUSED_IN_A_ROW, Claim, culprits, message, speaks
from poise.errors import PoiseWarning, StateMismatch
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Workers
from tests.training import Recipe, build, dataset

RECIPE = Recipe(samples=64, global_batch=8, dtype="float32")
Poison = dict[int, tuple[int, ...]]
"""Steps, and the workers whose loss is not finite in them."""


def remarks(
    poison: Poison,
    split: list[int],
    how: str = "plain",
    factor: float = math.nan,
    steps: int = 12,
) -> list[str]:
    """Train, and return what Poise warns of."""
    model, optimizer, _ = build(RECIPE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how == "scaled")
    with warnings.catch_warnings(record=True) as caught, Balancer(8, policy=Fixed(split)) as b:
        warnings.simplefilter("always")
        loader = DataLoader(dataset(RECIPE), 8)
        shared, optimizer, shares = b.prepare(model, optimizer, loader)
        if how == "weights":
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)
        step = 0
        for _ in b.epochs(9):
            for batch in shares:
                if step == steps:
                    break
                spoiled = b.worker in poison.get(step, ())
                loss_factor = factor if spoiled else 1.0
                _learn(b, shared, optimizer, scaler, batch, loss_factor, how, step)
                step += 1
    return [str(each.message) for each in caught if each.category is PoiseWarning]


def _learn(
    balancer: Any,
    model: nn.Module,
    optimizer: Any,
    scaler: Any,
    batch: Any,
    factor: float,
    how: str,
    step: int,
) -> None:
    def backward(inputs: Any, targets: Any) -> None:
        loss = nn.functional.cross_entropy(model(inputs), targets) * factor
        scaler.scale(loss).backward()

    if how == "parts":
        for part in balancer.micro_batches(batch):
            with part as (inputs, targets, _):
                backward(inputs, targets)
    else:
        backward(*batch[:2])
    if how == "accumulating" and step % 2 == 0:
        return
    if how != "left out":
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("how", ["plain", "parts", "accumulating"])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_nan_of_one_worker_is_said_by_it_and_by_worker_0(
    workers: Workers, how: str, factor: float
) -> None:
    said = workers.run(remarks, {4: (1,)}, [3, 2, 3], how, factor, workers=3)
    assert [len(each) for each in said] == [1, 1, 0]
    for text in (said[0][0], said[1][0]):
        assert "worker 1's own part of the gradient of step 4 is not finite" in text
        assert "an optimizer used the sum" in text


def test_worker_0_says_its_own_alone(workers: Workers) -> None:
    said = workers.run(remarks, {4: (0,)}, [3, 2, 3], workers=3)
    assert [len(each) for each in said] == [1, 0, 0]
    assert "worker 0's own part of the gradient of step 4" in said[0][0]


def test_several_culprits_are_named_together(workers: Workers) -> None:
    said = workers.run(remarks, {4: (1, 2)}, [3, 2, 3], workers=3)
    assert [len(each) for each in said] == [1, 1, 0]
    assert "the own part of workers 1, 2 of the gradient of step 4" in said[1][0]


def test_steps_that_a_grad_scaler_leaves_out_are_not_said(workers: Workers) -> None:
    poison: Poison = {2: (1,), 3: (1,), 7: (0,)}
    assert workers.run(remarks, poison, [4, 4], "scaled", math.inf, workers=2) == [[], []]


def test_a_scaler_that_leaves_out_every_step_is_said(workers: Workers) -> None:
    poison: Poison = dict.fromkeys(range(3, 99), (1,))
    steps = 3 + UNUSED_IN_A_ROW
    said = workers.run(remarks, poison, [4, 4], "scaled", math.nan, steps, workers=2)
    assert [len(each) for each in said] == [0, 1]
    assert f"{UNUSED_IN_A_ROW} steps in a row, which no optimizer used" in said[1][0]


def test_a_loop_that_leaves_such_a_step_out_itself_hears_nothing(workers: Workers) -> None:
    assert workers.run(remarks, {4: (1,)}, [4, 4], "left out", workers=2) == [[], []]


def test_an_empty_batch_is_nan_by_nature(workers: Workers) -> None:
    assert workers.run(remarks, {}, [8, 0], workers=2) == [[], []]


def test_weights_that_are_not_finite_are_no_workers_gradient(workers: Workers) -> None:
    said = workers.run(remarks, {}, [4, 4], "weights", workers=2)
    assert [len(each) for each in said] == [1, 0]
    assert "the weights were not finite when step 0 began" in said[0][0]


def test_one_process_alone_is_told_too() -> None:
    (text,) = remarks({4: (0,)}, [8])
    assert "worker 0's own part of the gradient of step 4" in text


def test_large_gradients_whose_sum_overflows_are_finite() -> None:
    assert remarks({4: (0,)}, [8], how="left out", factor=1e38) == []


def test_an_old_claim_that_nobody_used_blames_no_one() -> None:
    own = Claim(900, 900)
    assert culprits(own, {0: own, 2: Claim(100, 100)}) == [0]
    assert culprits(own, {0: own, 2: Claim(100, 100, used=True)}) == [2]


def test_claims_in_a_row_keep_their_first_step() -> None:
    claim = Claim(3, 3)
    for step in (3, 4, 4, 5):
        claim = claim.at(step, weights=True)
    assert (claim.since, claim.last, claim.in_a_row) == (3, 5, 3)
    assert Claim(3, 3, used=True).at(9, weights=False) == Claim(3, 9, used=True)


def test_everybody_at_once_is_said_in_one_word() -> None:
    assert "every worker's own part" in message([0, 1, 2], Claim(1, 1, used=True), 3)
    assert [worker for worker in range(3) if speaks(worker, [0, 1, 2])] == [0]


def test_a_claim_travels_as_text() -> None:
    claim = Claim(3, 5, weights=False, used=True)
    assert Claim.from_json(claim.to_json()) == claim
    assert Claim.from_json("") is None
    with pytest.raises(StateMismatch, match="no claim"):
        Claim.from_json('{"step": 3}')

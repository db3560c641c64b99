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
from poise.runtime.clocks import Stopwatch, Waits
from poise.runtime.events import Events, NotFinite
from poise.torch import Balancer
from poise.torch.own_part import OwnPart, is_used
from poise.torch.part_gradients import Bucket
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


class Told:
    """What an adapter needs of a session to look at its own part, and what it tells."""

    def __init__(self) -> None:
        self.events = Events()
        self.heard: list[NotFinite] = []
        self.stopwatch = Stopwatch(self, Waits())  # type: ignore[arg-type] # a clock, by its verbs
        self.events.on(NotFinite, self.heard.append)

    def mark(self) -> int:
        return 0

    def host_s(self) -> float:
        return 0.0


def looked(model: nn.Module, value: float, dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    """Return what looks, what hears of it, and a bucket of the model's gradients."""
    model = model.to(dtype)
    parameters = list(model.parameters())
    flat = torch.full((sum(p.numel() for p in parameters),), value, dtype=dtype)
    told = Told()
    return OwnPart(told, model), told, Bucket(1, True, flat, parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_every_type_are_looked_at(dtype: Any) -> None:
    for value, expected in ((1.0, 0), (math.inf, 1), (math.nan, 1)):
        own, told, bucket = looked(nn.Linear(40, 50), value, dtype)
        own.look(3, bucket, bucket.flat, on_cpu=True)
        assert len(told.heard) == expected


def test_the_bias_is_looked_at_where_a_table_fills_the_bucket() -> None:
    own, told, bucket = looked(nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 3)), 0.0)
    own.look(3, bucket, bucket.flat, on_cpu=True)
    assert not told.heard
    bucket.flat[-3:] = math.nan  # the gradient of the bias
    own.look(4, bucket, bucket.flat, on_cpu=True)
    assert [event[::2] for event in told.heard] == [(4, True)]


def test_a_device_is_asked_and_nobody_waits_for_it() -> None:
    own, told, bucket = looked(nn.Linear(40, 50), math.nan)
    told.stopwatch.clock.passed = lambda _: False
    own.look(3, bucket, bucket.flat, on_cpu=False)
    own.look(4, bucket, bucket.flat, on_cpu=False)
    assert not told.heard
    told.stopwatch.clock.passed = lambda _: True
    own.read()
    assert [(event.step, event.used) for event in told.heard] == [(3, False), (4, False)]


def test_a_device_that_answers_after_the_update_says_that_it_was_used() -> None:
    own, told, bucket = looked(nn.Linear(40, 50), math.nan)
    told.stopwatch.clock.passed = lambda _: True
    own.look(3, bucket, bucket.flat, on_cpu=False)
    with torch.no_grad():
        own._model.weight.fill_(math.nan)
    own.read()
    assert [(event.step, event.used, event.weights) for event in told.heard] == [(3, True, True)]


def test_a_fused_optimizer_that_leaves_a_step_out_did_not_use_it() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    assert is_used(optimizer)
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined] # as GradScaler sets it
    assert not is_used(optimizer)


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

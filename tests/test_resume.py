"""Stop anywhere, go on with another number of workers: exactly the unseen samples follow."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from poise.core.order import Order
from poise.errors import Disagreement, OutOfOrder, StateMismatch
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Workers
from tests.inside import session_of
from tests.test_exactness import EXACT
from tests.training import Recipe, build, dataset, distance, train_plain

RECIPE = Recipe(model="mlp", optimizer="adamw", samples=101, global_batch=9, epochs=3, seed=5)


def train_part(
    policy: Any, checkpoint: str, stop_after: int | None, loader_workers: int = 0
) -> list[tuple[int, int, list[int]]]:
    """Train from the checkpoint, if there is one, up to a step; save; return what was seen."""
    torch.manual_seed(random.randrange(10**6))  # initial weights of their own, except on worker 0
    model, optimizer, _ = build(RECIPE)
    seen = []
    with Balancer(RECIPE.global_batch, policy=policy, seed=RECIPE.seed) as balancer:
        loader = DataLoader(
            dataset(RECIPE), RECIPE.global_batch, shuffle=True, num_workers=loader_workers
        )
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        if Path(checkpoint).exists():
            saved = torch.load(checkpoint, weights_only=True)
            shared.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            balancer.load_state_dict(saved["balancer"])
        state: dict[str, Any] = balancer.state_dict()
        for epoch in balancer.epochs(RECIPE.epochs):
            for inputs, targets, samples in shares:
                nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                state = balancer.state_dict()
                seen.append((epoch, int(state["step"]), samples.tolist()))
                if state["step"] == stop_after:
                    break
            if state["step"] == stop_after:
                break
        everyone = session_of(balancer).peers.control.table(
            [state[k] for k in ("epoch", "position", "step")], "t"
        )
        assert all(row == everyone[0] for row in everyone)
        if balancer.worker == 0:
            torch.save(
                {
                    "model": shared.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "balancer": state,
                },
                checkpoint,
            )
        balancer.mean(0.0, 1)  # nobody goes on before the file is written
    return seen


def joined(parts: list[list[tuple[int, int, list[int]]]]) -> list[tuple[int, int]]:
    """(epoch, sample) of all workers in the order of training."""
    return [
        (rows[0][0], sample)
        for rows in zip(*parts, strict=True)
        for _, _, samples in rows
        for sample in samples
    ]


def test_training_goes_on_with_any_number_of_workers(workers: Workers, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint.pt")
    stages = [
        (4, Fixed([1, 2, 6, 0]), 7),
        (2, Fixed([8, 1]), 8),
        (3, "even", 24),
        (1, "even", None),
    ]
    seen = []
    for count, policy, stop_after in stages:
        ahead = 1 if count == 2 else 0
        parts = workers.run(train_part, policy, checkpoint, stop_after, ahead, workers=count)
        seen += joined(parts)
    expected = [
        (epoch, sample)
        for epoch in range(3)
        for sample in Order(length=101, seed=5, epoch=epoch).at(0, 101).tolist()
    ]
    assert seen == expected
    final = torch.load(checkpoint, weights_only=True)
    assert distance(final["model"], train_plain(RECIPE)) < EXACT


def test_a_checkpoint_loads_without_poise(workers: Workers, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint.pt")
    workers.run(train_part, "even", checkpoint, 3, workers=4)
    model, optimizer, _ = build(RECIPE)
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def refusals() -> dict[str, str]:
    """Ask for the state at wrong moments and load wrong ones; return the messages."""
    model, optimizer, _ = build(RECIPE)
    messages = {}
    with Balancer(9, seed=5) as balancer:
        with pytest.raises(OutOfOrder) as early:
            balancer.state_dict()
        messages["early"] = str(early.value)
        loader = DataLoader(dataset(RECIPE), 9, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        first = balancer.state_dict()
        for inputs, targets, _ in shares:
            assert balancer.state_dict() == first  # a batch handed out is not yet consumed
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            with pytest.raises(OutOfOrder) as between:
                balancer.state_dict()
            messages["between"] = str(between.value)
            optimizer.step()
            assert balancer.state_dict()["position"] == 9
            break
        wrong_values: dict[str, int | str] = {
            "length": 100,
            "seed": 6,
            "order": "x",
            "version": 1,
            "position": 102,
            "epoch": "x",
            "step": -1,
        }
        for key, value in wrong_values.items():
            with pytest.raises(StateMismatch) as wrong:
                balancer.load_state_dict({**balancer.state_dict(), key: value})
            messages[key] = str(wrong.value)
    return messages


def test_states_are_refused_with_the_reason(workers: Workers) -> None:
    messages = workers.run(refusals, workers=2)[1]
    assert "call prepare first" in messages["early"]
    assert "between backward and optimizer.step() of step 0" in messages["between"]
    assert "length=100 and this training length=101" in messages["length"]
    assert "seed=6" in messages["seed"]
    assert "order='x'" in messages["order"]
    assert "version=1" in messages["version"]
    assert "position=102 in a data set of 101" in messages["position"]
    assert "epoch='x', which is not a whole number" in messages["epoch"]
    assert "step=-1, which is not a whole number" in messages["step"]


def load_on_worker_0_alone() -> str:
    model, optimizer, _ = build(RECIPE)
    with Balancer(9, seed=5) as balancer:
        loader = DataLoader(dataset(RECIPE), 9, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        if balancer.worker == 0:
            balancer.load_state_dict({**balancer.state_dict(), "position": 18, "step": 2})
        inputs, targets, _ = next(iter(shares))
        with pytest.raises(Disagreement) as caught:
            nn.functional.cross_entropy(shared(inputs), targets).backward()
        return str(caught.value)


def test_a_state_loaded_on_one_worker_only_is_noticed(workers: Workers) -> None:
    for message in workers.run(load_on_worker_0_alone, workers=2):
        assert "different places: position 0 on one, 18 on another" in message


def plain_range_loop() -> tuple[list[int], list[list[int]]]:
    """A script that keeps its own `for epoch in range(...)`."""
    model, optimizer, _ = build(RECIPE)
    epochs: list[int] = []
    firsts: list[list[int]] = []
    with Balancer(9, seed=5) as balancer:
        loader = DataLoader(dataset(RECIPE), 9, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        assert len(shares) == 12
        for _ in range(3):
            epochs.append(int(balancer.state_dict()["epoch"]))
            for inputs, targets, samples in shares:
                if len(firsts) < len(epochs):
                    firsts.append(samples.tolist())
                nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
    return epochs, firsts


def test_a_loop_over_range_gets_a_new_order_each_epoch(workers: Workers) -> None:
    epochs, firsts = workers.run(plain_range_loop, workers=1)[0]
    assert epochs == [0, 1, 2]
    assert firsts == [Order(length=101, seed=5, epoch=e).at(0, 9).tolist() for e in range(3)]

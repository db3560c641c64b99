"""Mixed precision: autocast and GradScaler on unequal shares."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from poise.core.order import Order
from poise.errors import OutOfOrder
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Workers
from tests.training import Recipe, Weights, build, dataset, distance, weights

RECIPE = Recipe(samples=40, global_batch=8, dtype="float32")
HUGE = {3: 1, 9: 0, 10: 2, 14: 0}
"""Steps in which one worker's gradient overflows."""


def scaled_step(
    model: nn.Module, optimizer: Any, scaler: Any, dtype: Any, batch: Any, factor: float
) -> float:
    """One step as the documentation of torch writes it; returns the norm after unscaling."""
    inputs, targets = batch
    with torch.autocast("cpu", dtype=dtype):
        loss = nn.functional.cross_entropy(model(inputs), targets) * factor
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return float(norm)


Course = list[tuple[float, float]]


def train_scaled(
    dtype_name: str, split: dict[int, list[int]], in_parts: bool
) -> tuple[Weights, Course, list[int], int, Weights]:
    """Return weights, (scale, norm) of each step, skips so far, updates, the first gradient."""
    dtype = getattr(torch, dtype_name)
    model, optimizer, _ = build(RECIPE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    course: Course = []
    skipped: list[int] = []
    updates = 0
    first: Weights = {}

    def count(*_: Any) -> None:
        nonlocal updates
        updates += 1

    optimizer.register_step_post_hook(count)
    with Balancer(8, policy=Fixed(split)) as balancer:
        loader = DataLoader(dataset(RECIPE), 8, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        step = 0
        for _ in balancer.epochs(4):
            for batch in shares:
                overflows = HUGE.get(step) == balancer.worker and len(batch[0])
                factor = math.inf if overflows else 1.0
                if in_parts:
                    for part in balancer.micro_batches(batch):
                        with part as (inputs, targets, _), torch.autocast("cpu", dtype=dtype):
                            loss = nn.functional.cross_entropy(shared(inputs), targets)
                            scaler.scale(loss * factor).backward()
                    scaler.unscale_(optimizer)
                    norm = float(nn.utils.clip_grad_norm_(shared.parameters(), 0.1))
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    norm = scaled_step(shared, optimizer, scaler, dtype, batch[:2], factor)
                if step == 0:
                    first = {n: p.grad.clone() for n, p in shared.named_parameters()}  # type: ignore[union-attr]
                course.append((scaler.get_scale(), norm))
                assert balancer.state_dict()["step"] == step + 1  # also after a skipped step
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                skipped.append(balancer.skipped)
                step += 1
        return weights(shared), course, skipped, updates, first


def train_scaled_alone(dtype_name: str) -> tuple[Weights, Course, Weights]:
    model, optimizer, _ = build(RECIPE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    inputs, targets, _ = dataset(RECIPE).tensors  # type: ignore[attr-defined]
    course: Course = []
    first: Weights = {}
    for epoch in range(4):
        for start in range(0, 40, 8):
            rows = torch.from_numpy(Order(length=40, epoch=epoch).at(start, start + 8))
            factor = math.inf if len(course) in HUGE else 1.0
            batch = (inputs[rows], targets[rows])
            norm = scaled_step(model, optimizer, scaler, getattr(torch, dtype_name), batch, factor)
            if not course:
                first = {n: p.grad.clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
            course.append((scaler.get_scale(), norm))
            optimizer.zero_grad()
    return weights(model), course, first


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_scale_and_skips_are_the_same_everywhere(
    workers: Workers, dtype_name: str, in_parts: bool
) -> None:
    split = {0: [5, 1, 2], 6: [1, 6, 1]}
    results = workers.run(train_scaled, dtype_name, split, in_parts, workers=3)
    expected, course, gradient = train_scaled_alone(dtype_name)
    for found, scales, skipped, updates, first in results:
        assert [scale for scale, _ in scales] == [scale for scale, _ in course]
        assert skipped == [sum(huge <= step for huge in HUGE) for step in range(20)]
        assert updates == 20 - len(HUGE)
        assert distance(found, results[0][0]) == 0
        size = max(float(tensor.abs().max()) for tensor in gradient.values())
        assert distance(first, gradient) <= 2**-7 * size
        assert distance(found, expected) < 2e-3  # the curves agree
        for (_, norm), (_, alone) in zip(scales, course, strict=True):
            assert norm == pytest.approx(alone, rel=0.05, nan_ok=True)


def accumulate() -> tuple[int, str]:
    """Two global batches for each update, without a part of Poise in it."""
    model, optimizer, _ = build(RECIPE)
    with Balancer(8, policy=Fixed([3, 5])) as balancer:
        loader = DataLoader(dataset(RECIPE), 8)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        message = ""
        for number, (inputs, targets, _) in enumerate(shares):
            (nn.functional.cross_entropy(shared(inputs), targets) / 2).backward()
            if number == 0:
                with pytest.raises(OutOfOrder) as caught:
                    balancer.state_dict()
                message = str(caught.value)
            if number == 1:
                gradient = {n: p.grad.clone() for n, p in shared.named_parameters()}  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
                break
        inputs, targets, _ = dataset(RECIPE).tensors  # type: ignore[attr-defined]
        model, _, _ = build(RECIPE)
        nn.functional.cross_entropy(model(inputs[:16]), targets[:16]).backward()
        alone = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert distance(gradient, alone) < 1e-6
        return balancer.skipped, message


def test_a_gradient_that_waits_for_the_next_batch_is_not_a_skipped_step(workers: Workers) -> None:
    for skipped, message in workers.run(accumulate, workers=2):
        assert skipped == 0
        assert "between backward and optimizer.step()" in message

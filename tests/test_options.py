"""Options of DistributedDataParallel, hooks under ours, several models and optimizers."""

import os
import signal
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from poise.core.order import Order
from poise.core.weight import Scaling
from poise.errors import InvalidSetting, OutOfOrder
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Workers
from tests.test_exactness import EXACT, LONG
from tests.training import (
    Log,
    Recipe,
    Weights,
    build,
    dataset,
    distance,
    plain_batches,
    plain_gradient,
    train_balanced,
    train_plain,
    weights,
)

SPLITS = {0: [2, 3, 7], 5: [0, 11, 1], 11: [4, 4, 4]}


def train_with_options(options: dict[str, Any]) -> Weights:
    return train_balanced(replace(LONG, extra={"ddp": options}), Fixed(SPLITS)).weights


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"static_graph": True, "bucket_cap_mb": 0.0001},
    ],
    ids=str,
)
def test_options_of_ddp_leave_the_training_exact(workers: Workers, options: dict[str, Any]) -> None:
    expected = train_plain(LONG)
    for found in workers.run(train_with_options, options, workers=3):
        assert distance(found, expected) < EXACT


FLOAT32 = Recipe(samples=60, dtype="float32", epochs=2)
HOOKS: dict[str, tuple[Any, float]] = {
    "fp16": (lambda: fp16_compress_hook, 2e-3),
    "bf16": (lambda: bf16_compress_hook, 2**-7),
    # With all its ranks PowerSGD leaves nothing out.
    "powerSGD": (lambda: (full_rank(), powerSGD_hook), 1e-4),
    "fp16 powerSGD": (lambda: (full_rank(), fp16_compress_wrapper(powerSGD_hook)), 5e-3),
}


MANY = {"bucket_cap_mb": 0.0001}


def recipe_for(many_buckets: bool) -> Recipe:
    return replace(FLOAT32, model="transformer") if many_buckets else FLOAT32


def full_rank() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=24, start_powerSGD_iter=2)


def train_with_hook(name: str, many_buckets: bool) -> Log:
    extra = {"comm_hook": HOOKS[name][0](), "ddp": MANY if many_buckets else {}}
    recipe = replace(recipe_for(many_buckets), extra=extra)
    return train_balanced(recipe, Fixed(SPLITS), keep_gradients=True)


@pytest.mark.parametrize("name", list(HOOKS))
@pytest.mark.parametrize("many_buckets", [False, True])
def test_a_hook_under_ours_gives_the_weighted_gradient(
    workers: Workers, name: str, many_buckets: bool
) -> None:
    recipe = recipe_for(many_buckets)
    logs = workers.run(train_with_hook, name, many_buckets, workers=3)
    assert distance(logs[0].weights, logs[1].weights) == 0
    batches = plain_batches(recipe)
    for (before, gradient), samples in zip(logs[0].gradients, batches, strict=True):
        expected = plain_gradient(recipe, before, samples)
        size = max(float(tensor.abs().max()) for tensor in expected.values())
        assert distance(gradient, expected) <= HOOKS[name][1] * size


def unscaled_hook() -> Log:
    """Break it on purpose: the hook averages what nobody weighted."""
    with patch("poise.torch.gradient_sum.averaged", lambda *_: Scaling(1.0, 1.0)):
        return train_with_hook("bf16", False)


def test_the_tests_notice_a_hook_without_weights(workers: Workers) -> None:
    log = workers.run(unscaled_hook, workers=3)[0]
    before, gradient = log.gradients[0]
    expected = plain_gradient(FLOAT32, before, next(iter(plain_batches(FLOAT32))))
    size = max(float(tensor.abs().max()) for tensor in expected.values())
    assert distance(gradient, expected) > 10 * HOOKS["bf16"][1] * size


def large_gradients() -> tuple[float, float]:
    """A worker with nearly all samples, and a gradient that just fits into 16 bits."""
    model: Any = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    data = TensorDataset(torch.full((8, 1), 40_000.0))
    with Balancer(8, policy=Fixed([7, 1]), comm_hook=fp16_compress_hook) as balancer:
        shared, optimizer, shares = balancer.prepare(model, optimizer, DataLoader(data, 8))
        for (inputs,) in shares:
            shared(inputs).mean().backward()
            found = float(shared.weight.grad)
            optimizer.zero_grad()
            for part in balancer.micro_batches((inputs,)):
                with part as (part_inputs,):
                    shared(part_inputs).mean().backward()
            return found, float(shared.weight.grad)
    raise AssertionError("no batch")


def test_scaling_around_a_hook_does_not_overflow(workers: Workers) -> None:
    for found in workers.run(large_gradients, workers=2):
        assert found == pytest.approx((40_000, 40_000), rel=1e-3)


def parts_with_hook(name: str) -> Weights:
    model, optimizer, _ = build(FLOAT32)
    hook = HOOKS[name][0]()
    with Balancer(12, policy=Fixed([2, 3, 7]), comm_hook=hook, micro_batch=[2, 2, 3]) as balancer:
        loader = DataLoader(dataset(FLOAT32), 12, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for batch in shares:
            for part in balancer.micro_batches(batch):
                with part as (inputs, targets, _):
                    nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(shared)


@pytest.mark.parametrize("name", ["bf16", "fp16 powerSGD"])
def test_parts_are_reduced_by_the_hook_too(workers: Workers, name: str) -> None:
    expected = train_plain(replace(FLOAT32, epochs=1))
    for found in workers.run(parts_with_hook, name, workers=3):
        assert 0 < distance(found, expected) < 5e-3


def killed_under_a_hook(name: str) -> None:
    def kill(balancer: Balancer, step: int) -> None:
        if balancer.worker == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    recipe = replace(FLOAT32, extra={"comm_hook": HOOKS[name][0]()})
    train_balanced(recipe, Fixed([2, 3, 7]), after_step=kill, hang_s=30)


@pytest.mark.parametrize("name", ["fp16", pytest.param("powerSGD", marks=pytest.mark.slow)])
def test_a_worker_that_dies_under_a_hook_is_named(workers: Workers, name: str) -> None:
    outcomes = workers.attempt(killed_under_a_hook, name, workers=3)
    for worker in (0, 2):
        assert "worker 1" in outcomes[worker].error, outcomes[worker].error
        assert "poise: " in outcomes[worker].stderr


def hooks_with_a_state() -> list[str]:
    """Several models, and buckets of two kinds, under a hook that knows buckets by number."""
    messages = []
    hook = (full_rank(), powerSGD_hook)
    with Balancer(8, comm_hook=hook) as balancer:
        loader = DataLoader(adversarial_data(), 8)
        with pytest.raises(InvalidSetting) as several:
            balancer.prepare(*generator_and_discriminator(), loader)
        messages.append(str(several.value))
    with Balancer(8, comm_hook=hook) as balancer:
        model = nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        batch = next(iter(shares))
        shared(batch[0]).mean().backward()
        with pytest.raises(InvalidSetting) as mixed:
            in_parts(balancer, shared, batch)
        messages.append(str(mixed.value))
    return messages


def in_parts(balancer: Balancer, model: nn.Module, batch: Any) -> None:
    for part in balancer.micro_batches(batch):
        with part as (real, _):
            model(real).mean().backward()


@pytest.mark.slow
def test_a_hook_with_a_state_keeps_to_one_layout_of_buckets(workers: Workers) -> None:
    several, mixed = workers.run(hooks_with_a_state, workers=1)[0]
    assert "would mix those of several models" in several
    assert "micro_batches and plain backwards have different buckets" in mixed


def frozen_later() -> str:
    model, optimizer, _ = build(LONG)
    with Balancer(12) as balancer:
        loader = DataLoader(dataset(LONG), 12)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        inputs, targets, _ = next(iter(shares))
        model[0].requires_grad_(False)  # type: ignore[index]
        nn.functional.cross_entropy(shared(inputs), targets).backward()
        with pytest.raises(OutOfOrder) as caught:
            optimizer.step()
        return str(caught.value)


def test_parameters_frozen_after_prepare_are_named_as_the_reason(workers: Workers) -> None:
    assert "frozen after prepare" in workers.run(frozen_later, workers=1)[0]


@pytest.mark.parametrize("hook", [3, ("state", "not a function"), (1, 2, 3)])
def test_what_is_not_a_hook_is_refused(hook: Any) -> None:
    with pytest.raises(InvalidSetting, match="is not a communication hook"):
        Balancer(4, comm_hook=hook)


def generator_and_discriminator() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(11)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return [generator, discriminator], [
        torch.optim.Adam(generator.parameters(), 1e-2),
        torch.optim.SGD(discriminator.parameters(), 0.05, momentum=0.5),
    ]


def adversarial_data() -> TensorDataset:
    """Real samples and the noise of each: part of the data, so that it follows the sample."""
    generator = torch.Generator().manual_seed(12)
    real = torch.randn(40, 2, generator=generator).double() + 1
    return TensorDataset(real, torch.randn(40, 3, generator=generator).double())


def adversarial_step(models: Any, optimizers: Any, real: Tensor, noise: Tensor) -> None:
    """Two backwards on one batch; the second also reaches the discriminator."""
    generator, discriminator = models
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
    fake = generator(noise)
    optimizers[1].zero_grad()
    (
        criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
    ).backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    criterion(discriminator(generator(noise)), ones).backward()
    optimizers[0].step()


def train_adversaries(split: dict[int, list[int]]) -> tuple[list[Weights], int]:
    models, optimizers = generator_and_discriminator()
    with Balancer(8, policy=Fixed(split)) as balancer:
        loader = DataLoader(adversarial_data(), 8, shuffle=True)
        shared, optimizers, shares = balancer.prepare(models, optimizers, loader)
        for _ in balancer.epochs(4):
            for real, noise in shares:
                adversarial_step(shared, optimizers, real, noise)
        return [weights(model) for model in shared], balancer.state_dict()["step"]


def test_two_models_that_train_against_each_other_are_exact(workers: Workers) -> None:
    models, optimizers = generator_and_discriminator()
    real, noise = adversarial_data().tensors
    for epoch in range(4):
        order = Order(length=40, epoch=epoch)
        for start in range(0, 40, 8):
            rows = torch.from_numpy(order.at(start, start + 8))
            adversarial_step(models, optimizers, real[rows], noise[rows])
    split = {0: [5, 1, 2], 7: [0, 7, 1]}
    for found, steps in workers.run(train_adversaries, split, workers=3):
        assert steps == 20
        for mine, model in zip(found, models, strict=True):
            assert distance(mine, weights(model)) < 1e-11  # Adam amplifies rounding


def train_with_two_optimizers() -> Weights:
    model, _, _ = build(LONG)
    first = torch.optim.SGD(model[0].parameters(), 0.05)  # type: ignore[index]
    last = torch.optim.SGD(model[2].parameters(), 0.01)  # type: ignore[index]
    with Balancer(12, policy=Fixed([3, 9])) as balancer:
        loader = DataLoader(dataset(LONG), 12, shuffle=True)
        shared, (first, last), shares = balancer.prepare(model, (first, last), loader)
        for inputs, targets, _ in shares:
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            for optimizer in (first, last):
                optimizer.step()
                optimizer.zero_grad()
        return weights(shared)


def test_several_optimizers_share_a_model(workers: Workers) -> None:
    alone = workers.run(train_with_two_optimizers_alone, workers=1)[0]
    for found in workers.run(train_with_two_optimizers, workers=2):
        assert distance(found, alone) < EXACT


def train_with_two_optimizers_alone() -> Weights:
    model, _, _ = build(LONG)
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.05},  # type: ignore[index]
            {"params": model[2].parameters(), "lr": 0.01},  # type: ignore[index]
        ]
    )
    inputs, targets, _ = dataset(LONG).tensors  # type: ignore[attr-defined]
    for batch in plain_batches(replace(LONG, epochs=1)):
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def sharded_model() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with Balancer(4) as balancer:
        model = nn.Linear(2, 1)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(InvalidSetting) as caught:
            balancer.prepare(model, optimizer, DataLoader(adversarial_data(), 4))
    return str(caught.value)


def test_a_sharded_model_is_refused(workers: Workers) -> None:
    assert "wrapped by FSDP" in workers.run(sharded_model, workers=1)[0]

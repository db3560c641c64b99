"""Local batches in parts: any parts on any worker give one exact gradient."""

import resource
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from poise.errors import InvalidSetting, OutOfOrder, PoiseWarning
from poise.policy import Fixed
from poise.runtime.slicing import samples_left, sizes, sliced
from poise.torch import Balancer
from tests.cluster import Workers
from tests.test_counts import (
    CASES,
    SPLITS,
    Sentences,
    new_model,
    padded,
    token_loss,
    tokens,
    train_alone,
)
from tests.test_exactness import EXACT
from tests.training import (
    Recipe,
    Weights,
    build,
    dataset,
    distance,
    plain_batches,
    train_plain,
    weights,
)

RECIPE = Recipe(samples=50, global_batch=12, model="mlp")


class Memory:
    """Fails as an allocator does, on one worker and above a number of samples at once."""

    def __init__(self, worker: int, most: int, place: str) -> None:
        self.worker, self.most, self.place = worker, most, place
        self.failures = 0
        self.calls = 0

    def need(self, worker: int, samples: int, place: str) -> None:
        if (worker, place) != (self.worker, self.place):
            return
        self.calls += 1
        if self.calls == 40:
            self.most = 1  # less is free than before
        if samples > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")


class FailsInBackward(torch.autograd.Function):
    """Runs out of memory in the middle of backward, when some gradients are made."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, fail: Any) -> Tensor:
        ctx.fail = fail
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fail()
        return gradients[0], None


def train_in_parts(
    micro_batch: Any, split: dict[int, list[int]], memory: Memory | None = None
) -> tuple[Weights, list[list[int]], list[str], int]:
    """Return weights, the sizes of the parts of each step, warnings, and failures."""
    model, optimizer, _ = build(RECIPE)
    parts: list[list[int]] = []
    with (
        warnings.catch_warnings(record=True) as caught,
        Balancer(12, policy=Fixed(split), micro_batch=micro_batch) as balancer,
    ):
        warnings.simplefilter("always")
        need = (memory or Memory(-1, 0, "")).need
        loader = DataLoader(dataset(RECIPE), 12, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)

        def fail_below_the_last_layer(_: Any, __: Any, hidden: Tensor) -> Any:
            here = (balancer.worker, len(hidden), "backward")
            return FailsInBackward.apply(hidden, lambda: need(*here))  # type: ignore[no-untyped-call]

        model[1].register_forward_hook(fail_below_the_last_layer)  # type: ignore[index]
        for _ in balancer.epochs(RECIPE.epochs):
            for batch in shares:
                parts.append([])
                for part in balancer.micro_batches(batch):
                    with part as (inputs, targets, _):
                        need(balancer.worker, len(inputs), "forward")
                        nn.functional.cross_entropy(shared(inputs), targets).backward()
                        need(balancer.worker, len(inputs), "end")
                        parts[-1].append(len(inputs))
                optimizer.step()
                optimizer.zero_grad()
        told = [str(w.message) for w in caught if issubclass(w.category, PoiseWarning)]
        return weights(shared), parts, told, memory.failures if memory else 0


def test_ragged_parts_give_the_weights_of_one_process(workers: Workers) -> None:
    splits = {0: [7, 1, 4], 3: [0, 10, 2], 6: [12, 0, 0]}
    results = workers.run(train_in_parts, [3, 4, None], splits, workers=3)
    expected = train_plain(RECIPE)
    assert all(distance(found[0], expected) < EXACT for found in results)
    assert results[0][1][0] == [3, 3, 1]
    assert [worker[1][3] for worker in results] == [[0], [4, 4, 2], [2]]
    assert results[0][1][6] == [3, 3, 3, 3]


@pytest.mark.parametrize("place", ["forward", "backward", "end"])
def test_a_lack_of_memory_is_met_by_smaller_parts_on_that_worker_alone(
    workers: Workers, place: str
) -> None:
    results = workers.run(train_in_parts, None, {0: [2, 9, 1]}, Memory(1, 2, place), workers=3)
    expected = train_plain(RECIPE)
    assert all(distance(found[0], expected) < EXACT for found in results)
    (_, quiet, nothing, _), (_, parts, told, failures), _ = results
    assert all(len(step) == 1 for step in quiet)
    assert nothing == []
    assert parts[0] == [2, 2, 2, 2, 1]
    assert failures == 4  # with 9, 5, 3 samples in the first step, and later once with 2
    assert set(parts[-2]) == {1}
    assert len(told) == 1
    assert "worker 1 ran out of memory with 9 samples at once and goes on in parts of 2" in told[0]


def one_sample_too_many() -> None:
    train_in_parts(None, {0: [6, 6]}, Memory(1, 0, "forward"))


def test_a_sample_that_does_not_fit_alone_is_an_error(workers: Workers) -> None:
    outcomes = workers.attempt(one_sample_too_many, workers=2)
    assert "OutOfMemoryError" in outcomes[1].error
    assert "one sample alone does not fit" in outcomes[1].trace
    assert "worker 1" in outcomes[0].error


class Hungry(nn.Module):
    """Needs 32 MiB for each sample while it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 1).double()

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.repeat(1, 2**20).view(len(inputs), -1, 4)
        out: Tensor = self.layer(wide).mean(1)
        return out


def used_address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def train_hungry(limited: int) -> tuple[Weights, list[str]]:
    """On one worker the address space ends soon above what is used."""
    data = torch.utils.data.TensorDataset(
        torch.randn(16, 4, generator=torch.Generator().manual_seed(4)).double()
    )
    model = Hungry()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with (
        warnings.catch_warnings(record=True) as caught,
        Balancer(8, policy=Fixed([2, 6])) as balancer,
    ):
        warnings.simplefilter("always")
        shared, optimizer, shares = balancer.prepare(model, optimizer, DataLoader(data, 8))
        for batch in shares:
            if balancer.worker == limited:
                resource.setrlimit(resource.RLIMIT_AS, (used_address_space() + 150 * 2**20, hard))
            try:
                for part in balancer.micro_batches(batch):
                    with part as (inputs,):
                        shared(inputs).pow(2).mean().backward()
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
            optimizer.step()
            optimizer.zero_grad()
        return weights(shared), [str(w.message) for w in caught]


@pytest.mark.slow
def test_an_allocation_that_fails_is_met_by_smaller_parts(workers: Workers) -> None:
    unlimited = workers.run(train_hungry, -1, workers=2)
    limited = workers.run(train_hungry, 1, workers=2)
    assert not any("out of memory" in text for text in unlimited[1][1])
    assert sum("worker 1 ran out of memory" in text for text in limited[1][1]) == 1
    assert not any("out of memory" in text for text in limited[0][1])
    assert distance(limited[0][0], unlimited[0][0]) < 1e-10  # sums over millions of entries


def train_tokens_in_parts(slicer: bool) -> Weights:
    model, optimizer = new_model()
    with Balancer(
        10,
        policy=Fixed(SPLITS),
        count=tokens,
        micro_batch=[2, 3, 1],
        slicer=(lambda b, start, stop: (b[0][start:stop], b[1][start:stop])) if slicer else None,
    ) as balancer:
        loader = DataLoader(Sentences(), 10, shuffle=True, collate_fn=padded)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(4):
            for batch in shares:
                for part in balancer.micro_batches(batch):
                    with part as (inputs, targets):
                        token_loss(shared, inputs, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        return weights(shared)


@pytest.mark.parametrize("slicer", [False, True])
def test_parts_without_a_token_and_a_slicer_of_the_users(workers: Workers, slicer: bool) -> None:
    assert "tokens" in CASES
    results = workers.run(train_tokens_in_parts, slicer, workers=3)
    expected = train_alone("tokens")
    assert all(distance(found, expected) < EXACT for found in results)


def train_lists(split: list[int], micro_batch: int | None) -> Weights:
    """The batch is a list of samples, each of them a sequence of six tokens."""
    model, optimizer = new_model()
    data = torch.utils.data.TensorDataset(Sentences().tokens[:, :6])
    with Balancer(10, policy=Fixed(split), micro_batch=micro_batch) as balancer:
        collate = lambda samples: [row for (row,) in samples]  # noqa: E731
        loader = DataLoader(data, 10, collate_fn=collate)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for batch in shares:
            for part in balancer.micro_batches(batch):
                with part as rows:
                    stacked = torch.stack(rows) if rows else torch.zeros(0, 6, dtype=torch.long)
                    shared(stacked).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(shared)


def test_a_list_of_samples_is_cut_between_samples(workers: Workers) -> None:
    (whole,) = workers.run(train_lists, [10], None, workers=1)
    for found in workers.run(train_lists, [8, 2], 3, workers=2):
        assert distance(found, whole) < EXACT


def train_filtered_in_parts() -> Weights:
    collate, loss_of, count = CASES["filtered"]
    model, optimizer = new_model()
    with Balancer(10, policy=Fixed(SPLITS), count=count, micro_batch=2) as balancer:
        loader = DataLoader(Sentences(), 10, shuffle=True, collate_fn=collate)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(4):
            for batch in shares:
                for part in balancer.micro_batches(batch):
                    with part as (inputs, targets):
                        loss_of(shared, inputs, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        return weights(shared)


def test_parts_of_a_batch_that_lost_samples(workers: Workers) -> None:
    expected = train_alone("filtered")
    for found in workers.run(train_filtered_in_parts, workers=3):
        assert distance(found, expected) < EXACT


class Branches(nn.Module):
    """Which branch a sample takes depends on the sample; one is never taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.low, self.high, self.never = (nn.Linear(24, 5).double() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        high = inputs[:, 0] > 0
        out = inputs.new_zeros(len(inputs), 5)
        if high.any():
            out = out.index_put((high,), self.high(inputs[high]))
        if not high.all() or not len(inputs):
            out = out.index_put((~high,), self.low(inputs[~high]))
        return out


def train_branches(in_parts: bool) -> tuple[Weights, list[bool]]:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    ddp = None if in_parts else {"find_unused_parameters": True}
    with Balancer(12, policy=Fixed([1, 4, 7]), ddp=ddp) as balancer:
        loader = DataLoader(dataset(RECIPE), 12, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        unused = []
        for _ in balancer.epochs(2):
            for batch in shares:
                if in_parts:
                    for part in balancer.micro_batches(batch):
                        with part as (inputs, targets, _):
                            nn.functional.cross_entropy(shared(inputs), targets).backward()
                else:
                    nn.functional.cross_entropy(shared(batch[0]), batch[1]).backward()
                unused.append(model.never.weight.grad is None)
                optimizer.step()
                optimizer.zero_grad()
        return weights(shared), unused


@pytest.mark.parametrize("in_parts", [True, False])
def test_parameters_used_on_some_workers_only(workers: Workers, in_parts: bool) -> None:
    three = workers.run(train_branches, in_parts, workers=3)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    inputs, targets, _ = dataset(RECIPE).tensors  # type: ignore[attr-defined]
    for number, batch in enumerate(plain_batches(RECIPE)):
        if number == 10:
            break
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, unused in three:
        assert distance(found, weights(model)) < EXACT
        assert all(unused)


def mistakes() -> dict[str, str]:
    messages = {}

    def attempt(**settings: Any) -> Any:
        model, optimizer, _ = build(RECIPE)
        return Balancer(12, **settings), model, optimizer, DataLoader(dataset(RECIPE), 12)

    def no_with(balancer: Balancer, model: Any, optimizer: Any, batch: Any) -> None:  # noqa: ARG001
        for part in balancer.micro_batches(batch):
            _, _, _ = part

    def not_entered(balancer: Balancer, model: Any, optimizer: Any, batch: Any) -> None:  # noqa: ARG001
        for _ in balancer.micro_batches(batch):
            pass

    def no_backward(balancer: Balancer, model: Any, optimizer: Any, batch: Any) -> None:  # noqa: ARG001
        for part in balancer.micro_batches(batch):
            with part as (inputs, _, _):
                model(inputs)

    def left_early(balancer: Balancer, model: Any, optimizer: Any, batch: Any) -> None:
        for part in balancer.micro_batches(batch):
            with part as (inputs, _, _):
                model(inputs).mean().backward()
            break
        optimizer.step()

    def ignored(balancer: Balancer, model: Any, optimizer: Any, batch: Any) -> None:  # noqa: ARG001
        model(batch[0]).mean().backward()
        optimizer.step()

    def own_error(balancer: Balancer, model: Any, optimizer: Any, batch: Any) -> None:  # noqa: ARG001
        for part in balancer.micro_batches(batch):
            with part:
                raise RuntimeError("an error of the script's own")

    cases: list[tuple[Any, dict[str, Any]]] = [
        (no_with, {}),
        (not_entered, {}),
        (no_backward, {}),
        (left_early, {"micro_batch": 3}),
        (ignored, {"micro_batch": 3}),
        (own_error, {}),
        (no_backward, {"ddp": {"static_graph": True}}),
    ]
    for mistake, settings in cases:
        balancer, model, optimizer, loader = attempt(**settings)
        with balancer:
            shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
            with pytest.raises((OutOfOrder, InvalidSetting, RuntimeError)) as caught:
                mistake(balancer, shared, optimizer, next(iter(shares)))
            messages[f"{mistake.__name__} {settings}"] = str(caught.value)
            if mistake is ignored:
                with pytest.raises(OutOfOrder) as no_sync, shared.no_sync():
                    pass
                messages["no_sync"] = str(no_sync.value)
    return messages


def test_parts_that_are_used_wrongly_are_refused(workers: Workers) -> None:
    messages = list(workers.run(mistakes, workers=1)[0].values())
    expected = [
        "with part as (x, y)",
        "was not used",
        "without a backward",
        "was left before its last part",
        "micro_batch=3 is set, but the batch did not go through",
        "no_sync adds up gradients before they are weighted",
        "an error of the script's own",
        "static_graph",
    ]
    assert all(text in message for text, message in zip(expected, messages, strict=True))


@pytest.mark.parametrize("micro_batch", [0, -2, True, [1, 2], [0], "all"])
def test_a_wrong_size_of_parts_is_refused(micro_batch: Any) -> None:
    with pytest.raises(InvalidSetting, match="micro_batch="):
        Balancer(12, micro_batch=micro_batch)


@dataclass
class Pair:
    left: Any
    right: Any


def test_batches_of_all_forms_are_sliced() -> None:
    six = torch.arange(6).view(3, 2)
    assert sliced(six, 3, 1, 3).tolist() == [[2, 3], [4, 5]]
    assert sliced([six, ("a", "b", "c")], 3, 0, 1)[1] == ("a",)
    assert sliced({"x": six, "scale": 2.0}, 3, 2, 3)["x"].tolist() == [[4, 5]]
    assert sliced(Pair(six, np.arange(3)), 3, 1, 2).right.tolist() == [1]
    assert len(sliced((six[:2], six[:2]), 2, 0, 1)) == 2
    assert sliced(["a", "b"], 2, 1, 2) == ["b"]
    assert sliced(([six] * 2, [{"a": six}] * 2), 2, 0, 1)[1] == [{"a": six}]
    with pytest.raises(InvalidSetting, match=r"holds a tensor of shape \(3, 2\).*slicer="):
        sliced((torch.ones(2), six), 2, 0, 1)
    with pytest.raises(InvalidSetting, match="unclear whether these are 3 samples or 3 parts"):
        sliced([six, six, six], 3, 0, 1)
    with pytest.raises(InvalidSetting, match="how many are left is unclear"):
        samples_left([six, six], 8)
    assert samples_left((six, torch.ones(3)), 8) == 3
    assert samples_left([torch.ones(6)] * 8, 8) == 8
    assert set(sizes((six, ["a"]))) == {3, 2, 1}

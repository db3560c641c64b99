"""Loaders of all kinds: their settings, samplers and random augmentation."""

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from poise.errors import InvalidSetting
from poise.policy import Fixed
from poise.runtime.orders import DrawnOrders, KeyedOrders
from poise.torch import Balancer
from poise.torch.orders import orders_of
from poise.torch.seeding import SeededDataset, Wanted
from tests.cluster import Workers
from tests.inside import loader_of

LENGTH = 37
SPLIT = {0: [7, 3], 2: [0, 10]}


class Numbered(Dataset[Any]):
    """Each sample is its own number, and what a loader process was told."""

    told = -1

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.told


def tell(process: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.told = process + 100  # type: ignore[attr-defined]


def collate_as_text(samples: list[tuple[int, int]]) -> dict[str, Any]:
    numbers = torch.tensor([number for number, _ in samples])
    return {"names": [f"sample {number}" for number, _ in samples], "numbers": numbers} | {
        "told": torch.tensor([told for _, told in samples])
    }


def train(balancer: Balancer, loader: DataLoader[Any], epochs: int) -> list[Any]:
    """Take all batches as a training would."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
    seen = []
    for _ in balancer.epochs(epochs):
        for batch in shares:
            seen.append(batch)
            rows = len(batch["numbers"] if isinstance(batch, dict) else batch[0])
            shared(torch.ones(rows, 1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def end_processes(balancer: Balancer) -> None:
    """End persistent loader processes, as the end of the interpreter would."""
    loader_of(balancer)._iterator._shutdown_workers()


def loader_settings() -> tuple[list[Any], dict[str, Any]]:
    loader = DataLoader(
        Numbered(),
        10,
        shuffle=False,
        collate_fn=collate_as_text,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=3,
        worker_init_fn=tell,
        timeout=30,
        multiprocessing_context="spawn",
        drop_last=True,
    )
    with Balancer(10, policy=Fixed(SPLIT)) as balancer:
        seen = train(balancer, loader, 2)
        inner = loader_of(balancer)
        kept = {
            name: getattr(inner, name)
            for name in ("num_workers", "persistent_workers", "prefetch_factor", "timeout")
        }
        kept["context"] = inner.multiprocessing_context.get_start_method()
        end_processes(balancer)
    return [(b["names"], b["numbers"].tolist(), b["told"].tolist()) for b in seen], kept


def test_a_loader_keeps_its_settings(workers: Workers) -> None:
    results = workers.run(loader_settings, workers=2)
    for batches, kept in results:
        assert len(batches) == 2 * (LENGTH // 10)
        assert kept == {
            "num_workers": 1,
            "persistent_workers": True,
            "prefetch_factor": 3,
            "timeout": 30,
            "context": "spawn",
        }
        for names, numbers, told in batches:
            assert names == [f"sample {number}" for number in numbers]
            assert set(told) <= {100}
    joined = [
        number
        for step in zip(*(r[0] for r in results), strict=True)
        for _, n, _ in step
        for number in n
    ]
    assert joined == list(range(30)) * 2


class Curriculum(Sampler[int]):
    """Draws from the global generators, and from more of the data in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        easy = list(range(10 + 10 * self.epoch))
        random.shuffle(easy)
        yield from easy
        yield int(np.random.randint(10))
        yield from torch.randperm(5)


class Private(Sampler[int]):
    """Shuffles by a generator of its own, which is another one in each process."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        random.Random(os.getpid()).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return LENGTH


def sampler_named(name: str) -> Any:
    weights = [1.0] * 5 + [0.0] * (LENGTH - 5)
    return {
        "weighted": lambda: WeightedRandomSampler(weights, 24),
        "own seed": lambda: WeightedRandomSampler(
            weights, 24, generator=torch.Generator().manual_seed(9)
        ),
        "replacement": lambda: RandomSampler(Numbered(), replacement=True, num_samples=24),
        "curriculum": Curriculum,
        "private": Private,
    }[name]()


def train_with_sampler(name: str, split: list[int], seed: int) -> list[list[int]]:
    """Each worker's own generators stand elsewhere."""
    with Balancer(sum(split), policy=Fixed(split), seed=seed) as balancer:
        torch.manual_seed(balancer.worker + 50)
        loader = DataLoader(Numbered(), sum(split), sampler=sampler_named(name))
        seen = train(balancer, loader, 2)
    return [numbers.tolist() for numbers, _ in seen]


def joined(results: list[list[list[int]]]) -> list[int]:
    return [number for step in zip(*results, strict=True) for part in step for number in part]


@pytest.mark.parametrize(
    ("stated", "kind"),
    [({}, KeyedOrders), ({"num_samples": LENGTH}, KeyedOrders), ({"num_samples": 7}, DrawnOrders)],
)
def test_a_random_sampler_of_every_sample_once_gives_way_to_our_own_order(
    stated: Any, kind: type[Any]
) -> None:
    loader = DataLoader(Numbered(), 8, sampler=RandomSampler(Numbered(), **stated))
    drawing: Any = None  # nothing is drawn here
    assert isinstance(orders_of(loader, seed=0, drawing=drawing), kind)


@pytest.mark.parametrize("name", ["weighted", "own seed", "replacement", "curriculum"])
def test_a_sampler_is_drawn_once_for_all_workers_and_splits(workers: Workers, name: str) -> None:
    three = joined(workers.run(train_with_sampler, name, [5, 0, 3], 4, workers=3))
    alone = joined(workers.run(train_with_sampler, name, [8], 4, workers=1))
    other = joined(workers.run(train_with_sampler, name, [8], 5, workers=1))
    assert three == alone
    assert three != other
    if name == "curriculum":
        assert len(three) == (10 + 6) + (20 + 6)
        assert set(range(10)) <= set(three[:16])
        assert set(range(20)) <= set(three[16:])
    else:
        assert len(three) == 2 * 24
        assert three[:24] != three[24:]
    if name == "weighted":
        assert set(three) <= set(range(5))
        assert three != joined(workers.run(train_with_sampler, "own seed", [8], 4, workers=1))


def test_only_worker_0_draws(workers: Workers) -> None:
    three = joined(workers.run(train_with_sampler, "private", [5, 0, 3], 4, workers=3))
    assert sorted(three[:LENGTH]) == sorted(three[LENGTH:]) == list(range(LENGTH))
    assert three[:LENGTH] != list(range(LENGTH))


def sampler_resume(
    split: list[int], state: Any, other_weights: bool, last_step: int
) -> tuple[Any, list[list[int]]]:
    """Start, or go on from a state; leave after a step."""
    with Balancer(8, policy=Fixed(split)) as balancer:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        weights = torch.arange(LENGTH).double() if other_weights else torch.ones(LENGTH)
        sampler = WeightedRandomSampler(weights.tolist(), 30)
        shared, optimizer, shares = balancer.prepare(
            model, optimizer, DataLoader(Numbered(), 8, sampler=sampler)
        )
        if state:
            balancer.load_state_dict(state)
        seen = []
        for step, (numbers, _) in enumerate(shares):
            seen.append(numbers.tolist())
            shared(torch.ones(len(numbers), 1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == last_step:
                break
        return balancer.state_dict(), seen


def test_a_drawn_epoch_is_resumed_with_other_workers(workers: Workers) -> None:
    ((_, whole),) = workers.run(sampler_resume, [8], None, False, 99, workers=1)
    results = workers.run(sampler_resume, [3, 5], None, False, 1, workers=2)
    state = results[0][0]
    assert state == results[1][0]
    ((_, rest),) = workers.run(sampler_resume, [8], state, False, 99, workers=1)
    assert joined([whole]) == joined([seen for _, seen in results]) + joined([rest])
    outcome = workers.attempt(sampler_resume, [8], state, True, 99, workers=1)[0]
    assert "StateMismatch" in outcome.error
    assert "drew other samples for epoch 0" in outcome.error


class Text(Sampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield "a"


class TooFar(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield LENGTH


def refused_sampler(kind: type[Sampler[Any]]) -> None:
    with Balancer(4) as balancer:
        train(balancer, DataLoader(Numbered(), 4, sampler=kind()), 1)


def sampler_too_far() -> str:
    with pytest.raises(InvalidSetting) as caught:
        refused_sampler(TooFar)
    return str(caught.value)


def test_what_is_not_a_sample_number_is_refused(workers: Workers) -> None:
    message = workers.run(sampler_too_far, workers=1)[0]
    assert "yields 37, but the data set has samples 0 to 36" in message
    outcomes = workers.attempt(refused_sampler, Text, workers=2)
    assert "'a', which is not a whole number" in outcomes[0].error
    assert "worker 0" in outcomes[1].error
    assert "'a', which is not a whole number" in outcomes[1].error


class Augmented(Dataset[Any]):
    """Adds noise from all three global generators, some of them seldom."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float]:
        noise = torch.rand(()).item()
        if index % 3 == 0:
            noise += random.random()
        if noise > 1.0:
            noise += float(np.random.rand())
        return index, noise


def augmented(split: list[int], processes: int, persistent: bool) -> list[list[tuple[int, float]]]:
    """Return the noise of each sample in two epochs; the generators' own course is not touched."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    loader = DataLoader(
        Subset(Augmented(), range(LENGTH)),
        sum(split),
        shuffle=True,
        num_workers=processes,
        persistent_workers=persistent,
    )
    with Balancer(sum(split), policy=Fixed(split), seed=3) as balancer:
        seen = train(balancer, loader, 2)
        if persistent:
            end_processes(balancer)
    if processes == 0:
        assert random.random() == random.Random(5).random()
        assert np.random.rand() == np.random.RandomState(5).rand()
    return [list(zip(i.tolist(), noise.tolist(), strict=True)) for i, noise in seen]


@pytest.fixture(scope="module")
def noise_of_one_process(workers: Workers) -> list[Any]:
    (batches,) = workers.run(augmented, [12], 0, False, workers=1)
    return [pair for batch in batches for pair in batch]


@pytest.mark.parametrize(
    ("split", "processes", "persistent"), [([5, 0, 7], 0, False), ([1, 11], 2, True)]
)
def test_augmentation_depends_on_the_sample_and_not_on_the_split(
    workers: Workers,
    noise_of_one_process: list[Any],
    split: list[int],
    processes: int,
    persistent: bool,
) -> None:
    results = workers.run(augmented, split, processes, persistent, workers=len(split))
    together = [pair for step in zip(*results, strict=True) for part in step for pair in part]
    assert together == noise_of_one_process
    first, second = dict(together[:LENGTH]), dict(together[LENGTH:])
    assert all(first[index] != second[index] for index in range(LENGTH))


def test_a_data_set_that_is_not_random_is_fetched_once() -> None:
    class Counting(Numbered):
        fetched = 0

        def __getitem__(self, index: int) -> tuple[int, int]:
            self.fetched += 1
            return super().__getitem__(index)

    data = Counting()
    assert len(SeededDataset(data, 0).__getitems__(Wanted(0, [1, 2, 3]))) == 3
    assert data.fetched == 3


def test_a_data_set_that_fetches_batches_goes_on_doing_so() -> None:
    class Batched(Numbered):
        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"batched {index}" for index in indices]

    assert SeededDataset(Batched(), 0).__getitems__(Wanted(0, [4])) == ["batched 4"]
    assert SeededDataset(Subset(Batched(), [7]), 0).__getitems__(Wanted(0, [0])) == ["batched 7"]


def evaluation_with_sampler(split: list[int]) -> list[int]:
    data = TensorDataset(torch.arange(LENGTH))
    with Balancer(sum(split), policy=Fixed(split)) as balancer:
        sampler = torch.utils.data.SubsetRandomSampler(range(5, 25))
        shares = balancer.evaluation(DataLoader(data, 6, sampler=sampler))
        return [number for (batch,) in shares for number in batch.tolist()]


def test_evaluation_follows_a_sampler_too(workers: Workers) -> None:
    results = workers.run(evaluation_with_sampler, [2, 4], workers=2)
    assert sorted(results[0] + results[1]) == list(range(5, 25))


class ReadsStates(Dataset[float]):
    """Draws numbers that follow from the states of the global generators, which it leaves alone."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __getitem__(self, index: int) -> float:
        if self.how == "initial_seed":
            own = torch.Generator().manual_seed(torch.initial_seed() + index)
            return float(torch.rand(1, generator=own))
        if self.how == "fork_rng":
            with torch.random.fork_rng():
                return float(torch.rand(1))
        state = np.random.get_state()
        drawn = np.random.rand()
        np.random.set_state(state)
        return drawn


@pytest.mark.parametrize("how", ["initial_seed", "fork_rng", "numpy"])
def test_what_a_data_set_reads_from_generators_is_the_same_in_every_process(how: str) -> None:
    drawn = set()
    for process in range(3):
        torch.manual_seed(process)
        np.random.seed(process)
        data = SeededDataset(ReadsStates(how), 0)
        for _ in range(process):
            data.__getitems__(Wanted(0, [1, 2]))
        drawn.add(data.__getitems__(Wanted(0, [5]))[0])
    assert len(drawn) == 1

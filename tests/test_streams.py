"""Streams: an IterableDataset of which every worker reads its own part."""

import pickle
from collections.abc import Iterator
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from poise.environment import launched_as
from poise.errors import StateMismatch
from poise.policy import Fixed
from poise.runtime.counts import Counts
from poise.torch import Balancer
from tests.cluster import Workers
from tests.test_exactness import EXACT
from tests.training import Weights, distance, weights

PARTS = ([0, 17], [17, 20], [20, 41])
"""First and last sample of each worker's part."""


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(6, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(0, keepdim=True), number


class Part(IterableDataset[Any]):
    """Shards itself by worker, and by loader process."""

    def __init__(self) -> None:
        launch = launched_as()
        self.start, self.stop = PARTS[0 if launch is None else launch.worker]

    def numbers(self) -> Iterator[int]:
        process = get_worker_info()
        step, first = (1, 0) if process is None else (process.num_workers, process.id)
        yield from range(self.start + first, self.stop, step)

    def __iter__(self) -> Iterator[Any]:
        yield from (sample(number) for number in self.numbers())


class Resumable(Part):
    """A part that can say where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for number in list(self.numbers())[self.given :]:
            self.given += 1
            yield sample(number)
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(6, 1).double()
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


Seen = list[list[int]]


def train_stream(
    data: type[Part],
    processes: int,
    split: list[int],
    epochs: int,
    state: Any = None,
    last_step: int = 99,
    drop_last: bool = False,
) -> tuple[Weights, Seen, Any, Any]:
    """Return weights, this worker's samples in each step, and the balancer's and model's state."""
    model, optimizer = new_model()
    with Balancer(sum(split), policy=Fixed(split)) as balancer:
        loader = DataLoader(data(), 4, num_workers=processes, drop_last=drop_last)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        if state is not None:
            balancer.load_state_dict(state["balancer"])
            shared.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        seen: Seen = []
        for _ in balancer.epochs(epochs):
            for inputs, targets, numbers in shares:
                seen.append(numbers.tolist())
                assert balancer.state_dict()["samples"] == balancer.samples
                (shared(inputs) - targets).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if len(seen) - 1 == last_step:
                    break
            else:
                continue
            break
        saved = {
            "balancer": balancer.state_dict(),
            "model": weights(shared),
            "optimizer": optimizer.state_dict(),
        }
        return weights(shared), seen, saved, balancer.samples


def train_alone(steps: list[list[int]]) -> Weights:
    """Train in one process on given global batches."""
    model, optimizer = new_model()
    for numbers in steps:
        inputs = torch.stack([sample(number)[0] for number in numbers])
        (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def joined(results: list[Any]) -> list[list[int]]:
    """The global batch of each step."""
    return [list(chain(*step)) for step in zip(*(seen for _, seen, *_ in results), strict=True)]


@pytest.mark.parametrize("processes", [0, 2])
def test_unequal_parts_of_a_stream_are_used_up_without_a_hang(
    workers: Workers, processes: int
) -> None:
    results = workers.run(train_stream, Part, processes, [3, 0, 6], 2, workers=3)
    steps = joined(results)
    assert sorted(chain(*steps)) == sorted([*range(41)] * 2)
    assert all(samples == 82 for *_, samples in results)
    assert [len(part) for part in results[1][1][:5]] == [1, 1, 1, 0, 0]
    expected = train_alone(steps)
    assert all(distance(found, expected) < EXACT for found, *_ in results)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stream_goes_on_where_its_data_set_says(workers: Workers, processes: int) -> None:
    whole = workers.run(train_stream, Resumable, processes, [3, 1, 6], 2, workers=3)
    first = workers.run(train_stream, Resumable, processes, [3, 1, 6], 2, None, 1, workers=3)
    states = pickle.dumps([saved for *_, saved, _ in first])
    rest = workers.run(resume_own, processes, states, workers=3)
    steps = joined(first) + joined(rest)
    assert sorted(chain(*steps)) == sorted([*range(41)] * 2)
    if processes == 0:
        assert steps == joined(whole)
        assert all(distance(a[0], b[0]) == 0 for a, b in zip(rest, whole, strict=True))
    assert distance(rest[0][0], train_alone(steps)) < EXACT


def resume_own(processes: int, states: bytes) -> Any:
    """Go on from this worker's own state, pickled so that no tensor is shared with the parent."""
    launch = launched_as()
    assert launch is not None
    return train_stream(Resumable, processes, [3, 1, 6], 2, pickle.loads(states)[launch.worker])


PLACES = {
    "exhausted": ([0, 12], [12, 16]),  # saved when worker 1's part is over
    "unreduced": ([0, 12], [12, 18]),  # saved before the backward of such a step
    "left early": ([0, 12], [12, 24]),  # saved in the epoch after one that was left
    "left early, two processes": ([0, 12], [12, 24]),
}


def save_at(case: str) -> tuple[Seen, Any]:
    """Train on four samples a step until the case is reached; return what counts, and a state."""
    model, optimizer = new_model()
    launch = launched_as()
    assert launch is not None
    data = Resumable()
    data.start, data.stop = PLACES[case][launch.worker]
    processes = 2 if "processes" in case else 0
    with Balancer(4) as balancer:
        loader = DataLoader(data, 4, num_workers=processes)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        seen: Seen = []
        for epoch in balancer.epochs(2):
            for inputs, targets, numbers in shares:
                if case == "unreduced" and len(seen) == 4:
                    return seen, balancer.state_dict()
                seen.append(numbers.tolist())
                (shared(inputs) - targets).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if "left early" in case and len(seen) == 4 * (1 - epoch) + epoch:
                    if epoch == 1:
                        return seen, balancer.state_dict()
                    seen = []
                    break
                if case == "exhausted" and len(seen) == 4:
                    return seen, balancer.state_dict()
    raise AssertionError("not reached")


def go_on_from(case: str, states: bytes) -> Seen:
    model, optimizer = new_model()
    launch = launched_as()
    assert launch is not None
    data = Resumable()
    data.start, data.stop = PLACES[case][launch.worker]
    state = pickle.loads(states)[launch.worker]
    with Balancer(4) as balancer:
        loader = DataLoader(data, 4, num_workers=2 if "processes" in case else 0)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        balancer.load_state_dict(state)
        seen: Seen = []
        for _ in balancer.epochs(state["epoch"] + 1):
            for inputs, targets, numbers in shares:
                seen.append(numbers.tolist())
                (shared(inputs) - targets).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return seen


@pytest.mark.parametrize("case", list(PLACES))
def test_every_sample_of_an_epoch_is_used_once_however_it_was_saved(
    workers: Workers, case: str
) -> None:
    first = workers.run(save_at, case, workers=2)
    states = pickle.dumps([state for _, state in first])
    rest = workers.run(go_on_from, case, states, workers=2)
    for worker, (start, stop) in enumerate(PLACES[case]):
        assert sorted(chain(*first[worker][0], *rest[worker])) == list(range(start, stop))


def refused_states() -> list[str]:
    launch = launched_as()
    assert launch is not None
    *_, silent, _ = train_stream(Part, 0, [3, 6], 1, None, 1)
    *_, spoken, _ = train_stream(Resumable, 0, [3, 6], 1, None, 1)
    messages = []
    for data, state in (
        (Part, silent),
        (Resumable, {"balancer": {**spoken["balancer"], "worker": 1 - launch.worker}}),
    ):
        with pytest.raises(StateMismatch) as caught:
            train_stream(data, 0, [3, 6], 1, state)
        messages.append(str(caught.value))
    return messages


def test_a_stream_that_cannot_go_on_is_refused(workers: Workers) -> None:
    for messages in workers.run(refused_states, workers=2):
        assert "from the middle of a stream that cannot say where it stands" in messages[0]
        assert "each worker from the state it saved itself" in messages[1]


class OnlyOnWorker0(Part):
    def __init__(self) -> None:
        super().__init__()
        self.stop = self.stop if self.start == 0 else self.start


def empty_part() -> None:
    train_stream(OnlyOnWorker0, 0, [3, 6], 1)


def test_a_part_without_any_sample_is_named(workers: Workers) -> None:
    outcomes = workers.attempt(empty_part, workers=2)
    assert "worker 1's part of the stream has no sample at all" in outcomes[1].error
    assert "worker 1" in outcomes[0].error


def evaluate_stream() -> tuple[list[int], float]:
    with Balancer(9, policy=Fixed([3, 6])) as balancer:
        seen: list[int] = []
        total = steps = 0
        for inputs, _, numbers in balancer.evaluation(DataLoader(Part(), 6)):
            assert len(inputs) == len(numbers)
            seen += numbers.tolist()
            total += int(numbers.sum())
            steps += 1
        assert balancer.mean(steps, 1) == steps
        return seen, balancer.mean(total / len(seen), len(seen))


def test_evaluation_reads_streams_too(workers: Workers) -> None:
    results = workers.run(evaluate_stream, workers=2)
    assert [seen for seen, _ in results] == [list(range(17)), [17, 18, 19]]
    assert all(mean == pytest.approx(sum(range(20)) / 20) for _, mean in results)


def weighted_by_the_plan() -> Any:
    """Break it on purpose: weights by the plan, though a part is exhausted."""

    def by_plan(self: Counts, *_: Any) -> None:
        self._counts = (3.0, 6.0)

    with patch.object(Counts, "begin", by_plan):
        return train_stream(Part, 0, [3, 6], 1)


def test_the_tests_notice_weights_of_samples_that_are_not_there(workers: Workers) -> None:
    results = workers.run(weighted_by_the_plan, workers=2)
    assert distance(results[0][0], train_alone(joined(results))) > 1e-3

"""torch.compile with local batches of changing size."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from poise.core.observation import Event, Observation
from poise.core.split import Split
from poise.engine.bsp import Engine
from poise.policy import Fixed
from poise.policy.base import Decision, Schedule
from poise.torch import Balancer
from tests.cluster import Workers
from tests.training import Weights, distance, weights

GLOBAL = 23
SIZES = [7, 5, 0, 1, 3, 20, 2, 9, 16, 4, 6, 8, 10, 11, 12, 13, 14, 15, 17, 18]
"""Twenty local sizes of worker 0, 0 and 1 among them."""


class Net(nn.Module):
    def __init__(self, convolution: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        if convolution:
            first: nn.Module = nn.Sequential(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3))
            self.layers = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
        else:
            self.layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs)
        return out


class Counter:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(GLOBAL * len(SIZES), 12, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def train_compiled(convolution: bool, in_place: bool, compiled: bool) -> tuple[Weights, int]:
    torch.compiler.reset()
    counter = Counter()
    model: Any = Net(convolution)
    if compiled and in_place:
        model.compile(backend=counter)
    elif compiled:
        model = torch.compile(model, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    split = Fixed({step: [size, GLOBAL - size] for step, size in enumerate(SIZES)})
    with warnings.catch_warnings(), Balancer(GLOBAL, policy=split) as balancer:
        warnings.simplefilter("ignore")
        shared, optimizer, shares = balancer.prepare(model, optimizer, DataLoader(data(), GLOBAL))
        for inputs, targets in shares:
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    plain = {name.replace("_orig_mod.", ""): value for name, value in weights(shared).items()}
    torch.compiler.reset()
    return plain, counter.graphs


@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_twenty_sizes_make_at_most_four_graphs(
    workers: Workers, convolution: bool, in_place: bool
) -> None:
    results = workers.run(train_compiled, convolution, in_place, True, workers=2)
    eager = workers.run(train_compiled, convolution, in_place, False, workers=2)
    for found, graphs in results:
        assert 1 <= graphs <= 4
        assert distance(found, eager[0][0]) < 1e-6
    assert eager[0][1] == 0


class Restless:
    """An online policy that wants another split after every step it sees."""

    online = True
    state_type = int

    def __init__(self) -> None:
        self.seen: list[int] = []

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, int]:
        return {0: (3, GLOBAL - 3)}, 3

    def update(self, state: int, events: Sequence[Event]) -> tuple[Decision | None, int]:
        self.seen += [event.step for event in events if isinstance(event, Observation)]
        state = 3 + (state + 1) % 7
        return Decision((state, GLOBAL - state)), state


def train_while_compiling() -> tuple[list[int], list[bool], list[Split]]:
    """Worker 1 compiles again in steps 5 and 11."""
    torch.compiler.reset()
    model = Net(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    policy = Restless()
    compiled, splits = [], []
    with warnings.catch_warnings(), Balancer(GLOBAL, policy=policy) as balancer:
        warnings.simplefilter("ignore")
        shared, optimizer, shares = balancer.prepare(model, optimizer, DataLoader(data(), GLOBAL))
        for step, (inputs, targets) in enumerate(shares):
            splits.append(balancer.plan.split)
            compiles = balancer.worker == 1 and step in (5, 11)
            compiled.append(compiles)
            if compiles:
                torch.compile(lambda x, step=step: x * step, backend="eager")(inputs)
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.compiler.reset()
    return policy.seen, compiled, splits


def test_a_plan_holds_while_a_worker_compiles(workers: Workers) -> None:
    results = workers.run(train_while_compiling, workers=2)
    seen, _, splits = results[0]
    assert splits == results[1][2]
    assert 5 not in seen
    assert 11 not in seen
    assert {1, 2, 3, 4, 6, 7, 8, 9} <= set(seen)


def test_a_step_in_which_a_worker_compiled_is_not_learned_from() -> None:
    policy = Restless()
    _, engine = Engine(policy, 2, GLOBAL).start()
    assert engine.update([Observation(0, (3, 20), compiling=(1,))], 2) == (None, engine)
    assert policy.seen == []
    plan, _ = engine.update([Observation(1, (3, 20))], 3)
    assert plan is not None
    assert plan.start_step == 3
    assert policy.seen == [1]

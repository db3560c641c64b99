"""Bad input gets an error that says what was found, what is required and what to do."""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from poise.environment import launched_as
from poise.errors import Disagreement, InfeasibleSplit, OutOfOrder, PoiseError
from poise.policy import Fixed
from poise.runtime.instruments import Instrument, instrumented
from poise.torch import Balancer
from tests.cluster import Workers

DATA = TensorDataset(torch.zeros(20, 3), torch.zeros(20, 1))


def parts(data: Any = DATA, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 1)
    settings = settings or {"batch_size": 4, "shuffle": True}
    return model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, **settings)


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Empty(Dataset[int]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([5])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "batch_sampler": (
        lambda: parts(batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)),
        r"has a batch_sampler \(BatchSampler\).*shuffle=True or False",
    ),
    "distributed sampler": (
        lambda: parts(sampler=DistributedSampler(DATA, 1, 0), batch_size=4),
        "DistributedSampler.*remove it",
    ),
    "batch_size=None": (lambda: parts(batch_size=None), "batch_size=None.*give it any batch_size"),
    "no length": (
        lambda: parts(NoLength(), batch_size=4, sampler=SequentialSampler(DATA)),
        "NoLength has no length.*__len__",
    ),
    "stream of batches": (lambda: parts(Stream(), batch_size=None), "batch_size=None.*any batch"),
    "empty": (lambda: parts(Empty(), batch_size=4), "data set is empty"),
    "not a loader": (
        lambda: (*parts()[:2], "data"),
        "the loader is a str; pass a torch.utils.data",
    ),
    "two loaders": (
        lambda: (*parts()[:2], [parts()[2], parts()[2]]),
        "got 2 loaders.*StackDataset",
    ),
    "out of order": (
        lambda: parts(batch_size=4, num_workers=1, in_order=False),
        "way of its own.*in_order=True",
    ),
    "not a model": (lambda: (None, *parts()[1:]), "a NoneType as model"),
    "wrong order": (lambda: (parts()[0], parts()[2], parts()[1]), "a DataLoader as optimizer"),
    "foreign optimizer": (
        lambda: (parts()[0], *parts()[1:]),
        "holds 2 tensors that are not parameters of the model",
    ),
    "wrapped model": (
        lambda: (DistributedDataParallel(parts()[0]), *parts()[1:]),
        r"already wrapped in DistributedDataParallel.*ddp=\{\.\.\.\}",
    ),
    "loader of its own": (
        lambda: (*parts()[:2], OwnLoader(DATA, 4)),
        "yields batches in a way of its own",
    ),
    "nothing left": (
        lambda: parts(TensorDataset(torch.zeros(3, 3)), batch_size=4, drop_last=True),
        "drop_last=True drops them all",
    ),
    "frozen model": (
        lambda: (parts()[0].requires_grad_(False), *parts()[1:]),
        "no parameter that requires a gradient",
    ),
}


def refuse_everything() -> None:
    for name, (make, message) in REFUSED.items():
        with Balancer(4) as balancer, pytest.raises(PoiseError) as caught:
            balancer.prepare(*make())
        assert re.search(message, str(caught.value)), (name, str(caught.value))


def test_what_cannot_be_split_exactly_is_refused(workers: Workers) -> None:
    workers.run(refuse_everything, workers=1)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"global_batch": 0}, "global_batch=0 is not a number of samples"),
    ({"global_batch": 4.0}, "global_batch=4.0"),
    ({"global_batch": 4, "idle": "sleep"}, "idle='sleep' is unknown"),
    ({"global_batch": 4, "hang_s": -1}, "hang_s=-1 is not a usable time"),
    ({"global_batch": 4, "hang_s": 1e308}, "hang_s=1e+308 is not a usable time"),
    ({"global_batch": 4, "silent_s": None}, "silent_s=None is not a usable time"),
    ({"global_batch": 4, "silent_s": 0.1}, "give seconds from 1 to"),
    ({"global_batch": 4, "policy": 3}, "policy=3 is not a policy"),
    ({"global_batch": 4, "seed": -3}, "seed=-3 is not a whole number"),
    ({"global_batch": 4, "ddp": {"broadcast_buffers": True}}, "which Poise sets itself"),
    ({"global_batch": 4, "ddp": {"buckets": 3}}, "does not know"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_wrong_settings_are_refused_before_anything_starts(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoiseError, match=re.escape(message)):
        Balancer(**settings)


def wrong_splits() -> list[str]:
    messages = []
    for policy in (Fixed([4, 4]), Fixed([4, 4, 3]), Fixed({0: [4, 4, 4], 9: [13, 0, -1]}), "even"):
        with pytest.raises(PoiseError) as caught:
            Balancer(2 if policy == "even" else 12, policy=policy)
        messages.append(str(caught.value))
    return messages


def test_splits_that_do_not_fit_the_workers_are_refused(workers: Workers) -> None:
    for messages in workers.run(wrong_splits, workers=3):
        assert "has 2 entries, but there are 3 workers" in messages[0]
        assert "adds up to 11, but global_batch=12" in messages[1]
        assert "gives worker 2 -1 samples" in messages[2]
        assert "raise global_batch to at least 3" in messages[3]


ODDITIES = ("length", "batch", "seed", "shape", "dtype", "name", "policy", "shuffle")


def disagreements() -> dict[str, str]:
    """Worker 1 differs from the others in one thing at a time."""
    launch = launched_as()
    assert launch is not None
    messages = {}
    for name in ODDITIES:
        odd = {oddity: launch.worker == 1 and oddity == name for oddity in ODDITIES}
        data = TensorDataset(*(tensor[: 19 if odd["length"] else 20] for tensor in DATA.tensors))
        model: nn.Module = nn.Linear(3, 2 if odd["shape"] else 1)
        if odd["dtype"]:
            model = model.double()
        if odd["name"]:
            model = nn.Sequential(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(data, 6, shuffle=not odd["shuffle"])
        policy = Fixed([3, 2, 1]) if odd["policy"] else Fixed([1, 2, 3])
        other = Instrument(
            settings=lambda stated: replace(stated, global_batch=7, policy=Fixed([1, 2, 4]))
        )
        with (
            instrumented(other) if odd["batch"] else nullcontext(),
            Balancer(6, policy=policy, seed=5 if odd["seed"] else 0) as balancer,
        ):
            try:
                balancer.prepare(model, optimizer, loader)
            except Disagreement as error:
                messages[name] = str(error)
    return messages


def test_workers_that_differ_are_told_in_what(workers: Workers) -> None:
    for messages in workers.run(disagreements, workers=3):
        assert (
            "the length of the data set is 19 on worker 1 and 20 on worker 0" in messages["length"]
        )
        assert "global_batch is 7 on worker 1 and 6 on worker 0" in messages["batch"]
        assert "seed is 5 on worker 1" in messages["seed"]
        assert "parameter weight is torch.float32 (2, 3) on worker 1" in messages["shape"]
        assert "parameter weight is torch.float64 (1, 3) on worker 1" in messages["dtype"]
        assert "parameter weight is missing on worker 1" in messages["name"]
        assert "[(0, (3, 2, 1))] on worker 1" in messages["policy"]
        assert "the order of the data set" in messages["shuffle"]


def wrong_moments() -> dict[str, str]:
    messages = {}
    with Balancer(4) as balancer:
        model, optimizer, loader = balancer.prepare(*parts())
        with pytest.raises(OutOfOrder) as twice:
            balancer.prepare(*parts())
        messages["twice"] = str(twice.value)
        with pytest.raises(RuntimeError) as none:
            model(torch.zeros(2, 3)).sum().backward()
        messages["none"] = str(none.value)
    with Balancer(4) as balancer:
        model, optimizer, loader = balancer.prepare(*parts())
        with pytest.raises(PoiseError) as again:
            Balancer(4).prepare(model, optimizer, DataLoader(DATA, 4, shuffle=True))
        messages["again"] = str(again.value)
    with Balancer(4) as balancer:
        model, optimizer, loader = balancer.prepare(*parts())
        batches = iter(loader)
        next(batches)
        x, _ = next(batches)
        with pytest.raises(RuntimeError) as ahead:
            model(x).sum().backward()
        messages["ahead"] = str(ahead.value)
        iter_again = iter(loader)
        next(iter_again)
        with pytest.raises(OutOfOrder) as ended:
            next(batches)
        messages["ended"] = str(ended.value)
    return messages


def test_calls_at_the_wrong_moment_are_refused(workers: Workers) -> None:
    messages = workers.run(wrong_moments, workers=1)[0]
    assert "prepare was called before" in messages["twice"]
    assert "backward ran without a batch" in messages["none"]
    assert "prepared already" in messages["again"]
    assert "2 batches" in messages["ahead"]
    assert "ended when another one began" in messages["ended"]


class WithLoss(nn.Linear):
    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.forward(inputs).sum()


def backwards_around_the_model() -> list[str]:
    """Gradients that DistributedDataParallel would leave unsummed, in silence."""

    def by_method(model: Any, x: torch.Tensor) -> None:
        model.loss(x).backward()

    def by_the_bare_module(model: Any, x: torch.Tensor) -> None:
        model.module(x).sum().backward()

    def twice(model: Any, x: torch.Tensor) -> None:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    messages = []
    for mistake in (by_method, by_the_bare_module, twice):
        model = WithLoss(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Balancer(4) as balancer:
            shared, optimizer, loader = balancer.prepare(model, optimizer, DataLoader(DATA, 4))
            x, _ = next(iter(loader))
            mistake(shared, x)
            with pytest.raises(OutOfOrder) as caught:
                optimizer.step()
            messages.append(str(caught.value))
    return messages


def test_a_gradient_that_is_not_summed_is_refused(workers: Workers) -> None:
    method, module, twice = workers.run(backwards_around_the_model, workers=1)[0]
    assert "1 backwards reached the model" in method
    assert "0 of them were summed" in module
    assert "2 backwards reached the model" in twice


def test_the_errors_share_one_root() -> None:
    assert issubclass(InfeasibleSplit, PoiseError)
    assert issubclass(InfeasibleSplit, ValueError)

"""The three lines in a user's script: torchrun, an existing group, or no group at all."""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poise.errors import InvalidSetting
from poise.policy import Fixed
from poise.runtime.slicing import emptied
from poise.torch import Balancer
from poise.torch.loader import lead
from tests.cluster import Workers
from tests.leaks import group_threads
from tests.test_exactness import EXACT
from tests.training import Recipe, distance, train_balanced, train_plain, weights

ROOT = Path(__file__).parent.parent
RECIPE = Recipe(samples=50, global_batch=12)


def in_a_group_of_the_user(hang_s: float | None) -> dict[str, torch.Tensor]:
    """The user's group is joined and still there afterwards."""
    dist.init_process_group("gloo")
    try:
        found = train_balanced(RECIPE, Fixed([7, 5]), hang_s=hang_s).weights
        assert dist.is_initialized()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("hang_s", [None, 60.0])
def test_an_existing_group_is_joined_and_left_alone(workers: Workers, hang_s: float | None) -> None:
    expected = train_plain(RECIPE)
    for found in workers.run(in_a_group_of_the_user, hang_s, workers=2):
        assert distance(found, expected) < EXACT


def alone() -> dict[str, torch.Tensor]:
    """No launcher, no group: one process."""
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return train_balanced(RECIPE).weights


def test_one_process_needs_no_group(workers: Workers) -> None:
    assert distance(workers.run(alone, workers=1)[0], train_plain(RECIPE)) < EXACT


def two_trainings_in_a_row() -> list[dict[str, torch.Tensor]]:
    return [train_balanced(RECIPE, Fixed([4, 8])).weights for _ in range(2)]


def test_trainings_can_follow_each_other(workers: Workers) -> None:
    expected = train_plain(RECIPE)
    for found in workers.run(two_trainings_in_a_row, workers=2):
        assert all(distance(each, expected) < EXACT for each in found)


def threads_after_close() -> set[str]:
    before = group_threads()
    train_balanced(RECIPE, Fixed([4, 8]))
    return group_threads() - before


def test_no_thread_of_a_group_outlives_the_balancer(workers: Workers) -> None:
    """One that still holds a callback while the interpreter shuts down aborts the process."""
    assert workers.run(threads_after_close, workers=2) == [set(), set()]


class Custom(nn.Module):
    """A model with attributes, methods and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(24, 5)
        self.register_buffer("scale", torch.ones(1))
        self.device = "a name that DistributedDataParallel uses too"
        self.temperature = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(inputs) / self.temperature
        return logits

    def describe(self) -> str:
        return f"custom at {self.temperature}"


def a_model_keeps_its_face() -> dict[str, Any]:
    model = Custom()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.zeros(12, 24), torch.zeros(12, dtype=torch.long))
    with Balancer(4) as balancer:
        shared, same, loader = balancer.prepare(model, optimizer, DataLoader(data, 4))
        shared.temperature = 2.0
        shared.eval()
        facts = {
            "keys": list(shared.state_dict()),
            "names": [name for name, _ in shared.named_parameters()],
            "buffers": [name for name, _ in shared.named_buffers()],
            "modules": [name for name, _ in shared.named_modules()],
            "device": shared.device,
            "describe": shared.describe(),
            "inner training": model.training,
            "same optimizer": same is optimizer,
            "module": shared.module is model,
            "dataset": loader.dataset is data,
        }
        with pytest.raises(AttributeError, match="'Custom' object has no attribute 'nothing'"):
            _ = shared.nothing
    facts["after close"] = tuple(shared(torch.zeros(2, 24)).shape)
    return facts


def test_the_prepared_model_is_the_users_own(workers: Workers) -> None:
    for facts in workers.run(a_model_keeps_its_face, workers=2):
        assert facts == {
            "keys": ["scale", "body.weight", "body.bias"],
            "names": ["body.weight", "body.bias"],
            "buffers": ["scale"],
            "modules": ["", "body"],
            "device": "a name that DistributedDataParallel uses too",
            "describe": "custom at 2.0",
            "inner training": False,
            "same optimizer": True,
            "module": True,
            "dataset": True,
            "after close": (2, 5),
        }


def worker_0_gives_the_first_weights() -> tuple[Any, Any]:
    torch.manual_seed(os.getpid())
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.uniform_()  # type: ignore[operator]
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.zeros(12, 3))
    with warnings.catch_warnings(), Balancer(4) as balancer:
        warnings.simplefilter("ignore")
        shared, _, _ = balancer.prepare(model, optimizer, DataLoader(data, 4))
        return before, weights(shared)


def test_initial_values_come_from_worker_0(workers: Workers) -> None:
    results = workers.run(worker_0_gives_the_first_weights, workers=3)
    for before, after in results:
        assert distance(after, results[0][0]) == 0
        assert before is not after


def said(batch_size: int) -> list[str]:
    model = nn.Linear(3, 1)
    data = TensorDataset(torch.zeros(12, 3))
    with warnings.catch_warnings(record=True) as caught, Balancer(4) as balancer:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        balancer.prepare(model, optimizer, DataLoader(data, batch_size))
    return [str(each.message) for each in caught]


def test_an_unused_batch_size_is_said_once_by_worker_0(workers: Workers) -> None:
    found = workers.run(said, 7, workers=2)
    assert len(found[0]) == 1
    assert "batch_size=7 is not used" in found[0][0]
    assert found[1] == []
    assert workers.run(said, 4, workers=2) == [[], []]


def short_epochs(samples: int, drop_last: bool) -> tuple[int, list[int]]:
    """Last global batches smaller than the number of workers."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.ones(samples, 3), torch.arange(samples))
    sizes = []
    with Balancer(8) as balancer:
        loader = DataLoader(data, 8, shuffle=True, drop_last=drop_last)
        model, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(2):
            for inputs, _ in shares:
                sizes.append(len(inputs))
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        return len(shares), sizes


def test_a_last_batch_smaller_than_the_workers_leaves_some_idle(workers: Workers) -> None:
    results = workers.run(short_epochs, 18, False)
    assert [length for length, _ in results] == [3, 3, 3, 3]
    per_step = list(zip(*(sizes for _, sizes in results), strict=True))
    assert [sum(step) for step in per_step] == [8, 8, 2, 8, 8, 2]
    assert sorted(per_step[2]) == [0, 0, 1, 1]


def test_drop_last_drops_the_smaller_global_batch(workers: Workers) -> None:
    for length, sizes in workers.run(short_epochs, 18, True, workers=2):
        assert (length, sizes) == (2, [4] * 4)


def test_a_data_set_smaller_than_one_global_batch_trains(workers: Workers) -> None:
    results = workers.run(short_epochs, 3, False)
    assert [sum(step) for step in zip(*(sizes for _, sizes in results), strict=True)] == [3, 3]


def look_without_training() -> tuple[list[list[int]], dict[str, Any]]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.arange(12))
    with Balancer(4) as balancer:
        _, _, shares = balancer.prepare(model, optimizer, DataLoader(data, 4, shuffle=True))
        passes = [[int(i) for (batch,) in shares for i in batch] for _ in range(2)]
        return passes, balancer.state_dict()


def test_looking_at_the_data_consumes_nothing(workers: Workers) -> None:
    (first, second), state = workers.run(look_without_training, workers=1)[0]
    assert first == second
    assert (state["epoch"], state["position"], state["step"]) == (0, 0, 0)


@dataclasses.dataclass
class Sentence:
    tokens: torch.Tensor
    texts: list[str]


Pair = namedtuple("Pair", ["left", "right"])


def test_a_batch_is_emptied_in_its_own_form() -> None:
    one = torch.ones(1, 3)
    assert emptied([one, torch.ones(1)])[0].shape == (0, 3)
    assert emptied({"x": one, "names": ["a"], "scale": 2.0})["names"] == []
    assert emptied(Pair(one, np.ones((1, 2)))).right.shape == (0, 2)
    assert emptied((one, [one]))[1] == []
    assert emptied(Sentence(one, ["a"])).tokens.shape == (0, 3)
    assert emptied((one, None, torch.tensor(3.0)))[2] == 3.0
    assert emptied([one, ("name",)])[1] == ()
    assert emptied(((one,), ({"boxes": one},))) == ((), ())
    assert emptied([(one, "name")]) == []
    assert emptied([one])[0].shape == (0, 3)
    with pytest.raises(InvalidSetting, match=r'a set in the batch cannot be cut.*idle="repeat"'):
        emptied((one, {1}))


def test_the_lead_is_what_a_loader_fetches_ahead() -> None:
    data = TensorDataset(torch.zeros(4))
    assert lead(DataLoader(data)) == 0
    assert lead(DataLoader(data, num_workers=1)) == 2
    assert lead(DataLoader(data, num_workers=2, prefetch_factor=16)) == 32


def readme_block() -> str:
    text = (ROOT / "README.md").read_text()
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return next(block for block in blocks if "Balancer" in block)


def test_the_readme_block_runs_under_torchrun(tmp_path: Path) -> None:
    """The block as it stands, between a set-up and a check."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from torch.utils.data import DataLoader, TensorDataset
            torch.manual_seed(0)
            torch.set_num_threads(1)
            inputs = torch.randn(2000, 8)
            targets = (inputs.sum(1) > 0).long()
            dataset = TensorDataset(inputs, targets)
            model = torch.nn.Linear(8, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            loader = DataLoader(dataset, batch_size=512, shuffle=True)
            loss_fn = torch.nn.CrossEntropyLoss()
            """
        )
        + readme_block()
        + textwrap.dedent(
            """
            accuracy = float((model(inputs).argmax(1) == targets).float().mean())
            import sys
            sys.stdout.write(f"worker {balancer.worker} of {balancer.workers}: {accuracy:.4f}\\n")
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(": ")[0] for line in lines] == ["worker 0 of 2", "worker 1 of 2"]
    accuracies = {line.split(": ")[1] for line in lines}
    assert len(accuracies) == 1
    assert float(accuracies.pop()) > 0.9


def train_without_pickle() -> None:
    """Let every way of torch.distributed to send Python objects fail."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an object is pickled")

    with (
        mock.patch("torch.distributed.distributed_c10d._object_to_tensor", refuse),
        mock.patch("torch.distributed.distributed_c10d._tensor_to_object", refuse),
    ):
        with pytest.raises(AssertionError, match="pickled"):
            dist.distributed_c10d._object_to_tensor(1, torch.device("cpu"), None)
        train_balanced(RECIPE, Fixed([7, 5]))


def test_nothing_is_pickled_between_workers(workers: Workers) -> None:
    workers.run(train_without_pickle, workers=2)

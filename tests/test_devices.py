"""Which group sums gradients follows from where the parameters are, on all workers."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer, Fixed
from poise.torch.groups import common_backend
from tests.cluster import Fault, Workers
from tests.inside import session_of
from tests.test_exactness import EXACT
from tests.training import Recipe, distance, train_balanced, train_plain

RECIPE = Recipe(samples=60, global_batch=12, epochs=3)


def test_workers_on_different_devices_meet_where_both_can() -> None:
    assert common_backend(["cpu", "cpu"]) == "gloo"
    assert common_backend(["cpu", "cuda", "cuda"]) == "gloo"
    assert common_backend(["cuda", "cuda"]) == dist.get_default_backend_for_device("cuda")


def on_a_machine_with_accelerators(fault: Fault | None) -> tuple[str, dict[str, torch.Tensor]]:
    """Train on the CPU where torch sees an accelerator, in a group that is for the CPU only."""
    torch.accelerator.is_available = lambda: True
    dist.init_process_group("cpu:gloo")
    with Balancer(2) as balancer:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        balancer.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(4, 1)), 2))
        backend = str(dist.get_backend(session_of(balancer).generation.gradients))
    log = train_balanced(RECIPE, Fixed([7, 5]), fault=fault)
    dist.destroy_process_group()
    return backend, log.weights


def test_a_model_on_the_cpu_trains_beside_accelerators(workers: Workers) -> None:
    for backend, weights in workers.run(on_a_machine_with_accelerators, None, workers=2):
        assert backend == "gloo"
        assert distance(weights, train_plain(RECIPE)) < EXACT


def test_a_lost_worker_is_named_there_too(workers: Workers) -> None:
    """Whoever takes the sums for those of an accelerator never looks at their errors."""
    fault = Fault(worker=1, step=3, kind="kill")
    outcomes = workers.attempt(on_a_machine_with_accelerators, fault, workers=2)
    assert "WorkerLost: worker 1" in outcomes[0].error
    assert "died at step 3" in outcomes[0].error


def test_gradients_do_not_travel_in_a_gloo_group_of_ones_own(workers: Workers) -> None:
    """Nothing could end a wait there when a worker is lost."""
    assert workers.run(in_the_group_of_the_script, workers=2) == [False, False]


def in_the_group_of_the_script() -> bool:
    """Whether gradients travel in the group that the script made."""
    dist.init_process_group("gloo")
    with Balancer(2) as balancer:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        balancer.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(4, 1)), 2))
        same = session_of(balancer).generation.gradients is dist.group.WORLD
    dist.destroy_process_group()
    return same


def test_the_kit_for_accelerators_says_that_there_is_none() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator: run make test-accelerator")
    done = subprocess.run(
        [sys.executable, "-m", "tests.accelerator_kit"], check=True, capture_output=True, text=True
    )
    assert done.stdout == "no accelerator: nothing to test on this machine\n"


@pytest.mark.slow
def test_the_kit_for_accelerators_runs_on_the_cpu() -> None:
    words = [sys.executable, "-m", "tests.accelerator_kit", "--device", "cpu"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert "6 of 6 hold" in done.stdout, done.stdout + done.stderr

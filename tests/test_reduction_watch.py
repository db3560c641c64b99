"""A link that becomes slow: noticed after a few steps, said once, and no stall is taken for it."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from poise.core.observation import Observation
from poise.core.reduction_watch import IN_A_ROW, Episode, ReductionWatch
from poise.lab import Lab
from tests.machine import needs_namespaces

WORK_S = np.array([0.040, 0.055, 0.050])
"""What each of three workers computes; the second is ready last."""


def step(
    number: int, reduction_s: float, work: float = 1.0, noise: Sequence[float] = (1, 1, 1)
) -> Observation:
    """Return a step of two buckets whose reduction adds so much to it."""
    ready = WORK_S * work * np.array(noise)
    end = ready.max() + reduction_s
    return Observation(
        number,
        (4, 4, 4),
        ready_s=np.stack([0.5 * ready, ready], axis=1),
        done_s=np.stack([0.6 * ready, np.full(3, end)], axis=1),
    )


def watched(steps: Sequence[Observation]) -> list[Episode]:
    """Return all that is said of steps, which come in twos and threes."""
    said, watch, first = [], ReductionWatch(), 0
    while first < len(steps):
        size = 2 + first % 2
        episodes, watch = watch.update(steps[first : first + size])
        said += episodes
        first += size
    return said


def test_a_link_that_became_ten_times_as_slow_is_said_once_and_its_end_too() -> None:
    times = [0.010] * 40 + [0.100] * 40 + [0.010] * 40
    slow, over = watched([step(number, each) for number, each in enumerate(times)])
    assert (slow.since, slow.over, over.since, over.over) == (40, False, 80, True)
    assert slow.takes_s == pytest.approx(0.1)
    assert str(slow).endswith("takes 100 ms since step 40, 10 times what it took before (10 ms)")
    assert str(over).endswith("takes 10 ms again since step 80")


def test_a_second_episode_is_said_too() -> None:
    times = [0.010] * 40 + [0.300] * 20 + [0.010] * 40 + [0.300] * 20
    said = watched([step(number, each) for number, each in enumerate(times)])
    assert [(each.since, each.over) for each in said] == [(40, False), (60, True), (100, False)]


def test_stalls_are_no_episode() -> None:
    times = [2.0 if number % IN_A_ROW == 1 else 0.010 for number in range(400)]
    assert watched([step(number, each) for number, each in enumerate(times)]) == []


@pytest.mark.parametrize("seed", range(20))
def test_the_noise_of_a_lab_is_no_episode(seed: int) -> None:
    """Times scatter by 30 %, one reduction in ten takes ten times as long."""
    random = np.random.default_rng(seed)
    steps = []
    for number in range(1000):
        reduction_s = 0.01 * random.lognormal(0.0, 0.5) * (10 if random.random() < 0.1 else 1)
        noise = random.lognormal(0.0, 0.3, 3).tolist()
        steps.append(step(number, reduction_s, noise=noise))
    assert watched(steps) == []


def test_a_slower_processor_is_no_slower_link() -> None:
    """Where gloo shares the worker's processor, all of the step becomes slower together."""
    steps = [
        step(number, 0.02 if number < 40 else 0.16, 1 if number < 40 else 8) for number in range(80)
    ]
    assert watched(steps) == []


def test_a_reduction_that_hides_behind_backward_or_hardly_matters_is_not_said() -> None:
    times = [0.0002] * 40 + [0.010] * 40  # fifty times as long, and a fifth of the step
    assert watched([step(number, each) for number, each in enumerate(times)]) == []


def test_what_was_not_measured_says_nothing() -> None:
    times = [0.010] * 40 + [0.100] * 40
    steps = [step(number, each) for number, each in enumerate(times)]
    nothing = [Observation(number, (4, 4, 4)) for number in range(80)]
    blank = np.full((3, 2), np.nan)
    unknown = [Observation(n, (4, 4, 4), ready_s=blank, done_s=blank) for n in range(80)]
    compiling = [step(number, 9.0) for number in range(80)]
    mixed = [each for group in zip(steps, nothing, unknown, strict=True) for each in group]
    assert [each.since for each in watched(mixed)] == [40]
    alone = [Observation(0, (4,), ready_s=blank[:1], done_s=blank[:1] + 1)] * 80
    assert watched(alone) == []
    marked = [Observation(**{**vars(each), "compiling": (1,)}) for each in compiling]
    assert watched([*steps[:40], *marked]) == []


def test_waiting_for_input_is_no_reduction() -> None:
    def waited(number: int, seconds: float) -> Observation:
        seen = step(number, 0.01)
        assert seen.done_s is not None
        return Observation(
            number,
            seen.split,
            ready_s=seen.ready_s,
            done_s=seen.done_s + seconds,
            wait_s=np.full(3, seconds),
        )

    assert watched([waited(number, 0.0 if number < 40 else 0.5) for number in range(80)]) == []


TRAIN = """
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from poise.torch import Balancer

torch.manual_seed(0)
data = TensorDataset(torch.randn(6400, 256), torch.randn(6400, 128))
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
balancer = Balancer(64{settings})
model, optimizer, loader = balancer.prepare(model, optimizer, DataLoader(data, 64))
for epoch in balancer.epochs(99):
    for x, y in loader:
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LIMIT_S = 150.0


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("settings", ["", ", policy='even', record='run.jsonl'"])
def test_a_link_whose_rate_falls_is_said_on_worker_0(tmp_path: Path, settings: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        TRAIN.replace("{settings}", settings).replace("run.jsonl", str(tmp_path / "r"))
    )
    heard = tmp_path / "stderr"
    with (
        heard.open("w") as file,
        Lab([1, 1], pace="200us+10ms", link="200mbit") as lab,
    ):
        lab.start([str(script)], stdout=subprocess.DEVNULL, stderr=file.fileno())
        await_steps(lab, 60)
        limit_links("4mbit")
        await_text(heard, "since step")
        limit_links("200mbit")
        await_text(heard, "again since step")
    said = [line for line in heard.read_text().splitlines() if "PoiseWarning" in line]
    assert len(said) == 2, said
    assert "times what it took before" in said[0]
    assert "workers by host: " in said[0]


def await_steps(lab: Lab, steps: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while min(lab.steps) < steps:
        assert time.monotonic() < deadline, f"{lab.steps} steps"
        time.sleep(0.1)


def await_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.2)


def limit_links(rate: str) -> None:
    """Change the rate of what the workers of this process's lab send."""
    found = sorted(Path("/run/netns").glob(f"poise-lab-{os.getpid()}-*-[01]"))
    assert len(found) == 2
    for path in found:
        command = f"tc -n {path.name} qdisc change dev lab0 root tbf rate {rate} burst 32kb"
        subprocess.run([*command.split(), "latency", "200ms"], check=True)

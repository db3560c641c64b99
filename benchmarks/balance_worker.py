"""One worker of the balance benchmark: `python benchmarks/balance_worker.py SETTINGS`, in a lab.

It runs one training after the other, each with a policy of its own, and tells the benchmark what
it saw as JSON lines on standard output. SETTINGS is a JSON object, see `Settings`.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from poise.cli.worker_messages import send
from poise.core.observation import Observation
from poise.core.plan import Plan
from poise.core.split import apportion, optimal_split
from poise.core.timing import SpeedModel
from poise.policy import Fixed, Policy, Static, policy_named
from poise.policy.bounds import NO_BOUNDS
from poise.records import read_record
from poise.torch import Balancer

STEADY = 14
"""Steps at the end of a training that tell how it goes on."""
_STEPS_PER_EPOCH = 12
_CALIBRATION_STEPS = 9
_NEW = 3
"""Steps with another split that say nothing of the next ones: allocators have to follow."""
_APPLY_S = 0.3
"""Until the lab has surely heard of new speeds."""
_BUCKET_MB = 25
Split = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """What to do, the same on all workers."""

    speeds: list[float]
    """Of the workers, for the static policy and as a first guess."""
    global_batch: int
    model: str
    rounds: int
    policies: list[str]
    steps: dict[str, int]
    """Steps of a training, by policy; "other" for those not named."""
    calibrations: int = 1
    """How often the splits of a calibration follow each other."""
    slow_speeds: list[float] = field(default_factory=list)
    """The speeds after a slowdown; empty: there is none."""
    slow_at: int = 0
    slow_steps: int = 0
    walk: list[list[float]] = field(default_factory=list)
    """Speeds that follow each other in one training; empty: there is no walk."""
    walk_steps: int = 0
    """Steps at each of them."""
    walk_policies: list[str] = field(default_factory=list)


def main(settings: Settings) -> None:
    """Run everything that the settings ask for."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(settings)
    bench.train("even", None, 4, report=False)  # the lab throttles from here on
    if settings.walk:
        bench.walk()
    else:
        bench.compare()
        if settings.slow_speeds:
            bench.slow_down()
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    """The trainings of one cluster."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.worker, self.workers = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        samples = settings.global_batch * _STEPS_PER_EPOCH
        inputs = torch.randn(samples, *INPUTS[settings.model])
        self.data = TensorDataset(inputs, torch.randint(0, 10, (samples,)))

    def compare(self) -> None:
        """All policies in a random order, again and again."""
        oracle = self.oracle(self.settings.speeds)
        order = random.Random(0)
        for round_ in range(self.settings.rounds):
            names = list(self.settings.policies)
            order.shuffle(names)
            for name in names:
                steps = self.settings.steps.get(name) or self.settings.steps["other"]
                self.train(name, self.policy(name, oracle), steps, round=round_)

    def slow_down(self) -> None:
        """Auto, while the speeds change at a step; then the oracle for the new speeds."""
        settings = self.settings
        after = settings.slow_at + settings.slow_steps
        for round_ in range(settings.rounds):
            self.set_speeds(settings.speeds)
            change = {settings.slow_at: settings.slow_speeds}
            self.train("slowdown", policy_named("auto"), after, change, round=round_)
        self.set_speeds(settings.slow_speeds)
        oracle = self.oracle(settings.slow_speeds)
        for round_ in range(settings.rounds):
            self.train("slowdown oracle", Fixed(oracle), _NEW + 8, round=round_)

    def walk(self) -> None:
        """Every policy over the whole walk."""
        oracles: dict[tuple[float, ...], Split] = {}
        for speeds in self.settings.walk:
            if tuple(speeds) not in oracles:
                self.set_speeds(speeds)
                oracles[tuple(speeds)] = self.oracle(speeds)
        each = self.settings.walk_steps
        changes = {number * each: speeds for number, speeds in enumerate(self.settings.walk)}
        known = Fixed({step: oracles[tuple(speeds)] for step, speeds in changes.items()})
        steps = each * len(self.settings.walk)
        for round_ in range(self.settings.rounds):
            for name in self.settings.walk_policies:
                self.set_speeds(self.settings.walk[0])
                policy = known if name == "oracle" else self.policy(name, ())
                self.train(f"walk {name}", policy, steps, changes, round=round_)

    def policy(self, name: str, oracle: Split) -> Policy | None:
        """Return a policy; None is plain DistributedDataParallel."""
        if name == "even":
            return None
        if name == "oracle":
            return Fixed(oracle)
        if name == "static":
            return Static(self.settings.speeds)
        return policy_named(name)

    def oracle(self, speeds: Sequence[float]) -> Split:
        """Return the best split by speeds that are measured apart, at several splits."""
        total = self.settings.global_batch
        splits = [parts(weights, total) for weights in spread(speeds)]
        splits *= self.settings.calibrations
        schedule = {number * _CALIBRATION_STEPS: split for number, split in enumerate(splits)}
        seen: list[Observation] = []
        with TemporaryDirectory() as folder:
            path = Path(folder) / "calibration.jsonl"
            steps = _CALIBRATION_STEPS * len(splits)
            self.train("calibration", Fixed(schedule), steps, record=path, report=False)
            if self.worker == 0:
                seen = [row.observation for row in read_record(path).rows if row.observation]
        best = torch.zeros(self.workers, dtype=torch.int64)
        if self.worker == 0:
            model = measured_model([s for s in seen if s.step % _CALIBRATION_STEPS >= _NEW])
            found = optimal_split(model, total, NO_BOUNDS.limits(self.workers))
            best[:] = torch.tensor(found.split)
        dist.broadcast(best, 0)
        return tuple(best.tolist())

    def train(
        self,
        label: str,
        policy: Policy | None,
        steps: int,
        changes: dict[int, list[float]] | None = None,
        *,
        record: Path | None = None,
        report: bool = True,
        **also: Any,
    ) -> None:
        """Train anew, and tell how long each step took."""
        torch.manual_seed(2)
        model = MODELS[self.settings.model]()
        training: Generator[Plan | None, None, None]
        training = self.plain(model) if policy is None else self.balanced(model, policy, record)
        step_s, splits, predicted_s = [], [], None
        dist.barrier()
        before = time.perf_counter()
        for number, plan in zip(range(steps), training, strict=False):
            now = time.perf_counter()
            step_s.append(now - before)
            before = now
            if plan is not None:
                splits.append(list(plan.split))
                if number == steps - STEADY - 1 and plan.forecast is not None:
                    predicted_s = plan.step_s
            if changes and number + 1 in changes and self.worker == 0:
                send(speeds=changes[number + 1])
        training.close()
        if report:
            self.tell(label=label, step_s=step_s, splits=splits, predicted_s=predicted_s, **also)

    def balanced(
        self, model: nn.Module, policy: Policy, record: Path | None
    ) -> Generator[Plan, None, None]:
        """Train with Poise; yield the plan after each step."""
        with Balancer(
            self.settings.global_batch,
            policy=policy,
            ddp={"bucket_cap_mb": _BUCKET_MB},
            record=record,
        ) as balancer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loader = DataLoader(self.data, self.settings.global_batch, shuffle=True)
            shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
            for _ in balancer.epochs(10**9):
                for inputs, targets in shares:
                    _learn(shared, optimizer, inputs, targets)
                    yield balancer.plan

    def plain(self, model: nn.Module) -> Generator[None, None, None]:
        """Train with DistributedDataParallel alone."""
        shared = DistributedDataParallel(
            model, bucket_cap_mb=_BUCKET_MB, gradient_as_bucket_view=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sampler: DistributedSampler[Any] = DistributedSampler(self.data, self.workers, self.worker)
        local = self.settings.global_batch // self.workers
        loader = DataLoader(self.data, local, sampler=sampler)
        while True:
            for inputs, targets in loader:
                _learn(shared, optimizer, inputs, targets)
                yield None

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Ask the lab for other speeds, and wait until it has them."""
        if self.worker == 0:
            send(speeds=list(speeds))
        dist.barrier()
        time.sleep(_APPLY_S)

    def tell(self, **message: Any) -> None:
        """Send a message to the benchmark, once."""
        if self.worker == 0:
            send(**message)


def spread(speeds: Sequence[float]) -> list[list[float]]:
    """Return three kinds of shares that differ on every worker: by speed, and to both sides."""
    lean = [1.25 if worker % 2 else 0.8 for worker in range(len(speeds))]
    return [
        list(speeds),
        [speed * each for speed, each in zip(speeds, lean, strict=True)],
        [speed / each for speed, each in zip(speeds, lean, strict=True)],
    ]


def parts(weights: Sequence[float], total: int) -> Split:
    """Divide whole samples in proportion to weights."""
    return apportion([max(1, round(1e6 * weight)) for weight in weights], total)


def measured_model(seen: Sequence[Observation]) -> SpeedModel:
    """Return the speed model of a calibration: a line through the medians at each local batch."""
    seen = [each for each in seen if each.ready_s is not None and not np.isnan(each.ready_s).any()]
    workers, buckets = seen[0].times("a calibration").shape
    fixed, slope = np.zeros((workers, buckets)), np.zeros((workers, buckets))
    sums = []
    for each in seen:
        assert each.ready_s is not None
        assert each.done_s is not None
        begun = each.ready_s.copy()
        begun[:, 1:] = np.maximum(begun[:, 1:], each.done_s[:, :-1])
        sums.append(np.maximum((each.done_s - begun).min(axis=0), 0.0))
    for worker in range(workers):
        sizes = sorted({each.split[worker] for each in seen})
        for bucket in range(buckets):
            times = [
                statistics.median(
                    float(each.ready_s[worker, bucket])
                    for each in seen
                    if each.ready_s is not None and each.split[worker] == size
                )
                for size in sizes
            ]
            slope[worker, bucket], fixed[worker, bucket] = np.polyfit(sizes, times, 1)
    return SpeedModel.of(
        np.maximum(fixed, 0.0), np.maximum(slope, 1e-9), np.median(sums, axis=0).tolist()
    )


def _learn(model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _images() -> nn.Module:
    """A small network on images of 28 x 28: 0.1 million parameters, most time in convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(48, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 49, 48),
        nn.ReLU(),
        nn.Linear(48, 10),
    )


def _points() -> nn.Module:
    """A network that computes almost nothing, for paced workers."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))


def _heavy() -> nn.Module:
    """Many parameters for little computation: 4 million, 16 MB a reduction."""
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10))


MODELS = {"images": _images, "points": _points, "heavy": _heavy}
INPUTS = {"images": (1, 28, 28), "points": (16,), "heavy": (64,)}


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))

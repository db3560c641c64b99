"""One worker of the balance benchmark: `python benchmarks/balance_worker.py SETTINGS`, in a lab.

It runs one training after the other, each with a policy of its own, and tells the benchmark what
it saw as JSON lines on standard output. SETTINGS is a JSON object, see `Settings`.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
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
from poise.core.split import apportion, optimal_split
from poise.core.timing import SpeedModel
from poise.policy import Fixed, Policy, Static, policy_named
from poise.policy.bounds import NO_BOUNDS
from poise.records import read_record
from poise.torch import Balancer

BLOCK = 6
"""Steps that a training makes before another one has its turn."""
SLOW_AT = 30
"""The step at which a worker slows down."""
_STEPS_PER_EPOCH = 12
_CALIBRATION_STEPS = 8
_FACTORS = (1.6, 1.4, 1.2)
"""How far local batches are from the best ones, in one calibration after the other."""
_NEW = 2
"""Steps with another split that say nothing of the next ones: allocators have to follow."""
_APPLY_S = 0.3
"""Until the lab has surely heard of new speeds."""
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
    """"even" is plain DistributedDataParallel."""
    oracles: list[str]
    """Candidates for the best split: by "lines" that are measured apart, by "cores"."""
    steps: int
    """Steps of a training."""
    even_steps: int
    """Of plain DistributedDataParallel, which may be slow."""
    calibrations: int = 2
    """How often lines are measured, each time around the split that was best by those before."""
    slow_speeds: list[float] = field(default_factory=list)
    """The speeds after a slowdown; empty: there is none."""
    walk: list[list[float]] = field(default_factory=list)
    """Speeds that follow each other while all trainings go on; empty: there is no walk."""


def main(settings: Settings) -> None:
    """Run everything that the settings ask for."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(settings)
    warm_up = Plain(bench)  # the lab throttles from here on
    for _ in range(3):
        warm_up.step()
    if settings.walk:
        bench.walk()
    else:
        bench.compare()
        if settings.slow_speeds:
            bench.slow_down()
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    """The trainings of one cluster.

    Those that are compared are under way at the same time and take turns, a block of steps each:
    the machine's own speed changes from one minute to the next.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.worker, self.workers = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        samples = settings.global_batch * _STEPS_PER_EPOCH
        inputs = torch.randn(samples, *INPUTS[settings.model])
        self.data = TensorDataset(inputs, torch.randint(0, 10, (samples,)))
        self._turns = random.Random(0)

    def compare(self) -> None:
        """All policies and the candidates for the best split, again and again."""
        splits = self.candidates(self.settings.speeds)
        for _ in range(self.settings.rounds):
            trainings = {name: self.training(name) for name in self.settings.policies}
            trainings |= {f"oracle {name}": self.fixed(split) for name, split in splits.items()}
            self.take_turns(trainings, self.settings.steps)
            self.report(trainings)

    def slow_down(self) -> None:
        """Auto alone, then speeds change, then in turns with candidates for the new best split."""
        self.set_speeds(self.settings.slow_speeds)
        splits = self.candidates(self.settings.slow_speeds)
        for _ in range(self.settings.rounds):
            self.set_speeds(self.settings.speeds)
            auto = self.training("auto")
            self.take_turns({"slowdown": auto}, SLOW_AT)
            self.set_speeds(self.settings.slow_speeds)
            trainings = {"slowdown": auto}
            for name, split in splits.items():
                trainings[f"slowdown oracle {name}"] = self.fixed(split)
            self.take_turns(trainings, SLOW_AT + 4 * BLOCK)
            self.report(trainings)

    def walk(self) -> None:
        """All policies over the whole walk; the candidates know the speeds of each part."""
        splits: dict[tuple[float, ...], dict[str, Split]] = {}
        for speeds in self.settings.walk:
            if tuple(speeds) not in splits:
                self.set_speeds(speeds)
                splits[tuple(speeds)] = self.candidates(speeds)
        part, parts_ = self.settings.steps, self.settings.walk
        for _ in range(self.settings.rounds):
            trainings = {name: self.training(name) for name in self.settings.policies}
            for name in self.settings.oracles:
                known = {n * part: splits[tuple(each)][name] for n, each in enumerate(parts_)}
                trainings[f"oracle {name}"] = Balanced(self, Fixed(known))
            for number, speeds in enumerate(parts_, start=1):
                self.set_speeds(speeds)
                self.take_turns(trainings, number * part)
            self.report(trainings)

    def candidates(self, speeds: Sequence[float]) -> dict[str, Split]:
        """Return the candidates for the best split at these speeds."""
        found = {"cores": parts(speeds, self.settings.global_batch)}
        if "lines" in self.settings.oracles:
            found["lines"] = self.best_by_lines(speeds)
        return {name: found[name] for name in self.settings.oracles}

    def best_by_lines(self, speeds: Sequence[float]) -> Split:
        """Return the best split by ready lines that are measured apart, nearer and nearer to it."""
        total, seen = self.settings.global_batch, list[Observation]()
        best = torch.tensor(parts(speeds, total))
        for factor in _FACTORS[: self.settings.calibrations]:
            splits = [parts(weights, total) for weights in spread(best.tolist(), factor)]
            seen += self.measured(splits)
            if self.worker == 0:
                limits = NO_BOUNDS.limits(self.workers)
                best[:] = torch.tensor(optimal_split(measured_model(seen), total, limits).split)
            dist.broadcast(best, 0)
        return tuple(best.tolist())

    def measured(self, splits: Sequence[Split]) -> list[Observation]:
        """Train with some splits, one after the other; return the steps, on worker 0."""
        schedule = {number * _CALIBRATION_STEPS: split for number, split in enumerate(splits)}
        with TemporaryDirectory() as folder:
            path = Path(folder) / "calibration.jsonl"
            training = Balanced(self, Fixed(schedule), path)
            for _ in range(_CALIBRATION_STEPS * len(splits)):
                training.step()
            training.close()
            rows = read_record(path).rows if self.worker == 0 else ()
        seen = [row.observation for row in rows if row.observation is not None]
        return [each for each in seen if each.step % _CALIBRATION_STEPS >= _NEW]

    def training(self, name: str) -> "Training":
        """Begin a training with a policy."""
        if name == "even":
            return Plain(self)
        if name == "static":
            return Balanced(self, Static(self.settings.speeds))
        return Balanced(self, policy_named(name))

    def fixed(self, split: Split) -> "Training":
        """Begin a training with a fixed split."""
        return Balanced(self, Fixed(split))

    def take_turns(self, trainings: "dict[str, Training]", steps: int) -> None:
        """Let trainings go on, a block of steps each, until all have made so many."""
        while left := [name for name, each in trainings.items() if self._unfinished(each, steps)]:
            self._turns.shuffle(left)
            for name in left:
                dist.barrier()
                trainings[name].advance(min(BLOCK, steps - len(trainings[name].step_s)))

    def _unfinished(self, training: "Training", steps: int) -> bool:
        most = min(steps, self.settings.even_steps) if isinstance(training, Plain) else steps
        return len(training.step_s) < most

    def report(self, trainings: "dict[str, Training]") -> None:
        """End trainings, and tell the benchmark of them."""
        for name, each in trainings.items():
            each.close()
            if self.worker == 0:
                send(label=name, step_s=each.step_s, splits=each.splits, predicted=each.predicted_s)

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Ask the lab for other speeds, and wait until it has them."""
        dist.barrier()
        if self.worker == 0:
            send(speeds=list(speeds))
        time.sleep(_APPLY_S)
        dist.barrier()


class Training:
    """A training under way."""

    def __init__(self, bench: Bench) -> None:
        torch.manual_seed(2)
        self.model = MODELS[bench.settings.model]()
        self.bench = bench
        self.step_s: list[float] = []
        self.splits: list[list[int]] = []
        self.predicted_s: list[float | None] = []
        """What was predicted at the beginning of each block; None: nothing."""

    def step(self) -> None:
        """Make one step."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""

    def advance(self, steps: int) -> None:
        """Make some steps, and note how long each takes."""
        self.note()
        before = time.perf_counter()
        for _ in range(steps):
            self.step()
            now = time.perf_counter()
            self.step_s.append(now - before)
            before = now

    def note(self) -> None:
        """Note what is known before a block."""


class Plain(Training):
    """DistributedDataParallel alone."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._shared = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        sampler: DistributedSampler[Any] = DistributedSampler(
            bench.data, bench.workers, bench.worker
        )
        local = bench.settings.global_batch // bench.workers
        self._loader = DataLoader(bench.data, local, sampler=sampler)
        self._steps = self._train()

    def step(self) -> None:
        """Make one step."""
        next(self._steps)

    def _train(self) -> Iterator[None]:
        while True:
            for inputs, targets in self._loader:
                _learn(self._shared, self._optimizer, inputs, targets)
                yield


class Balanced(Training):
    """Poise with a policy."""

    def __init__(self, bench: Bench, policy: Policy, record: Path | None = None) -> None:
        super().__init__(bench)
        batch = bench.settings.global_batch
        self._balancer = Balancer(batch, policy=policy, record=record)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        loader = DataLoader(bench.data, batch, shuffle=True)
        self._shared, self._optimizer, self._loader = self._balancer.prepare(
            self.model, optimizer, loader
        )
        self._steps = self._train()

    def step(self) -> None:
        """Make one step."""
        next(self._steps)

    def close(self) -> None:
        """Let go of the other workers."""
        self._balancer.close()

    def note(self) -> None:
        """Note the split and what worker 0 predicts of it."""
        plan = self._balancer.plan
        self.splits.append(list(plan.split))
        self.predicted_s.append(None if plan.forecast is None else plan.step_s)

    def _train(self) -> Iterator[None]:
        for _ in self._balancer.epochs(sys.maxsize):
            for inputs, targets in self._loader:
                _learn(self._shared, self._optimizer, inputs, targets)
                yield


def spread(speeds: Sequence[float], factor: float) -> list[list[float]]:
    """Return three kinds of shares; each worker has its own, less and more in another order."""
    lean = (1.0, 1 / factor, factor)
    return [
        [speed * lean[(worker + number) % len(lean)] for worker, speed in enumerate(speeds)]
        for number in range(len(lean))
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
    sys.stdout.flush()
    os._exit(0)  # taking an interpreter apart takes seconds on a tenth of a core

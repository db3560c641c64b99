"""Trainings of the asynchronous benchmark: five processes in a lab that make all of them."""

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from adaptive_setup import Say, data_file, random_file
from adaptive_tasks import accuracy, read_test
from asynchronous_tasks import KINDS, TASK, WORKERS, Turn, speeds
from asynchronous_worker import go_key, turn_key

from poise.cli.worker_messages import Message, receive
from poise.lab import Lab

_WORKER = Path(__file__).parent / "asynchronous_worker.py"
_STARTING = [0.1] * (1 + WORKERS)
"""Of a lab that is not to warn of too much."""
_SETTLED = 1 / 3
"""Part of a training after which local batches have settled."""
_MIX = 1000
"""More than there are levels, so that every seed and level has its own order."""


@dataclass(frozen=True)
class Amount:
    """How much to do."""

    levels: tuple[int, ...]
    seeds: tuple[int, ...]
    samples: int
    """Of each training."""
    target: float
    """The accuracy to reach, in parts of 1."""
    snapshots: int
    test_samples: int
    """For accuracy over time."""
    last_test_samples: int
    """For the accuracy at the end."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """The trainings that are compared."""
    random: bool = False
    """Whether the samples are random numbers, of which nothing can be learned."""


@dataclass(frozen=True)
class Point:
    """A training at one moment."""

    samples: int
    at_s: float
    """Since all workers are throttled and may begin."""
    file: str
    """The weights, until they are tested."""
    split: list[int]
    """Local batches, workers in their order."""
    staleness: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each worker, how many of its updates so far were so stale."""
    waited_s: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    busy_s: float = 0.0
    """Of the server."""
    accuracy: float = float("nan")


@dataclass(frozen=True)
class Trained:
    """One training from beginning to end."""

    points: list[Point]

    @property
    def final(self) -> float:
        """The accuracy after all samples."""
        return self.points[-1].accuracy

    @property
    def seconds(self) -> float:
        """The whole time."""
        return self.points[-1].at_s

    def seconds_to(self, target: float) -> float | None:
        """Return how long it takes to an accuracy, between tests by a line; None: never."""
        before_s, lower = 0.0, 0.0
        for point in self.points:
            if point.accuracy >= target:
                part = (target - lower) / (point.accuracy - lower)
                return before_s + (point.at_s - before_s) * part
            before_s, lower = point.at_s, point.accuracy
        return None

    @property
    def mean_staleness(self) -> dict[str, float]:
        """Each worker's mean over its updates, once local batches have settled."""
        whole = self.points[-1]
        begun = next(p for p in self.points if p.samples >= _SETTLED * whole.samples)
        return {
            worker: _mean_since(begun.staleness.get(worker, {}), seen)
            for worker, seen in sorted(whole.staleness.items())
        }


Runs = dict[tuple[int, int], dict[str, Trained]]
"""By level and seed, then by kind."""


class Field:
    """A server and its workers, which make one training after the other."""

    def __init__(self, lab: Lab, data: Path, folder: Path) -> None:
        self._lab = lab
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._messages: Iterator[tuple[int, Message]] = receive(
            lab.start(
                [str(_WORKER), str(self._store.port), str(data), str(folder)],
                stdout=PIPE,
                environment={"GLOO_SOCKET_IFNAME": "lo"},
            )
        )
        self._turns = 0
        self._free = float(len(os.sched_getaffinity(0)))
        """As a quota: none."""
        self._throttle(None)
        for _ in range(1 + WORKERS):
            self._await("ready")

    def train(self, turn: Turn, level: int) -> Trained:
        """Make one training with the quotas of a level; its weights are not tested yet."""
        turn = replace(turn, number=self._turns)
        self._put(asdict(turn))
        self._await("prepared")
        self._throttle(level)
        self._store.set(go_key(turn.number), str(time.monotonic()))
        points = self._await("points")
        self._throttle(None)
        return Trained([Point(**point) for point in points])

    def end(self) -> None:
        """Let all processes end."""
        self._put(None)
        for _ in self._messages:
            pass

    def _throttle(self, level: int | None) -> None:
        """Give the workers the quotas of a level; None: of none."""
        workers = [self._free] * WORKERS if level is None else speeds(level)
        self._lab.set_speeds([self._free, *workers])

    def _put(self, turn: dict[str, Any] | None) -> None:
        self._store.set(turn_key(self._turns), json.dumps(turn))
        self._turns += 1

    def _await(self, name: str) -> Any:
        """Wait for a message."""
        _, message = next(self._messages)
        return message[name]


@contextmanager
def started(amount: Amount, say: Say) -> Iterator[tuple[Field, Path]]:
    """Start all processes; gives them, and the file with the samples."""
    data = random_file(TASK.name) if amount.random else data_file(TASK.name, say)
    with TemporaryDirectory() as folder, Lab(_STARTING, from_start=True) as lab:
        field = Field(lab, data, Path(folder))
        say("server and workers are ready")
        yield field, data
        field.end()


def run(amount: Amount, say: Say) -> Runs:
    """Train in all ways that are compared; return the trainings with accuracies."""
    runs: Runs = {(level, seed): {} for level in amount.levels for seed in amount.seeds}
    with started(amount, say) as (field, data):
        for (level, seed), found in runs.items():
            every = random.Random(seed * _MIX + level).sample(list(KINDS), len(KINDS))
            for kind in (kind for kind in every if kind in amount.kinds):
                turn = _turn(amount, kind, seed)
                found[kind] = tested(field.train(turn, level), data, amount)
                say(f"HL{level} seed {seed} {kind}: {_summary(found[kind])}")
    return {key: {kind: found[kind] for kind in amount.kinds} for key, found in runs.items()}


def sweep(
    amount: Amount, choices: Sequence[tuple[float, float]], kind: str, say: Say
) -> list[tuple[float, float, list[float]]]:
    """Train with several learning rates and momentums, in one way, at the first level.

    Returns each with its accuracy for every seed.
    """
    results = []
    with started(amount, say) as (field, data):
        for rate, momentum in choices:
            finals = []
            for seed in amount.seeds:
                turn = _turn(amount, kind, seed)
                turn = replace(turn, learning_rate=rate, momentum=momentum)
                trained = tested(field.train(turn, amount.levels[0]), data, amount)
                finals.append(trained.final)
                say(f"learning rate {rate:g}, momentum {momentum:g}: {_summary(trained)}")
            results.append((rate, momentum, finals))
    return results


def tested(trained: Trained, data: Path, amount: Amount) -> Trained:
    """Test all weights that were kept, while nothing trains."""
    torch.set_num_threads(1)  # two are slower here on anything but an idle machine
    model, inputs, targets = TASK.model(), *read_test(data)
    points = []
    for point in trained.points:
        last = point is trained.points[-1]
        samples = amount.last_test_samples if last else amount.test_samples
        file = Path(point.file)
        found = accuracy(model, np.load(file), inputs[:samples], targets[:samples])
        points.append(replace(point, accuracy=found, file=""))
        file.unlink()
    return Trained(points)


def _turn(amount: Amount, kind: str, seed: int) -> Turn:
    return Turn(number=0, kind=kind, seed=seed, samples=amount.samples, snapshots=amount.snapshots)


def _summary(trained: Trained) -> str:
    last = trained.points[-1]
    stale = " ".join(f"{each:.1f}" for each in trained.mean_staleness.values())
    text = f"{trained.final:.2%} after {last.samples} samples, {trained.seconds:.1f} s"
    return f"{text}, last split {last.split}" + (f", staleness {stale}" if stale else "")


def _mean_since(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Return the mean of a histogram without what was in it before."""
    counts = {int(key): count - before.get(key, 0) for key, count in after.items()}
    total = sum(counts.values())
    return sum(stale * count for stale, count in counts.items()) / total if total else float("nan")

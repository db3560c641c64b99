"""Runs of the adaptive benchmark: two labs whose trainings take turns, then tests."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch.distributed as dist
from adaptive_setup import Say, adaptdl_python, data_file, random_file
from adaptive_tasks import Task, accuracy, read_test
from adaptive_turns import Block, Settings, turn_key
from options import Effort

from poise.cli.worker_messages import Message, receive
from poise.lab import Lab
from poise.sim.scenes import CORES

TOTAL_CORES = 1.35
SPEEDS = [TOTAL_CORES * each / sum(CORES[8]) for each in CORES[8]]
"""Of the workers, in cores: heterogeneity level 8."""
BLOCK_S = 1.8
"""How long a turn takes, about."""
PEER = "adaptdl"

_HERE = Path(__file__).parent
_FIRST_STEPS = 4
_STARTING = [0.5] * len(SPEEDS)
"""Cores of workers while they start and end, which is no part of a training."""
_LAST = 3
"""Tests of which the final accuracy is the mean."""
_SMOOTHED = 1
"""Neighbors on each side that a smoothed accuracy is the mean with."""


@dataclass(frozen=True)
class Amount:
    """How much to do."""

    samples: int
    target: float
    fixed_batches: tuple[int, ...]
    snapshots: int
    test_samples: int
    """For accuracy over time."""
    last_test_samples: int
    """For the accuracy at the end."""
    alone: bool = False
    """Whether nothing is fetched: the samples are random numbers, and AdaptDL is left out."""

    @staticmethod
    def of(task: Task, effort: Effort) -> "Amount":
        """Return how much of a task to do."""
        if effort == "smoke":
            fixed = task.fixed_batches[:1]
            return Amount(20 * task.global_batch, 0.001, fixed, 4, 100, 100, alone=True)
        if effort == "quick":
            return Amount(task.quick_samples, task.quick_target, task.quick_batches, 10, 1000, 2000)
        return Amount(task.samples, task.target, task.fixed_batches, 20, 4000, 10_000)

    def data(self, task: Task, say: Say) -> Path:
        """Return the file with the samples."""
        return random_file(task.name) if self.alone else data_file(task.name, say)


@dataclass
class Trained:
    """One training from beginning to end, as worker 0 saw it."""

    step_s: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """The global batch of each step."""
    states: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Steps made so far, and what the training said of itself then."""
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    """Steps made so far, and the accuracy then."""
    last_accuracies: list[float] = field(default_factory=list)
    """Those of the last tests."""
    files: list[tuple[int, str]] = field(default_factory=list)
    """The weights that are yet to be tested."""

    def add(self, block: Block) -> None:
        """Add one turn."""
        done = len(self.step_s)
        self.step_s += block.step_s
        self.batches += block.batches
        self.files += [(done + steps, file) for steps, file in block.snapshots]
        self.states.append((len(self.step_s), block.state))

    @property
    def smoothed(self) -> list[float]:
        """The accuracies, each as its mean with those before and after it."""
        plain = [value for _, value in self.accuracies]
        ends = ((max(0, at - _SMOOTHED), at + _SMOOTHED + 1) for at in range(len(plain)))
        return [float(np.mean(plain[low:high])) for low, high in ends]

    @property
    def final(self) -> float:
        """The accuracy at the end, as the mean of the last tests."""
        return float(np.mean(self.last_accuracies))

    def seconds(self, steps: int | None = None) -> float:
        """Return the time of the first steps, or of all."""
        return sum(self.step_s[:steps])

    def steps_to(self, target: float) -> float | None:
        """Return after how many steps an accuracy is reached, between two tests by a line."""
        before, lower = 0.0, 0.0
        for (steps, _), value in zip(self.accuracies, self.smoothed, strict=True):
            if value >= target:
                return before + (steps - before) * (target - lower) / (value - lower)
            before, lower = steps, value
        return None

    def seconds_to(self, target: float) -> float | None:
        """Return how long it takes to reach an accuracy; None: it is never reached."""
        return self._until(self.step_s, target)

    def samples_to(self, target: float) -> float | None:
        """Return how many samples it takes."""
        return self._until(self.batches, target)

    def _until(self, amounts: Sequence[float], target: float) -> float | None:
        steps = self.steps_to(target)
        if steps is None:
            return None
        sums = np.concatenate([[0.0], np.cumsum(amounts)])
        return float(np.interp(steps, np.arange(len(sums)), sums))


Runs = dict[str, Trained]
"""By the name of the training."""


def run(task: Task, amount: Amount, seed: int, say: Say) -> Runs:
    """Train in all ways that are compared, with one seed; return the trainings with accuracies."""
    poise = ["ddp", *(f"fixed {batch}" for batch in amount.fixed_batches), "adaptive"]
    data = amount.data(task, say)
    with TemporaryDirectory() as folder:
        settings = Settings(
            task=task.name,
            seed=seed,
            data=str(data),
            trainings=poise,
            samples=amount.samples,
            snapshots=amount.snapshots,
            folder=folder,
            port=0,
        )
        runs = _train(settings, None if amount.alone else adaptdl_python(say), say)
        say("testing")
        _test(task, amount, data, runs)
    return runs


class Members:
    """The workers of one lab, which train when told to."""

    def __init__(self, lab: Lab, arguments: Sequence[str], settings: Settings) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        placed = json.dumps(asdict(replace(settings, port=self._store.port)))
        self._messages: Iterator[tuple[int, Message]] = receive(
            lab.start([*arguments, placed], stdout=PIPE)
        )
        self._turns = 0

    def await_ready(self) -> None:
        """Wait until they can begin."""
        next(self._messages)

    def train(self, name: str, steps: int) -> Block:
        """Let one training make some steps."""
        self._put({"name": name, "steps": steps})
        _, message = next(self._messages)
        return Block(**message)

    def end(self) -> None:
        """Let them end."""
        self._put(None)
        for _ in self._messages:
            pass

    def _put(self, turn: dict[str, Any] | None) -> None:
        self._store.set(turn_key(self._turns), json.dumps(turn))
        self._turns += 1


def _train(settings: Settings, peer_python: Path | None, say: Say) -> Runs:
    """Start the labs, and let all trainings take turns until all are over.

    Without a Python for AdaptDL there is one lab, and AdaptDL does not take part.
    """
    commands: list[tuple[list[str], Settings]] = [([str(_HERE / "adaptive_worker.py")], settings)]
    if peer_python is None:
        say("AdaptDL, which has an environment of its own, does not take part")
    else:
        peer = [str(_HERE / "adaptive_adaptdl.py"), "--python", str(peer_python)]
        commands.append((peer, replace(settings, trainings=[PEER])))
    with ExitStack() as stack:
        labs = [stack.enter_context(Lab(_STARTING, from_start=True)) for _ in commands]
        everyone = [Members(lab, *each) for lab, each in zip(labs, commands, strict=True)]
        for members in everyone:
            members.await_ready()
        for lab in labs:
            lab.set_speeds(SPEEDS)
        say("all workers are ready")
        placed = zip(everyone, commands, strict=True)
        where = {name: members for members, (_, own) in placed for name in own.trainings}
        runs = _take_turns(where, settings.seed, say)
        for lab in labs:
            lab.set_speeds(_STARTING)
        for members in everyone:
            members.end()
    return runs


def _take_turns(where: dict[str, Members], seed: int, say: Say) -> Runs:
    runs: Runs = {name: Trained() for name in where}
    left, order = list(where), random.Random(seed)
    while left:
        order.shuffle(left)
        for name in list(left):
            block = where[name].train(name, _steps_of_turn(runs[name]))
            runs[name].add(block)
            if block.over:
                left.remove(name)
                say(_summary(name, runs[name]))
    return runs


def _steps_of_turn(trained: Trained) -> int:
    if not trained.step_s:
        return _FIRST_STEPS
    recent = trained.step_s[-_FIRST_STEPS:]
    return max(_FIRST_STEPS, round(BLOCK_S / float(np.median(recent))))


def _summary(name: str, trained: Trained) -> str:
    steps, batch = len(trained.step_s), trained.batches[-1]
    return f"{name}: {trained.seconds():.1f} s, {steps} steps, last global batch {batch}"


def _test(task: Task, amount: Amount, data: Path, runs: Runs) -> None:
    """Test all weights that were kept, now that no training is disturbed by it."""
    model, inputs, targets = task.model(), *read_test(data)

    def tested(file: str, samples: int) -> float:
        return accuracy(model, np.load(file), inputs[:samples], targets[:samples])

    for trained in runs.values():
        files, last = trained.files, trained.files[-_LAST:]
        trained.accuracies = [(steps, tested(file, amount.test_samples)) for steps, file in files]
        trained.last_accuracies = [tested(file, amount.last_test_samples) for _, file in last]
        trained.files = []

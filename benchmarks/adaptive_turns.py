"""Trainings that take turns when the benchmark says so, whatever library trains.

Needs torch and numpy alone, so that another library's environment can import it too. The benchmark
puts turns into a store; all workers read them there. Worker 0 answers on standard output, one JSON
object per line, and puts weights into files.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from adaptive_tasks import TASKS, Task, weights
from torch import nn

_PATIENCE = timedelta(hours=1)
"""Other trainings may have long turns."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train, the same on all workers."""

    task: str
    seed: int
    data: str
    """The file with the samples."""
    trainings: list[str]
    """Their names: "ddp", "fixed 128", "adaptive", "adaptdl"."""
    samples: int
    """After which a training is over."""
    snapshots: int
    """How often its weights are kept, at equal distances."""
    folder: str
    """Where weights go."""
    port: int
    """Of the store with the turns."""

    @property
    def the_task(self) -> Task:
        """The task itself."""
        return TASKS[self.task]


@dataclass
class Block:
    """What a training did in one turn, as worker 0 saw it."""

    name: str
    step_s: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """The global batch of each step."""
    snapshots: list[tuple[int, str]] = field(default_factory=list)
    """Steps of this block after which weights were kept, and their files."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the training says of itself afterwards."""
    over: bool = False


class Training:
    """A training under way, to be advanced turn by turn."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.name = name
        self.settings = settings
        self.task = settings.the_task
        self.model: nn.Module = self.task.new_model(settings.seed)
        self.samples = 0
        self.left_out_s = 0.0
        """Time of the step under way that does not count."""
        self._kept = 0
        self._steps: Iterator[int] | None = None

    def train(self) -> Iterator[int]:
        """Train for ever; yield after each step how many samples it took, over all workers."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what can be told of the training now."""
        return {}

    def resume(self) -> None:
        """Get ready for a turn, after others had theirs."""

    def close(self) -> None:
        """End it."""

    def advance(self, steps: int) -> Block:
        """Make so many steps, or fewer if the training is over then."""
        self._steps = self._steps or self.train()
        block = Block(self.name)
        self.resume()
        for _ in range(steps):
            self.left_out_s = 0.0
            begun_s = time.perf_counter()
            batch = next(self._steps)
            block.step_s.append(time.perf_counter() - begun_s - self.left_out_s)
            block.batches.append(batch)
            self.samples += batch
            self._keep_weights(block)
            if self.samples >= self.settings.samples:
                block.over = True
                break
        block.state = self.state()
        return block

    def _keep_weights(self, block: Block) -> None:
        due = self.samples * self.settings.snapshots // self.settings.samples
        if due > self._kept:
            self._kept = due
            if dist.get_rank() == 0:
                file = Path(self.settings.folder) / f"{self.name} {self.samples}.npy"
                np.save(file, weights(self.model))
                block.snapshots.append((len(block.step_s), str(file)))


def serve(trainings: Mapping[str, Training], settings: Settings) -> None:
    """Take turns until there are no more."""
    store = dist.TCPStore("127.0.0.1", settings.port, is_master=False, timeout=_PATIENCE)
    _tell({"ready": True})
    number = 0
    while turn := json.loads(store.get(turn_key(number))):
        dist.barrier()
        _tell(asdict(trainings[turn["name"]].advance(turn["steps"])))
        number += 1
    for training in trainings.values():
        training.close()
    dist.barrier()


def turn_key(number: int) -> str:
    """Return where in the store a turn is to be found."""
    return f"turn {number}"


def _tell(message: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

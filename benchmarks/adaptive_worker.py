"""One worker of the adaptive benchmark: plain DistributedDataParallel and Poise take turns.

Run by `adaptive.py` in a lab, with the settings as JSON.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adaptive_tasks import learn, read_train
from adaptive_turns import Settings, Training, serve
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from poise.torch import Balancer

_COST_BLOCK = 8
"""Steps of one turn in which costs are compared,"""
_WARM_UP = 3
"""and turns that say nothing of them."""


def main(settings: Settings) -> None:
    """Train whatever the settings name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = read_train(Path(settings.data))
    serve({name: training(settings, name, data) for name in settings.trainings}, settings)
    dist.destroy_process_group()


def training(settings: Settings, name: str, data: "Dataset[Any]") -> Training:
    """Begin the training with this name."""
    kind, _, batch = name.partition(" ")
    if kind == "ddp":
        return Plain(settings, name, data)
    if kind == "fixed":
        return Balanced(settings, name, data, int(batch))
    task = settings.the_task
    return Balanced(settings, name, data, task.global_batch, adapt=task.adapt)


class Plain(Training):
    """DistributedDataParallel alone."""

    def __init__(self, settings: Settings, name: str, data: "Dataset[Any]") -> None:
        super().__init__(settings, name)
        self._workers = dist.get_world_size()
        self._shared = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._optimizer = self.task.optimizer(self.model, self.task.learning_rate)
        self._sampler: DistributedSampler[Any] = DistributedSampler(data, seed=settings.seed)
        local = self.task.global_batch // self._workers
        self._loader = DataLoader(data, local, sampler=self._sampler)

    def train(self) -> Iterator[int]:
        """Train for ever."""
        for epoch in range(sys.maxsize):
            self._sampler.set_epoch(epoch)
            for inputs, targets in self._loader:
                learn(self._shared, self._optimizer, inputs, targets)
                yield len(inputs) * self._workers


class Balanced(Training):
    """Poise, with a fixed global batch or within a range."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        data: "Dataset[Any]",
        global_batch: int,
        **options: Any,
    ) -> None:
        super().__init__(settings, name)
        self.balancer = Balancer(global_batch, seed=settings.seed, **options)
        self._adapts = "adapt" in options
        optimizer = self.task.optimizer(self.model, self.task.learning_rate_of(global_batch))
        loader = DataLoader(data, global_batch, shuffle=True)
        self._shared, self._optimizer, self._loader = self.balancer.prepare(
            self.model, optimizer, loader
        )

    def train(self) -> Iterator[int]:
        """Train for ever."""
        before = 0
        for _ in self.balancer.epochs(sys.maxsize):
            for inputs, targets in self._loader:
                learn(self._shared, self._optimizer, inputs, targets)
                after = self.balancer.samples
                yield after - before
                before = after

    def state(self) -> dict[str, Any]:
        """Return the split and, where it adapts, noise and learning rate."""
        found: dict[str, Any] = {"split": list(self.balancer.plan.split)}
        if self._adapts:
            noise = self.balancer.noise
            found["noise"] = None if noise is None else noise.scale
            found["lr_factor"] = self.balancer.learning_rate_factor
        return found

    def close(self) -> None:
        """Let go of the other workers."""
        self.balancer.close()


def measuring_cost(settings: Settings, rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of blocks of steps, over all workers, by what is done in them.

    "plain" and "again" train with a fixed batch, "measured" measures the noise but has a range of
    one batch, so that all three do the same apart from that. They make a block of steps each in
    turns: not every step is looked at. All of them balance; workers are equal, so that the sum
    does not depend on the split.
    """
    data, batch = read_train(Path(settings.data)), settings.the_task.global_batch
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "again": {}, "measured": {}}
    kinds["measured"]["adapt"] = (batch, batch)
    trainings = {
        name: Balanced(settings, name, data, batch, **options) for name, options in kinds.items()
    }
    steps = {name: each.train() for name, each in trainings.items()}
    spent = torch.zeros(rounds, len(steps))
    names, order = list(steps), random.Random(0)
    for number in range(-_WARM_UP, rounds):
        for place in order.sample(range(len(names)), len(names)):
            dist.barrier()
            begun_s = time.process_time()
            for _ in range(_COST_BLOCK):
                next(steps[names[place]])
            if number >= 0:
                spent[number, place] = time.process_time() - begun_s
    dist.all_reduce(spent)
    for each in trainings.values():
        each.close()
    return {name: spent[:, place].tolist() for place, name in enumerate(names)}


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # taking an interpreter apart takes seconds on a tenth of a core

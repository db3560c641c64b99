"""One process of the asynchronous benchmark: the server, number 0, or one of its workers.

Run by `asynchronous_runs.py` in a lab, with the port of a store, the file with the samples and a
folder for weights. It makes one training after the other, as the store says. Synchronous trainings
have no server: the same workers make them, and process 0 waits for its next turn.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from adaptive_tasks import learn, read_train, weights
from asynchronous_tasks import GLOBAL_BATCH, KINDS, SYNC, WORKERS, Turn
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from poise.cli.worker_messages import send
from poise.errors import PoiseWarning
from poise.torch import Balancer, BySamples
from poise.torch.asynchronous.role import Serving, serving_as
from poise.torch.asynchronous.service import Service

_PATIENCE = timedelta(hours=1)
"""Others may take long."""


@dataclass
class Kept:
    """Weights at equal distances in samples, with what was known then."""

    turn: Turn
    model: nn.Module
    points: list[dict[str, Any]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """The weights of each point."""

    def due(self, samples: int) -> bool:
        """Whether to keep the weights now."""
        return samples * self.turn.snapshots // self.turn.samples > len(self.points)

    def keep(self, samples: int, known: Mapping[str, Any]) -> None:
        """Keep the weights."""
        self.points.append({"samples": samples, "at_s": time.monotonic(), **known})
        self.values.append(weights(self.model))

    def tell(self, begun_s: float, folder: Path) -> None:
        """Put the weights into files, and tell the benchmark of them."""
        for point, values in zip(self.points, self.values, strict=True):
            file = folder / f"{self.turn.number} {point['samples']}.npy"
            np.save(file, values)
            point |= {"file": str(file), "at_s": point["at_s"] - begun_s}
        send(points=self.points)


class _Keeping:
    """Keeps weights on a server: takes the place of a scheduler, which advances by samples."""

    def __init__(self, balancer: Balancer, kept: Kept) -> None:
        self._balancer, self._kept = balancer, kept

    def step(self) -> None:
        """Keep the weights, once where several are due."""
        if self._kept.due(self._balancer.samples):
            self._kept.keep(self._balancer.samples, {})


class _Services:
    """Tells points what the server shows: about every second, and when all is pushed."""

    def __init__(self) -> None:
        self._kept: Kept | None = None
        self._told = 0

    def follow(self, kept: Kept) -> None:
        """From now on, tell these points."""
        self._kept = kept

    def __call__(self, service: Service) -> None:
        """Tell the points that were kept since the last time."""
        if self._kept is not None:
            for point in self._kept.points[self._told :]:
                point.update(_known(service))
            self._told = len(self._kept.points)


def main(port: int, data: "Dataset[Any]", folder: Path) -> None:
    """Make trainings until there are no more."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PoiseWarning)  # that momentum is lowered, 60 times
    process = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
    if process:
        group = dist.PrefixStore("workers", store)
        dist.init_process_group("gloo", store=group, rank=process - 1, world_size=WORKERS)
        dist.barrier()
    _warm_up(data)
    send(ready=True)
    number = 0
    while stated := json.loads(store.get(turn_key(number))):
        turn = Turn(**stated)
        chosen = np.random.default_rng(turn.seed).permutation(len(data))[: turn.samples]  # type: ignore[arg-type]
        own = Subset(data, chosen.tolist())
        if process:
            _work(turn, own, store, folder)
        elif turn.kind != SYNC:
            _serve(turn, own, store, folder)
        number += 1
    if process:
        dist.barrier()
        dist.destroy_process_group()


def turn_key(number: int) -> str:
    """Return where in the store a turn is to be found."""
    return f"turn {number}"


def go_key(number: int) -> str:
    """Return where in the store it says when a turn's training has begun."""
    return f"go {number}"


def _warm_up(data: "Dataset[Any]") -> None:
    """Make a step, since the first of a process loads and sets up what others find there."""
    turn = Turn(number=0, kind=SYNC, seed=0, samples=0, snapshots=0)
    model = turn.model()
    inputs, targets = next(iter(DataLoader(data, GLOBAL_BATCH // WORKERS)))
    learn(model, turn.optimizer(model), inputs, targets)


def _address_key(number: int) -> str:
    return f"address {number}"


def _serve(turn: Turn, data: "Dataset[Any]", store: dist.Store, folder: Path) -> None:
    """Be the server of one training."""

    def announce(address: str) -> None:
        store.set(_address_key(turn.number), address)

    services = _Services()
    with serving_as(Serving(workers=WORKERS, announce=announce, show=services)):
        balancer, model, optimizer, loader = _prepared(turn, data)
    kept = Kept(turn, model)
    services.follow(kept)
    turn.schedule(optimizer, balancer)  # which the server follows by itself, as the next one
    BySamples(_Keeping(balancer, kept), balancer, turn.samples // turn.snapshots)
    for _ in balancer.epochs(1):
        for _ in loader:
            pass
    balancer.close()
    kept.tell(float(store.get(go_key(turn.number))), folder)


def _known(service: Service) -> dict[str, Any]:
    """Return what the server knows of its workers."""
    tallies = dict(service.gone) | {each.worker: each.tally for each in service.workers}
    return {
        "updates": service.updates,
        "busy_s": service.busy_s,
        "split": [each.local_batch for each in sorted(service.workers, key=lambda w: w.worker)],
        "staleness": {worker: dict(tally.staleness) for worker, tally in tallies.items()},
        "waited_s": {worker: tally.waited_s for worker, tally in tallies.items()},
    }


def _work(turn: Turn, data: "Dataset[Any]", store: dist.Store, folder: Path) -> None:
    """Be one of the workers of one training."""
    synchronous = turn.kind == SYNC
    if not synchronous:
        os.environ["POISE_SERVER"] = store.get(_address_key(turn.number)).decode()
    balancer, model, optimizer, loader = _prepared(turn, data)
    os.environ.pop("POISE_SERVER", None)
    schedule = turn.schedule(optimizer, balancer)
    plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    kept = Kept(turn, plain) if synchronous and balancer.worker == 0 else None
    dist.barrier()
    if dist.get_rank() == 0:
        send(prepared=True)
    begun_s = float(store.get(go_key(turn.number)))
    for _ in balancer.epochs(1):
        for inputs, targets in loader:
            learn(model, optimizer, inputs, targets)
            schedule.step()
            if kept is not None and kept.due(balancer.samples):
                kept.keep(balancer.samples, {"split": list(balancer.plan.split)})
    balancer.close()
    dist.barrier()
    if kept is not None:
        kept.tell(begun_s, folder)


def _prepared(turn: Turn, data: "Dataset[Any]") -> tuple[Balancer, nn.Module, Any, Any]:
    model = turn.model()
    balancer = Balancer(GLOBAL_BATCH, seed=turn.seed, **KINDS[turn.kind])
    loader = DataLoader(data, GLOBAL_BATCH, shuffle=True)
    return balancer, *balancer.prepare(model, turn.optimizer(model), loader)


if __name__ == "__main__":
    main(int(sys.argv[1]), read_train(Path(sys.argv[2])), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # taking an interpreter apart takes seconds on a tenth of a core

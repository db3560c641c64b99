"""How many updates a server makes in a second, with workers that only push."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from adaptive_setup import Say
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from workers import run_workers

from poise.engine.modes import Async
from poise.torch import Balancer
from poise.torch.asynchronous.role import Serving, serving_as
from poise.torch.asynchronous.service import Service

MEGABYTE = 1_000_000
_FLOAT = 4
_ROWS = 10
_LIMIT_S = 900.0
_GROWS = 1.1
"""More workers that raise the rate by less than this factor are in vain."""


@dataclass(frozen=True)
class Loaded:
    """A server with so many workers, over some seconds."""

    workers: int
    megabytes: float
    """Of the model."""
    updates_per_s: float
    busy: float
    """Part of the time in which it held the weights, to apply a gradient or to copy them."""
    cores: float
    """CPU that it used."""

    @property
    def limit(self) -> float:
        """Updates/s at which it would hold the weights all the time or use all cores."""
        free = len(os.sched_getaffinity(0))
        most = min(1 / self.busy if self.busy else free, free / self.cores if self.cores else free)
        return self.updates_per_s * most


def measured(
    workers: Sequence[int], megabytes: Sequence[float], seconds: int, say: Say
) -> list[Loaded]:
    """Return how servers do with each number of workers and each size of the model."""
    say(f"server: starting {max(workers)} workers that only push")
    # All are started once, since that takes longer than what is measured; some then only wait.
    results = run_workers(
        _push, workers, megabytes, seconds, workers=1 + max(workers), limit_s=_LIMIT_S
    )
    return [Loaded(**each) for each in results[0]]


def enough(of_one_size: Sequence[Loaded]) -> Loaded:
    """Return the first after which more workers bring little; the last if all bring much."""
    for fewer, more in pairwise(of_one_size):
        if more.updates_per_s < _GROWS * fewer.updates_per_s:
            return fewer
    return of_one_size[-1]


class _Enough(Exception):
    """The server has been looked at for long enough."""


class _Numbers(Dataset[Tensor]):
    """Samples that cost nothing, more than are ever used."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


class _Watch:
    """Notes what the server did, from when all workers are there and have warmed up."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._seen: list[tuple[Service, float, float]] = []

    def __call__(self, service: Service) -> None:
        """Look at the server, about every second."""
        if service.waiting_for or not service.updates:
            return
        self._seen.append((service, time.monotonic(), time.process_time()))
        if len(self._seen) > 1 + self._seconds:
            raise _Enough

    def loaded(self, megabytes: float) -> dict[str, Any]:
        """Return what was found."""
        before, begun_s, begun_cpu_s = self._seen[1]
        after, end_s, end_cpu_s = self._seen[-1]
        took_s = end_s - begun_s
        return {
            "workers": len(after.workers),
            "megabytes": megabytes,
            "updates_per_s": (after.updates - before.updates) / took_s,
            "busy": (after.busy_s - before.busy_s) / took_s,
            "cores": (end_cpu_s - begun_cpu_s) / took_s,
        }


def _push(workers: Sequence[int], megabytes: Sequence[float], seconds: int) -> list[dict[str, Any]]:
    """Be process 0, the server, or a worker that pushes random gradients without computing."""
    found = []
    for size, count in product(megabytes, workers):
        if dist.get_rank() == 0:
            watch = _Watch(seconds)
            _serve(count, size, watch)
            found.append(watch.loaded(size))
        else:
            _work(count, size)
        dist.barrier()
    return found


def _serve(workers: int, megabytes: float, watch: _Watch) -> None:
    def announce(address: str) -> None:
        _share(address)

    with serving_as(Serving(workers=workers, announce=announce, show=watch)):
        balancer, _, loader = _prepared(workers, megabytes)
    try:
        for _ in loader:
            pass
    except _Enough:
        balancer.close()


def _work(workers: int, megabytes: float) -> None:
    address = _share(None)
    if dist.get_rank() > workers:
        return
    os.environ["POISE_SERVER"] = address
    balancer, optimizer, loader = _prepared(workers, megabytes)
    del os.environ["POISE_SERVER"]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    for _ in balancer.epochs(1):
        for _ in loader:
            optimizer.step()
    balancer.close()


def _prepared(workers: int, megabytes: float) -> tuple[Balancer, torch.optim.Optimizer, Any]:
    model = nn.Linear(round(megabytes * MEGABYTE / _FLOAT / _ROWS), _ROWS, bias=False)
    balancer = Balancer(workers, policy="even", mode=Async(damped=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    _, _, loader = balancer.prepare(model, optimizer, DataLoader(_Numbers(), workers))
    return balancer, optimizer, loader


def _share(address: str | None) -> str:
    """Tell all processes the server's address; only the server knows it."""
    shared = [address]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None
    return shared[0]

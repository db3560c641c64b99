"""This worker's place among the others, and the process groups they talk through."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from poise.environment import launched_as


@dataclass(frozen=True)
class Cluster:
    """Who this worker is, and its connections.

    Gradients and control travel in groups of their own: within one group, two operations that
    cross on one worker give wrong sums without an error.
    """

    worker: int
    workers: int
    gradients: dist.ProcessGroup
    control: dist.ProcessGroup
    """Always gloo, for small tensors on the CPU."""
    store: Store
    owns_world: bool
    """Whether the default group was made here, to be destroyed at the end."""

    @staticmethod
    def join(hang_s: float | None) -> "Cluster":
        """Join the group that exists, or that the launcher describes, or be the only worker."""
        timeout = None if hang_s is None else timedelta(seconds=hang_s)
        owns_world = not dist.is_initialized()
        if owns_world:
            _init_world(timeout)
            gradients = dist.group.WORLD
        else:
            gradients = dist.group.WORLD if timeout is None else dist.new_group(timeout=timeout)
        assert gradients is not None
        worker = dist.get_rank()
        return Cluster(
            worker=worker,
            workers=dist.get_world_size(),
            gradients=gradients,
            control=dist.new_group(backend="gloo", timeout=timeout),
            store=_own_store(worker),
            owns_world=owns_world,
        )

    @property
    def on_accelerator(self) -> bool:
        """Whether gradients travel between accelerators."""
        return dist.get_backend(self.gradients) != "gloo"

    def leave(self) -> None:
        """Destroy the groups made here; the user's own group stays."""
        if not dist.is_initialized():
            return
        if self.owns_world:
            dist.destroy_process_group()
            return
        dist.destroy_process_group(self.control)
        if self.gradients is not dist.group.WORLD:
            dist.destroy_process_group(self.gradients)


def _init_world(timeout: timedelta | None) -> None:
    backend = None if torch.accelerator.is_available() else "gloo"
    if launched_as() is None:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def _own_store(worker: int) -> Store:
    """Return a part of the store that no other Balancer of this group uses."""
    shared = dist.distributed_c10d._get_default_store()
    joined = shared.add(f"poise/joined/{worker}", 1)
    return PrefixStore(f"poise/{joined}", shared)

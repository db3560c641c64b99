"""This worker's place among the others, and the process groups they talk through."""

import gc
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from poise.environment import Launch, launched_as
from poise.errors import WorkerLost


@dataclass
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
    on_accelerator: bool
    """Whether gradients travel between accelerators."""

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
            store=_own_part(dist.distributed_c10d._get_default_store(), "balancer", worker),
            owns_world=owns_world,
            on_accelerator=dist.get_backend(gradients) != "gloo",
        )

    def leave(self) -> None:
        """Destroy the groups made here; the user's own group stays.

        The last reference goes too, so that the threads of the groups end here and not while
        the interpreter shuts down, where one that still holds a callback aborts the process.
        """
        own = [self.control]
        if self.gradients is not dist.group.WORLD:
            own.append(self.gradients)
        del self.control, self.gradients
        if dist.is_initialized():
            if self.owns_world:
                dist.destroy_process_group()
            else:
                for group in own:
                    dist.destroy_process_group(group)
        del own
        gc.collect()


def _init_world(timeout: timedelta | None) -> None:
    backend = None if torch.accelerator.is_available() else "gloo"
    launch = launched_as()
    worker, workers = (launch.worker, launch.workers) if launch else (0, 1)
    try:
        store = HashStore() if launch is None else launch_store(launch, timeout)
        dist.init_process_group(
            backend,
            store=_own_part(store, "world", worker),
            rank=worker,
            world_size=workers,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise WorkerLost(
            f"worker {worker} could not meet all {workers} workers: "
            f"{str(error).splitlines()[0]}; look for one that failed before its Balancer"
        ) from error


_MET: dict[Launch, Store] = {}
"""Where this process met the others: once, since a second server on a port clashes."""


def launch_store(launch: Launch, timeout: timedelta | None) -> Store:
    """Meet the other workers where the launcher said."""
    limit = {} if timeout is None else {"timeout": timeout}
    if launch not in _MET:
        met = next(iter(dist.rendezvous("env://", launch.worker, launch.workers, **limit)))
        _MET[launch] = met[0]
    if timeout is not None:
        _MET[launch].set_timeout(timeout)
    return _MET[launch]


def _own_part(store: Store, name: str, worker: int) -> Store:
    """Return a part of the store that no earlier call for this name used."""
    joined = store.add(f"poise/{name}/{worker}", 1)
    return PrefixStore(f"poise/{name}/{joined}", store)

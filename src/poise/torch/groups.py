"""The process groups that this worker is in: those of its launcher, or of its own script."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroup, Store

from poise.core.liveness import Limits
from poise.environment import Launch, agent_hosts_store, launched_as
from poise.errors import WorkerLost
from poise.runtime.generation import Generation
from poise.torch.gloo import GlooCollectives, StoreRendezvous
from poise.torch.meeting import advice_on_meeting, meeting
from poise.torch.sockets import Sockets


class Groups:
    """This worker's connections: a world, and groups for control and for gradients."""

    def __init__(self, hang_s: float | None = None, silent_s: float = Limits.silent_s) -> None:
        """Join the group that exists, or that the launcher describes, or be the only worker."""
        self._timeout = None if hang_s is None else timedelta(seconds=hang_s)
        self._owns_world = not dist.is_initialized()
        """Whether the default group was made here, to be destroyed at the end."""
        self._sockets = Sockets()
        # Torch keeps to its limit, unless the process that hosts the store is stopped.
        limit_s = (hang_s or Limits.hang_s) + silent_s
        with self._sockets.opening(limit_s):
            control = _met(self._timeout, owns_world=self._owns_world)
            store = _own_part(default_store(), "balancer", dist.get_rank())
        port = _port_of(store)
        self.rendezvous = StoreRendezvous(store, _launcher_with_store(port), port, limit_s)
        self._sockets.count_store(port, spared=self.rendezvous.sockets)
        self._own: list[ProcessGroup] = [control]
        """Groups made here: that for control, always gloo, and perhaps one for gradients."""

    @property
    def generation(self) -> Generation:
        """The workers, of which nothing is known but their numbers."""
        return Generation(GlooCollectives(self._own[0], self._cut))

    def gradients(self, devices: Sequence[str]) -> ProcessGroup:
        """Return a group that can sum tensors on devices of these types, one of each worker.

        All workers call it together, with the same types.
        """
        world = dist.group.WORLD
        assert world is not None
        config, backend = str(dist.get_backend_config(world)), common_backend(devices)
        # A group of gloo that the script made cannot be ended from here when a worker is lost.
        limited = self._timeout is not None or backend == "gloo"
        if (self._owns_world or not limited) and _serves(config, devices):
            return world
        with self._sockets.opening():
            made: ProcessGroup = dist.new_group(backend=backend, timeout=self._timeout)
        self._own.append(made)
        return made

    def leave(self) -> None:
        """Destroy the groups made here; the user's own group stays.

        The last reference goes too, so that the threads of the groups end here and not while
        the interpreter shuts down, where one that still holds a callback aborts the process.
        """
        own, self._own = self._own, []
        if dist.is_initialized():
            if self._owns_world:
                dist.destroy_process_group()
            else:
                for group in own:
                    dist.destroy_process_group(group)
        del own
        gc.collect()
        self._sockets.forget()

    def _cut(self) -> None:
        """End what waits for other workers in these groups; called from any thread."""
        self._sockets.cut()
        for group in self._own:
            if group.name() != "gloo":  # whose abort does nothing
                group.abort()


def default_store() -> Store:
    """Return the store of the default group, which all workers share."""
    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()


def common_backend(devices: Sequence[str]) -> str:
    """Return a backend that all these types of devices have.

    >>> common_backend(["cpu", "cpu"]), common_backend(["cuda", "cpu"])
    ('gloo', 'gloo')
    """
    first, *others = sorted(set(devices))
    return "gloo" if others else str(dist.get_default_backend_for_device(first))


def _serves(config: str, devices: Sequence[str]) -> bool:
    """Whether a group of these backends, by device, sums tensors on all these devices.

    >>> both = "cpu:gloo,cuda:nccl"
    >>> _serves(both, ["cuda", "cuda"]), _serves(both, ["cuda", "cpu"])
    (True, False)
    """
    backends = dict(pair.split(":") for pair in config.split(","))
    needed = {backends.get(device) for device in devices}
    return len(needed) == 1 and None not in needed


def _met(timeout: timedelta | None, *, owns_world: bool) -> ProcessGroup:
    """Meet the others, and return a group for control.

    If there is no default group yet, it is made here, always of gloo, which workers on any device
    have.
    """
    launch = launched_as()
    if not owns_world:
        address = "" if launch is None else launch.address
        launch = Launch(dist.get_rank(), dist.get_world_size(), address)
    worker, workers = (launch.worker, launch.workers) if launch else (0, 1)
    limit_s = Limits.hang_s if timeout is None else timeout.total_seconds()
    try:
        if not owns_world:
            store = default_store()
        else:
            store = HashStore() if launch is None else launch_store(launch, timeout)
        part = _own_part(store, "world", worker)
        with nullcontext() if launch is None else meeting(part, launch, limit_s):
            if owns_world:
                dist.init_process_group(
                    "gloo", store=part, rank=worker, world_size=workers, timeout=timeout
                )
            control: ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
            return control
    except RuntimeError as error:
        raise WorkerLost(
            f"worker {worker} could not meet all {workers} workers: "
            f"{str(error).splitlines()[0]}; {advice_on_meeting(launch, str(error))}"
        ) from error


def _launcher_with_store(port: int | None) -> str | None:
    """Say which launcher hosts the store at a port; None: worker 0, or whoever the script chose."""
    launch = launched_as()
    if launch is None or not agent_hosts_store() or not launch.address.endswith(f":{port}"):
        return None
    return f"worker 0's launcher at {launch.address}"


def _port_of(store: Any) -> int | None:
    """Return the port at which a store is reached; None: at none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


_MET: dict[Launch, Store] = {}
"""Where this process met the others: once, since a second server on a port clashes."""


def launch_store(launch: Launch, timeout: timedelta | None) -> Store:
    """Meet the other workers where the launcher said."""
    limit = {} if timeout is None else {"timeout": timeout}
    if launch not in _MET:
        meeting = dist.rendezvous("env://", launch.worker, launch.workers, **limit)
        _MET[launch], _, _ = next(iter(meeting))
    if timeout is not None:
        _MET[launch].set_timeout(timeout)
    return _MET[launch]


def _own_part(store: Store, name: str, worker: int) -> Store:
    """Return a part of the store that no earlier call for this name used."""
    joined = store.add(f"poise/{name}/{worker}", 1)
    return PrefixStore(f"poise/{name}/{joined}", store)

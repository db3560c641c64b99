"""What this process is in a training: one of equal workers, a server, or a worker of a server."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from poise.engine.modes import Async, Mode, Stale, Sync, mode_of
from poise.environment import Launch, launched_as, server_address
from poise.errors import InvalidSetting, PoiseWarning
from poise.runtime.door import is_loopback
from poise.torch.asynchronous.service import Service
from poise.torch.groups import launch_store

LOOPBACK = "127.0.0.1"
_ADDRESS = "poise/server"
_MEETING = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a server serves."""

    host: str = LOOPBACK
    """The address that it listens on."""
    port: int = 0
    """0: any that is free."""
    workers: int = 1
    """Training starts when so many are there; others may join later."""
    closed: bool = False
    """Whether nobody takes the place of lost workers: without any, the server ends."""
    mode: Mode | None = None
    """None: as the script says, and else asynchronous."""
    save: Path | None = None
    """A file to which everything is saved, and from which a restart goes on; None: none."""
    save_every_s: float = 60.0
    show: Callable[[Service], None] | None = None
    """Is given what happens, about every second."""
    announce: Callable[[str], None] | None = None
    """Is given the address once the server listens."""


@dataclass(frozen=True)
class ServerRole:
    """This process is the server."""

    mode: Async | Stale
    serving: Serving


@dataclass(frozen=True)
class WorkerRole:
    """This process is a worker of a server."""

    address: str
    mode: Async | Stale | None
    """None: as the server says."""
    number: int | None
    """What its launcher calls it; None: nothing."""


_serving: list[Serving] = []
"""How the script that is being run is to serve; empty: it is not."""


@contextmanager
def serving_as(serving: Serving) -> Iterator[None]:
    """Make the Balancer of a script that is run inside a server."""
    _serving.append(serving)
    try:
        yield
    finally:
        _serving.remove(serving)


def role_of(stated: object) -> ServerRole | WorkerRole | None:
    """Return this process's part, by the mode its script states and by how it was started.

    None: it is one of equal workers.
    """
    mode = None if stated is None else mode_of(stated)
    launch = launched_as()
    if _serving:
        return _server(mode, _serving[-1])
    address = server_address()
    if address is not None:
        if isinstance(mode, Sync):
            raise InvalidSetting(
                f'mode="sync" has no server, but POISE_SERVER={address} says to join one; leave '
                'mode out or use mode="async", or unset POISE_SERVER'
            )
        number = None if launch is None else launch.worker
        return WorkerRole(address, mode, number or None)
    if mode is None or isinstance(mode, Sync):
        return None
    if launch is None or launch.workers == 1:
        warnings.warn(
            f'mode="{mode}" and no server: this process trains alone, as in mode="sync"; start '
            "`poise serve` and set POISE_SERVER to its address to train with others",
            PoiseWarning,
            stacklevel=4,
        )
        return None
    return _launched(mode, launch)


def _server(mode: Mode | None, serving: Serving) -> ServerRole:
    if mode is not None and serving.mode is not None and str(mode) != str(serving.mode):
        raise InvalidSetting(
            f'the script says mode="{mode}" and the command --mode {serving.mode}; say it once'
        )
    chosen = mode or serving.mode or Async()
    if isinstance(chosen, Sync):
        raise InvalidSetting(
            'mode="sync" has no server: start the workers with torchrun, or use mode="async"'
        )
    return ServerRole(chosen, serving)


def _launched(mode: Async | Stale, launch: Launch) -> ServerRole | WorkerRole:
    """Let worker 0 of a launcher be the server, and the others find it."""
    store = launch_store(launch, _MEETING)
    if launch.worker:
        return WorkerRole(store.get(_ADDRESS).decode(), mode, launch.worker)
    warnings.warn(
        f"worker 0 of the launcher is the server, and {launch.workers - 1} workers train; torchrun "
        "ends all of them when one dies: use `poise serve` where workers come and go",
        PoiseWarning,
        stacklevel=5,
    )
    host = launch.address.rpartition(":")[0]
    serving = Serving(
        host=LOOPBACK if is_loopback(host) else host,
        workers=launch.workers - 1,
        announce=lambda address: store.set(_ADDRESS, address),
    )
    return ServerRole(mode, serving)

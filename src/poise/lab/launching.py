"""Starting the processes of a lab, each in its place."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poise.environment import for_joining, for_secret, for_server, for_worker
from poise.lab.member import Member, launch
from poise.lab.network import Network
from poise.lab.processes import free_port
from poise.lab.setup import Setup

_LOOPBACK = "127.0.0.1"
_ALIKE = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(1024**3),
}
"""What makes equal workers equally fast, unless the user says otherwise. By default glibc's malloc
gives memory back to the system after a step or keeps it, depending on the sizes it has seen; the
page faults of the next step then take a third of a small step's time, on some workers."""


@dataclass(frozen=True)
class Streams:
    """Where output goes: None to a pipe, else as in `subprocess`."""

    stdout: int | None
    stderr: int | None


class Launching:
    """Starts workers and a server that meet at one address; each waits to be let go on.

    Args:
        setup: what is asked for.
        network: that they are in, if they have one of their own.
        arguments: what would follow `python`.
        streams: of all of them.
        environment: more variables for all of them.
    """

    def __init__(
        self,
        setup: Setup,
        network: Network | None,
        arguments: Sequence[str],
        streams: Streams,
        environment: Mapping[str, str],
    ) -> None:
        self._setup = setup
        self._network = network
        self._arguments = arguments
        self._streams = streams
        self._port = free_port()
        self._host = _LOOPBACK
        self._more = dict(environment)
        if setup.mode is not None and network is not None:
            self._host = network.server_host
            self._more = for_secret(secrets.token_hex(16)) | self._more

    def server(self) -> Member:
        """Start the server, which no speed limits."""
        workers = str(len(self._setup.speeds))
        options = ["--host", self._host, "--port", str(self._port), "--workers", workers]
        options += ["--closed", "--mode", str(self._setup.mode)]
        return launch(
            ["-m", "poise", "serve", *options, "--", *self._arguments],
            _ALIKE | for_server() | self._more,
            inside=() if self._network is None else self._network.inside(self._network.server),
            pace=None,
            speed=1.0,
            stdout=self._streams.stdout,
            stderr=self._streams.stderr,
        )

    def worker(self, worker: int, speed: float) -> Member:
        """Start a worker; its pace, if it has one, begins with this speed."""
        network = {} if self._network is None else self._network.environment()
        return launch(
            self._arguments,
            _ALIKE | self._placed(worker) | self._more | network,
            inside=() if self._network is None else self._network.inside(worker),
            pace=self._setup.pace,
            speed=speed,
            stdout=self._streams.stdout,
            stderr=self._streams.stderr,
        )

    def _placed(self, worker: int) -> dict[str, str]:
        workers = len(self._setup.speeds)
        if self._setup.mode is None:
            return for_worker(worker, workers, self._port)
        return for_joining(worker + 1, workers, f"{self._host}:{self._port}")

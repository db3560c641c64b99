"""Starting the processes of a lab, each in its place."""

import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import DEVNULL, PIPE, Popen

from poise.engine.modes import Mode, Sync, mode_of
from poise.environment import for_joining, for_secret, for_server, for_worker
from poise.errors import InvalidSetting
from poise.lab.crew import Member
from poise.lab.network import Network
from poise.lab.pacing import Pace
from poise.lab.processes import free_port

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
class Setup:
    """The workers of a lab as they are asked for."""

    workers: int
    pace: Pace | None
    """How workers sleep instead of being throttled; None: they do not."""
    from_start: bool
    mode: Mode | None
    """The mode of a training with a server; None: there is none."""

    def __post_init__(self) -> None:
        if self.from_start and self.pace:
            raise InvalidSetting("a paced worker sleeps in training only; leave out from_start")


@dataclass(frozen=True)
class Launching:
    """Starts workers and a server that meet at one address; each waits to be let go on."""

    setup: Setup
    network: Network | None
    """That they are in, if they have one of their own."""
    arguments: Sequence[str]
    """What would follow `python`."""
    stdout: int | None
    """Where output goes: None to a pipe, else as in `subprocess`."""
    stderr: int | None
    environment: Mapping[str, str]
    """More variables for all of them."""
    port: int = field(default_factory=free_port)
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    """By which they know each other in a network of their own."""

    def server(self) -> Member:
        """Start the server, which no speed limits."""
        host, port = self._address.split(":")
        workers = self.setup.workers
        options = ["--host", host, "--port", port, "--workers", str(workers)]
        options += ["--closed", "--mode", str(self.setup.mode)]
        command = ["-m", "poise", "serve", *options, "--", *self.arguments]
        return self._start(workers, command, for_server() | self._more)

    def worker(self, worker: int, speed: float) -> Member:
        """Start a worker; its pace, if it has one, begins with this speed."""
        network = {} if self.network is None else self.network.environment()
        pace = self.setup.pace
        paced = "-" if pace is None else f"{pace.per_sample_s!r},{pace.fixed_s!r}"
        environment = self._placed(worker) | self._more | network
        return self._start(worker, self.arguments, environment, paced, speed)

    def _start(
        self,
        place: int,
        arguments: Sequence[str],
        environment: dict[str, str],
        pace: str = "-",
        speed: float = 1.0,
    ) -> Member:
        """Start a script or, after -m, a module with its arguments, in its place of the network."""
        ours, theirs = socket.socketpair()
        inside = () if self.network is None else self.network.inside(place)
        shim = [sys.executable, "-m", "poise.lab.worker", str(theirs.fileno()), pace, repr(speed)]
        with theirs:
            process = Popen(
                [*inside, *shim, *arguments],
                env=_ALIKE | environment,
                pass_fds=(theirs.fileno(),),
                stdin=DEVNULL,
                stdout=PIPE if self.stdout is None else self.stdout,
                stderr=PIPE if self.stderr is None else self.stderr,
                start_new_session=True,  # an interrupt is for the lab; the guard finds all of it
                text=True,
                errors="replace",
            )
        return Member(process, ours)

    @property
    def _address(self) -> str:
        """Where the server listens."""
        return f"{_LOOPBACK if self.network is None else self.network.server_host}:{self.port}"

    @property
    def _more(self) -> dict[str, str]:
        shared = self.setup.mode is not None and self.network is not None
        return (for_secret(self.secret) if shared else {}) | dict(self.environment)

    def _placed(self, worker: int) -> dict[str, str]:
        workers = self.setup.workers
        if self.setup.mode is None:
            return for_worker(worker, workers, self.port)
        return for_joining(worker + 1, workers, self._address)


def served_mode(stated: object) -> Mode | None:
    """Return a mode as `Lab` is told it; None if it needs no server."""
    mode = mode_of(stated)
    if mode_of(str(mode)) != mode:
        raise InvalidSetting(
            f'mode={mode!r} has options, which a lab cannot pass on; use mode="{mode}" here, and '
            "state them in the script"
        )
    return None if isinstance(mode, Sync) else mode

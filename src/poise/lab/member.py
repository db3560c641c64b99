"""One worker of a lab as the lab sees it."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import PIPE, Popen

from poise.lab.line import GO, PREPARED, STEP
from poise.lab.pacing import Pace
from poise.lab.throttle import Throttle


@dataclass(frozen=True)
class Streams:
    """Where output goes: None to a pipe, else as in `subprocess`."""

    stdout: int | None
    stderr: int | None


@dataclass
class Member:
    """A worker's process and what is known of it."""

    process: "Popen[str]"
    end: socket.socket
    """The lab's end of the line between them."""
    throttle: Throttle | None = None
    steps: int = 0
    """How many training steps it has begun."""

    def let_go(self) -> None:
        """Let it go on; it waits for this before it does anything, and when it is prepared."""
        with suppress(BrokenPipeError):  # it has ended, which is seen elsewhere
            self.end.send(GO)

    def hear(self) -> tuple[bool, bool]:
        """Take in what it says; return whether it is there, and whether it is prepared now."""
        try:
            heard = self.end.recv(65536)
        except ConnectionError:
            return False, False
        self.steps += heard.count(STEP)
        return bool(heard), PREPARED in heard

    def leave(self) -> None:
        """Hang up; it ends as soon as it notices."""
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def lift(self) -> None:
        """Let it run as fast as it can, for good."""
        if self.throttle is not None:
            with suppress(OSError):
                self.throttle.lift()

    def close(self, limit_s: float) -> None:
        """Let go of a process that has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        self.end.close()


def launch(
    arguments: Sequence[str],
    environment: dict[str, str],
    *,
    inside: Sequence[str],
    pace: Pace | None,
    speed: float,
    streams: Streams,
) -> Member:
    """Start a worker, which waits to be let go on.

    Args:
        arguments: a script with its arguments, or `-m` and a module with its.
        environment: all its variables.
        inside: what stands before the command.
        pace: how it sleeps, if it does.
        speed: the speed that its pace begins with.
        streams: where its output goes.
    """
    ours, theirs = socket.socketpair()
    paced = "-" if pace is None else f"{pace.per_sample_s!r},{pace.fixed_s!r}"
    shim = [sys.executable, "-m", "poise.lab.worker", str(theirs.fileno()), paced, repr(speed)]
    with theirs:
        process = Popen(
            [*inside, *shim, *arguments],
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=PIPE if streams.stdout is None else streams.stdout,
            stderr=PIPE if streams.stderr is None else streams.stderr,
            start_new_session=True,  # an interrupt is for the lab; the guard finds all it starts
            text=True,
            errors="replace",
        )
    return Member(process, ours)

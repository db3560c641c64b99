"""The processes of a lab: its workers, and their server if there is one."""

import socket
from contextlib import suppress
from dataclasses import dataclass, field
from subprocess import Popen, TimeoutExpired
from typing import Protocol

from poise.lab.line import GO, PREPARED, STEP


class Throttle(Protocol):
    """Keeps one worker at a speed that can be changed at any time."""

    def set_speed(self, speed: float) -> None:
        """Change the speed."""

    def lift(self) -> None:
        """Let the worker run as fast as it can, for good."""


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

    def close(self, limit_s: float) -> None:
        """Let go of a process that has ended."""
        with suppress(TimeoutExpired):
            self.process.wait(limit_s)
        self.end.close()


@dataclass
class Crew:
    """Who is there, and who has ended."""

    workers: list[Member] = field(default_factory=list)
    server: Member | None = None

    def everybody(self) -> list[Member]:
        """Return all that have been started."""
        return [*self.workers, *(() if self.server is None else (self.server,))]

    def number(self, worker: int) -> int:
        """Return what a worker is called; a server is 0."""
        return worker if self.server is None else worker + 1

    def running(self) -> bool:
        """Whether a worker is left."""
        return any(member.process.poll() is None for member in self.workers)

    def failed(self) -> dict[int, int]:
        """Return the workers that have failed, with what their processes returned."""
        codes = ((worker, each.process.poll()) for worker, each in enumerate(self.workers))
        return {worker: code for worker, code in codes if code}

    def missing(self) -> int | None:
        """Return a worker that has ended and without which training never starts.

        Once it has, the server ends by itself when all workers are lost.
        """
        if any(member.steps for member in self.workers):  # training has started
            return None
        ended = (n for n, member in enumerate(self.workers) if member.process.poll() is not None)
        return next(ended, None)

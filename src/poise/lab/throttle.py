"""The ways to make a worker slow."""

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Protocol

from poise.lab.duty_cycle import DutyCycle
from poise.lab.leftovers import members, start_time
from poise.lab.quota import Quota


class Throttle(Protocol):
    """Keeps one worker at a speed that can be changed at any time."""

    def set_speed(self, speed: float) -> None:
        """Change the speed."""

    def lift(self) -> None:
        """Let the worker run as fast as it can, for good."""


Throttling = Callable[[int, "Popen[str]", socket.socket, float], Throttle]
"""Begins to throttle a worker: its number, process, end of the line, and speed."""


def by_quota(parent: Path) -> Throttling:
    """Throttle by CPU quotas of groups in this one."""

    def begin(worker: int, process: "Popen[str]", _: socket.socket, speed: float) -> Throttle:
        quota = Quota.create(parent / str(worker), pid=process.pid, speed=speed)
        start = start_time(process.pid)
        for pid in () if start is None else members(process.pid, start):
            with suppress(ProcessLookupError):  # it has ended since
                quota.add(pid)
        return quota

    return begin


def by_duty_cycle(_: int, process: "Popen[str]", __: socket.socket, speed: float) -> Throttle:
    """Throttle by stopping and continuing."""
    return DutyCycle(process, speed)


def by_pace(_: int, __: "Popen[str]", end: socket.socket, speed: float) -> Throttle:
    """Leave it to the worker, which sleeps by itself."""
    paced = Paced(end)
    paced.set_speed(speed)
    return paced


class Paced:
    """Tells a worker that paces itself how fast it is."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def set_speed(self, speed: float) -> None:
        """Tell the worker, which hears of it in its next step."""
        with suppress(OSError):  # it has ended
            self._end.send(f"{speed!r}\n".encode())

    def lift(self) -> None:
        """Leave it as it is: sleeping is no hindrance to ending."""

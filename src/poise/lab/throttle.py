"""The ways to make a worker slow."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from poise.lab.crew import Member, Throttle
from poise.lab.leftovers import members, start_time
from poise.lab.quota import Quota

_PERIOD_S = 0.02

Throttling = Callable[[Member, float], Throttle]
"""Begins to throttle a worker to a speed."""


def by_quota(parent: Path) -> Throttling:
    """Throttle by CPU quotas of groups in this one."""

    def begin(member: Member, speed: float) -> Throttle:
        leader = member.process.pid
        quota = Quota.create(parent / str(leader), pid=leader, speed=speed)
        start = start_time(leader)
        for pid in () if start is None else members(leader, start):
            with suppress(ProcessLookupError):  # it has ended since
                quota.add(pid)
        return quota

    return begin


class Paced:
    """Tells a worker that paces itself, and sleeps, how fast it is."""

    def __init__(self, member: Member, speed: float) -> None:
        self._member = member
        self.set_speed(speed)

    def set_speed(self, speed: float) -> None:
        """Tell the worker, which hears of it in its next step."""
        with suppress(OSError):  # it has ended
            self._member.end.send(f"{speed!r}\n".encode())

    def lift(self) -> None:
        """Leave it as it is: sleeping is no hindrance to ending."""


class DutyCycle:
    """Stops and continues, every few milliseconds, a worker that leads a process group of its own.

    This takes no privileges. A speed is the part of the time for which the worker runs; it cannot
    be given more than all of it.
    """

    def __init__(self, member: Member, speed: float) -> None:
        self._process = member.process
        self._speed = speed
        self._ended = Event()
        self._thread = Thread(target=self._run, name="poise-duty-cycle", daemon=True)
        self._thread.start()

    def set_speed(self, speed: float) -> None:
        """Let it run for another part of the time from now on."""
        self._speed = speed

    def lift(self) -> None:
        """Let it run all the time, for good."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        began_s = time.monotonic()
        while not self._ended.is_set() and self._process.poll() is None:
            on_s, off_s = parts_s(self._speed)
            self._ended.wait(began_s + on_s - time.monotonic())
            if off_s > 0 and not self._ended.is_set():
                self._send(signal.SIGSTOP)
                self._ended.wait(began_s + on_s + off_s - time.monotonic())
                self._send(signal.SIGCONT)
            # After a delay of our own the cycle begins anew: a burst would be no constant speed.
            began_s = max(began_s + on_s + off_s, time.monotonic() - _PERIOD_S)

    def _send(self, signal_number: signal.Signals) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal_number)


def parts_s(speed: float) -> tuple[float, float]:
    """Return for how long a worker runs and is stopped.

    >>> parts_s(0.25), parts_s(1.5)
    ((0.005, 0.015), (0.02, 0.0))
    """
    on_s = _PERIOD_S * min(1.0, speed)
    return on_s, _PERIOD_S - on_s

"""Clocks: when something happened on this worker, and how long it waited for others until then.

A moment on the device is marked without waiting for the device, and read later. On the CPU a mark
is a number; on an accelerator an event in the current stream, of which nothing is known until the
device gets there.
"""

import time
from typing import Any, NamedTuple, Protocol


class Clock(Protocol):
    """Marks moments, and says how far they are apart once that is known."""

    lag: int
    """Steps after which the marks of a step are read."""
    cheap: bool
    """Whether a mark costs so little that every gradient may get one."""

    def mark(self) -> Any:
        """Mark this moment on the device."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has got there; asking never waits."""

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks that have passed."""

    def host_s(self) -> float:
        """Return the time by the clock of the CPU."""


class HostClock:
    """The clock of the CPU, for work that is done when the call returns."""

    lag = 1
    cheap = True

    def mark(self) -> float:
        """Read the time."""
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        """It always has."""
        return True

    def between_s(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start

    def host_s(self) -> float:
        """Read the time."""
        return time.perf_counter()


class Waits:
    """How long this worker has waited for others in calls of its own: the running total."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Stamp(NamedTuple):
    """When something happened."""

    mark: Any
    """By the clock of the device."""
    host_s: float
    """By the clock of the CPU."""
    excused_s: float
    """How long the worker had waited for others by then, since it began."""


def host_stamp(waits: Waits | None = None) -> Stamp:
    """Stamp something that happens on no device."""
    return Stamp(None, time.perf_counter(), 0.0 if waits is None else waits.seconds)


class Stopwatch:
    """Takes the stamps of one worker."""

    def __init__(self, clock: Clock, waits: Waits) -> None:
        self.clock = clock
        self.waits = waits

    def stamp(self) -> Stamp:
        """Stamp this moment."""
        clock = self.clock
        if type(clock) is HostClock:  # one look at one clock, since this runs for every bucket
            now_s = time.perf_counter()
            return Stamp(now_s, now_s, self.waits.seconds)
        return Stamp(clock.mark(), clock.host_s(), self.waits.seconds)

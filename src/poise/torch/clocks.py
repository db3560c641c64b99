"""Clocks: when something happened on this worker's own device.

A stamp is taken without waiting for the device, and read later. On the CPU it is a number; on an
accelerator an event in the current stream, of which nothing is known until the device gets there.
"""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes stamps, and says how far they are apart once that is known."""

    lag: int
    """Steps after which the stamps of a step are read."""
    cheap: bool
    """Whether a stamp costs so little that every gradient may get one."""

    def stamp(self) -> Any:
        """Mark this moment."""

    def passed(self, stamp: Any) -> bool:
        """Whether the device has got there; asking never waits."""

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two stamps that have passed."""


class HostClock:
    """The clock of the CPU, for work that is done when the call returns."""

    lag = 1
    cheap = True

    def stamp(self) -> float:
        """Read the time."""
        return time.perf_counter()

    def passed(self, stamp: float) -> bool:
        """It always has."""
        return True

    def between_s(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start


class DeviceClock:
    """Events in the current stream of an accelerator."""

    lag = 3
    cheap = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.Event:
        """Put an event into the stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def passed(self, stamp: torch.Event) -> bool:
        """Ask whether the stream has reached the event."""
        return bool(stamp.query())

    def between_s(self, start: torch.Event, end: torch.Event) -> float:
        """Return the time between two events, which devices tell in milliseconds."""
        return float(start.elapsed_time(end)) * 1e-3


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)

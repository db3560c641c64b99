"""The clock of an accelerator: events in its current stream."""

import time

import torch

from poise.runtime.clocks import Clock, HostClock


class DeviceClock:
    """Events in the current stream of an accelerator."""

    lag = 3
    cheap = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        """Put an event into the stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.Event) -> bool:
        """Ask whether the stream has reached the event."""
        return bool(mark.query())

    def between_s(self, start: torch.Event, end: torch.Event) -> float:
        """Return the time between two events, which devices tell in milliseconds."""
        return float(start.elapsed_time(end)) * 1e-3

    def host_s(self) -> float:
        """Read the time."""
        return time.perf_counter()


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)

"""A device: what tells fast ones from slow ones, its clock and its memory."""

import os
import platform
import socket
import time
from pathlib import Path

import torch

from poise.runtime.clocks import Clock, HostClock
from poise.runtime.generation import Member
from poise.runtime.memory import HostMemory, Memory


def member_on(device: torch.device) -> Member:
    """Return this process as a worker that computes on a device."""
    host = socket.gethostname()
    return Member(f"{host}:{os.getpid()}", device_kind(device), host)


def device_kind(device: torch.device) -> str:
    """Return what tells fast devices from slow ones: the name of the model.

    >>> device_kind(torch.device("cpu")).endswith("threads")
    True
    """
    if device.type == "cpu":
        return f"{_processor()}, {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda _: device.type)
    return str(name(device))


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


class DeviceMemory:
    """The memory of this worker's accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, _ = torch.accelerator.get_memory_info(device)
        self.limit_bytes = float(free + torch.accelerator.memory_reserved(device))
        self.peak_bytes()

    def peak_bytes(self) -> float:
        """Return the peak since the last call."""
        peak = float(torch.accelerator.max_memory_allocated(self._device))
        torch.accelerator.reset_peak_memory_stats(self._device)
        return peak


def memory_of(device: torch.device, sharers: int) -> Memory:
    """Return the memory in which a worker on that device computes."""
    return HostMemory(sharers) if device.type == "cpu" else DeviceMemory(device)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""Points in time: of the host's clock, or of an accelerator's stream."""

import time
from typing import Any, Protocol


class Timer(Protocol):
    """Makes stamps, and tells the seconds between two of them."""

    at_gradients: bool
    """Whether a stamp costs so little that every gradient gets one."""

    def stamp(self) -> Any:
        """Return this moment."""

    def known(self, stamp: Any) -> bool:
        """Return whether the moment has come; asking never waits."""

    def between_s(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two moments that have come."""


class HostTimer:
    """The host's clock, where the host computes."""

    at_gradients = True

    def stamp(self) -> float:
        """Return this moment."""
        return time.perf_counter()

    def known(self, stamp: float) -> bool:
        """Return True: it is now."""
        return True

    def between_s(self, earlier: float, later: float) -> float:
        """Return the difference."""
        return later - earlier


class DeviceTimer:
    """Events on the stream of an accelerator, which runs behind the host.

    They are read when they have passed, and nothing waits for them.
    """

    at_gradients = False

    def __init__(self, device: str) -> None:
        self._device = device

    def stamp(self) -> Any:
        """Return an event recorded on the current stream."""
        import torch

        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def known(self, stamp: Any) -> bool:
        """Return whether the stream has passed it."""
        return bool(stamp.query())

    def between_s(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two events."""
        return float(earlier.elapsed_time(later)) / 1e3

"""Keeps connections alive in both directions, and ends those whose other end has fallen silent."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from poise.core.liveness import Limits
from poise.runtime.channel import Channel


class Pulse(threading.Thread):
    """Gives a sign of life on each of some channels, and looks for those of the other ends.

    Whatever arrives is a sign of life, whether anybody reads it or not; so the thread that uses a
    channel may be busy with something else.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(name="poise-pulse", daemon=True)
        self._limits = limits
        self._watched: dict[Channel, _Watched] = {}
        self._changing = threading.Lock()
        self._over = threading.Event()
        self.start()

    def watch(self, channel: Channel, silent: Callable[[str], None]) -> None:
        """Watch a channel; of one that is silent for too long, call a function with the reason."""
        with self._changing:
            self._watched[channel] = _Watched(channel.arrived(), silent)

    def release(self, channel: Channel) -> None:
        """Watch a channel no more."""
        with self._changing:
            self._watched.pop(channel, None)

    def run(self) -> None:
        """Beat and look, until the end."""
        beat_s, looked_s = self._limits.beat_s, time.monotonic()
        while not self._over.wait(beat_s):
            # Time in which this thread did not run, as in a stopped process, does not count.
            now_s = time.monotonic()
            passed_s, looked_s = min(now_s - looked_s, 2 * beat_s), now_s
            with self._changing:
                watched = list(self._watched.items())
            for channel, each in watched:
                with suppress(Exception):  # nothing ends this thread: waits end by it
                    channel.beat()
                    self._look(channel, each, passed_s)

    def end(self) -> None:
        """Beat no more."""
        self._over.set()
        self.join(self._limits.silent_s)

    def _look(self, channel: Channel, watched: "_Watched", passed_s: float) -> None:
        arrived = channel.arrived()
        if arrived != watched.arrived:
            watched.arrived, watched.silent_s = arrived, 0.0
            return
        watched.silent_s += passed_s
        if watched.silent_s >= self._limits.silent_s:
            self.release(channel)
            watched.silent(
                f"it has given no sign of life for {self._limits.silent_s:g} s: its process is "
                "stopped, or its machine or link is gone"
            )


@dataclass
class _Watched:
    arrived: int
    """Bytes that have come so far."""
    silent: Callable[[str], None]
    silent_s: float = 0.0

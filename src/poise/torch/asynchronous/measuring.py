"""What a worker tells of its iterations, and measures for the server to learn its speed from."""

import math
from collections import deque
from typing import Any

import torch

from poise.core.batch import Batch
from poise.engine.round import Report
from poise.environment import local_workers
from poise.runtime.clocks import Stopwatch, Waits
from poise.runtime.events import (
    Applied,
    BucketDone,
    BucketReady,
    Disturbed,
    Events,
    HandedOut,
    Reduced,
)
from poise.runtime.memory import Guard
from poise.runtime.meter import Meter
from poise.runtime.rows import observation_of
from poise.runtime.session import Fetching
from poise.torch.asynchronous.messages import Handed
from poise.torch.compiling import Graphs
from poise.torch.devices import clock_of, memory_of


class Measuring:
    """Measures each iteration, without what the worker waits for the server or for others."""

    def __init__(self, device: torch.device, events: Events, *, loads_itself: bool) -> None:
        """Measure what a device does; loading is its process's own work, or that of others."""
        clock = clock_of(device)
        memory = Guard(memory_of(device, sharers=local_workers() or 1))
        self._meter = Meter(clock, memory, loads_itself=loads_itself)
        self._meter.listen(events)
        self._events = events
        self.waits = Waits()
        """What the worker has waited, which is no work of its own."""
        self._stopwatch = Stopwatch(clock, self.waits)
        self.fetching = Fetching(self._stopwatch)
        """Surrounds what the loader does."""
        self._batches: deque[Batch] = deque(maxlen=2)
        """The one under way, and the one before."""
        self._graphs = Graphs()

    def disturb(self) -> None:
        """Something else runs between two iterations."""
        self._events.tell(Disturbed(self._step, self._stopwatch.stamp()))

    def begin(self, step: int, handed: Handed, contents: Any, *, fresh: bool) -> None:
        """The loop gets a local batch."""
        samples, fetching = handed.share.samples, self.fetching
        batch, stamp = Batch(step, handed.share.epoch, 0, (samples,)), self._stopwatch.stamp()
        told = (batch, samples, handed.whole, contents, fetching.asked_s, fetching.fetch_s)
        self._events.tell(HandedOut(step, stamp, *told, self._graphs.changed(), fresh))
        self._batches.append(batch)

    def pushed(self) -> None:
        """The gradient has left, all of it at once."""
        step, stamp = self._step, self._stopwatch.stamp()
        self._events.tell(BucketReady(step, stamp, step, None, first=True))
        self._events.tell(BucketDone(step, stamp, step, None))
        self._events.tell(Reduced(step, stamp, (1.0,)))

    def updated(self, optimizer: Any) -> None:
        """The optimizer's step is over."""
        self._events.tell(Applied(self._step, self._stopwatch.stamp(), optimizer))

    def report(self) -> Report | None:
        """Return what was measured in the iteration before the one under way; None: nothing."""
        if len(self._batches) < 2:  # noqa: PLR2004 (this one, and the one before)
            return None
        before = self._batches[0]
        seen = observation_of(before, self._meter.row(before.step)[None])
        if seen.compiling or seen.ready_s is None:
            return None
        others = seen.wait_s, seen.load_s, seen.input_s, seen.memory_bytes, seen.memory_limit_bytes
        known = [math.nan if values is None else float(values[0]) for values in others]
        return Report(before.count, float(seen.ready_s[0, -1]), *known)

    @property
    def _step(self) -> int:
        return self._batches[-1].step if self._batches else 0

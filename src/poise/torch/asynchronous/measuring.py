"""What a worker measures of its iterations, for the server to learn its speed from."""

import math
from collections import deque
from contextlib import AbstractContextManager

import torch

from poise.core.batch import Batch
from poise.engine.asp import Report
from poise.environment import local_workers
from poise.torch.asynchronous.messages import Handed
from poise.torch.clocks import clock_of
from poise.torch.compiling import graphs_compiled
from poise.torch.memory import Guard, memory_of
from poise.torch.meter import Meter, observation_of


class Measuring:
    """Measures each iteration, without what the worker waits for the server or for others."""

    def __init__(self, device: torch.device, *, loads_itself: bool) -> None:
        """Measure what a device does; loading is its process's own work, or that of others."""
        self._waited_s = 0.0
        """The running total."""
        memory = Guard(memory_of(device, sharers=local_workers() or 1))
        self._meter = Meter(
            clock_of(device), memory, lambda: self._waited_s, loads_itself=loads_itself
        )
        self._batches: deque[Batch] = deque(maxlen=2)
        """The one under way, and the one before."""
        self._graphs = 0

    def loading(self) -> AbstractContextManager[None]:
        """The loader is asked for a batch."""
        return self._meter.loading()

    def disturb(self) -> None:
        """Something else runs between two iterations."""
        self._meter.disturb()

    def waited(self, seconds: float) -> None:
        """The worker has waited, which is no work of its own."""
        self._waited_s += seconds

    def begin(self, step: int, handed: Handed) -> None:
        """The loop gets a local batch."""
        samples, graphs = handed.count, graphs_compiled()
        batch = Batch(step, handed.epoch, 0, (samples,))
        whole, compiled = samples == handed.planned, graphs != self._graphs
        self._meter.begin(batch, samples, whole=whole, compiled=compiled)
        self._batches.append(batch)
        self._graphs = graphs

    def pushed(self) -> None:
        """The gradient has left, all of it at once."""
        bucket = self._meter.ready(first=True)
        if bucket is not None:
            self._meter.done(bucket)

    def updated(self) -> None:
        """The optimizer's step is over."""
        self._meter.updated()

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

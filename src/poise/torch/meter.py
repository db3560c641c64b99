"""The meter: what each step takes on this worker, by its own clock alone.

Times count from the end of the worker's previous reduction. What it waits for others, or for its
loader's processes, is no work of its own and left out; an all-reduce inside backward would make
all workers look equally slow. Steps that say nothing of the worker's speed are left out as a
whole: the first ones, in which allocators warm up and DistributedDataParallel builds its buckets
anew; the first with a local batch of quite another size, to which allocators have to adjust; the
first of a pass and those with an evaluation or a checkpoint in between; and the smaller last one
of an epoch.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from poise.core.batch import Batch
from poise.core.observation import Observation
from poise.core.timing import Floats
from poise.torch.clocks import Clock
from poise.torch.memory import Guard

BUCKETS = 8
"""Neighboring buckets are put together until so many are left: a row has a fixed width."""
_WARM_UP = 2
"""Steps left out at the start."""
_RESIZED = 0.1
"""A local batch is of another size if it differs by more than this part."""
_EMPTY_QUEUE = 0.15
"""A loader's queue was empty if the worker waited for more than this part of the step: to take a
batch out of a full one takes a while, too."""
_NEW, _MEMORY_EVERY = 4, 16
_KEPT = 16
"""Steps that are kept for their rows to be asked for."""
_COMPILING = 0
_SCALARS = slice(1, 7)
"""wait_s, load_s, input_s, update_s, memory_bytes, memory_limit_bytes."""
_READY = slice(7, 7 + BUCKETS)
_DONE = slice(7 + BUCKETS, 7 + 2 * BUCKETS)
WIDTH = 7 + 2 * BUCKETS
"""Numbers in a row."""


@dataclass
class Bucket:
    """One bucket of gradients on its way."""

    ready: Any
    """The stamp when it was handed over."""
    excused_s: float
    """The running total of waiting for others then."""
    done: Any = None
    """The stamp when its sum was there; None: not yet."""


@dataclass
class Step:
    """The stamps of one step."""

    batch: Batch
    origin: Any
    """The end of the reduction before; None: there is none to count from."""
    excused_s: float
    """The running total of waiting for others at the origin."""
    updated: Any
    """The stamp when the optimizer had used the gradient before; None: it did not."""
    fetch_s: float
    """Seconds in the loader."""
    input_s: float
    """Seconds per sample of a loader whose queue was empty."""
    backwards: list[list[Bucket]] = field(default_factory=list)
    """The buckets of each backward."""
    compiled: bool = False
    memory_bytes: float = math.nan


class Meter:
    """Stamps every step, and returns it as a row of numbers once all of it is known."""

    def __init__(
        self, clock: Clock, memory: Guard, excused_s: Callable[[], float], *, loads_itself: bool
    ) -> None:
        """Measure one worker.

        Args:
            clock: of the device that computes.
            memory: what is taken of the same device's.
            excused_s: returns the running total of seconds in which the worker waited for others.
            loads_itself: whether loading is the worker's own work, and not other processes'.
        """
        self._clock = clock
        self._memory = memory
        self._excused_s = excused_s
        self._loads_itself = loads_itself
        self._steps: deque[Step] = deque(maxlen=_KEPT)
        self._left_out = _WARM_UP
        self._disturbed = True
        self._end: Any = None
        self._end_excused_s = 0.0
        self._updated: Any = None
        self._begun_s = self._updated_s = math.inf
        """By the host's clock: when the last batch was handed out, and its gradient used."""
        self._fetch_s = 0.0
        self._loader = LoaderRate()
        self._samples = 0
        self._alike = 0
        """Steps since the local batch changed."""

    @property
    def lag(self) -> int:
        """After how many steps a step's row is there."""
        return self._clock.lag

    def disturb(self) -> None:
        """Something else runs between two steps: the next one says nothing of the speed."""
        self._disturbed = True

    def forget(self) -> None:
        """Training goes on at another place: steps under way never end."""
        self._steps.clear()
        self._disturbed = True

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The loader is asked for a batch.

        If the loop did something else for longer than a step takes, such as an evaluation with a
        loader of its own or a checkpoint, the next step says nothing of the speed.
        """
        start_s, excused_s = time.perf_counter(), self._excused_s()
        if start_s - self._updated_s > self._updated_s - self._begun_s:
            self._disturbed = True
        yield
        self._fetch_s = time.perf_counter() - start_s - (self._excused_s() - excused_s)

    def begin(self, batch: Batch, samples: int, *, whole: bool, compiled: bool) -> None:
        """A batch is handed out, with so many samples for this worker.

        Args:
            batch: the global batch.
            samples: this worker's part of it.
            whole: whether the global batch has its full size.
            compiled: whether torch.compile was at work in the step before, which is over now.
        """
        resized = abs(samples - self._samples) > _RESIZED * self._samples
        if self._steps:
            self._end_step(self._steps[-1], samples, compiled=compiled)
        counts = whole and not (resized or self._disturbed or self._left_out)
        input_s = math.nan
        if not self._loads_itself:
            input_s = self._loader.arrived(time.perf_counter(), samples, self._fetch_s)
        self._steps.append(
            Step(
                batch,
                self._end if counts else None,
                self._end_excused_s,
                self._updated,
                self._fetch_s,
                input_s,
            )
        )
        self._left_out = max(0, self._left_out - 1)
        self._disturbed, self._end, self._updated = False, None, None
        self._begun_s = time.perf_counter()
        self._updated_s = math.inf

    def _end_step(self, step: Step, next_samples: int, *, compiled: bool) -> None:
        step.compiled = compiled
        # The peak is read often while a local batch is new, and seldom later.
        if self._alike < _NEW or self._alike % _MEMORY_EVERY == 0:
            step.memory_bytes = self._memory.end_step()
        self._alike = self._alike + 1 if next_samples == self._samples else 0
        self._samples = next_samples

    def ready(self, *, first: bool) -> Bucket | None:
        """A bucket is handed over, the first of its backward or a later one."""
        if not self._steps:
            return None
        backwards = self._steps[-1].backwards
        if first or not backwards:
            backwards.append([])
        bucket = Bucket(self._clock.stamp(), self._excused_s())
        backwards[-1].append(bucket)
        return bucket

    def done(self, bucket: Bucket) -> None:
        """A bucket's sum is there."""
        bucket.done = self._end = self._clock.stamp()
        self._end_excused_s = self._excused_s()

    def updated(self) -> None:
        """An optimizer has used the gradient."""
        self._updated = self._clock.stamp()
        self._updated_s = time.perf_counter()

    def row(self, step: int) -> Floats:
        """Return what is known of a step that is over; NaN for what is not."""
        row = np.full(WIDTH, np.nan)
        found = next((each for each in reversed(self._steps) if each.batch.step == step), None)
        row[_COMPILING] = found is not None and found.compiled
        if found is None or not self._is_known(found):
            return row
        ready_s, done_s = self._times(found)
        row[_SCALARS] = (
            math.nan if self._loads_itself else found.fetch_s,
            found.fetch_s if self._loads_itself else math.nan,
            found.input_s,
            math.nan if found.updated is None else self._since_origin_s(found, found.updated),
            found.memory_bytes,
            self._memory.limit_bytes,
        )
        row[_READY][: len(ready_s)] = ready_s
        row[_DONE][: len(done_s)] = done_s
        return row

    def _is_known(self, step: Step) -> bool:
        if step.origin is None or not step.backwards or not all(step.backwards):
            return False
        stamps = [step.origin, *(bucket.done for each in step.backwards for bucket in each)]
        return all(stamp is not None and self._clock.passed(stamp) for stamp in stamps)

    def _since_origin_s(self, step: Step, stamp: Any) -> float:
        return max(0.0, self._clock.between_s(step.origin, stamp))

    def _times(self, step: Step) -> tuple[list[float], list[float]]:
        """Return ready and done times of the buckets.

        A step of several backwards, each of which waits for its own reduction, counts as one
        bucket: its work is the sum of the parts, and so is its communication.
        """
        waited_s = 0.0 if self._loads_itself else step.fetch_s
        if len(step.backwards) == 1:
            ready_s, done_s = [], []
            for bucket in _merged(step.backwards[0]):
                excused_s = bucket.excused_s - step.excused_s
                ready = self._since_origin_s(step, bucket.ready) - excused_s - waited_s
                done = self._since_origin_s(step, bucket.done) - excused_s
                ready_s.append(max(0.0, ready))
                done_s.append(max(0.0, done))
            return ready_s, done_s
        worked_s, reduced_s, start = -waited_s, 0.0, step.origin
        for backward in step.backwards:
            last = backward[-1]
            worked_s += self._clock.between_s(start, last.ready)
            reduced_s += self._clock.between_s(last.ready, last.done)
            start = last.done
        worked_s = max(0.0, worked_s - (step.backwards[-1][-1].excused_s - step.excused_s))
        return [worked_s], [worked_s + waited_s + reduced_s]


class LoaderRate:
    """How fast a loader's processes are, seen whenever the worker has to wait for them.

    Between two batches that were waited for, the processes never rested: the time between them,
    over the samples in between, is their rate, whether batches come one by one or in bursts.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        """When the last batch came that was waited for."""
        self._samples = 0
        """Samples that came after it."""
        self._last_s = 0.0

    def arrived(self, now_s: float, samples: int, waited_s: float) -> float:
        """A batch arrived; return the seconds per sample, NaN if nothing can be said."""
        waited = waited_s > _EMPTY_QUEUE * (now_s - self._last_s)
        self._samples += samples
        self._last_s = now_s
        if not waited:
            return math.nan
        found = math.nan
        if self._since_s is not None and self._samples:
            found = (now_s - self._since_s) / self._samples
        self._since_s, self._samples = now_s, 0
        return found


def _merged(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Put neighbors together, each group as late as its last member, until few are left."""
    groups = min(len(buckets), BUCKETS)
    ends = [len(buckets) * (group + 1) // groups - 1 for group in range(groups)]
    return [buckets[end] for end in ends]


def observation_of(batch: Batch, rows: Floats) -> Observation:
    """Return a step as all workers saw it, from a row of each."""
    wait_s, load_s, input_s, update_s, memory, limit = rows[:, _SCALARS].T
    buckets = int((~np.isnan(rows[:, _READY])).any(axis=0).sum()) or 1
    return Observation(
        step=batch.step,
        split=batch.split,
        epoch=batch.epoch,
        compiling=tuple(np.flatnonzero(rows[:, _COMPILING]).tolist()),
        ready_s=rows[:, _READY][:, :buckets],
        done_s=rows[:, _DONE][:, :buckets],
        wait_s=_if_any(wait_s),
        load_s=_if_any(load_s),
        input_s=_if_any(input_s),
        update_s=_if_any(update_s),
        memory_bytes=_if_any(memory),
        memory_limit_bytes=_if_any(limit),
    )


def unmeasured(batch: Batch) -> Observation:
    """Return a step of which nothing but the split is known."""
    rows = np.full((len(batch.split), WIDTH), np.nan)
    rows[:, _COMPILING] = False
    return observation_of(batch, rows)


def _if_any(values: Floats) -> Floats | None:
    """Return values, or None if nobody measured any."""
    return None if np.isnan(values).all() else values

"""The meter: what each step takes on this worker, by its own clock alone.

Times count from the end of the worker's previous reduction. What it waits for others, or for its
loader's processes, is no work of its own and left out; an all-reduce inside backward would make
all workers look equally slow. Steps that say nothing of the worker's speed are left out as a
whole: the first ones, in which allocators warm up and frameworks build their buckets anew; the
first with a local batch of quite another size, to which allocators have to adjust; the first of a
pass and those with an evaluation or a checkpoint in between; and the smaller last one of an epoch.

The meter goes by the steps and stamps of events, whenever it hears of them.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from poise.core.timing import Floats
from poise.runtime.clocks import Clock, Stamp
from poise.runtime.events import (
    Applied,
    BucketDone,
    BucketReady,
    Disturbed,
    Events,
    HandedOut,
    PassBegan,
    Reduced,
    Resumed,
)
from poise.runtime.memory import Guard
from poise.runtime.rows import BUCKETS, Times

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


@dataclass(slots=True)
class Bucket:
    """One bucket of gradients on its way."""

    ready: Stamp
    """When it was handed over."""
    done: Stamp | None = None
    """When its sum was there; None: not yet."""


@dataclass(slots=True)
class Ending:
    """What the next step's times count from."""

    begun_s: float
    """When the step's batch was handed out, by the host's clock."""
    reduced: Stamp | None = None
    """The end of its last reduction."""
    applied: Stamp | None = None
    """When an optimizer had used its gradient."""

    def rested(self, asked_s: float) -> bool:
        """Whether the loop did something else for longer than a step until it asked for the next.

        Such as an evaluation with a loader of its own, or a checkpoint.
        """
        if self.applied is None:
            return False
        return asked_s - self.applied.host_s > self.applied.host_s - self.begun_s


@dataclass(slots=True)
class Step:
    """What was heard of one step."""

    number: int
    asked_s: float
    fetch_s: float
    input_s: float
    """Seconds per sample of a loader whose queue was empty."""
    end: Ending
    before: Ending | None
    """From where its times count; None: it says nothing of the speed."""
    backwards: list[list[Bucket]] = field(default_factory=list)
    """The buckets of each backward."""
    compiled: bool = False
    memory_bytes: float = math.nan


class Meter:
    """Hears of every step, and returns it as a row of numbers once all of it is known."""

    def __init__(self, clock: Clock, memory: Guard, *, loads_itself: bool) -> None:
        """Measure one worker.

        Args:
            clock: of the device that computes.
            memory: what is taken of the same device's.
            loads_itself: whether loading is the worker's own work, and not other processes'.
        """
        self._clock = clock
        self._peaks = Peaks(memory)
        self._loads_itself = loads_itself
        self._steps: deque[Step] = deque(maxlen=_KEPT)
        self._on_their_way: dict[int, Bucket] = {}
        """Buckets whose sum is not there, by their numbers."""
        self._left_out = _WARM_UP
        self._disturbed = True
        self._loader = LoaderRate()

    def listen(self, events: Events) -> None:
        """Hear of what happens in a training."""
        events.on(PassBegan, self._disturb)
        events.on(Disturbed, self._disturb)
        events.on(Resumed, self._forget)
        events.on(HandedOut, self._handed_out)
        events.on(BucketReady, self._ready)
        events.on(BucketDone, self._done)
        events.on(Reduced, self._reduced)
        events.on(Applied, self._applied)

    def row(self, step: int) -> Floats:
        """Return what is known of a step that is over; NaN for what is not."""
        found = self._found(step)
        if found is None or not self._is_known(found):
            return Times(compiling=found is not None and found.compiled).row()
        fetch_s, applied = found.fetch_s, found.before and found.before.applied
        ready_s, done_s = self._times(found)
        return Times(
            compiling=found.compiled,
            wait_s=math.nan if self._loads_itself else fetch_s,
            load_s=fetch_s if self._loads_itself else math.nan,
            input_s=found.input_s,
            update_s=self._since_origin_s(found, applied) if applied else math.nan,
            memory_bytes=found.memory_bytes,
            memory_limit_bytes=self._peaks.memory.limit_bytes,
            ready_s=ready_s,
            done_s=done_s,
        ).row()

    def _disturb(self, _: Any) -> None:
        self._disturbed = True

    def _forget(self, _: Resumed) -> None:
        """Training goes on at another place: steps under way never end."""
        self._steps.clear()
        self._on_their_way.clear()
        self._disturbed = True

    def _handed_out(self, event: HandedOut) -> None:
        resized = self._peaks.is_resized(event.samples)
        before = self._steps[-1] if self._steps else None
        if before is not None:
            before.compiled = event.compiled
            before.memory_bytes = self._peaks.end_step(event.samples)
        counts = event.whole and not (resized or self._disturbed or self._left_out)
        input_s = math.nan
        if not self._loads_itself:
            input_s = self._loader.arrived(event.stamp.host_s, event.samples, event.fetch_s)
        origin = before.end if before is not None and counts else None
        end = Ending(event.stamp.host_s)
        self._steps.append(Step(event.step, event.asked_s, event.fetch_s, input_s, end, origin))
        self._left_out = max(0, self._left_out - 1)
        self._disturbed = False

    def _ready(self, event: BucketReady) -> None:
        step = self._found(event.step)
        if step is None:
            return
        if event.first or not step.backwards:
            step.backwards.append([])
        bucket = self._on_their_way[event.number] = Bucket(event.stamp)
        step.backwards[-1].append(bucket)

    def _done(self, event: BucketDone) -> None:
        bucket = self._on_their_way.pop(event.number, None)
        if bucket is not None:
            bucket.done = event.stamp

    def _reduced(self, event: Reduced) -> None:
        step = self._found(event.step)
        if step is not None:
            step.end.reduced = event.stamp

    def _applied(self, event: Applied) -> None:
        step = self._found(event.step)
        if step is not None:
            step.end.applied = event.stamp

    def _found(self, step: int) -> Step | None:
        if self._steps and self._steps[-1].number == step:  # unless events come late
            return self._steps[-1]
        return next((each for each in reversed(self._steps) if each.number == step), None)

    def _is_known(self, step: Step) -> bool:
        before = step.before
        if before is None or before.rested(step.asked_s):
            return False
        if not step.backwards or not all(step.backwards):
            return False
        stamps = [before.reduced, *(bucket.done for each in step.backwards for bucket in each)]
        return all(stamp is not None and self._clock.passed(stamp.mark) for stamp in stamps)

    def _since_origin_s(self, step: Step, stamp: Stamp) -> float:
        return max(0.0, self._clock.between_s(_origin(step).mark, stamp.mark))

    def _times(self, step: Step) -> tuple[list[float], list[float]]:
        """Return ready and done times of the buckets.

        A step of several backwards, each of which waits for its own reduction, counts as one
        bucket: its work is the sum of the parts, and so is its communication.
        """
        waited_s = 0.0 if self._loads_itself else step.fetch_s
        origin = _origin(step)
        if len(step.backwards) == 1:
            ready_s, done_s = [], []
            for bucket in _merged(step.backwards[0]):
                excused_s = bucket.ready.excused_s - origin.excused_s
                ready = self._since_origin_s(step, bucket.ready) - excused_s - waited_s
                done = self._since_origin_s(step, _sum_of(bucket)) - excused_s
                ready_s.append(max(0.0, ready))
                done_s.append(max(0.0, done))
            return ready_s, done_s
        worked_s, reduced_s, start = -waited_s, 0.0, origin
        for backward in step.backwards:
            last, summed = backward[-1], _sum_of(backward[-1])
            worked_s += self._clock.between_s(start.mark, last.ready.mark)
            reduced_s += self._clock.between_s(last.ready.mark, summed.mark)
            start = summed
        excused_s = step.backwards[-1][-1].ready.excused_s - origin.excused_s
        worked_s = max(0.0, worked_s - excused_s)
        return [worked_s], [worked_s + waited_s + reduced_s]


class Peaks:
    """The peaks of memory, read often while a local batch is new, and seldom later."""

    def __init__(self, memory: Guard) -> None:
        self.memory = memory
        self._samples = 0
        self._alike = 0
        """Steps since the local batch changed."""

    def is_resized(self, samples: int) -> bool:
        """Whether a local batch has quite another size than the one before."""
        return abs(samples - self._samples) > _RESIZED * self._samples

    def end_step(self, next_samples: int) -> float:
        """Return the peak of a step, where it is read; so many samples follow."""
        read = self._alike < _NEW or self._alike % _MEMORY_EVERY == 0
        self._alike = self._alike + 1 if next_samples == self._samples else 0
        self._samples = next_samples
        return self.memory.end_step() if read else math.nan


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


def _origin(step: Step) -> Stamp:
    assert step.before is not None
    assert step.before.reduced is not None
    return step.before.reduced


def _sum_of(bucket: Bucket) -> Stamp:
    assert bucket.done is not None
    return bucket.done


def _merged(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Put neighbors together, each group as late as its last member, until few are left."""
    groups = min(len(buckets), BUCKETS)
    ends = [len(buckets) * (group + 1) // groups - 1 for group in range(groups)]
    return [buckets[end] for end in ends]

"""The meter: local times from stamps, on a clock that the tests turn."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poise.core.batch import Batch
from poise.core.fit import Fit
from poise.core.observation import Observation
from poise.runtime.clocks import Clock, HostClock, Stamp, Stopwatch, Waits
from poise.runtime.events import (
    Applied,
    BucketDone,
    BucketReady,
    Disturbed,
    Event,
    Events,
    HandedOut,
    Reduced,
)
from poise.runtime.memory import Guard, HostMemory
from poise.runtime.meter import LoaderRate, Meter
from poise.runtime.rows import BUCKETS, observation_of, unmeasured
from poise.torch.devices import DeviceClock, clock_of

MB = 2.0**20


@dataclass
class FakeDevice:
    """An accelerator whose stream gets to a mark some time after it was put there.

    A mark is the moment at which the stream will reach it.
    """

    lag: int = 3
    cheap: bool = False
    now_s: float = 0.0
    behind_s: float = 0.0
    """How far the stream is behind the CPU."""

    def mark(self) -> float:
        return self.now_s + self.behind_s

    def passed(self, mark: float) -> bool:
        return mark <= self.now_s

    def between_s(self, start: float, end: float) -> float:
        return end - start

    def host_s(self) -> float:
        return self.now_s


@dataclass
class FakeMemory:
    limit_bytes: float = 100 * MB
    peaks: list[float] = field(default_factory=list)

    def peak_bytes(self) -> float:
        return self.peaks.pop(0) if self.peaks else 10 * MB


@dataclass
class Bench:
    """A worker on a turned clock."""

    clock: FakeDevice = field(default_factory=lambda: FakeDevice(lag=1))
    loads_itself: bool = True
    late: int = 0
    """By how many steps events of the device are told late."""
    waits: Waits = field(default_factory=Waits)
    meter: Meter = field(init=False)
    events: Events = field(default_factory=Events)
    told_later: list[tuple[int, Event]] = field(default_factory=list)
    number: int = 0
    """Of the step under way."""
    buckets: int = 0

    def __post_init__(self) -> None:
        self.meter = Meter(self.clock, Guard(FakeMemory()), loads_itself=self.loads_itself)
        self.meter.listen(self.events)

    def stamp(self) -> Stamp:
        return Stopwatch(self.clock, self.waits).stamp()

    def tell(self, event: Event) -> None:
        """Tell of something on the device, as late as that is."""
        self.told_later.append((self.number + self.late, event))
        self.catch_up(self.number)

    def catch_up(self, step: int) -> None:
        while self.told_later and self.told_later[0][0] <= step:
            self.events.tell(self.told_later.pop(0)[1])

    def begin(
        self,
        step: int,
        *,
        samples: int = 4,
        whole: bool = True,
        compiled: bool = False,
        load_s: float = 0.0,
    ) -> None:
        asked_s = self.clock.now_s
        self.clock.now_s += load_s
        self.number = step
        self.catch_up(step)
        batch = Batch(step=step, epoch=0, start=0, split=(samples, 6))
        stamp = self.stamp()
        self.events.tell(
            HandedOut(step, stamp, batch, samples, whole, None, asked_s, load_s, compiled, True)
        )

    def backward(self, *buckets_s: float, sum_s: float) -> None:
        """Each bucket is ready so long after the one before, all sums are there at the end."""
        first = self.buckets
        for each_s in buckets_s:
            self.clock.now_s += each_s
            begins = self.buckets == first
            self.tell(BucketReady(self.number, self.stamp(), self.buckets, None, begins))
            self.buckets += 1
        self.clock.now_s += sum_s
        for number in range(first, self.buckets):
            self.tell(BucketDone(self.number, self.stamp(), number, None))
        self.tell(Reduced(self.number, self.stamp(), (0.4, 0.6)))

    def updated(self) -> None:
        self.tell(Applied(self.number, self.stamp(), None))

    def disturb(self) -> None:
        self.events.tell(Disturbed(self.number, self.stamp()))

    def step(self, number: int, *buckets_s: float, sum_s: float = 0.5, load_s: float = 0.0) -> None:
        self.begin(number, load_s=load_s)
        self.backward(*buckets_s, sum_s=sum_s)

    def seen(self, step: int) -> Observation:
        rows = np.stack([self.meter.row(step), self.meter.row(step)])
        return observation_of(Batch(step=step, epoch=0, start=0, split=(4, 6)), rows)


def warmed_up(**settings: Any) -> Bench:
    """Return a worker after the steps that are left out."""
    bench = Bench(**settings)
    for number in range(2):
        bench.step(number, 1.0)
    return bench


def test_times_count_from_the_end_of_the_reduction_before() -> None:
    bench = warmed_up()
    bench.clock.now_s += 0.1  # update
    bench.updated()
    bench.clock.now_s += 0.2  # the loop's own work
    bench.step(2, 1.0, 0.3, sum_s=0.5)
    seen = bench.seen(2)
    assert seen.ready_s is not None
    assert seen.done_s is not None
    assert seen.update_s is not None
    np.testing.assert_allclose(seen.ready_s[0], [1.3, 1.6])
    np.testing.assert_allclose(seen.done_s[0], [2.1, 2.1])
    np.testing.assert_allclose(seen.update_s[0], 0.1)
    assert seen.split == (4, 6)


@pytest.mark.parametrize(
    ("samples", "left_out"), [(41, False), (44, False), (45, True), (30, True)]
)
def test_the_first_step_with_another_size_says_nothing(samples: int, left_out: bool) -> None:
    bench = Bench()
    for number, size in enumerate([40, 40, 40, samples, samples]):
        bench.begin(number, samples=size)
        bench.backward(1.0, sum_s=0.5)
    measured = [bool(np.isfinite(bench.meter.row(number)[7])) for number in range(5)]
    assert measured == [False, False, True, not left_out, True]


def test_waiting_for_others_is_no_work_of_the_worker() -> None:
    """A slow peer makes reductions long; its effect is in done, never in ready."""
    bench = warmed_up()
    bench.step(2, 1.0, sum_s=50.0)
    bench.step(3, 1.0, sum_s=0.5)
    for step in (2, 3):
        seen = bench.seen(step)
        assert seen.ready_s is not None
        np.testing.assert_allclose(seen.ready_s[0], [1.0])
    bench.begin(4)
    bench.clock.now_s += 30.0  # say, the counts of all workers
    bench.waits.seconds += 30.0
    bench.backward(1.0, sum_s=0.5)
    seen = bench.seen(4)
    assert seen.ready_s is not None
    assert seen.done_s is not None
    np.testing.assert_allclose(seen.ready_s[0], [1.0])
    np.testing.assert_allclose(seen.done_s[0], [1.5])


@pytest.mark.parametrize("what", ["warm-up", "pass", "evaluation", "short", "no backward", "stray"])
def test_steps_that_say_nothing_are_left_out(what: str) -> None:
    bench = Bench() if what == "warm-up" else warmed_up()
    step = 1 if what == "warm-up" else 2
    if what == "warm-up":
        bench.step(0, 1.0)
    if what in ("pass", "evaluation"):
        bench.disturb()
    bench.begin(step, whole=what != "short")
    if what != "no backward":
        bench.backward(1.0, sum_s=0.5)
    bench.begin(step + 1)
    row = bench.meter.row(99 if what == "stray" else step)
    assert row[0] == 0
    assert np.isnan(row[1:]).all()


def test_a_step_left_out_does_not_spoil_the_next() -> None:
    bench = warmed_up()
    bench.begin(2, whole=False)
    bench.backward(0.2, sum_s=0.5)
    bench.step(3, 1.0)
    seen = bench.seen(3)
    assert seen.ready_s is not None
    np.testing.assert_allclose(seen.ready_s[0], [1.0])


def test_compiling_is_told_of_the_step_in_which_it_was() -> None:
    bench = warmed_up()
    bench.step(2, 1.0)
    bench.begin(3, compiled=True)
    assert bench.seen(2).compiling == (0, 1)
    assert bench.seen(3).compiling == ()


def test_several_backwards_in_a_step_count_as_one_bucket() -> None:
    """Two models: the second backward begins after the first reduction, which may take long."""
    bench = warmed_up()
    bench.begin(2)
    bench.backward(1.0, 0.5, sum_s=7.0)
    bench.backward(2.0, sum_s=0.25)
    seen = bench.seen(2)
    assert seen.ready_s is not None
    assert seen.done_s is not None
    np.testing.assert_allclose(seen.ready_s[0], [3.5])
    np.testing.assert_allclose(seen.done_s[0], [10.75])


def test_many_buckets_are_put_together() -> None:
    bench = warmed_up()
    bench.step(2, *[0.1] * 20)
    seen = bench.seen(2)
    assert seen.ready_s is not None
    assert seen.ready_s.shape == (2, BUCKETS)
    np.testing.assert_allclose(seen.ready_s[0, -1], 2.0)
    assert (np.diff(seen.ready_s[0]) > 0).all()


def test_loading_by_the_worker_is_work_and_by_processes_waiting() -> None:
    for loads_itself in (True, False):
        bench = warmed_up(loads_itself=loads_itself)
        bench.step(2, 1.0, load_s=0.4)
        seen = bench.seen(2)
        assert seen.ready_s is not None
        assert seen.done_s is not None
        np.testing.assert_allclose(seen.ready_s[0], [1.4 if loads_itself else 1.0])
        np.testing.assert_allclose(seen.done_s[0], [1.9])
        took = seen.load_s if loads_itself else seen.wait_s
        other = seen.wait_s if loads_itself else seen.load_s
        assert took is not None
        np.testing.assert_allclose(took[0], 0.4)
        assert other is None
        assert np.isclose(seen.length_s or 0.0, 1.9)


@pytest.mark.parametrize(("pause_s", "counts"), [(0.5, True), (30.0, False)])
def test_a_step_after_a_long_pause_says_nothing(pause_s: float, counts: bool) -> None:
    """Say, a checkpoint; a little logging is part of the loop."""
    bench = warmed_up()
    for step in (2, 3):
        if step == 3:
            bench.clock.now_s += pause_s
        bench.step(step, 1.0)
        bench.updated()
    seen = bench.seen(3)
    assert seen.ready_s is not None
    assert np.isnan(seen.ready_s).all() != counts


def test_a_loader_is_timed_between_batches_that_were_waited_for() -> None:
    loader = LoaderRate()
    assert math.isnan(loader.arrived(1.0, 10, 0.9))  # the first: since when is not known
    assert np.isclose(loader.arrived(2.0, 10, 0.5), 0.1)
    assert math.isnan(loader.arrived(2.1, 10, 0.0))  # one in a burst
    assert np.isclose(loader.arrived(5.0, 10, 2.0), 0.15)  # 3 s for the 20 samples since
    assert math.isnan(loader.arrived(9.0, 10, 0.4))  # no more than it takes to unpack a batch


def test_a_device_is_read_when_it_got_there_and_never_waited_for() -> None:
    clock = FakeDevice(lag=3, behind_s=5.0)
    bench = warmed_up(clock=clock)
    bench.step(2, 1.0)
    assert np.isnan(bench.meter.row(2)[1:]).all()  # the stream is 5 s behind
    for step in (3, 4, 5, 6):
        bench.step(step, 1.0)
    seen = bench.seen(2)
    assert seen.ready_s is not None
    np.testing.assert_allclose(seen.ready_s[0], [1.0])
    assert np.isnan(bench.meter.row(6)[1:]).all()


@pytest.mark.parametrize("late", [1, 3])
def test_events_that_are_told_late_give_the_same_observations(late: int) -> None:
    """Events of a device, or of a graph, come steps after the batch they are about."""

    def trained(late: int) -> list[list[float]]:
        bench, chance = Bench(late=late), np.random.default_rng(1)
        for number in range(12):
            bench.begin(number, load_s=float(chance.uniform(0.0, 0.2)))
            bench.backward(*chance.uniform(0.5, 1.0, size=3), sum_s=float(chance.uniform(0.1, 1)))
            bench.waits.seconds += 0.05
            bench.clock.now_s += float(chance.uniform(0.1, 0.2))
            if number != 6:  # an optimizer that is left out
                bench.updated()
        bench.catch_up(99)
        return [np.nan_to_num(bench.meter.row(number), nan=-1).tolist() for number in range(12)]

    punctual = trained(0)
    assert sum(row[7] > 0 for row in punctual) >= 9
    assert trained(late) == punctual


def test_the_clock_follows_the_device() -> None:
    host: Clock = clock_of(torch.device("cpu"))
    assert isinstance(host, HostClock)
    first, second = host.mark(), host.mark()
    assert host.passed(second)
    assert host.between_s(first, second) >= 0
    assert isinstance(clock_of(torch.device("meta")), DeviceClock)


def test_events_of_a_device_are_read_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, device: Any, *, enable_timing: bool) -> None:
            assert enable_timing
            self.recorded = False

        def record(self) -> None:
            self.recorded = True

        def query(self) -> bool:
            return self.recorded

        def elapsed_time(self, end: "Event") -> float:
            assert end.recorded
            return 250.0

    monkeypatch.setattr(torch, "Event", Event)
    clock = DeviceClock(torch.device("meta"))
    start, end = clock.mark(), clock.mark()
    assert clock.passed(start)
    assert clock.between_s(start, end) == 0.25
    assert clock.lag >= 2


def test_a_step_nobody_measured_changes_no_fit() -> None:
    batch = Batch(step=7, epoch=0, start=0, split=(1, 2))
    fit = Fit.start(2, 3)
    after, alarms = fit.update(unmeasured(batch))
    assert after is fit
    assert alarms.size == 0
    unmeasured(batch).check()


def test_the_peak_is_that_of_the_step() -> None:
    memory = HostMemory(sharers=1)
    block = np.ones(int(64 * MB), dtype=np.uint8)
    with_block = memory.peak_bytes()
    del block
    memory.peak_bytes()
    without = memory.peak_bytes()
    assert with_block - without > 32 * MB
    assert memory.limit_bytes > with_block


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files as a kernel shows them."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


PROC = {
    "proc/self/status": "VmHWM:\t2048 kB\nVmRSS:\t1024 kB\n",
    "proc/self/clear_refs": "",
    "proc/meminfo": "MemTotal: 999999 kB\nMemAvailable: 102400 kB\n",
}


@pytest.mark.parametrize(
    ("files", "sharers", "limit"),
    [
        ({}, 1, 1 + 100),
        ({}, 4, 1 + 25),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n1:cpu:/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(int(50 * MB)),
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(int(30 * MB)),
                "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {int(10 * MB)}\n",
            },
            2,
            1 + 15,
        ),
        (
            {
                "proc/self/cgroup": "0::/slice/job\n",
                "sys/fs/cgroup/slice/memory.max": str(int(40 * MB)),
                "sys/fs/cgroup/slice/memory.current": str(int(10 * MB)),
                "sys/fs/cgroup/slice/job/memory.max": "max\n",
                "sys/fs/cgroup/slice/job/memory.current": str(int(10 * MB)),
            },
            1,
            1 + 30,
        ),
        (  # inside a container, where the path is not to be seen
            {
                "proc/self/cgroup": "0::/../elsewhere\n",
                "sys/fs/cgroup/memory.max": str(int(20 * MB)),
                "sys/fs/cgroup/memory.current": str(int(5 * MB)),
            },
            1,
            1 + 15,
        ),
    ],
)
def test_the_limit_is_that_of_the_machine_or_the_control_group(
    tmp_path: Path, files: dict[str, str], sharers: int, limit: float
) -> None:
    memory = HostMemory(sharers, tree(tmp_path, {**PROC, **files}))
    assert memory.limit_bytes == limit * MB
    assert memory.peak_bytes() == 2 * MB


def test_where_nothing_can_be_read_nothing_is_claimed(tmp_path: Path) -> None:
    memory = HostMemory(2, tmp_path)
    assert math.isnan(memory.limit_bytes)
    assert math.isnan(memory.peak_bytes())


def test_parts_grow_no_further_than_memory_allows() -> None:
    memory = FakeMemory(limit_bytes=100 * MB)
    guard = Guard(memory)
    assert guard.most_samples == math.inf
    memory.peaks = [0.0, 40 * MB, 0.0, 60 * MB]
    guard.begin_parts()
    guard.end_parts(10)
    assert guard.most_samples == 22  # one size seen: 4 MB a sample at most, 90 MB of 100
    guard.begin_parts()
    guard.end_parts(20)
    assert guard.most_samples == 35  # 20 MB and 2 MB a sample
    guard.ran_out(30)
    assert guard.most_samples == 27
    assert math.isnan(guard.end_step())  # the peak of a part says nothing of the local batch
    assert guard.end_step() == 10 * MB

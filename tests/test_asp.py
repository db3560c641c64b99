"""The engine of training with a server: laws on made-up workers, without a process or a clock."""

import heapq
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.batch import batches
from poise.core.observation import Observation
from poise.core.plan import Plan
from poise.core.staleness import (
    lowered_momentum,
    rate_factor,
    stable_part,
)
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.engine.member import Share, Tally
from poise.engine.modes import Async, Mode, Stale, Sync, mode_of
from poise.engine.pool import Pool, count_of
from poise.engine.round import Report
from poise.errors import Disagreement, InvalidSetting, StateMismatch
from poise.policy import Even, Fixed, Policy, policy_named


def begun(
    mode: Async | Stale, workers: int, *, length: int = 100, policy: Policy | None = None
) -> AsyncEngine:
    """An engine of a global batch of 12 whose workers, numbered from 1, are all there."""
    engine = AsyncEngine.begin(mode, Engine(policy or Even(), workers, 12), length)
    for worker in range(1, workers + 1):
        _, engine = engine.join(worker)
    return engine


def test_a_push_counts_by_share_and_less_the_staler_it_is() -> None:
    assert rate_factor(0.1, staleness=3, usual=3) == 0.1
    assert rate_factor(0.1, staleness=0, usual=3) == 0.1
    assert rate_factor(0.1, staleness=7, usual=3) == pytest.approx(0.02)
    assert rate_factor(0.1, staleness=7, usual=3, damped=False) == 0.1


def test_a_worker_that_computes_ahead_is_usually_one_update_late() -> None:
    engine = begun(Async(ahead=True), 1)
    share, engine = engine.draw(1)
    assert share is not None
    assert [engine.factor(share, stale) for stale in (0, 1, 2)] == [1, 1, 0.5]


@pytest.mark.parametrize("late", [0, 1, 4])
def test_a_late_gradient_is_stable_up_to_a_part_of_the_step(late: int) -> None:
    """Gradient descent on x^2 / 2, whose largest stable step is 2, with gradients that are late."""
    for part, diverges in ((0.97, False), (1.03, True)):
        places = [1.0] * (late + 1)
        for _ in range(3000):
            places.append(places[-1] - 2 * part * stable_part(late) * places[-1 - late])
        assert (max(abs(place) for place in places[-50:]) > 1) == diverges


@given(st.floats(0, 0.999), st.integers(0, 100))
def test_momentum_is_lowered_with_staleness_and_kept_without(m: float, staleness: int) -> None:
    assert lowered_momentum(m, 0) == m
    assert 0 <= lowered_momentum(m, staleness + 1) <= lowered_momentum(m, staleness) + 1e-12


def test_modes_have_names() -> None:
    modes: dict[str, Mode] = {"sync": Sync(), "async": Async(), "stale:4": Stale(4)}
    for name, mode in modes.items():
        assert mode_of(name) == mode_of(mode) == mode
        assert str(mode) == name
    for wrong in ("asynchronous", "stale", "stale:-1", 4, "Async"):
        with pytest.raises(InvalidSetting, match="stale:4"):
            mode_of(wrong)
    with pytest.raises(InvalidSetting, match="whole number"):
        Stale(-1)


@given(st.integers(0, 60), st.integers(0, 10_000))
def test_every_sample_of_a_pool_is_pushed_once(length: int, seed: int) -> None:
    chance = random.Random(seed)
    pool, pushed, number = Pool(length), Counter[int](), 0
    while not pool.over:
        out = sorted(pool.out)
        what = chance.choice(["take", "push", "back", "resume"]) if out else "take"
        if what == "take":
            _, pool = pool.take(number, chance.randint(1, 20))
            number += 1
        elif what == "resume":
            pool = pool.all_back()
        else:
            chosen = chance.choice(out)
            if what == "push":
                for start, stop in pool.out[chosen]:
                    pushed.update(range(start, stop))
            pool = pool.push(chosen) if what == "push" else pool.give_back(chosen)
        assert pool.free + pool.pushed + sum(map(count_of, pool.out.values())) == pool.length
    assert pushed == Counter(range(length))


class Workers:
    """Made-up workers of given speeds, which join, compute, push, and may die."""

    def __init__(self, engine: AsyncEngine, times_s: dict[int, float], *, seed: int = 0) -> None:
        self.engine = engine
        self.times_s = times_s
        self.now_s = 0.0
        self.pushed: Counter[tuple[int, int]] = Counter()
        """(epoch, position) of each sample."""
        self.applied: list[list[Share]] = []
        """The shares of each step, with a bound."""
        self.apart = 0
        """The most steps that two workers were apart, with a bound."""
        self._read: dict[int, int] = {}
        self._computing: list[tuple[float, int]] = []
        self._arrived: dict[int, list[Share]] = {}
        self._random = random.Random(seed)
        for worker in times_s:
            self.start(worker)

    def start(self, worker: int) -> None:
        """A worker that is here asks for a local batch, and computes if there is one."""
        share, self.engine = self.engine.draw(worker)
        self.resume()
        del share

    def resume(self) -> None:
        """Whoever has something to compute and may start does."""
        computing = {worker for _, worker in self._computing}
        for member in self.engine.members:
            if member.worker in computing or not member.out:
                continue
            if self.engine.may_start(member.worker):
                self._read[member.worker] = self.engine.updates
                samples = member.out[0].samples
                time_s = self.times_s[member.worker] * samples * self._random.uniform(0.97, 1.03)
                heapq.heappush(self._computing, (self.now_s + time_s, member.worker))
        at = [self.engine._at(member) for member in self.engine.members if member.out]
        running = {worker for _, worker in self._computing}
        begun = [
            member.out[0].step
            for member in self.engine.members
            if member.out and member.worker in running
        ]
        if begun and isinstance(self.engine.mode, Stale):
            self.apart = max(self.apart, max(begun) - min(at))

    def step(self) -> None:
        """The next worker to be done pushes."""
        self.now_s, worker = heapq.heappop(self._computing)
        member = self.engine.member(worker)
        share = member.out[0]
        iteration_s = self.times_s[worker] * share.samples + 0.001
        for start, stop in share.ranges:
            self.pushed.update((share.epoch, position) for position in range(start, stop))
        self._arrived.setdefault(share.step, []).append(share)
        staleness = self.engine.updates - self._read[worker]
        self.engine = self.engine.pushed(worker, [share.number], staleness=staleness)
        while (step := self.engine.complete()) is not None:
            self.applied.append(self._arrived.pop(step))
            self.engine = self.engine.applied(step, {worker: 0})
        _, self.engine = self.engine.reported(worker, Report(share.samples, iteration_s))
        self.start(worker)

    def epoch(self) -> None:
        """Train until the epoch is over."""
        while not self.engine.over:
            for member in self.engine.members:
                if not member.out:
                    self.start(member.worker)
            self.step()
        self.engine = self.engine.next_epoch()

    def kill(self, worker: int) -> None:
        """A worker dies, whatever it is doing."""
        self._computing = [each for each in self._computing if each[1] != worker]
        heapq.heapify(self._computing)
        _, self.engine = self.engine.leave(worker)
        while (step := self.engine.complete()) is not None:
            self.applied.append(self._arrived.pop(step))
            self.engine = self.engine.applied(step, {})
        self.resume()

    def join(self, worker: int, time_s: float) -> None:
        """A worker comes."""
        self.times_s[worker] = time_s
        _, self.engine = self.engine.join(worker)
        self.start(worker)


MODES = st.sampled_from([Async(), Stale(0), Stale(1), Stale(4)])


@settings(max_examples=60)
@given(MODES, st.integers(1, 5), st.integers(1, 130), st.integers(0, 1000))
def test_whoever_comes_and_goes_every_sample_is_pushed_once(
    mode: Async | Stale, count: int, length: int, seed: int
) -> None:
    chance = random.Random(seed)
    speeds = {worker: chance.uniform(0.01, 0.2) for worker in range(1, count + 1)}
    workers = Workers(begun(mode, count, length=length), speeds, seed=seed)
    number = count
    for epoch in range(2):
        while not workers.engine.over:
            here = [member.worker for member in workers.engine.members]
            what = chance.random()
            if (what < 0.15 and len(here) < 8) or not here:
                number += 1
                workers.join(number, chance.uniform(0.01, 0.2))
            elif what < 0.3:
                workers.kill(chance.choice(here))
            else:
                for worker in here:
                    if not workers.engine.member(worker).out:
                        workers.start(worker)
                workers.step()
        assert all(n == 1 for n in workers.pushed.values())
        assert len(workers.pushed) == (epoch + 1) * length
        workers.engine = workers.engine.next_epoch()
    assert workers.engine.samples == 2 * length


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_no_worker_is_more_steps_ahead_than_the_bound(bound: int) -> None:
    speeds = {1: 0.01, 2: 0.05, 3: 0.2}
    workers = Workers(begun(Stale(bound), 3, length=600), speeds)
    for _ in range(3):
        workers.epoch()
    assert workers.apart == bound


@pytest.mark.parametrize("length", [60, 65, 71])
def test_a_bound_of_zero_takes_the_steps_of_synchronous_training(length: int) -> None:
    policy = Fixed([5, 1, 6])
    workers = Workers(begun(Stale(0), 3, length=length, policy=policy), {1: 0.1, 2: 0.02, 3: 0.3})
    workers.epoch()
    found = [sorted(each for share in step for each in share.ranges) for step in workers.applied]
    expected = [
        [batch.slice(worker) for worker in range(3) if batch.split[worker]]
        for batch in batches(lambda _: Plan((5, 1, 6)), length=length)
    ]
    assert found == expected


def test_a_push_carries_its_planned_share_also_when_the_last_batch_is_smaller() -> None:
    engine = begun(Async(), 1, length=20)
    first, engine = engine.draw(1)
    second, engine = engine.draw(1)
    assert first is not None
    assert second is not None
    assert (first.samples, first.part) == (12, 1.0)
    assert (second.samples, second.part) == (8, 1.0)
    assert engine.draw(1)[0] is None


def test_equal_iteration_times_make_equal_staleness() -> None:
    """The policies of synchronous training balance here, too: 3 for each of 4 workers."""
    speeds = {1: 0.01 / 0.178, 2: 0.01 / 0.178, 3: 0.01 / 0.119, 4: 0.01 / 0.9}
    engine = AsyncEngine.begin(Async(), Engine(policy_named("auto"), 4, 240), 240 * 40)
    for worker in speeds:
        _, engine = engine.join(worker)
    uneven = Workers(AsyncEngine.begin(Async(), Engine(Even(), 4, 240), 240 * 40), {}, seed=1)
    for worker, time_s in speeds.items():
        uneven.join(worker, time_s)
    uneven.epoch()
    tails = [member.tally.mean_staleness for member in uneven.engine.members]
    assert max(tails) > 8
    workers = Workers(engine, dict(speeds), seed=1)
    workers.epoch()
    before = {member.worker: member.tally for member in workers.engine.members}
    workers.epoch()
    for member in workers.engine.members:
        mean = _mean_since(before[member.worker], member.tally)
        assert mean == pytest.approx(3.0, rel=0.2)


def _mean_since(before: Tally, after: Tally) -> float:
    counts = {
        staleness: count - before.staleness.get(staleness, 0)
        for staleness, count in after.staleness.items()
    }
    return sum(s * n for s, n in counts.items()) / sum(counts.values())


def test_training_waits_until_all_expected_workers_are_there() -> None:
    engine = AsyncEngine.begin(Async(), Engine(Even(), 2, 12), 100)
    _, engine = engine.join(1)
    assert engine.draw(1)[0] is None
    assert not engine.may_start(1)
    _, engine = engine.join(2)
    share, engine = engine.draw(1)
    assert share is not None
    assert share.samples == 6


@pytest.mark.parametrize("mode", [Async(), Stale(1)])
def test_an_epoch_is_over_when_no_worker_wants_the_rest_of_it(mode: Async | Stale) -> None:
    engine = begun(mode, 2)
    _, engine = engine.draw(1)
    engine = engine.unused(1, epoch=1)
    assert not engine.over
    engine = engine.unused(2, epoch=1)
    assert engine.over
    engine = engine.next_epoch()
    assert not engine.over
    share, engine = engine.draw(2)
    assert share is not None
    assert (share.epoch, engine.pool.pushed) == (1, 0)


@pytest.mark.parametrize("split", [[6, 6], [12, 0]])
def test_who_has_left_an_epoch_gets_no_part_of_its_steps(split: list[int]) -> None:
    engine = begun(Stale(1), 2, length=30, policy=Fixed(split))
    engine = engine.unused(1, epoch=1)
    seen = Counter[int]()
    while not engine.over:
        share, engine = engine.draw(2)
        assert share is not None
        assert engine.may_start(2)
        for start, stop in share.ranges:
            seen.update(range(start, stop))
        engine = engine.pushed(2, [share.number])
        while (step := engine.complete()) is not None:
            engine = engine.applied(step, {2: 0})
    assert seen == Counter(range(30))


def test_training_is_finished_when_the_last_worker_leaves_because_it_is_done() -> None:
    _, engine = begun(Async(), 2).leave(1, done=True)
    assert not engine.over
    _, lost = engine.leave(2)
    assert not lost.over  # others may join
    assert lost.abandoned
    _, engine = engine.leave(2, done=True)
    assert engine.finished
    assert engine.over
    assert not engine.abandoned
    _, engine = engine.join(3)
    assert not engine.over


def test_late_steps_count_for_less_unless_told_otherwise() -> None:
    assert begun(Stale(4), 2).step_factor(0) == 1
    assert begun(Stale(4), 2).step_factor(2) == stable_part(2) < 0.5
    assert begun(Stale(4, damped=False), 2).step_factor(2) == 1


def test_a_non_finite_push_is_dropped_and_counted_and_its_samples_do_not_come_again() -> None:
    for mode in (Async(), Stale(0)):
        engine = begun(mode, 1, length=12)
        share, engine = engine.draw(1)
        assert share is not None
        engine = engine.pushed(1, [share.number], finite=False)
        if (step := engine.complete()) is not None:
            engine = engine.applied(step, {})
        assert engine.member(1).tally.dropped == 1
        assert engine.updates == 0
        assert engine.over


def test_a_push_of_what_was_not_handed_out_is_refused() -> None:
    engine = begun(Async(), 2)
    share, engine = engine.draw(1)
    assert share is not None
    for worker, numbers in ((2, [share.number]), (1, [7]), (1, []), (1, [share.number, 9])):
        with pytest.raises(Disagreement, match="protocol"):
            engine.pushed(worker, numbers)


@given(MODES, st.integers(0, 1000))
def test_a_saved_place_goes_on_with_what_was_not_pushed(mode: Async | Stale, seed: int) -> None:
    workers = Workers(begun(mode, 3, length=100), {1: 0.05, 2: 0.1, 3: 0.02}, seed=seed)
    for _ in range(4):
        workers.step()
    waiting = [share for shares in workers._arrived.values() for share in shares]
    saved = workers.engine.state_dict()
    resumed = AsyncEngine.begin(mode, Engine(Even(), 2, 12), 100).load_state_dict(saved)
    assert resumed.samples + resumed.pool.free == 100
    for worker in (1, 2):
        _, resumed = resumed.join(worker)
    rest = Workers(resumed, {1: 0.1, 2: 0.1})
    rest.epoch()
    lost = Counter((0, n) for share in waiting for each in share.ranges for n in range(*each))
    if isinstance(mode, Async):
        lost.clear()  # what is pushed is applied
    assert workers.pushed - lost + rest.pushed == Counter((0, n) for n in range(100))


@pytest.mark.parametrize(
    "change",
    [
        {"position": 101},
        {"position": -1},
        {"returned": [[0, 300]]},
        {"returned": 3},
        {"epoch": "x"},
    ],
)
def test_a_damaged_place_is_refused(change: dict[str, object]) -> None:
    engine = begun(Async(), 1)
    state = {**engine.state_dict(), **change}
    with pytest.raises(StateMismatch, match=r"damaged|load the state"):
        AsyncEngine.begin(Async(), Engine(Even(), 1, 12), 100).load_state_dict(state)


def test_workers_are_known_again_by_their_label() -> None:
    auto = policy_named("auto")
    engine = AsyncEngine.begin(Async(), Engine(auto, 2, 100), 10_000)
    for worker, label in ((1, "fast"), (2, "slow")):
        _, engine = engine.join(worker, label)
    workers = Workers(engine, {1: 0.01, 2: 0.04})
    workers.epoch()
    fast, slow = workers.engine.plan.split
    assert fast > 3 * slow
    resumed = AsyncEngine.begin(Async(), Engine(auto, 2, 100), 10_000)
    resumed = resumed.load_state_dict(workers.engine.state_dict())
    for worker, label in ((1, "slow"), (2, "fast")):
        _, resumed = resumed.join(worker, label)
    first, second = resumed.plan.split
    assert second > 3 * first


def test_stated_splits_go_on_after_a_resume_with_as_many_workers() -> None:
    stated = Fixed({0: [8, 4], 5: [6, 6]})
    state = begun(Async(), 2, policy=stated).state_dict()
    resumed = AsyncEngine.begin(Async(), Engine(stated, 2, 12), 100).load_state_dict(state)
    for worker in (1, 2):
        _, resumed = resumed.join(worker)
    assert resumed.plan.split == (8, 4)
    with pytest.raises(InvalidSetting, match="now there are 3 workers"):
        resumed.join(3)


def test_reports_do_not_pile_up_while_a_worker_is_silent() -> None:
    engine = begun(Async(), 2)
    for _ in range(1000):
        decided, engine = engine.reported(1, Report(6, 1.0))
        assert decided is None
    assert len(engine.member(1).reports) < 100


def test_a_worker_without_a_part_is_not_waited_for() -> None:
    engine = begun(Stale(1), 2, policy=Fixed([0, 12]))
    decided, _ = engine.reported(2, Report(12, 1.0))
    assert decided is not None
    (observation,) = decided.events
    assert isinstance(observation, Observation)
    assert observation.split == (0, 12)
    assert np.isnan(observation.times("a test")[0, 0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 13},
        {"samples": -1},
        {"samples": 10**400},
        {"iteration_s": 5e-324},
        {"iteration_s": 1.7e308},
        {"iteration_s": -1.0},
        {"wait_s": np.inf},
        {"memory_limit_bytes": 1e300},
    ],
    ids=str,
)
def test_what_no_worker_can_measure_is_known_as_such(wrong: dict[str, Any]) -> None:
    possible = Report(12, 0.1, 0.0, memory_bytes=1e9)
    assert possible.is_possible(global_batch=12)
    assert replace(possible, wait_s=1e-17).is_possible(global_batch=12)  # a difference, rounded
    assert not replace(possible, **wrong).is_possible(global_batch=12)


@pytest.mark.parametrize("policy", ["auto", "proportional", "lbbsp", "optperf"])
@pytest.mark.parametrize("iteration_s", [0.0, 1e-9, 1e9])
@pytest.mark.parametrize("samples", [0, 12])
def test_a_policy_survives_whatever_can_be_measured(
    policy: str, iteration_s: float, samples: int
) -> None:
    engine = begun(Async(), 2, policy=policy_named(policy))
    odd = Report(samples, iteration_s, 5e-324, 5e-324, 1e9, memory_bytes=1e18, memory_limit_bytes=0)
    assert odd.is_possible(global_batch=12)
    for _ in range(40):
        _, engine = engine.reported(1, Report(engine.plan.split[0], 0.1))
        _, engine = engine.reported(2, odd)
    assert sum(engine.plan.split) == 12


def test_reports_of_a_round_are_averaged_worker_by_worker() -> None:
    seen: list[Any] = []

    class Watching(Even):
        """Notes what it is shown."""

        def update(self, state: None, events: object) -> tuple[None, None]:
            seen.append(events)
            return None, None

    engine = begun(Async(), 2, policy=Watching())
    for worker, iteration_s in ((1, 1.0), (1, 3.0), (1, np.nan)):
        decided, engine = engine.reported(worker, Report(6, iteration_s))
        assert decided is None
    decided, engine = engine.reported(2, Report(6, 5.0))
    assert decided is not None
    ((observation,),) = seen
    assert observation.ready_s.tolist() == [[2.0], [5.0]]
    assert observation.split == (6, 6)

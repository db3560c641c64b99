"""The start-step machine: whatever the order of events, all workers cut the same splits."""

import json
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.batch import Batch
from poise.core.limits import Limits
from poise.core.plan import Plan, Timetable, best_plan
from poise.core.split import Split
from poise.core.timing import SpeedModel
from poise.engine.rhythm import SELDOM, SETTLING, delay
from poise.engine.start_step import Announcements, Posted
from poise.errors import StateMismatch

STEPS = 70
SPLITS: list[Split] = [(4, 4), (5, 3), (2, 6)]
FIRST = Timetable((Plan(SPLITS[0]),))


def copied(machine: Announcements) -> Announcements:
    """Return the machine as another worker gets it: through JSON."""
    return Announcements.from_state_dict(json.loads(json.dumps(machine.state_dict())))


def batch_of(step: int, split: Split = SPLITS[0]) -> Batch:
    return Batch(step, 0, 8 * step, split)


@dataclass
class Virtual:
    """A worker whose loader runs ahead by at most its lead."""

    machine: Announcements
    lead: int
    cut: dict[int, Split] = field(default_factory=dict)
    next_cut: int = 0
    next_yield: int = 0
    exchanges: dict[int, Posted] = field(default_factory=dict)

    @property
    def may_cut(self) -> bool:
        return self.next_cut <= self.next_yield + self.lead


@dataclass
class World:
    """Workers that take turns by chance, as far as reductions, exchanges and leads let them."""

    chance: random.Random
    leads: tuple[int, ...]
    lag: int = 1
    fickle: float = 0.4
    """How likely worker 0 decides, each time that it has heard of steps."""
    workers: list[Virtual] = field(default_factory=list)
    heard: list[Batch] = field(default_factory=list)
    """What worker 0 was told of, in the order of its arrival."""
    decisions: list[Plan] = field(default_factory=list)
    announced: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        machine = Announcements(FIRST, delay(max(self.leads)), self.lag)
        self.workers = [Virtual(machine, lead) for lead in self.leads]

    def run(self, until: int) -> None:
        while any(worker.next_yield < until for worker in self.workers):
            self.turn()

    def turn(self) -> None:
        """Let one worker do one thing."""
        number = self.chance.randrange(len(self.workers))
        worker = self.workers[number]
        if worker.may_cut and self.chance.random() < 0.5:
            self.cut(number)
        elif worker.next_yield < worker.next_cut and worker.next_yield <= min(
            each.next_yield for each in self.workers
        ):  # a reduction needs all workers, so nobody is a whole step ahead
            self.hand_out(number)

    def cut(self, number: int) -> None:
        worker, step = self.workers[number], self.workers[number].next_cut
        while (posted := worker.machine.due(step)) is not None:
            # Or else this worker would wait for others that wait for it.
            assert self.arrived(number, posted)
            self.absorb(number)
        worker.cut[step] = worker.machine.timetable.at(step).split
        worker.next_cut += 1

    def hand_out(self, number: int) -> None:
        worker, step = self.workers[number], self.workers[number].next_yield
        eager = number == 0 and self.chance.random() < 0.5
        while eager and worker.machine.posted and self.arrived(0, worker.machine.posted[0]):
            self.absorb(0)
        worker.machine = worker.machine.handed_out(batch_of(step, worker.cut[step]))
        if worker.machine.is_due(step):
            posted, worker.machine = worker.machine.post(step)
            worker.exchanges[step] = posted
            if posted.plan is not None:
                self.announced.append(posted.plan)
        worker.next_yield += 1

    def arrived(self, number: int, posted: Posted) -> bool:
        """Whether an exchange is complete for a worker: a gather for 0, a broadcast for others."""
        needed = self.workers if number == 0 else self.workers[:1]
        return all(posted.step in worker.exchanges for worker in needed)

    def absorb(self, number: int) -> None:
        worker = self.workers[number]
        posted = worker.machine.posted[0]
        worker.machine = worker.machine.absorb(self.workers[0].exchanges[posted.step].plan)
        if number == 0:
            self.heard += posted.reported
            if posted.reported and self.chance.random() < self.fickle:
                plan = Plan(self.chance.choice(SPLITS), worker.machine.start_step)
                self.decisions.append(plan)
                worker.machine = worker.machine.decide(plan)

    def begin_pass(self) -> None:
        """All workers leave the loader, absorb everything, and take the last batch again."""
        step = max(worker.next_yield for worker in self.workers) - 1
        for worker in self.workers:
            while worker.next_cut <= step:
                self.cut(self.workers.index(worker))
            while worker.next_yield <= step:
                self.hand_out(self.workers.index(worker))
        for number, worker in enumerate(self.workers):
            while worker.machine.posted:
                self.absorb(number)
        for worker in self.workers:
            worker.machine = worker.machine.abort(step)
        self.go_back(step)

    def abort(self, *, reduced: bool) -> None:
        """A step is given up that some have begun; all go on with a copy of worker 0's."""
        yields = {worker.next_yield for worker in self.workers}
        step = max(yields) - (len(yields) > 1 or not reduced)
        machine = self.workers[0].machine.abort(step)
        for worker in self.workers:
            worker.machine = copied(machine)
        self.go_back(step)

    def go_back(self, step: int) -> None:
        for worker in self.workers:
            worker.next_cut = worker.next_yield = step
            worker.cut = {at: split for at, split in worker.cut.items() if at < step}
            worker.exchanges = {at: each for at, each in worker.exchanges.items() if at < step}

    def check(self) -> None:
        """All workers cut the same and posted the same; each batch was told once, in order."""
        first = self.workers[0]
        for worker in self.workers[1:]:
            common = min(worker.next_cut, first.next_cut)
            assert [worker.cut[s] for s in range(common)] == [first.cut[s] for s in range(common)]
            done = min(worker.next_yield, first.next_yield)
            assert {s for s in worker.exchanges if s < done} == {
                s for s in first.exchanges if s < done
            }
            for step in worker.exchanges.keys() & first.exchanges.keys():
                assert worker.exchanges[step].reported == first.exchanges[step].reported
        told = [batch.step for batch in self.heard]
        assert told == sorted(set(told))


worlds = st.builds(
    World,
    st.integers(0, 2**32).map(random.Random),
    st.lists(st.integers(0, 9), min_size=2, max_size=4).map(tuple),
    lag=st.integers(1, 2),
    fickle=st.sampled_from([0.05, 0.4, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_all_workers_cut_the_same_splits_in_any_order_of_events(world: World) -> None:
    world.run(STEPS)
    world.check()
    timetable = FIRST
    for plan in world.announced:
        timetable = timetable.announce(plan)
    assert world.workers[0].cut == {step: timetable.at(step).split for step in world.workers[0].cut}


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_every_batch_is_told_once_and_soon(world: World) -> None:
    world.run(STEPS)
    machine = world.workers[0].machine
    on_the_way = [batch for posted in machine.posted for batch in posted.reported]
    told = [batch.step for batch in (*world.heard, *on_the_way, *machine.unreported)]
    assert told == list(range(world.workers[0].next_yield))
    assert len(machine.unreported) <= SELDOM + world.lag


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_what_is_decided_is_announced_as_it_is_and_in_time(world: World) -> None:
    """Its start step is computed once: that of the exchange it goes out with, plus the delay."""
    world.run(STEPS)
    decided = iter(world.decisions)
    assert all(any(plan == each for each in decided) for plan in world.announced)
    worker = world.workers[0]
    for step, posted in worker.exchanges.items():
        assert posted.plan is None or posted.plan.start_step == step + worker.machine.delay


@pytest.mark.parametrize(
    ("absorbed", "under_way", "next_post"),
    [
        ([], Plan(SPLITS[1], 22), 22),  # a new split, which is exchanged every step at first
        ([Plan(SPLITS[1], 22)], Plan(SPLITS[0], 21), 24),  # takes a new split back
    ],
)
def test_plans_under_way_count_for_the_start_step(
    absorbed: list[Plan], under_way: Plan, next_post: int
) -> None:
    timetable = Timetable((*FIRST.plans, *absorbed))
    posted = Posted(under_way.start_step - 10, (), under_way)
    machine = Announcements(timetable, 10, next_step=21, posted=(posted,))
    plan = Plan(SPLITS[2], machine.start_step)
    machine = machine.decide(plan).absorb(under_way)
    for step in range(21, next_post + 1):
        machine = machine.handed_out(batch_of(step))
        assert machine.next_step == step + 1
        assert machine.is_due(step) == (step == next_post)
    sent, _ = machine.post(next_post)
    assert sent.plan == plan == Plan(SPLITS[2], next_post + 10)


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(0, STEPS))
def test_a_copy_goes_on_as_the_original_does(world: World, at: int) -> None:
    world.run(at)
    before = [worker.machine for worker in world.workers]
    for worker in world.workers:
        worker.machine = copied(worker.machine)
    assert [worker.machine for worker in world.workers] == before
    world.run(STEPS)
    world.check()


@settings(max_examples=60, deadline=None)
@given(worlds, st.lists(st.integers(1, 15), max_size=6), st.booleans())
def test_after_a_step_was_given_up_copies_of_worker_0_agree(
    world: World, runs: list[int], reduced: bool
) -> None:
    for steps in runs:
        world.run(world.workers[0].next_yield + steps)
        last = world.decisions[-1].split if world.decisions else SPLITS[0]
        world.abort(reduced=reduced)
        machine = world.workers[0].machine
        goes_on = machine.decided or machine.timetable.plans[-1]
        assert goes_on.split == last
        world.check()
    world.run(world.workers[0].next_yield + STEPS)
    world.check()


@settings(max_examples=60, deadline=None)
@given(worlds, st.lists(st.integers(1, 15), max_size=6))
def test_after_a_pass_is_left_nothing_needs_to_be_copied(world: World, runs: list[int]) -> None:
    for steps in runs:
        world.run(world.workers[0].next_yield + steps)
        world.begin_pass()
        assert len({worker.machine.timetable for worker in world.workers}) == 1
        assert len({worker.machine.unreported for worker in world.workers}) == 1
        world.check()
    world.run(world.workers[0].next_yield + STEPS)
    world.check()


def test_batches_of_a_step_given_up_are_dropped_and_others_reported_again() -> None:
    machine = Announcements(FIRST, delay=4)
    for step in range(3):
        _, machine = machine.handed_out(batch_of(step)).post(step)
    assert [each.reported for each in machine.posted] == [(), (batch_of(0),), (batch_of(1),)]
    aborted = machine.abort(1)
    assert (aborted.unreported, aborted.posted, aborted.next_step) == ((batch_of(0),), (), 1)


def test_a_plan_under_way_starts_later_if_its_exchange_is_void() -> None:
    machine = Announcements(FIRST, delay=4)
    machine = machine.decide(Plan(SPLITS[1], machine.start_step))
    for step in range(3):
        _, machine = machine.handed_out(batch_of(step)).post(step)
    assert machine.posted[0].plan == Plan(SPLITS[1], 4)
    assert machine.abort(3).decided == Plan(SPLITS[1], 7)
    newer = machine.decide(Plan(SPLITS[2], machine.start_step))
    assert newer.abort(2).decided == Plan(SPLITS[2], 7)


def test_a_decision_is_kept_until_there_is_a_newer_one() -> None:
    machine = Announcements(FIRST, delay=2)
    first = machine.decide(Plan(SPLITS[1], machine.start_step))
    assert first.decide(None) == first
    assert first.decide(Plan(SPLITS[2], 2)).decided == Plan(SPLITS[2], 2)


def test_a_resumed_training_forgets_all_but_its_settings() -> None:
    machine = Announcements(FIRST, delay=4, lag=2)
    for step in range(3):
        _, machine = machine.handed_out(batch_of(step)).post(step)
    there = Timetable((Plan((3, 3, 2)),))
    resumed = machine.resume(41, there)
    assert resumed == Announcements(there, 4, 2, first_step=41, next_step=41)
    # Every step is exchanged for a while, also where the split is an old one.
    assert [s for s in range(41, 60) if resumed.is_due(s)] == [*range(41, 41 + SETTLING), 52, 56]
    plan = Plan((2, 3, 3), resumed.start_step)
    assert plan.start_step == 41 + 4
    posted, _ = machine.resume(41, there, plan).post(41)
    assert posted.plan is plan


def test_worker_0_keeps_what_its_plan_predicts_and_a_copy_does_not() -> None:
    model = SpeedModel.of(np.zeros(2), [0.1, 0.2])
    machine = Announcements(FIRST, delay=2)
    best = best_plan(model, Limits.of(2), 8)
    plan = Plan(best.split, machine.start_step, why="faster", forecast=best.forecast)
    _, machine = machine.decide(plan).post(0)
    traveled = Plan(plan.split, plan.start_step)
    assert machine.absorb(traveled).timetable.at(2).forecast is best.forecast
    other = copied(machine).absorb(traveled).timetable.at(2)
    assert other == plan
    assert (other.why, other.forecast) == ("faster", None)


def test_what_arrives_counts_and_not_what_a_copy_would_have_said() -> None:
    machine = Announcements(FIRST, delay=2).decide(Plan(SPLITS[1], 2))
    _, machine = machine.post(0)
    assert machine.absorb(Plan(SPLITS[2], 2)).timetable.at(2).split == SPLITS[2]


@pytest.mark.parametrize("damage", [{"delay": "soon"}, {"posted": [{"step": 1}]}, {"more": 1}])
def test_a_damaged_copy_is_refused(damage: dict[str, object]) -> None:
    state = Announcements(FIRST, delay=2).state_dict()
    with pytest.raises(StateMismatch, match="not a saved Announcements"):
        Announcements.from_state_dict({**state, **damage})

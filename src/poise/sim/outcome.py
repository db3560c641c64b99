"""What comes of a scenario: one policy after another, by the same course of chance."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from poise.core.split import Split
from poise.core.timing import Floats, Ints
from poise.engine.modes import Sync
from poise.errors import InfeasibleSplit, InvalidSetting
from poise.policy import Policy
from poise.records import Recorder
from poise.sim.asp import Asynchronous
from poise.sim.bsp import Synchronous, engine_of
from poise.sim.scenario import Scenario
from poise.sim.step import Step

_POINTS = 400
"""Of a course that is kept for pictures."""
_SHOWN_STEPS = 12
"""Steps of a timeline."""
_RECORDED_WORK = 200_000
"""Worker-steps of which a record holds every step; of more, some."""
HOUR_S = 3600.0


@dataclass(frozen=True, eq=False)
class Point:
    """A place in the course of a training, for pictures."""

    step: int
    end_s: float
    samples_per_s: float
    """Of this step."""
    ideal_samples_per_s: float
    """With the best split; NaN where it was not looked for."""
    workers: Ints
    split: Split
    effective_samples: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one policy made of a scenario."""

    policy: str
    steps: int = 0
    """Steps that were made, or that the simulated ones stand for."""
    clock_s: float = 0.0
    """How long that took."""
    step_s: float = math.nan
    """The mean step."""
    waiting: float = math.nan
    """The part of their time that workers waited for others, on average."""
    regret: float = math.nan
    """How much longer steps took than with the best splits, without noise; as a part of those."""
    changes: int = 0
    """Plans that were announced."""
    lost_s: float = 0.0
    """Seconds lost with workers that failed, left or came."""
    target_s: float | None = None
    """When the goal was reached; None: it was not, or there is none."""
    worker_hours: float = 0.0
    money: float | None = None
    """None where no prices are known."""
    samples: float = 0.0
    last_split: Split = ()
    settled_step: int | None = None
    """The first step from which on the split stayed within 2 % of the best; None: never."""
    settled_s: float | None = None
    """When that was."""
    course: tuple[Point, ...] = field(default=(), repr=False)
    timeline: tuple[Step, ...] = field(default=(), repr=False)
    """The last steps."""
    refused: str = ""
    """Why the policy cannot follow; empty: it can."""

    @property
    def samples_per_s(self) -> float:
        """The mean throughput."""
        return self.samples / self.clock_s if self.clock_s else math.nan


Watch = Callable[[str, Step], None]
"""Called with a policy's name after each of its steps."""


def compare(
    scenario: Scenario, *, watch: Watch | None = None, records: Path | None = None
) -> list[Outcome]:
    """Run every policy of a scenario.

    Args:
        scenario: what to run.
        watch: called after each step, as for a progress bar.
        records: a directory for the record of each policy, POLICY.jsonl; None: none is written.
    """
    return [
        outcome_of(scenario, name, scenario.policy(name), watch=watch, records=records)
        for name in scenario.policies
    ]


def outcome_of(
    scenario: Scenario,
    name: str,
    policy: Policy,
    *,
    watch: Watch | None = None,
    records: Path | None = None,
) -> Outcome:
    """Run one policy; one that cannot follow workers that come and go is told as an outcome."""
    tally = Tally(scenario, name)
    recorder = None
    if records is not None:
        thinned = max(1, round(scenario.workers * scenario.steps / _RECORDED_WORK))
        mode = None if isinstance(scenario.mode, Sync) else str(scenario.mode)
        engine = engine_of(scenario, policy)
        recorder = Recorder(records / f"{name}.jsonl", engine, mode=mode, thinned=thinned)
    try:
        for step in steps_of(scenario, policy, recorder):
            tally.add(step)
            if watch is not None:
                watch(name, step)
    except (InvalidSetting, InfeasibleSplit) as error:
        return Outcome(name, refused=str(error))
    finally:
        if recorder is not None:
            recorder.close()
    return tally.outcome()


def steps_of(
    scenario: Scenario, policy: Policy, recorder: Recorder | None = None
) -> Iterator[Step]:
    """Train virtually in the scenario's mode, and yield its steps."""
    run = Synchronous if isinstance(scenario.mode, Sync) else Asynchronous
    return run(scenario, policy, recorder).steps()


@dataclass
class Totals:
    """Sums over steps, each counted by the steps it stands for."""

    steps: float = 0.0
    samples: float = 0.0
    taken_s: float = 0.0
    idle_s: float = 0.0
    """Of a worker, on average."""
    worker_s: float = 0.0
    money: float = 0.0
    clean_s: float = 0.0
    """Of the steps whose best split was looked for, without noise,"""
    best_s: float = 0.0
    """and with their best splits."""
    lost_s: float = 0.0
    changes: int = 0

    def add(self, step: Step, prices: Floats) -> None:
        """Add one more step; prices are those of all workers, or none."""
        weight = step.stands_for * step.part
        taken_s = step.lasts_s * weight
        alive_s = taken_s + step.lost_s
        price = float(prices[step.workers].sum()) if prices.size else 0.0
        self.steps += weight
        self.samples += step.samples * weight
        self.taken_s += taken_s
        self.idle_s += float(step.idle_s.mean()) * weight
        self.worker_s += alive_s * len(step.workers)
        self.money += price * alive_s / HOUR_S
        self.lost_s += step.lost_s
        self.changes += step.plan is not None
        if not math.isnan(step.best_s):
            self.clean_s += step.clean_s * weight
            self.best_s += step.best_s * weight


class Tally:
    """Adds steps up, and keeps some of them for pictures."""

    def __init__(self, scenario: Scenario, policy: str) -> None:
        self._scenario = scenario
        self._policy = policy
        self._prices = np.array(scenario.prices)
        self._totals = Totals()
        self._course: list[Point] = []
        self._next_point = 0
        self._last: list[Step] = []
        self._split: Split = ()
        self._near_since: tuple[int, float] | None = None

    def add(self, step: Step) -> None:
        """Add one."""
        self._totals.add(step, self._prices)
        if not math.isnan(step.best_s):
            self._settle(step)
        self._last = [*self._last[1 - _SHOWN_STEPS :], step]
        if step.whole:
            self._split = step.split
        if step.number >= self._next_point and step.whole:
            self._next_point = step.number + max(1, self._scenario.steps // _POINTS)
            self._course.append(_point(step))

    def outcome(self) -> Outcome:
        """Return what came of them."""
        totals, learning = self._totals, self._scenario.learning
        last = self._last[-1] if self._last else None
        clock_s = 0.0 if last is None else last.end_s
        goal = None if learning is None else learning.target_samples
        reached = goal is not None and last is not None and last.effective_samples >= goal
        near_step, near_s = self._near_since or (None, None)
        if last is not None and last.whole and self._course[-1].step < last.number:
            self._course.append(_point(last))
        return Outcome(
            self._policy,
            steps=round(totals.steps),
            clock_s=clock_s,
            step_s=totals.taken_s / totals.steps if totals.steps else math.nan,
            waiting=totals.idle_s / totals.taken_s if totals.taken_s else math.nan,
            regret=totals.clean_s / totals.best_s - 1 if totals.best_s else math.nan,
            changes=totals.changes,
            lost_s=totals.lost_s,
            target_s=clock_s if reached else None,
            worker_hours=totals.worker_s / HOUR_S,
            money=totals.money if self._prices.size else None,
            samples=totals.samples,
            last_split=self._split,
            settled_step=near_step,
            settled_s=near_s,
            course=tuple(self._course),
            timeline=tuple(self._last),
        )

    def _settle(self, step: Step) -> None:
        if step.clean_s > step.best_s * 1.02 + 1e-12:
            self._near_since = None
        elif self._near_since is None:
            self._near_since = step.number, step.begin_s


def _point(step: Step) -> Point:
    return Point(
        step.number,
        step.end_s,
        step.samples / step.lasts_s,
        step.samples / step.best_s if step.best_s > 0 else math.nan,
        step.workers,
        step.split,
        step.effective_samples,
    )

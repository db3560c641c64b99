"""Synchronous training of virtual workers, by the engine that live training runs.

A step is simulated bucket by bucket; what its workers would measure goes to the engine, in the
rhythm of live training, and its plans take effect at the steps that they say.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from poise.core.observation import Change, Event, Observation
from poise.core.plan import Plan, Timetable
from poise.core.split import Split
from poise.core.timing import Floats, Ints
from poise.engine.bsp import Engine
from poise.engine.rhythm import SELDOM, delay, is_due
from poise.errors import InfeasibleSplit
from poise.policy import Forecasting, Policy
from poise.records import Recorder
from poise.sim.cluster import Cluster, Passage
from poise.sim.conditions import Conditions, Moment, Scatter
from poise.sim.learning import Lessons
from poise.sim.scenario import Noise, Scenario
from poise.sim.truth import Truth, oracle

__all__ = ["Course", "Noise", "Step", "Training", "observe", "simulate", "synchronous"]

_LONG_SETTLED = 60
"""Steps without a decision after which a step may stand for several."""
_ORACLE_WORK = 1_000_000
"""Worker-steps for which the best split is looked for in every step; of more, in some."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a virtual training, or the time that one global batch took."""

    number: int
    workers: Ints
    """Who took part, by the number in the scenario."""
    split: Split
    samples: int
    """Their sum; with a server, what was pushed meanwhile."""
    begin_s: float
    lasts_s: float
    computed_s: Floats
    """When each worker had handed over its gradient, from the begin."""
    input_s: Floats
    """How long each worker waited for input first."""
    idle_s: Floats
    """How long each worker waited for others, or for the server."""
    clean_s: float
    """How long it would have lasted without noise."""
    best_s: float
    """The same with the best split; NaN where it was not looked for."""
    stands_for: float = 1.0
    """How many steps it stands for."""
    part: float = 1.0
    """The part of it up to the goal of the training."""
    lost_s: float = 0.0
    """Seconds lost before it, with workers that failed, left or came."""
    effective_samples: float = 0.0
    """What is learned by its end, in samples with the global batch of the start."""
    plan: Plan | None = None
    """What was decided after it."""
    whole: bool = True
    """False for the smaller last step of an epoch."""

    @property
    def end_s(self) -> float:
        """When it was over, or the goal reached."""
        return self.begin_s + self.lasts_s * self.stands_for * self.part


class Reports(Protocol):
    """When what was measured reaches the engine."""

    def after(
        self, observation: Observation, timetable: Timetable
    ) -> tuple[Sequence[Observation], int] | None:
        """A step is over: return what is decided on now, and the first step that can change."""


@dataclass(frozen=True)
class AtOnce:
    """Every step is decided on when it is over, and a plan starts some steps later."""

    delay: int = 2

    def after(
        self, observation: Observation, timetable: Timetable
    ) -> tuple[Sequence[Observation], int]:
        """Return that step."""
        return [observation], observation.step + self.delay


class Live:
    """The rhythm of live training: see `poise.engine.rhythm`.

    What was measured in a step is posted at the next exchange, and decided on at the one after,
    when it has arrived.
    """

    def __init__(self, lead: int) -> None:
        self._delay = delay(lead)
        self._unreported: deque[Observation] = deque()
        self._posted: Sequence[Observation] = ()

    def after(
        self, observation: Observation, timetable: Timetable
    ) -> tuple[Sequence[Observation], int] | None:
        """Return what was posted before, if an exchange is due at the next step."""
        self._unreported.append(observation)
        step = observation.step + 1
        if not is_due(timetable, step):
            return None
        arrived, self._posted = self._posted, tuple(self._unreported)[-SELDOM:]
        self._unreported.clear()
        return (arrived, step + self._delay) if arrived else None

    def forget(self) -> None:
        """Other workers go on: what is on its way belongs to those before."""
        self._unreported.clear()
        self._posted = ()


class Training:
    """An engine at work: its plans, and what it decided on, for the record."""

    def __init__(self, engine: Engine, recorder: Recorder | None = None) -> None:
        self.timetable, self.engine = engine.start()
        self._recorder = recorder

    def decide(self, events: Sequence[Event], start_step: int) -> Plan | None:
        """Let the engine learn and decide; a plan is announced."""
        plan, self.engine = self.engine.update(events, start_step)
        if self._recorder is not None:
            self._recorder.write(events, start_step, plan)
        if plan is not None:
            self.timetable = self.timetable.announce(plan)
        return plan

    def tell(self, observation: Observation, reports: Reports) -> Plan | None:
        """A step is over; return what was decided, on it or on earlier ones."""
        due = reports.after(observation, self.timetable)
        return None if due is None else self.decide(*due)


class Loaders:
    """Queues of local batches that are loaded while workers compute.

    Batch k is loaded after batch k - 1 and when there is room in the queue, that is when the
    worker has taken batch k - q. At the start queues are full. So a loader of l seconds a sample
    makes steps last l b at least, and a short stall of one is not felt.
    """

    def __init__(self, workers: int, queue: int) -> None:
        self._loaded_s = np.zeros(workers)
        self._taken_s: deque[Floats] = deque(maxlen=queue)
        self._queue = queue

    def wait_s(self, workers: Ints, now_s: float, work_s: Floats) -> Floats:
        """Return how long workers wait for their next batches, which take so long to load."""
        if len(self._taken_s) == self._queue:
            begin = np.maximum(self._loaded_s[workers], self._taken_s[0][workers])
            self._loaded_s[workers] = begin + work_s
        wait = np.maximum(self._loaded_s[workers] - now_s, 0.0)
        taken = np.full(len(self._loaded_s), now_s)
        taken[workers] = now_s + wait
        self._taken_s.append(taken)
        return np.asarray(wait)


def synchronous(
    scenario: Scenario, policy: Policy, *, recorder: Recorder | None = None
) -> Iterator[Step]:
    """Train virtually, and yield each step when it is over."""
    return _Synchronous(scenario, policy, recorder).steps()


def engine_of(scenario: Scenario, policy: Policy) -> Engine:
    """Return the engine at the start; the global batch moves only if the policy can predict."""
    learning = scenario.learning
    adapt = None if learning is None or not isinstance(policy, Forecasting) else learning.adapt
    return Engine(policy, len(scenario.first), scenario.global_batch, adapt)


class _Synchronous:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, policy: Policy, recorder: Recorder | None) -> None:
        self._scenario = scenario
        self._conditions = Conditions(scenario)
        self._training = Training(engine_of(scenario, policy), recorder)
        self._reports = Live(scenario.lead)
        self._loaders = Loaders(scenario.workers, scenario.queue)
        learning = scenario.learning
        self._lessons = None if learning is None else Lessons(learning, scenario.seed)
        self._present = scenario.first
        self._clock_s = 0.0
        self._lasted_s = 0.0
        self._epoch, self._left = 0, scenario.epoch
        self._checked: Split = ()
        """A split that is within the bounds that workers state."""
        self._decided_at = 0
        self._oracle_every = max(1, scenario.workers * scenario.steps // _ORACLE_WORK)
        self._best: tuple[Cluster | None, int, float] = (None, 0, 0.0)

    def steps(self) -> Iterator[Step]:
        for number in range(self._scenario.steps):
            moment = self._conditions.at(number, self._clock_s)
            followed, lost_s = self._followed(number, moment)
            step = self._step(number, moment, lost_s)
            yield step if step.plan or not followed else replace(step, plan=followed)
            if self._lessons is not None and self._lessons.reached:
                return

    def _step(self, number: int, moment: Moment, lost_s: float) -> Step:
        scenario, cluster, training = self._scenario, moment.cluster, self._training
        plan = training.timetable.at(number)
        self._check(plan.split)
        stands_for = self._stands_for(number)
        whole = plan.global_batch <= self._left or stands_for > 1
        split = plan.split if whole else plan.scaled(self._left).split
        factor = self._conditions.scatter.next()[moment.present]
        wait = self._waits(moment, split, factor, stands_for)
        passage = cluster.passage(split, factor, wait)
        seen = self._measured(number, moment, split, passage, whole=whole)
        begin_s = self._clock_s
        learned, part = self._learned(sum(split), plan.global_batch, stands_for)
        best_s = self._best_s(number, cluster, sum(split))
        clean_s = passage.lasts_s
        if scenario.noise != Noise():
            clean_s = cluster.step_s(split)
        decided = training.tell(seen, self._reports)
        if decided is not None:
            self._decided_at = number
        self._lasted_s = passage.lasts_s
        self._clock_s += passage.lasts_s * stands_for * part
        self._consume(sum(split) * stands_for)
        return Step(
            number=number,
            workers=moment.present,
            split=split,
            samples=sum(split),
            begin_s=begin_s,
            lasts_s=passage.lasts_s,
            computed_s=passage.arrived_s,
            input_s=passage.wait_s,
            idle_s=passage.idle_s,
            clean_s=max(clean_s, float((cluster.truth.input_s * np.array(split)).max())),
            best_s=best_s,
            stands_for=stands_for,
            part=part,
            lost_s=lost_s,
            effective_samples=learned,
            plan=decided,
            whole=whole,
        )

    def _check(self, split: Split) -> None:
        """Raise if a policy without bounds exceeds what a worker states."""
        if split == self._checked:
            return
        limits = self._scenario.limits.take(self._present.tolist())
        local = np.array(split)
        wrong = (local < limits.low) | (local > limits.high) | (local % limits.multiple > 0)
        if wrong.any():
            worker = int(np.flatnonzero(wrong)[0])
            raise InfeasibleSplit(
                f"{limits.name(worker)} would get {split[worker]} samples, and takes "
                f"{limits.low[worker]} to {limits.high[worker]} in multiples of "
                f"{limits.multiple[worker]}"
            )
        self._checked = split

    def _followed(self, number: int, moment: Moment) -> tuple[Plan | None, float]:
        """Tell the engine who is there now; return its plan, and the seconds that are lost."""
        if np.array_equal(moment.present, self._present):
            return None, 0.0
        origin = origins(self._scenario, self._present, moment.present)
        change = Change(origin, self._training.engine.global_batch)
        plan = self._training.decide([change], number)
        self._reports.forget()
        self._decided_at = number
        self._present = moment.present
        lost_s = self._scenario.restart_s + (self._lasted_s if moment.failed else 0.0)
        self._clock_s += lost_s
        return plan, lost_s

    def _stands_for(self, number: int) -> float:
        settled = number - self._decided_at >= _LONG_SETTLED
        return float(self._scenario.stride if settled else 1)

    def _waits(
        self, moment: Moment, split: Split, factor: Floats, stands_for: float
    ) -> Floats | None:
        """Return how long workers wait for input; in a step that stands for many, as usual."""
        each_s = moment.cluster.truth.input_s
        if not each_s.any():
            return None
        loading = each_s * np.array(split)
        if stands_for > 1:
            computing_s = moment.cluster.passage(split, factor).lasts_s
            return np.asarray(np.maximum(loading - computing_s, 0.0))
        return self._loaders.wait_s(moment.present, self._clock_s, loading)

    def _measured(
        self, number: int, moment: Moment, split: Split, passage: Passage, *, whole: bool
    ) -> Observation:
        """Return what workers report; nothing of the smaller last step of an epoch, as live."""
        if not whole:
            nothing = np.full_like(passage.ready_s, np.nan)
            return Observation(number, split, self._epoch, ready_s=nothing)
        more: dict[str, Any] = {}
        taken, limit = self._scenario.memory_of(moment.present, np.array(split))
        if not np.isnan(taken).all():
            more = {"memory_bytes": taken, "memory_limit_bytes": limit}
        if self._training.engine.adapt is not None and self._lessons is not None:
            more["group_sums"], more["global_sqnorm"] = self._lessons.norms(
                np.array(split, dtype=np.float64)
            )
        loading = moment.cluster.truth.input_s
        waited = passage.wait_s > 0
        return Observation(
            number,
            split,
            self._epoch,
            ready_s=passage.ready_s,
            done_s=passage.done_s,
            wait_s=passage.wait_s if loading.any() else None,
            input_s=np.where(waited, loading, np.nan) if loading.any() else None,
            **more,
        )

    def _learned(self, samples: int, batch: int, stands_for: float) -> tuple[float, float]:
        """Return what is learned by the end of a step, and the part of it up to the goal."""
        lessons = self._lessons
        if lessons is None:
            return 0.0, 1.0
        part = lessons.taught(lessons.worth(samples * stands_for, batch))
        return lessons.effective_samples, part

    def _best_s(self, number: int, cluster: Cluster, samples: int) -> float:
        """Return the step time of the best split of so many samples."""
        if (cluster, samples) == self._best[:2]:
            return self._best[2]
        if number % self._oracle_every:
            return float("nan")
        limits = self._scenario.limits.take(self._present.tolist())
        try:
            _, found = cluster.best(samples, limits)
        except InfeasibleSplit:  # the smaller last step of an epoch may be no sum of multiples
            found = float("nan")
        self._best = (cluster, samples, found)
        return found

    def _consume(self, samples: float) -> None:
        self._left -= int(samples)
        if self._left <= 0:
            passed, used = divmod(-self._left, self._scenario.epoch)
            self._epoch += 1 + passed
            self._left = self._scenario.epoch - used


def origins(scenario: Scenario, before: Ints, now: Ints) -> tuple[int | None, ...]:
    """Return for each worker the one before whose speed it has: itself, or one of its kind."""
    places = {worker: place for place, worker in enumerate(before.tolist())}
    by_kind: dict[int, int] = {}
    for worker, place in places.items():
        by_kind.setdefault(int(scenario.kind_of[worker]), place)
    kinds = scenario.kind_of
    return tuple(places.get(worker, by_kind.get(int(kinds[worker]))) for worker in now.tolist())


@dataclass(frozen=True, eq=False)
class Course:
    """What happened in a simulated training, step by step."""

    splits: tuple[Split, ...]
    step_s: Floats
    """The step times of these splits, without noise."""
    best_s: Floats
    """Those of an oracle's."""
    clock_s: Floats
    """The virtual time at which each step ends, noise included."""
    plans: tuple[Plan, ...]
    """The plans that were announced."""

    @property
    def regret(self) -> float:
        """How much longer all steps take than with an oracle's splits, as a part of those."""
        return float(self.step_s.sum() / self.best_s.sum() - 1)


def simulate(
    policy: Policy,
    truth_at: Callable[[int], Truth],
    *,
    global_batch: int,
    steps: int,
    noise: Noise | None = None,
    seed: int = 0,
    delay: int = 2,
    epoch_steps: int = 100,
) -> Course:
    """Train on a truth that is given, without a scenario: the smallest driver, for policies.

    Args:
        policy: the rule that is tried.
        truth_at: the cluster at each step; the same object while nothing changes.
        global_batch: samples per step.
        steps: how many steps to take.
        noise: how measurements scatter; None: not at all.
        seed: of the scatter.
        delay: steps from a plan's announcement to its start.
        epoch_steps: steps of an epoch.
    """
    workers = truth_at(0).workers
    scatter = Scatter(noise or Noise(), workers, seed)
    training = Training(Engine(policy, workers, global_batch))
    reports = AtOnce(delay)
    splits, taken, best, clock, plans = [], [], [], [], []
    known: tuple[Truth | None, float] = (None, 0.0)
    for step in range(steps):
        truth, split = truth_at(step), training.timetable.at(step).split
        if truth is not known[0]:
            known = truth, oracle(truth, global_batch).step_s
        seen = observe(truth, step, step // epoch_steps, split, scatter.next())
        splits.append(split)
        taken.append(truth.step_s(split))
        best.append(known[1])
        assert seen.done_s is not None
        clock.append(float(seen.done_s.max()))
        plan = training.tell(seen, reports)
        if plan is not None:
            plans.append(plan)
    return Course(tuple(splits), np.array(taken), np.array(best), np.cumsum(clock), tuple(plans))


def observe(truth: Truth, step: int, epoch: int, split: Split, factor: Floats) -> Observation:
    """Return what workers measure in a step; a collective starts when the last one is there.

    A worker whose loader cannot keep up waits for input until its step is as long as loading.
    """
    cluster = Cluster.of(truth)
    loading = truth.input_s * np.array(split)
    wait = np.maximum(loading - cluster.passage(split, factor).lasts_s, 0.0)
    passage = cluster.passage(split, factor, wait)
    return Observation(
        step,
        split,
        epoch,
        ready_s=passage.ready_s,
        done_s=passage.done_s,
        wait_s=wait,
        input_s=np.where(wait > 0, truth.input_s, np.nan),
    )

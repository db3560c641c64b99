"""Synchronous training of virtual workers, by the engine that live training runs.

A step is simulated bucket by bucket; what its workers would measure goes to the engine, in the
rhythm of live training, and its plans take effect at the steps that they say.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from poise.core.membership import Identity, origins
from poise.core.observation import Change, Observation
from poise.core.plan import Plan
from poise.core.split import Split
from poise.core.timing import Floats, Ints
from poise.engine.bsp import Engine
from poise.errors import InfeasibleSplit
from poise.policy import Forecasting, Policy
from poise.records import Recorder
from poise.sim.cluster import Cluster, Passage
from poise.sim.conditions import Conditions, Moment
from poise.sim.learning import Lessons
from poise.sim.scenario import Noise, Scenario
from poise.sim.step import Step
from poise.sim.training import Training

_LONG_SETTLED = 60
"""Steps without a decision after which a step may stand for several."""
_ORACLE_WORK = 1_000_000
"""Worker-steps for which the best split is looked for in every step; of more, in some."""


def engine_of(scenario: Scenario, policy: Policy) -> Engine:
    """Return the engine at the start; the global batch moves only if the policy can predict."""
    learning = scenario.learning
    adapt = None if learning is None or not isinstance(policy, Forecasting) else learning.adapt
    return Engine(policy, len(scenario.first), scenario.global_batch, adapt)


def synchronous(
    scenario: Scenario, policy: Policy, *, recorder: Recorder | None = None
) -> Iterator[Step]:
    """Train virtually, and yield each step when it is over."""
    return Synchronous(scenario, policy, recorder).steps()


class Synchronous:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, policy: Policy, recorder: Recorder | None) -> None:
        self._scenario = scenario
        self._conditions = Conditions(scenario)
        self._training = Training(engine_of(scenario, policy), scenario.lead, recorder)
        self._loaders = _Loaders(scenario.workers, scenario.queue)
        self._lessons = Lessons(scenario.learning, scenario.seed)
        self._present = scenario.first
        self._clock_s = 0.0
        self._lasted_s = 0.0
        self._samples = 0
        """Trained on so far."""
        self._possible = _Possible(scenario)
        self._decided_at = 0

    def steps(self) -> Iterator[Step]:
        """Train virtually, and yield each step when it is over."""
        for number in range(self._scenario.steps):
            moment = self._conditions.at(number, self._clock_s)
            followed, lost_s = self._followed(number, moment)
            step = self._step(number, moment, lost_s)
            yield step if step.plan or not followed else replace(step, plan=followed)
            if self._lessons.reached:
                return

    def _step(self, number: int, moment: Moment, lost_s: float) -> Step:
        scenario, cluster, training = self._scenario, moment.cluster, self._training
        plan = training.plan_at(number)
        self._possible.check(plan.split)
        settled = number - self._decided_at >= _LONG_SETTLED
        stands_for = float(scenario.stride if settled else 1)
        epoch, used = divmod(self._samples, scenario.epoch)
        left = scenario.epoch - used
        whole = plan.global_batch <= left or stands_for > 1
        split = plan.split if whole else plan.scaled(left).split
        factor = self._conditions.scatter.next()[moment.present]
        wait = self._waits(moment, split, factor, stands_for)
        passage = cluster.passage(split, factor, wait)
        seen = Observation(
            number, split, epoch, **self._measured(moment, split, passage, whole=whole)
        )
        begin_s, samples = self._clock_s, sum(split)
        part = self._lessons.taught(samples * stands_for, plan.global_batch)
        best_s = self._possible.best_s(number, cluster, samples)
        clean_s = passage.lasts_s
        if scenario.noise != Noise():
            clean_s = cluster.step_s(split)
        decided = training.tell(seen)
        if decided is not None:
            self._decided_at = number
        self._lasted_s = passage.lasts_s
        self._clock_s += passage.lasts_s * stands_for * part
        self._samples += int(samples * stands_for)
        return Step(
            number=number,
            workers=moment.present,
            split=split,
            samples=samples,
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
            effective_samples=self._lessons.effective_samples,
            plan=decided,
            whole=whole,
        )

    def _followed(self, number: int, moment: Moment) -> tuple[Plan | None, float]:
        """Tell the engine who is there now; return its plan, and the seconds that are lost."""
        if np.array_equal(moment.present, self._present):
            return None, 0.0
        origin = origins(self._identities(self._present), self._identities(moment.present))
        change = Change(origin, self._training.engine.global_batch)
        plan = self._training.change(change, number)
        self._possible.follow(moment.present)
        self._decided_at = number
        self._present = moment.present
        lost_s = self._scenario.restart_s + (self._lasted_s if moment.failed else 0.0)
        self._clock_s += lost_s
        return plan, lost_s

    def _identities(self, workers: Ints) -> list[Identity]:
        kinds = self._scenario.kind_of
        return [Identity(int(kinds[worker]), worker) for worker in workers.tolist()]

    def _waits(
        self, moment: Moment, split: Split, factor: Floats, stands_for: float
    ) -> Floats | None:
        """Return how long workers wait for input; in a step that stands for many, as usual."""
        each_s = moment.cluster.truth.input_s
        if not each_s.any():
            return None
        if stands_for > 1:
            return moment.cluster.usual_wait_s(split, factor)
        return self._loaders.wait_s(moment.present, self._clock_s, each_s * np.array(split))

    def _measured(
        self, moment: Moment, split: Split, passage: Passage, *, whole: bool
    ) -> dict[str, Any]:
        """Return what workers report; nothing of the smaller last step of an epoch, as live."""
        if not whole:
            return {"ready_s": np.full_like(passage.ready_s, np.nan)}
        found: dict[str, Any] = {"ready_s": passage.ready_s, "done_s": passage.done_s}
        taken, limit = self._scenario.memory_of(moment.present, np.array(split))
        if not np.isnan(taken).all():
            found |= {"memory_bytes": taken, "memory_limit_bytes": limit}
        if self._training.engine.adapt is not None:
            batches = np.array(split, dtype=np.float64)
            found["group_sums"], found["global_sqnorm"] = self._lessons.norms(batches)
        loading, waited = moment.cluster.truth.input_s, passage.wait_s
        if loading.any():
            found |= {"wait_s": waited, "input_s": np.where(waited > 0, loading, np.nan)}
        return found


class _Loaders:
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


class _Possible:
    """The bounds of the workers that are there, and the best split within them."""

    def __init__(self, scenario: Scenario) -> None:
        self._all = scenario.limits
        self._every = max(1, scenario.workers * scenario.steps // _ORACLE_WORK)
        self.follow(scenario.first)

    def follow(self, present: Ints) -> None:
        """Other workers are there."""
        self._limits = self._all.take(present.tolist())
        self._checked: Split = ()
        """A split that is within their bounds."""
        self._best: tuple[Cluster | None, int, float] = (None, 0, 0.0)

    def check(self, split: Split) -> None:
        """Raise if a policy without bounds exceeds what a worker states."""
        if split == self._checked:
            return
        limits, local = self._limits, np.array(split)
        wrong = (local < limits.low) | (local > limits.high) | (local % limits.multiple > 0)
        if wrong.any():
            worker = int(np.flatnonzero(wrong)[0])
            raise InfeasibleSplit(
                f"{limits.name(worker)} would get {split[worker]} samples, and takes "
                f"{limits.low[worker]} to {limits.high[worker]} in multiples of "
                f"{limits.multiple[worker]}"
            )
        self._checked = split

    def best_s(self, step: int, cluster: Cluster, samples: int) -> float:
        """Return the step time of the best split of so many samples; NaN: not looked for."""
        if (cluster, samples) == self._best[:2]:
            return self._best[2]
        if step % self._every:
            return float("nan")
        try:
            _, found = cluster.best(samples, self._limits)
        except InfeasibleSplit:  # the smaller last step of an epoch may be no sum of multiples
            found = float("nan")
        self._best = (cluster, samples, found)
        return found

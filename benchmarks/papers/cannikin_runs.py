"""One training of the reproduction of Cannikin, and what is measured of it."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from cannikin_setup import SYSTEMS, Case

from poise.core.split import even_split
from poise.sim.outcome import outcome_of
from poise.sim.scenario import Scenario
from poise.sim.step import Step


@dataclass(frozen=True)
class Result:
    """What came of a training."""

    clock_s: float
    """When the goal was reached; of a fixed batch, if all that is left is like the second half."""
    batch_s: float
    """The mean step of the second half, without noise."""
    ceiling: float
    """The most that balancing saves of this training's steps at their own global batches."""
    batch: float
    """The mean global batch."""
    changes: int
    settled: tuple[float, float, float] | None
    """Steps, seconds and epochs until the split stayed within 2 % of the best; None: never."""
    errors: tuple[float, ...]
    """Of each predicted step time, relative to the true one."""
    even_s: float
    """An even step with the global batch of the start, without noise,"""
    best_s: float
    """and the best one."""
    refused: str = ""


def run_all(cases: Sequence[Case]) -> dict[Case, Result]:
    """Run trainings, as many at once as there are cores."""
    with ProcessPoolExecutor() as pool:
        return dict(zip(cases, pool.map(run, cases), strict=True))


def run(case: Case) -> Result:
    """Run one."""
    scenario = case.scenario()
    seen = _Seen(scenario)
    policy = SYSTEMS[case.system].policy(scenario)
    outcome = outcome_of(scenario, case.system, policy, watch=seen.add)
    even = even_split(scenario.workers, scenario.global_batch)
    _, best_s = seen.cluster.best(scenario.global_batch, scenario.limits)
    settled = None
    if outcome.settled_step is not None and outcome.settled_s is not None:
        steps, epochs = seen.before(outcome.settled_step)
        settled = steps, outcome.settled_s, epochs
    return Result(
        clock_s=outcome.target_s or seen.extrapolated_s(scenario),
        batch_s=seen.late_s,
        ceiling=1 - 1 / (1 + outcome.regret),
        batch=outcome.samples / outcome.steps if outcome.steps else float("nan"),
        changes=outcome.changes,
        settled=settled,
        errors=tuple(seen.errors),
        even_s=seen.cluster.step_s(even),
        best_s=best_s,
        refused=outcome.refused,
    )


class _Seen:
    """What is noted of the steps as they pass."""

    def __init__(self, scenario: Scenario) -> None:
        everyone = np.arange(scenario.workers)
        self.cluster = scenario.cluster_of(everyone, np.ones(scenario.workers))
        self.errors: list[float] = []
        self._epoch_samples = scenario.epoch_samples or 1
        self._steps: list[float] = []
        self._samples: list[float] = []
        self._clean_s: list[float] = []
        self._lasts_s: list[float] = []
        self._clock_s = 0.0

    def add(self, _: str, step: Step) -> None:
        weight = step.stands_for * step.part
        self._steps.append(weight)
        self._samples.append(weight * sum(step.split))
        self._clean_s.append(step.clean_s)
        self._lasts_s.append(step.lasts_s)
        self._clock_s = step.end_s
        if step.plan is not None and step.plan.forecast is not None:
            split = step.plan.split
            predicted = step.plan.forecast.model.step_s(split)
            self.errors.append(abs(predicted / self.cluster.step_s(split) - 1))

    @property
    def late_s(self) -> float:
        return self._late(self._clean_s)

    def extrapolated_s(self, scenario: Scenario) -> float:
        """Return when a training with a fixed batch reaches its goal; NaN where it moves."""
        learning = scenario.learning
        if learning is None or learning.target_samples is None or learning.adapt is not None:
            return float("nan")
        left = learning.target_samples / scenario.global_batch - sum(self._steps)
        return self._clock_s + left * self._late(self._lasts_s)

    def _late(self, values: list[float]) -> float:
        """Return the mean over the second half of the steps."""
        weights = np.array(self._steps)
        late = np.cumsum(weights) > weights.sum() / 2
        return float(np.average(np.array(values)[late], weights=weights[late]))

    def before(self, number: int) -> tuple[float, float]:
        """Return the steps and epochs before a simulated step."""
        return sum(self._steps[:number]), sum(self._samples[:number]) / self._epoch_samples

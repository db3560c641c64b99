"""A policy at work on a truth: virtual steps, without a scenario and without exchanges."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from poise.core.observation import Observation
from poise.core.plan import Plan
from poise.core.split import Split, optimal_split
from poise.core.timing import Floats
from poise.engine.bsp import Engine
from poise.policy import Policy
from poise.sim.cluster import Cluster
from poise.sim.conditions import Scatter
from poise.sim.scenario import Noise
from poise.sim.truth import Truth


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

    Every step is decided on when it is over.

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
    timetable, engine = Engine(policy, workers, global_batch).start()
    splits, taken, best, clock, plans = [], [], [], [], []
    known: tuple[Truth | None, float] = (None, 0.0)
    for step in range(steps):
        truth, split = truth_at(step), timetable.at(step).split
        if truth is not known[0]:
            known = truth, optimal_split(truth, global_batch).step_s
        seen = observe(truth, step, step // epoch_steps, split, scatter.next())
        splits.append(split)
        taken.append(truth.step_s(split))
        best.append(known[1])
        assert seen.done_s is not None
        clock.append(float(seen.done_s.max()))
        plan, engine = engine.update([seen], step + delay)
        if plan is not None:
            timetable = timetable.announce(plan)
            plans.append(plan)
    return Course(tuple(splits), np.array(taken), np.array(best), np.cumsum(clock), tuple(plans))


def observe(truth: Truth, step: int, epoch: int, split: Split, factor: Floats) -> Observation:
    """Return what workers measure in a step; a collective starts when the last one is there.

    A worker whose loader cannot keep up waits for input until its step is as long as loading.
    """
    cluster = Cluster.of(truth)
    wait = cluster.usual_wait_s(split, factor)
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

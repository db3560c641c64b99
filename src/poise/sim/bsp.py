"""The smallest driver of the synchronous engine: virtual workers under a virtual clock."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from poise.core.observation import Observation
from poise.core.plan import Plan
from poise.core.split import Split
from poise.core.timing import Floats
from poise.engine.bsp import Engine
from poise.policy import Policy
from poise.sim.truth import Truth, oracle


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How measured times scatter around the truth: log-normal, with mean 1."""

    cv: float = 0.0
    correlation: float = 0.0
    """Between a worker's neighboring steps."""


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
    """Train virtually: the engine sees noisy times of the truth and its plans take effect.

    Args:
        policy: the rule that is tried.
        truth_at: the cluster at each step; the same object while nothing changes.
        global_batch: samples per step.
        steps: how many steps to take.
        noise: how measurements scatter; None: not at all.
        seed: of the scatter.
        delay: steps from a plan's announcement to its start, as in live training.
        epoch_steps: steps of an epoch.
    """
    noise = noise or Noise()
    draw = np.random.default_rng(seed)
    workers = truth_at(0).workers
    timetable, engine = Engine(policy, workers, global_batch).start()
    scatter = np.zeros(workers)
    splits, taken, best, clock, plans = [], [], [], [], []
    known: tuple[Truth | None, float] = (None, 0.0)
    for step in range(steps):
        truth, split = truth_at(step), timetable.at(step).split
        if truth is not known[0]:
            known = truth, oracle(truth, global_batch).step_s
        kept = noise.correlation
        fresh = draw.standard_normal(workers)
        scatter = kept * scatter + np.sqrt(1 - kept**2) * fresh if step else fresh
        factor = np.exp(noise.cv * scatter - noise.cv**2 / 2)
        observation = observe(truth, step, step // epoch_steps, split, factor)
        splits.append(split)
        taken.append(truth.step_s(split))
        best.append(known[1])
        assert observation.done_s is not None
        clock.append(float(observation.done_s.max()))
        plan, engine = engine.update([observation], start_step=step + delay)
        if plan is not None:
            timetable = timetable.announce(plan)
            plans.append(plan)
    return Course(tuple(splits), np.array(taken), np.array(best), np.cumsum(clock), tuple(plans))


def observe(truth: Truth, step: int, epoch: int, split: Split, factor: Floats) -> Observation:
    """Return what workers measure in a step; a collective starts when the last one is there.

    A worker whose loader cannot keep up waits for input until its step is as long as loading.
    """
    batches = np.array(split, dtype=np.float64)
    ready = truth.ready_s(batches) * factor[:, None]
    loading = truth.input_s * batches
    wait = np.maximum(loading - _ends(ready, truth.bucket_s)[-1], 0.0)
    done = _ends(ready + wait[:, None], truth.bucket_s)
    return Observation(
        step,
        split,
        epoch,
        ready_s=ready,
        done_s=np.broadcast_to(done, ready.shape),
        wait_s=wait,
        input_s=np.where(wait > 0, truth.input_s, np.nan),
    )


def _ends(arrivals: Floats, bucket_s: Floats) -> Floats:
    """Return when the reduction of each bucket is done."""
    ends, end = [], 0.0
    for arrival, seconds in zip(arrivals.max(axis=0), bucket_s, strict=True):
        end = max(end, float(arrival)) + float(seconds)
        ends.append(end)
    return np.array(ends)

"""Policy "auto": learn every worker's speed, solve for the best split, change it when it pays.

A speed model is fitted to each step's measurements, with a weak prior that makes the first
sample useful (`poise.core.fit`). The split that this model says is best is found exactly
(`poise.core.split.optimal_split`), and adopted when the predicted gain is larger than noise and
than the cost of a change. A worker whose speed changes is noticed by a CUSUM and its lines are
rescaled at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from poise.core.entries import Entries, check_local_batches
from poise.core.fit import Fit
from poise.core.limits import Limits
from poise.core.memory import MemoryLine
from poise.core.observation import Change, Event, Observation
from poise.core.plan import Forecast
from poise.core.revised import revised
from poise.core.split import Optimum, Split, capacity_within, optimal_split
from poise.core.timing import Floats, SpeedModel
from poise.errors import InvalidSetting
from poise.numbers import check_number, check_whole
from poise.policy.base import Decision, Schedule
from poise.policy.bounds import NO_BOUNDS, Bounds, check_bounds
from poise.policy.pace import Pace

_SURE = 0.7
"""Standard errors more than the largest of some workers' chance deviations."""
_NORMAL = NormalDist()
_LONG = 10**9
"""Steps that no training takes."""
_GREAT = 0.2
"""A change of a log time that makes earlier step times worthless."""


@dataclass(frozen=True, eq=False)
class AutoState:
    """What the policy knows and has decided."""

    fit: Fit
    memory: MemoryLine
    split: Split
    """The split decided last; it may not have started yet."""
    pace: Pace
    alarmed: tuple[int, ...] = ()
    """Workers whose speed changed since then."""
    caps: Floats | None = None
    """The largest local batches that fit into memory."""

    def check_loaded(self) -> None:
        """Raise unless all of it is about the same workers."""
        workers = len(self.split)
        check_local_batches("split", self.split)
        check_local_batches("pace.before", self.pace.before, workers)
        if (self.fit.workers, self.memory.workers) != (workers, workers):
            raise InvalidSetting(
                f"split has {workers} local batches, fit {self.fit.workers} workers and memory "
                f"{self.memory.workers}; the same number is required"
            )
        if not all(0 <= worker < workers for worker in self.alarmed):
            raise InvalidSetting(f"alarmed={list(self.alarmed)} are not all among the workers")
        if self.caps is not None:
            Entries(most=np.inf).check("caps", self.caps, workers)


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Learns the split while training; needs no setting."""

    bounds: Bounds = NO_BOUNDS
    least_gain: float = 0.01
    """Part of the step time that a change must gain."""
    horizon: int = 100
    """Steps over which a change must earn its cost."""
    patience: int = 10
    """Steps to see before a split is tried for what it teaches."""
    watchful: int = 40
    """For so many steps a split is judged in each of them; later only after as many as patience
    says, or when a speed changed."""
    careful_gain: float = 0.1
    """From this gain on a split goes no further than the fit is sure of."""
    free_changes: int = 3
    """So many changes may follow each other at any pace,"""
    unhurried: int = 2
    """and each further one waits for so many more steps than the one before."""
    longest_wait: int = 100
    """Steps after which a change is never too soon, whatever became of those before."""
    furthest: int = 6
    """A local batch shrinks to no less than one part of so many at once: how much of a time is
    fixed is a guess until smaller ones were seen."""
    curiosity: float = 1.5
    """By how many standard errors a slope may be steeper than it seems to be worth a trial."""

    online = True
    state_type = AutoState

    def __post_init__(self) -> None:
        check_bounds("Auto", self.bounds)
        for name in ("least_gain", "careful_gain"):
            check_number("Auto", name, getattr(self, name), 0, 1)
        check_number("Auto", "curiosity", self.curiosity, 0, 100)
        for name in ("horizon", "patience", "furthest"):
            check_whole("Auto", name, getattr(self, name), 1, _LONG)
        for name in ("watchful", "free_changes", "unhurried", "longest_wait"):
            check_whole("Auto", name, getattr(self, name), 0, _LONG)

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, AutoState]:
        """Start evenly, as far as the bounds allow."""
        split = self.bounds.even(workers, global_batch)
        memory = MemoryLine.unknown(workers)
        return {0: split}, AutoState(Fit.start(workers), memory, split, Pace())

    def update(
        self, state: AutoState, events: Sequence[Event]
    ) -> tuple[Decision | None, AutoState]:
        """Learn from all events, then decide once."""
        decision, current, steps = None, False, list[Observation]()
        for event in events:
            if isinstance(event, Change):
                decision, state = self._changed(_learned(state, steps), event)
                current, steps = False, []
            else:
                steps.append(event)
                current = current or event.split == state.split
        steps_before = state.pace.steps
        state = _learned(state, steps)
        if not (current and self._knows_enough(state.fit)):
            return decision, state
        limits = self._limits(state)
        forced = bool((np.array(state.split) > limits.high).any())
        noise = float(state.fit.noise.max())
        if not forced and state.pace.failed(noise):
            if (np.array(state.pace.before) <= limits.high).all():
                return _went_back(state)
            state = revised(state, pace=state.pace.renewed())
        if state.pace.mistaken(noise):
            state = revised(state, pace=state.pace.renewed())
        if state.fit.suspected and not state.alarmed:
            return decision, state  # half of the evidence points both ways: wait for the rest
        long_look = state.pace.steps // self.patience > steps_before // self.patience
        if not (forced or state.alarmed or long_look or state.pace.steps < self.watchful):
            return decision, state
        better = self._better(state, curious=long_look)
        if better is None:
            return decision, state
        pace = state.pace.renewed() if forced else state.pace.changed(state.split)
        return better, revised(state, split=better.split, pace=pace, alarmed=())

    def _knows_enough(self, fit: Fit) -> bool:
        """Whether every worker was measured, or the others often enough to go on without it."""
        return fit.known or float(fit.seen.max()) >= self.patience

    def forecast(self, state: AutoState) -> Forecast | None:
        """Return the speeds as they are believed to be, and the bounds."""
        if not self._knows_enough(state.fit):
            return None
        model = state.fit.model()
        return Forecast(model, self._limits(state), model.step_s(state.split), state.fit.cv)

    def _changed(self, state: AutoState, change: Change) -> tuple[Decision, AutoState]:
        """Split another global batch, or over other workers, by what is known of them."""
        fit, memory = state.fit.take(change.origin), state.memory.take(change.origin)
        caps = None
        if state.caps is not None:
            known = [np.inf if number is None else state.caps[number] for number in change.origin]
            caps = np.array(known)
        if np.isnan(fit.first_batch).all():
            split = self.bounds.even(fit.workers, change.global_batch)
            decision = Decision(split, "nothing is known of these workers: even shares")
        else:
            model = fit.model()
            limits = self.bounds.limits(fit.workers)
            if caps is not None:
                limits = limits.capped_for(change.global_batch, caps)
            best = optimal_split(model, change.global_batch, limits)
            why = f"{fit.workers} workers share {change.global_batch} samples"
            decision = _decision(fit, model, limits, best, why)
        return decision, AutoState(fit, memory, decision.split, state.pace.renewed(), caps=caps)

    def _better(self, state: AutoState, *, curious: bool) -> Decision | None:
        """Return a decision for a split that pays, if there is one; a trial if curious."""
        model, limits = state.fit.model(), self._limits(state)
        if (np.array(state.split) > limits.high).any():
            best = optimal_split(model, sum(state.split), limits)
            return _decision(
                state.fit, model, limits, best, "a local batch comes too close to the memory"
            )
        local_s = model.local_s(state.split)
        now_s = float(local_s.max())
        least = max(self.least_gain, state.pace.cost_s / now_s / self.horizon)
        enough_s = min(now_s * (1 - least), _surely_s(state, local_s))
        best_now = _best(model, limits, state.split, enough_s)
        if best_now is not None:
            if self._hasty(state, 1 - best_now.step_s / now_s):
                return None
            further = self._further(state, limits, now_s, best_now)
            return _decision(state.fit, model, limits, further, _why(state, now_s, best_now.step_s))
        if not curious or self._hasty(state, 0.0):
            return None
        # A slope that seems flat, from few measurements, would never be tried again otherwise.
        steep = state.fit.model(steeper=self.curiosity)
        trial = _best(steep, limits, state.split, enough_s)
        if trial is None:
            return None
        return _decision(
            state.fit, steep, limits, trial, "to see how times change with the local batch"
        )

    def _hasty(self, state: AutoState, gain: float) -> bool:
        """Whether a change comes too soon after others.

        Where no line fits the times, some split always seems a little better: each change asks
        for a longer look than the one before, and much longer after one that failed.
        """
        pace = state.pace
        due = self.unhurried * (pace.changes - self.free_changes)
        if pace.failures:
            due = max(due, self.patience * 2**pace.failures)
        elif gain >= self.careful_gain:
            return False
        return pace.steps < min(due, self.longest_wait)

    def _further(self, state: AutoState, limits: Limits, now_s: float, best: Optimum) -> Optimum:
        """Return a split that goes further where little is to gain and slopes are uncertain.

        A small step from few measurements shows nothing of the slope: where fixed costs are high
        and times noisy, small steps would follow each other for ever. As far as the slope may be
        flatter by one standard error, too far costs little.
        """
        if best.step_s < now_s * (1 - self.careful_gain):
            return best
        flat = state.fit.model(steeper=-1.0)
        return optimal_split(flat, sum(state.split), limits, near_s=best.step_s)

    def _limits(self, state: AutoState) -> Limits:
        """Return the bounds with those of memory and of how far a line is to be trusted.

        If memory is too short for the global batch, no local batch grows beyond its cap, and none
        has to shrink.
        """
        limits, split = self.bounds.limits(state.fit.workers), np.array(state.split)
        if state.caps is not None:
            capped = limits.capped(state.caps)
            fits = capped.most >= split.sum()
            limits = capped if fits else limits.capped(np.maximum(state.caps, split))
        return limits.at_least(split // self.furthest)


def _best(model: SpeedModel, limits: Limits, split: Split, enough_s: float) -> Optimum | None:
    """Return the optimum if it is faster than that."""
    if not capacity_within(model, enough_s, limits) > sum(split):
        return None
    best = optimal_split(model, sum(split), limits, near_s=enough_s)
    return best if best.step_s < enough_s else None


def _decision(fit: Fit, model: SpeedModel, limits: Limits, best: Optimum, why: str) -> Decision:
    return Decision(best.split, why, Forecast(model, limits, best.poured_s, fit.cv))


def _learned(state: AutoState, steps: Sequence[Observation]) -> AutoState:
    fit, alarms = state.fit.update(*steps)
    known = [worker for worker in alarms.tolist() if worker not in state.alarmed]
    state = revised(state, fit=fit, alarmed=(*state.alarmed, *known))
    pace = state.pace
    if (np.abs(np.log(fit.changed_by[alarms])) > _GREAT).any():
        pace = pace.renewed()
    noise = float(fit.noise.max())
    for step in steps:
        if step.memory_bytes is not None and step.memory_limit_bytes is not None:
            memory = state.memory.update(step.split, step.memory_bytes)
            limit = step.memory_limit_bytes
            known_before = np.inf if state.caps is None else state.caps
            caps = np.where(np.isnan(limit), known_before, memory.cap(limit))
            state = revised(state, memory=memory, caps=caps)
        if step.split == state.split and step.length_s is not None:
            pace = pace.stepped(step.length_s, noise)
    return revised(state, pace=pace)


def _went_back(state: AutoState) -> tuple[Decision, AutoState]:
    """Return to the split before, and be slower to leave it again."""
    pace = state.pace
    why = f"steps of {pace.mean_s * 1e3:.1f} ms, {pace.before_s * 1e3:.1f} before: going back"
    return Decision(pace.before, why), revised(
        state, split=pace.before, pace=pace.went_back(), alarmed=()
    )


def _surely_s(state: AutoState, local_s: Floats) -> float:
    """Return how long a step surely takes now: what is faster is no work of chance.

    The slowest of n workers seems slower than it is, by as many standard errors as the largest of
    n normal deviations (Blom's approximation), the second by as many as the second, and so on: a
    few slow ones together are surer than one. More is asked for, since every step is another
    chance to be misled; and of few measurements the noise itself is hardly known.
    """
    fit = state.fit
    deviations = _deviations(fit.workers)
    slowest = np.argsort(-local_s)[: len(deviations)]
    known = slowest[~np.isnan(fit.first_batch[slowest])]
    error = fit.error(state.split)[known] * (1 + 2 / np.maximum(fit.evidence[known], 1))
    surely_s = local_s[known] * (1 - (deviations[: len(known)] + _SURE) * error)
    return float(surely_s.max(initial=0.0))


@cache
def _deviations(count: int) -> Floats:
    """Return about what the largest quarter of normal deviations are expected to be."""
    ranks = range(1, max(1, count // 4) + 1)
    return np.array([_NORMAL.inv_cdf((count + 0.625 - rank) / (count + 0.25)) for rank in ranks])


def _why(state: AutoState, now_s: float, best_s: float) -> str:
    what = f"{now_s * 1e3:.1f} ms a step become {best_s * 1e3:.1f}"
    if state.alarmed:
        who = ", ".join(str(worker) for worker in state.alarmed[:5])
        return f"the speed of worker {who} changed: {what}"
    return what

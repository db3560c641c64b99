"""Policy "auto": learn every worker's speed, solve for the best split, change it when it pays.

A speed model is fitted to each step's measurements, with a weak prior that makes the first
sample useful (`poise.core.fit`). The split that this model says is best is found exactly
(`poise.core.split.optimal_split`), and adopted when the predicted gain is larger than noise and
than the cost of a change. A worker whose speed changes is noticed by a CUSUM and its lines are
rescaled at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from poise.core.fit import Fit
from poise.core.limits import Limits
from poise.core.memory import MemoryLine
from poise.core.observation import Change, Event, Observation
from poise.core.plan import Forecast
from poise.core.split import Optimum, Split, capacity_within, optimal_split
from poise.core.timing import Floats, Ints, SpeedModel
from poise.policy.base import Decision, Schedule
from poise.policy.bounds import NO_BOUNDS, Bounds


@dataclass(frozen=True, eq=False)
class AutoState:
    """What the policy knows and has decided."""

    fit: Fit
    memory: MemoryLine
    split: Split
    """The split decided last; it may not have started yet."""
    alarmed: tuple[int, ...] = ()
    """Workers whose speed changed since then."""
    settled_s: float = 0.0
    """Mean step time of the window, without its first two steps."""
    settled: int = 0
    """Over how many steps."""
    early_s: float = 0.0
    """Sum of the first two."""
    early: int = 0
    cost_s: float = 0.0
    """What a change costs: by how much the first two steps after it are longer."""
    changes: int = 0
    """How often the split changed since a worker's speed last did."""
    caps: Floats | None = None
    """The largest local batches that fit into memory."""


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
    careful_gain: float = 0.1
    """From this gain on a split goes no further than the fit is sure of."""
    free_changes: int = 3
    """So many changes may follow each other at any pace,"""
    unhurried: int = 2
    """and each further one waits for so many more steps than the one before."""
    curiosity: float = 1.2
    """How much more than otherwise such a trial must promise."""

    online = True
    state_type = AutoState

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, AutoState]:
        """Start evenly, as far as the bounds allow."""
        split = self.bounds.even(workers, global_batch)
        return {0: split}, AutoState(Fit.start(workers), MemoryLine.unknown(workers), split)

    def update(
        self, state: AutoState, events: Sequence[Event]
    ) -> tuple[Decision | None, AutoState]:
        """Learn from each event, then decide once."""
        decision = None
        for event in events:
            if isinstance(event, Change):
                decision, state = self._changed(state, event)
            else:
                state = _learned(state, event)
        last = events[-1] if events else None
        if isinstance(last, Observation) and last.split == state.split and state.fit.known:
            if state.fit.suspected and not state.alarmed:
                return decision, state  # half of the evidence points both ways: wait for the rest
            better = self._better(state)
            if better is not None:
                decision, state = better, _adopted(state, better.split)
        return decision, state

    def forecast(self, state: AutoState) -> Forecast | None:
        """Return the speeds as they are believed to be, and the bounds."""
        if not state.fit.known:
            return None
        model = state.fit.model()
        return Forecast(model, self._limits(state), model.step_s(state.split))

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
            if caps is not None and limits.capped(caps).most >= change.global_batch:
                limits = limits.capped(caps)
            best = optimal_split(model, change.global_batch, limits)
            why = f"{fit.workers} workers share {change.global_batch} samples"
            decision = _decision(model, limits, best, why)
        return decision, AutoState(fit, memory, decision.split, cost_s=state.cost_s, caps=caps)

    def _better(self, state: AutoState) -> Decision | None:
        """Return a decision for a split that pays, if there is one."""
        model, limits = state.fit.model(), self._limits(state)
        if (np.array(state.split) > limits.high).any():
            best = optimal_split(model, sum(state.split), limits)
            return _decision(model, limits, best, "a local batch comes too close to the memory")
        local_s = model.local_s(state.split)
        now_s = float(local_s.max())
        chance = _chance(state, int(local_s.argmax()))
        least = max(self.least_gain, chance, state.cost_s / now_s / self.horizon)
        best_now = _best(model, limits, state.split, now_s * (1 - least))
        if best_now is not None and self._hasty(state, 1 - best_now.step_s / now_s):
            return None
        if best_now is not None:
            best_now = self._further(state, limits, now_s, best_now)
            return _decision(model, limits, best_now, _why(state, now_s, best_now.step_s))
        if state.fit.seen.min() < self.patience:
            return None
        # A slope that seems flat, from few measurements, would never be tried again otherwise.
        steep = state.fit.model(steeper=1.0)
        trial = _best(steep, limits, state.split, now_s * (1 - self.curiosity * least))
        if trial is None:
            return None
        return _decision(steep, limits, trial, "to see how times change with the local batch")

    def _hasty(self, state: AutoState, gain: float) -> bool:
        """Whether a small gain comes too soon after others.

        Where no line fits the times, some split always seems a little better: each change asks
        for a longer look than the one before.
        """
        due = self.unhurried * (state.changes - self.free_changes)
        return gain < self.careful_gain and float(state.fit.seen.min()) < due

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
        """Return the bounds with those of memory.

        If memory is too short for the global batch, no local batch grows beyond its cap, and none
        has to shrink.
        """
        limits, total = self.bounds.limits(state.fit.workers), sum(state.split)
        if state.caps is None:
            return limits
        capped = limits.capped(state.caps)
        if capped.high.sum() >= total:
            return capped
        return limits.capped(np.maximum(state.caps, np.array(state.split)))


def _best(model: SpeedModel, limits: Limits, split: Split, enough_s: float) -> Optimum | None:
    """Return the optimum if it is faster than that."""
    if not capacity_within(model, enough_s, limits) > sum(split):
        return None
    best = optimal_split(model, sum(split), limits, near_s=enough_s)
    return best if best.step_s < enough_s else None


def _decision(model: SpeedModel, limits: Limits, best: Optimum, why: str) -> Decision:
    return Decision(best.split, why, Forecast(model, limits, best.poured_s))


def _learned(state: AutoState, observation: Observation) -> AutoState:
    fit, alarms = state.fit.update(observation)
    state = replace(state, fit=fit, alarmed=(*state.alarmed, *_new(alarms, state.alarmed)))
    if observation.memory_bytes is not None and observation.memory_limit_bytes is not None:
        memory = state.memory.update(observation.split, observation.memory_bytes)
        state = replace(state, memory=memory, caps=memory.cap(observation.memory_limit_bytes))
    if observation.split != state.split:
        return state
    return _timed(state, float(np.nanmax(observation.times("auto")[:, -1])))


def _timed(state: AutoState, step_s: float) -> AutoState:
    """Keep what the first two steps after a change took, and the others."""
    if state.early < 2:  # noqa: PLR2004
        return replace(state, early=state.early + 1, early_s=state.early_s + step_s)
    settled = state.settled + 1
    mean = state.settled_s + (step_s - state.settled_s) / settled
    return replace(state, settled=settled, settled_s=mean)


def _adopted(state: AutoState, split: Split) -> AutoState:
    """Begin another window, and learn what the last change has cost."""
    cost_s = state.cost_s
    if state.settled >= 5 and not state.alarmed:  # noqa: PLR2004
        cost_s += 0.3 * (max(0.0, state.early_s - 2 * state.settled_s) - cost_s)
    changes = 1 if state.alarmed else state.changes + 1
    return AutoState(
        state.fit, state.memory, split, cost_s=cost_s, changes=changes, caps=state.caps
    )


def _chance(state: AutoState, slowest: int) -> float:
    """Return the gain that noise alone may promise.

    The slowest of n workers seems slower than it is, by about sqrt(2 log n) standard errors; and
    of few measurements the noise itself is hardly known.
    """
    fit = state.fit
    error = float(fit.error(state.split)[slowest]) * (1 + 2 / max(float(fit.evidence[slowest]), 1))
    return max(1.5, math.sqrt(2 * math.log(fit.workers))) * error


def _new(alarms: Ints, known: tuple[int, ...]) -> list[int]:
    return [worker for worker in alarms.tolist() if worker not in known]


def _why(state: AutoState, now_s: float, best_s: float) -> str:
    what = f"{now_s * 1e3:.1f} ms a step become {best_s * 1e3:.1f}"
    if state.alarmed:
        who = ", ".join(str(worker) for worker in state.alarmed[:5])
        return f"the speed of worker {who} changed: {what}"
    return what

"""Policy "optperf": Cannikin's controller, once per epoch.

Nie, Maghakian, Liu: "Cannikin", Middleware 2024, arXiv 2402.05302, sections 4 and 5. Epoch 0 is
even, epoch 1 by inverse speed, so that every worker is seen at two local batches. From epoch 2
on the two-line model (first bucket, last bucket; T_o may overlap, T_u never does) is fitted to
the epochs' means and its optimal split is used for the next epoch. Quantities that all workers
measure, T_o and T_u, are combined by inverse variance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from poise.core.entries import (
    BATCHES,
    LONGEST_S,
    SHORTEST_S,
    TIMES,
    Entries,
    check_local_batches,
    check_within,
)
from poise.core.observation import Change, Event, Observation
from poise.core.plan import Forecast, best_plan
from poise.core.split import Split
from poise.core.timing import Floats, SpeedModel
from poise.numbers import check_whole
from poise.policy.base import Decision, Schedule
from poise.policy.bounds import NO_BOUNDS, Bounds, check_bounds
from poise.policy.window import resized

_EPOCHS = 2
"""Of different local batches that a line needs."""


@dataclass(frozen=True, eq=False)
class OptPerfState:
    """Sums over the epoch under way, and the means of the epochs before."""

    split: Split
    speeds: Floats
    """Samples per second of each worker, as last measured; all 1 before."""
    epoch: int
    count: float
    """Steps of this epoch with the split decided last."""
    ready: Floats
    """Workers x 2: summed ready times of the first and the last bucket."""
    reduction: Floats
    """Workers x 4: sums of T_o, its square, T_u, its square."""
    batches: Floats
    """Epochs x workers: local batches of past epochs."""
    first_s: Floats
    """Epochs x workers: mean ready times of the first bucket."""
    last_s: Floats
    """Epochs x workers: of the last one."""
    reduction_s: tuple[float, float] | None = None
    """T_o and T_u of the last epoch that was over."""

    def check_loaded(self) -> None:
        """Raise unless these can be sums over steps, and means of epochs."""
        workers, epochs = len(self.split), len(self.batches)
        check_local_batches("split", self.split)
        Entries(least=1e-12, most=1e30).check("speeds", self.speeds, workers)
        longest_s = LONGEST_S * max(self.count, 1.0)
        Entries(most=longest_s).check("ready", self.ready, workers, 2)
        Entries(most=longest_s * LONGEST_S).check("reduction", self.reduction, workers, 4)
        past = (epochs, workers) if epochs else (0,)
        BATCHES.check("batches", self.batches, *past)
        TIMES.check("first_s", self.first_s, *past)
        Entries(least=SHORTEST_S, most=LONGEST_S).check("last_s", self.last_s, *past)
        check_within("epoch", self.epoch, 0, 1e12)
        check_within("count", self.count, 1 if self.count else 0, 1e12)
        for each in self.reduction_s or ():
            check_within("reduction_s", each, 0, LONGEST_S)


@dataclass(frozen=True, kw_only=True)
class OptPerf:
    """Cannikin: two epochs to learn, then the optimal split of a two-line model, per epoch."""

    bounds: Bounds = NO_BOUNDS
    remembered: int = 10
    """Epochs that a fit looks back."""

    online = True

    def __post_init__(self) -> None:
        check_bounds("OptPerf", self.bounds)
        check_whole("OptPerf", "remembered", self.remembered, _EPOCHS, 10**6)

    state_type = OptPerfState

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, OptPerfState]:
        """Start evenly, as far as the bounds allow."""
        split = self.bounds.even(workers, global_batch)
        return {0: split}, _begin(split, np.ones(workers), epoch=0)

    def update(
        self, state: OptPerfState, events: Sequence[Event]
    ) -> tuple[Decision | None, OptPerfState]:
        """Add up the steps of an epoch; decide when the next one begins."""
        decision = None
        for event in events:
            if isinstance(event, Change):
                decision, state = self._changed(state, event)
            elif event.epoch != state.epoch:
                found, state = self._next_epoch(state, event.epoch)
                decision, state = found or decision, _added(state, event)
            else:
                state = _added(state, event)
        return decision, state

    def forecast(self, state: OptPerfState) -> Forecast | None:
        """Return the two-line model with the bounds; None in the first two epochs."""
        if len(state.batches) < _EPOCHS:
            return None
        first, last = _line(state.batches, state.first_s), _line(state.batches, state.last_s)
        fixed_s, per_sample_s = np.stack([first, last], axis=-1)
        model = SpeedModel.of(fixed_s, per_sample_s, state.reduction_s or (0.0, 0.0))
        return Forecast(model, self.bounds.limits(model.workers), model.step_s(state.split))

    def _changed(self, state: OptPerfState, change: Change) -> tuple[Decision, OptPerfState]:
        """Split another global batch by the model; other workers are learned anew."""
        known = self.forecast(state)
        if known is not None and change.origin == tuple(range(len(state.split))):
            best = best_plan(known.model, known.limits, change.global_batch)
            decision = Decision(best.split, "another global batch", best.forecast)
            return decision, _forgotten(state, best.split)
        speeds = resized(state.speeds, change)
        split = self.bounds.proportional(speeds, change.global_batch)
        decision = Decision(split, "another cluster: the model is learned anew")
        return decision, _begin(split, speeds, state.epoch)

    def _next_epoch(self, state: OptPerfState, epoch: int) -> tuple[Decision | None, OptPerfState]:
        if state.count == 0:
            return None, replace(state, epoch=epoch)
        state = _closed(state, epoch, self.remembered)
        total, known = sum(state.split), self.forecast(state)
        if known is None:
            split = self.bounds.proportional(state.speeds, total)
            decision = Decision(split, "the second epoch goes by inverse speed")
        else:
            best = best_plan(known.model, known.limits, total)
            why = f"{best.step_s * 1e3:.1f} ms a step expected from a two-line model"
            decision = Decision(best.split, why, best.forecast)
        changed = decision.split != state.split
        return decision if changed else None, _forgotten(state, decision.split)


def _begin(split: Split, speeds: Floats, epoch: int) -> OptPerfState:
    none, workers = np.zeros((0, len(split))), len(split)
    sums = 0.0, np.zeros((workers, 2)), np.zeros((workers, 4))
    return OptPerfState(split, speeds, epoch, *sums, none, none, none)


def _added(state: OptPerfState, observation: Observation) -> OptPerfState:
    """Add a step that ran with the split decided last and that all workers measured."""
    times = observation.times("optperf")
    if observation.split != state.split or np.isnan(times).any():
        return state
    ready = state.ready + times[:, [0, -1]]
    reduction = state.reduction
    if observation.done_s is not None and not np.isnan(observation.done_s).any():
        done = observation.done_s
        before_last = done[:, -2] if done.shape[1] > 1 else times[:, -1]
        overlapping = np.maximum(before_last - times[:, 0], 0.0)
        final = np.maximum(done[:, -1] - np.maximum(times[:, -1], before_last), 0.0)
        reduction = reduction + np.stack([overlapping, overlapping**2, final, final**2], axis=1)
    return replace(state, count=state.count + 1, ready=ready, reduction=reduction)


def _closed(state: OptPerfState, epoch: int, remembered: int) -> OptPerfState:
    """Put the epoch's means with those before."""
    means = state.ready / state.count
    overlapping, over_sq, final, final_sq = (state.reduction / state.count).T
    return replace(
        state,
        reduction_s=(
            inverse_variance_mean(overlapping, over_sq - overlapping**2),
            inverse_variance_mean(final, final_sq - final**2),
        ),
        epoch=epoch,
        speeds=np.maximum(state.split, 1) / np.maximum(means[:, 1], 1e-9),
        batches=_with(state.batches, np.array(state.split, dtype=float), remembered),
        first_s=_with(state.first_s, means[:, 0], remembered),
        last_s=_with(state.last_s, means[:, 1], remembered),
    )


def _with(rows: Floats, row: Floats, remembered: int) -> Floats:
    """Return the last rows, with one more."""
    return np.vstack([rows.reshape(-1, len(row)), row])[-remembered:]


def _forgotten(state: OptPerfState, split: Split) -> OptPerfState:
    """Begin the sums of another epoch with a split of it."""
    ready, reduction = np.zeros_like(state.ready), np.zeros_like(state.reduction)
    return replace(state, split=split, count=0.0, ready=ready, reduction=reduction)


def _line(batches: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return least-squares lines; through the origin where all local batches were the same."""
    mean_b, mean_s = batches.mean(axis=0), seconds.mean(axis=0)
    spread = ((batches - mean_b) ** 2).sum(axis=0)
    together = ((batches - mean_b) * (seconds - mean_s)).sum(axis=0)
    through_origin = mean_s / np.maximum(mean_b, 1.0)
    slope = np.divide(together, spread, out=through_origin.copy(), where=spread > 0)
    slope = np.where(slope > 0, slope, through_origin)
    return np.maximum(mean_s - slope * mean_b, 0.0), slope


def inverse_variance_mean(means: Floats, variances: Floats) -> float:
    """Combine independent estimates of one quantity, sum (m_i / v_i) / sum (1 / v_i).

    >>> inverse_variance_mean(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    1.25
    """
    floor = max(float(np.max(variances)), float(np.mean(means)) ** 2, 1e-30) * 1e-12
    inverse = 1 / np.maximum(variances, floor)
    return float((means * inverse).sum() / inverse.sum())

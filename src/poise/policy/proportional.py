"""Policy "proportional": OmniLearn's controller.

Notation (OmniLearn, arXiv 2503.17469, section 4.2): mu_k smoothed iteration time of worker k,
b_k its local batch, X_k = b_k / mu_k its throughput.

    error_k = mu_k - mean(mu);   db_k = -X_k error_k;   b_k' = b_k mean(mu) / mu_k

The published rule does not keep the global batch (1.84 times as much in one move at a
heterogeneity of 8), so the new local batches are normalized: in proportion to X_k, in whole
samples. Its error shrinks with every move by the share of fixed cost, c / t, and so it is slow
where that is high; it diverges when times grow faster than b^2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from poise.core.entries import Entries, check_local_batches
from poise.core.observation import Change, Event
from poise.core.split import Split
from poise.core.timing import Floats
from poise.numbers import check_number, check_whole
from poise.policy.base import Decision, Schedule
from poise.policy.bounds import NO_BOUNDS, Bounds, check_bounds
from poise.policy.window import Window, resized


@dataclass(frozen=True, eq=False)
class ProportionalState:
    """The window, and what was learned of the largest useful local batches."""

    window: Window
    most: Floats
    """b_max of each worker; infinity: none was found."""
    previous: Split
    """The split before the last change, and its throughputs; empty if there was none."""
    speeds: Floats

    @property
    def split(self) -> Split:
        """The split decided last."""
        return self.window.split

    def check_loaded(self) -> None:
        """Raise unless all of it is about the same workers."""
        workers = len(self.window.split)
        Entries(most=np.inf).check("most", self.most, workers)
        Entries(most=1e30).check("speeds", self.speeds, workers)
        check_local_batches("previous", self.previous, workers)


@dataclass(frozen=True, kw_only=True)
class Proportional:
    """Moves every local batch towards equal iteration times, in proportion to the error."""

    bounds: Bounds = NO_BOUNDS
    dead_band: float = 0.05
    """Act only if some local batch would change by more than this part of it."""
    weight: float = 0.2
    """Of the newest time in the smoothed one."""
    patience: int = 5
    """Steps to see before the split changes again."""

    online = True

    def __post_init__(self) -> None:
        check_bounds("Proportional", self.bounds)
        check_number("Proportional", "dead_band", self.dead_band, 0, 1)
        check_number("Proportional", "weight", self.weight, 0, 1)
        check_whole("Proportional", "patience", self.patience, 1, 10**9)

    state_type = ProportionalState

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, ProportionalState]:
        """Start evenly, as far as the bounds allow."""
        split = self.bounds.even(workers, global_batch)
        return {0: split}, _begin(split)

    def update(
        self, state: ProportionalState, events: Sequence[Event]
    ) -> tuple[Decision | None, ProportionalState]:
        """Smooth the times of each step, then move if it is worth it."""
        decision = None
        for event in events:
            if isinstance(event, Change):
                speeds = resized(state.window.throughput(), event)
                split = self.bounds.proportional(speeds, event.global_batch)
                decision = Decision(split, "shares by throughput")
                state = _begin(split, speeds)
            else:
                window = state.window.add(event, "proportional", self.weight)
                state = replace(state, window=window)
        if decision is None and state.window.length >= self.patience:
            return self._moved(state)
        return decision, state

    def _moved(self, state: ProportionalState) -> tuple[Decision | None, ProportionalState]:
        mean_s, split = state.window.times_s, np.array(state.window.split)
        change = np.abs(mean_s.mean() / mean_s - 1)
        if change.max() <= self.dead_band:
            return None, state
        speeds, most = state.window.throughput(), _learned_most(state)
        new = self.bounds.proportional(speeds, int(split.sum()), most)
        if new == state.window.split:
            return None, replace(state, most=most)
        slowest = int(mean_s.argmax())
        why = f"worker {slowest} takes {mean_s[slowest] / mean_s.mean():.2f} times the mean"
        window = Window.begin(new, speeds)
        return Decision(new, why), ProportionalState(window, most, state.window.split, speeds)


def _begin(split: Split, speeds: Floats | None = None) -> ProportionalState:
    unlimited, unknown = np.full(len(split), np.inf), np.zeros(len(split))
    return ProportionalState(Window.begin(split, speeds), unlimited, (), unknown)


def _learned_most(state: ProportionalState) -> Floats:
    """Lower b_max to the old local batch where a larger one lowered the throughput."""
    if not state.previous:
        return state.most
    old, now = np.array(state.previous), np.array(state.window.split)
    worse = (now > old) & (state.window.throughput() < state.speeds)
    return np.where(worse, np.minimum(state.most, old), state.most)

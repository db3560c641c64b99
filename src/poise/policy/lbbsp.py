"""Policy "lbbsp": LB-BSP, a few samples at a time from the slowest worker to the fastest.

Chen, Weng, Wang, Li, Li: "Semi-dynamic load balancing", SoCC 2020. Equal compute times are its
aim: what the reduction of gradients hides or adds is not part of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poise.core.limits import UNLIMITED
from poise.core.observation import Change, Event
from poise.numbers import check_number, check_whole
from poise.policy.base import Decision, Schedule
from poise.policy.bounds import NO_BOUNDS, Bounds, check_bounds
from poise.policy.window import Window, resized


@dataclass(frozen=True, kw_only=True)
class LbBsp:
    """Moves a fixed number of samples from the slowest worker to the fastest."""

    bounds: Bounds = NO_BOUNDS
    samples: int | None = None
    """How many move at once; None: 1 % of the global batch, at least one."""
    weight: float = 0.3
    """Of the newest time in the smoothed one."""

    online = True

    def __post_init__(self) -> None:
        check_bounds("LbBsp", self.bounds)
        check_number("LbBsp", "weight", self.weight, 0, 1)
        if self.samples is not None:
            check_whole("LbBsp", "samples", self.samples, 1, UNLIMITED)

    state_type = Window

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, Window]:
        """Start evenly, as far as the bounds allow."""
        split = self.bounds.even(workers, global_batch)
        return {0: split}, Window.begin(split)

    def update(self, state: Window, events: Sequence[Event]) -> tuple[Decision | None, Window]:
        """Smooth the times of each step, then move samples if that brings the two closer."""
        decision = None
        for event in events:
            if isinstance(event, Change):
                speeds = resized(state.throughput(), event)
                split = self.bounds.proportional(speeds, event.global_batch)
                decision = Decision(split, "shares by throughput")
                state = Window.begin(split, speeds)
            else:
                state = state.add(event, "lbbsp", self.weight)
        if decision is None and state.length >= 1:
            decision = self._moved(state)
            if decision is not None:
                state = Window.begin(decision.split, state.throughput())
        return decision, state

    def _moved(self, state: Window) -> Decision | None:
        limits = self.bounds.limits(len(state.split))
        split, times_s = np.array(state.split), state.times_s
        slow, fast = int(times_s.argmax()), int(times_s.argmin())
        unit = math.lcm(int(limits.multiple[slow]), int(limits.multiple[fast]))
        room = min(int(split[slow] - limits.low[slow]), int(limits.high[fast] - split[fast]))
        wanted = self.samples or max(1, round(0.01 * split.sum()))
        count = min(max(unit, wanted // unit * unit), room // unit * unit)
        per_sample = times_s / np.maximum(split, 1)
        gap = times_s[slow] - times_s[fast]
        if count <= 0 or gap <= count * (per_sample[slow] + per_sample[fast]) / 2:
            return None  # moving would only turn the two around
        split[slow] -= count
        split[fast] += count
        why = f"worker {slow} is slowest, worker {fast} fastest"
        return Decision(tuple(split.tolist()), why)

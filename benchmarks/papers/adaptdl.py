"""What AdaptDL would do: even shares, and a speed model in which all workers are alike.

AdaptDL (Pollux, OSDI 2021) chooses the global batch by goodput and divides it evenly. Its model
knows one kind of worker. Here that is the slowest one, since it is what a step lasts as long as:
one line is fitted to its ready times, by the same fit that policy auto uses, and forecasts are
made as if every worker were like it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from poise.core.fit import Fit
from poise.core.limits import Limits
from poise.core.observation import Change, Event, Observation
from poise.core.plan import Forecast
from poise.core.split import Split, even_split
from poise.policy import Decision
from poise.policy.base import Schedule


@dataclass(frozen=True, eq=False)
class AdaptDlState:
    """The split decided last, and what is known of the slowest worker."""

    split: Split
    fit: Fit


@dataclass(frozen=True, kw_only=True)
class AdaptDl:
    """Even shares; the global batch follows the forecast of equal workers."""

    max_batch: int | None = None
    """The largest local batch, the same for all workers."""

    online = True
    state_type = AdaptDlState

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, AdaptDlState]:
        """Start evenly."""
        split = even_split(workers, global_batch)
        return {0: split}, AdaptDlState(split, Fit.start(1))

    def update(
        self, state: AdaptDlState, events: Sequence[Event]
    ) -> tuple[Decision | None, AdaptDlState]:
        """Learn; only another cluster or global batch changes the split."""
        decision = None
        for event in events:
            if isinstance(event, Change):
                split = even_split(len(event.origin), event.global_batch)
                decision, state = Decision(split, "even shares"), replace(state, split=split)
            elif (slowest := _slowest(event)) is not None:
                state = replace(state, fit=state.fit.update(slowest)[0])
        if decision is not None:
            decision = replace(decision, forecast=self.forecast(state))
        return decision, state

    def forecast(self, state: AdaptDlState) -> Forecast | None:
        """Return the model in which every worker is like the slowest; None before it is known."""
        if not state.fit.known:
            return None
        workers = len(state.split)
        model = state.fit.model().take(np.zeros(workers, dtype=np.int64))
        limits = Limits.of(workers, max_batch=self.max_batch)
        return Forecast(model, limits, model.step_s(state.split))


def _slowest(seen: Observation) -> Observation | None:
    """Return a step as the worker saw it that handed over its gradient last; None: nobody did."""
    last_s = seen.times("adaptdl")[:, -1]
    if np.isnan(last_s).all():
        return None
    worker = int(np.nanargmax(last_s))
    rows: dict[str, Any] = {
        name: values[[worker]]
        for name in ("ready_s", "done_s", "wait_s", "input_s")
        if (values := getattr(seen, name)) is not None
    }
    return Observation(seen.step, (seen.split[worker],), seen.epoch, **rows)

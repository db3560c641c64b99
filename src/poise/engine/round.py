"""A round of an asynchronous training: what workers measured, and what was decided on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poise.core.entries import LONGEST_S, MOST_BYTES, SHORTEST_S
from poise.core.observation import Event, Observation
from poise.core.plan import Plan
from poise.core.timing import Floats
from poise.engine.bsp import Engine

_MEASURED = ("wait_s", "load_s", "input_s", "memory_bytes", "memory_limit_bytes")
"""What a report and an observation have under the same name."""


@dataclass(frozen=True)
class Report:
    """What a worker measured in one iteration; NaN: it did not."""

    samples: int
    iteration_s: float = float("nan")
    """Without what it waited for the server, for others, or for input."""
    wait_s: float = float("nan")
    load_s: float = float("nan")
    input_s: float = float("nan")
    memory_bytes: float = float("nan")
    memory_limit_bytes: float = float("nan")

    def is_possible(self, global_batch: int) -> bool:
        """Whether a worker can have measured this; what is learned from must be a time."""
        times_s = (self.iteration_s, self.wait_s, self.load_s, self.input_s)
        sizes = (self.memory_bytes, self.memory_limit_bytes)
        return (
            0 <= self.samples <= global_batch
            and not 0 < self.iteration_s < SHORTEST_S  # others may be what rounding leaves
            and all(np.isnan(time_s) or 0 <= time_s <= LONGEST_S for time_s in times_s)
            and all(np.isnan(size) or 0 <= size <= MOST_BYTES for size in sizes)
        )


def observation_of(number: int, reports: Sequence[Sequence[Report]]) -> Observation:
    """Return a round as a policy sees it: each worker's mean over its reports."""

    def mean(name: str) -> Floats:
        columns = [np.array([getattr(each, name) for each in own]) for own in reports]
        known = [column[~np.isnan(column)] for column in columns]
        return np.array([column.mean() if column.size else np.nan for column in known])

    means: dict[str, Any] = {name: mean(name) for name in _MEASURED}
    return Observation(
        step=number,
        split=tuple(own[-1].samples if own else 0 for own in reports),
        ready_s=mean("iteration_s")[:, None],
        **{name: values for name, values in means.items() if not np.isnan(values).all()},
    )


@dataclass(frozen=True)
class Round:
    """What a decision was made on, for the record."""

    events: tuple[Event, ...]
    start_step: int
    plan: Plan | None
    loaded: Engine | None = None
    """The engine of before a resume, from which this one goes on."""

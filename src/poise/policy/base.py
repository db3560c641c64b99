"""The one shape of all policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from poise.core.observation import Event
from poise.core.plan import Forecast
from poise.core.split import Split

Schedule = Mapping[int, Split]
"""Splits by the step from which they hold; step 0 is always there."""


@dataclass(frozen=True)
class Decision:
    """A new split, and why."""

    split: Split
    why: str = ""
    """One sentence for people."""
    forecast: Forecast | None = field(default=None, compare=False, repr=False)
    """What is predicted, by policies that have a speed model."""


@runtime_checkable
class Policy(Protocol):
    """A rule that chooses the split: pure, and the same on every machine.

    `init` runs on every worker and must give the same schedule there; `update` runs on worker 0
    alone, so that machines with different arithmetic cannot disagree. `poise.sim.conformance`
    checks what is promised here.
    """

    @property
    def online(self) -> bool:
        """Whether the rule learns while training; if not, workers exchange nothing for it."""

    @property
    def state_type(self) -> type:
        """The type of its states: None, or frozen data that `poise.core.plain` can save.

        A state that has a `split` has the one decided last; a saved one with another is refused.
        """

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, Any]:
        """Return what is known before the first step, and the first state."""

    def update(self, state: Any, events: Sequence[Event]) -> tuple[Decision | None, Any]:
        """Learn from what happened since the last call; return a decision and the next state.

        None means no change. After a `Change` a decision must follow: a split of its global batch
        over its workers.
        """


@runtime_checkable
class Forecasting(Protocol):
    """A policy with a speed model; what chooses a global batch needs one."""

    def forecast(self, state: Any) -> Forecast | None:
        """Return what it predicts now; None before every worker was measured."""

"""The one shape of all policies."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from poise.core.observation import Observation
from poise.core.split import Split

Schedule = Mapping[int, Split]
"""Splits by the step from which they hold; step 0 is always there."""


@runtime_checkable
class Policy(Protocol):
    """A rule that chooses the split: pure, and the same on every machine.

    `init` runs on every worker and must give the same schedule there; `update` runs on worker 0
    alone, so that machines with different arithmetic cannot disagree.
    """

    @property
    def online(self) -> bool:
        """Whether the rule learns while training; if not, workers exchange nothing for it."""

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, Any]:
        """Return what is known before the first step, and the first state."""

    def update(self, state: Any, observation: Observation) -> tuple[Split | None, Any]:
        """Return a new split, or None for no change, and the next state."""

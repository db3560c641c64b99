"""Policy "even": every worker the same share, as plain data parallelism does."""

from collections.abc import Sequence
from dataclasses import dataclass

from poise.core.observation import Change, Event
from poise.core.split import even_split
from poise.policy.base import Decision, Schedule


@dataclass(frozen=True)
class Even:
    """Every worker gets the same share of the global batch."""

    online = False
    state_type = type(None)

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, None]:
        """One split for the whole training."""
        return {0: even_split(workers, global_batch)}, None

    def update(self, state: None, events: Sequence[Event]) -> tuple[Decision | None, None]:
        """Only another cluster or global batch changes it."""
        changes = [event for event in events if isinstance(event, Change)]
        if not changes:
            return None, None
        now = changes[-1]
        return Decision(even_split(len(now.origin), now.global_batch), "even shares"), None

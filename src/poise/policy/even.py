"""Policy "even": every worker the same share, as plain data parallelism does."""

from dataclasses import dataclass

from poise.core.observation import Change
from poise.core.split import even_split
from poise.policy.base import Decision, Schedule, Stated


@dataclass(frozen=True)
class Even(Stated):
    """Every worker gets the same share of the global batch."""

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, None]:
        """One split for the whole training."""
        return {0: even_split(workers, global_batch)}, None

    def changed(self, change: Change) -> Decision:
        """The same rule for other workers, or another global batch."""
        return Decision(even_split(len(change.origin), change.global_batch), "even shares")

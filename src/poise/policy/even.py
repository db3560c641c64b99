"""Policy "even": every worker the same share, as plain data parallelism does."""

from dataclasses import dataclass

from poise.core.observation import Observation
from poise.core.split import Split, even_split
from poise.policy.base import Schedule


@dataclass(frozen=True)
class Even:
    """Every worker gets the same share of the global batch."""

    online = False

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, None]:
        """One split for the whole training."""
        return {0: even_split(workers, global_batch)}, None

    def update(self, state: None, observation: Observation) -> tuple[Split | None, None]:
        """Nothing observed changes it."""
        return None, None

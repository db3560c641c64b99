"""What one step of a virtual training was like."""

from dataclasses import dataclass

from poise.core.plan import Plan
from poise.core.split import Split
from poise.core.timing import Floats, Ints


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a virtual training, or the time that one global batch took."""

    number: int
    workers: Ints
    """Who took part, by the number in the scenario."""
    split: Split
    samples: int
    """Their sum; with a server, what was pushed meanwhile."""
    begin_s: float
    lasts_s: float
    computed_s: Floats
    """When each worker had handed over its gradient, from the begin."""
    input_s: Floats
    """How long each worker waited for input first."""
    idle_s: Floats
    """How long each worker waited for others, or for the server."""
    clean_s: float
    """How long it would have lasted without noise."""
    best_s: float
    """The same with the best split; NaN where it was not looked for."""
    stands_for: float = 1.0
    """How many steps it stands for."""
    part: float = 1.0
    """The part of it up to the goal of the training."""
    lost_s: float = 0.0
    """Seconds lost before it, with workers that failed, left or came."""
    effective_samples: float = 0.0
    """What is learned by its end, in samples with the global batch of the start."""
    plan: Plan | None = None
    """What was decided after it."""
    whole: bool = True
    """False for the smaller last step of an epoch."""

    @property
    def end_s(self) -> float:
        """When it was over, or the goal reached."""
        return self.begin_s + self.lasts_s * self.stands_for * self.part

"""A generation: who trains together, as long as nobody comes or goes.

Whatever is sized by the number of workers is built from one generation, and built anew from the
next. What outlives it, such as who is alive, is at the rendezvous.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from poise.runtime.collectives import Collectives


class Member(NamedTuple):
    """One worker, as the others can tell it from others."""

    name: str
    """The same as long as its process lives."""
    kind: str
    """What tells fast devices from slow ones: the name of the model."""
    host: str


@dataclass(frozen=True, eq=False)
class Generation:
    """The workers of some steps in a row, and what they talk through."""

    collectives: Collectives
    """For control: small numbers, on the main thread only."""
    gradients: Any = None
    """What gradients are summed over, as the adapter knows it. Apart from control: within one
    group, two operations that cross on one worker give wrong sums without an error."""
    number: int = 0
    """Counts the generations of a training."""
    members: tuple[Member, ...] = ()
    """By their numbers; empty until they have introduced themselves."""

    @property
    def worker(self) -> int:
        """This worker's number, from 0."""
        return self.collectives.worker

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.collectives.workers

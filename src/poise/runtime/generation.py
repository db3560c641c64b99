"""A generation: who trains together, as long as nobody comes or goes.

Whatever is sized by the number of workers is built from one generation, and built anew from the
next. What outlives it, such as who is alive, is at the rendezvous.
"""

from dataclasses import dataclass, replace
from typing import Any

from poise.runtime.collectives import Collectives


@dataclass(frozen=True)
class Member:
    """One worker, as the others can tell it from others."""

    identity: str
    """The same as long as its process lives."""
    kind: str = ""
    """What tells fast devices from slow ones: the name of the model; "" until it is known."""
    host: str = ""


@dataclass(frozen=True, eq=False)
class Generation:
    """The workers of some steps in a row, and what they talk through."""

    members: tuple[Member, ...]
    """By their numbers."""
    collectives: Collectives
    """For control: small numbers, on the main thread only."""
    gradients: Any
    """What gradients are summed over, as the adapter knows it. Apart from control: within one
    group, two operations that cross on one worker give wrong sums without an error."""
    number: int = 0
    """Counts the generations of a training."""

    @property
    def worker(self) -> int:
        """This worker's number, from 0."""
        return self.collectives.worker

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.collectives.workers

    def of_kinds(self, kinds: list[str], hosts: list[str]) -> "Generation":
        """Return the generation with what its members have said of themselves."""
        members = [
            replace(member, kind=kind, host=host)
            for member, kind, host in zip(self.members, kinds, hosts, strict=True)
        ]
        return replace(self, members=tuple(members))

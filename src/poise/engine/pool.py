"""The samples of an epoch: which are free, which are handed out, and which are pushed.

Samples that were handed out and not pushed, because their worker died, are free again and handed
out before new ones. So every sample is pushed exactly once per epoch, whoever comes and goes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from poise.core.plain import whole_in
from poise.core.revised import revised
from poise.errors import StateMismatch
from poise.numbers import is_whole

Range = tuple[int, int]
"""Positions from start to stop - 1 in the epoch's order."""
Ranges = tuple[Range, ...]


def count_of(ranges: Iterable[Range]) -> int:
    """Return how many samples ranges hold.

    >>> count_of([(0, 4), (10, 11)])
    5
    """
    return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True)
class Pool:
    """The samples of one epoch. Frozen: each call returns the next pool."""

    length: int
    """Samples of the epoch that are to be pushed."""
    position: int = 0
    """Samples before this one were handed out at least once."""
    returned: Ranges = ()
    """Of those, the ones that are free again."""
    out: Mapping[int, Ranges] = field(default_factory=dict)
    """What is handed out now, by the number it was given."""

    @staticmethod
    def of(state: Mapping[str, Any], length: int) -> "Pool":
        """Read the pool from a state, in epochs of so many samples; raise if it is damaged."""
        position = whole_in(state, "position")
        try:
            found = state["returned"]
            returned = tuple(sorted((start, stop) for start, stop in found))
            whole = all(is_whole(each) for ends in returned for each in ends)
            if not (whole and isinstance(found, list | tuple)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise StateMismatch(
                f"the state has returned={state.get('returned')!r}, which are no ranges of "
                "samples; it is damaged, load another one"
            ) from None
        inside = all(0 <= start < stop <= position for start, stop in returned)
        inside &= all(one[1] <= other[0] for one, other in pairwise(returned))
        if not inside or position > length:
            raise StateMismatch(
                f"the state is at position {position} with {list(returned)} left out, in "
                f"epochs of {length} samples; load the state of this training"
            )
        return Pool(length, position, returned)

    @property
    def free(self) -> int:
        """Samples that can be handed out."""
        return count_of(self.returned) + self.length - self.position

    @property
    def pushed(self) -> int:
        """Samples whose gradient was pushed."""
        handed_out = sum(count_of(ranges) for ranges in self.out.values())
        return self.position - count_of(self.returned) - handed_out

    @property
    def over(self) -> bool:
        """Whether every sample is pushed."""
        return self.pushed == self.length

    def take(self, number: int, samples: int) -> tuple[Ranges, "Pool"]:
        """Hand out so many samples, or as many as are free; returned ones first.

        >>> ranges, pool = Pool(10).take(0, 4)
        >>> ranges, pool = pool.give_back(0).take(1, 6)
        >>> ranges, pool.free
        (((0, 4), (4, 6)), 4)
        """
        taken: list[Range] = []
        left: list[Range] = []
        missing = samples
        for start, stop in self.returned:
            cut = min(stop, start + missing)
            if cut > start:
                taken.append((start, cut))
            if cut < stop:
                left.append((cut, stop))
            missing -= cut - start
        fresh = min(missing, self.length - self.position)
        if fresh:
            taken.append((self.position, self.position + fresh))
        ranges = tuple(taken)
        out = {**self.out, number: ranges} if ranges else self.out
        return ranges, revised(self, position=self.position + fresh, returned=tuple(left), out=out)

    def push(self, number: int) -> "Pool":
        """What was handed out under a number is pushed."""
        return revised(self, out={key: each for key, each in self.out.items() if key != number})

    def give_back(self, number: int) -> "Pool":
        """What was handed out under a number is free again."""
        ranges = self.out.get(number, ())
        return revised(self.push(number), returned=tuple(sorted((*self.returned, *ranges))))

    def all_back(self) -> "Pool":
        """Everything that is handed out is free again, as for a training that goes on later."""
        pool = self
        for number in self.out:
            pool = pool.give_back(number)
        return pool

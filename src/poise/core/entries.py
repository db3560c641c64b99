"""What the numbers of a saved state may be: tables of the right shape, within their ends.

Formulas take for granted what the code that made a state guarantees. A state that comes from a
file guarantees nothing, so its numbers are checked where they enter, each by the range that its
formula keeps. What passes gives finite results.
"""

from dataclasses import dataclass

import numpy as np

from poise.core.limits import UNLIMITED
from poise.core.split import Split
from poise.core.timing import Floats, Ints
from poise.errors import InvalidSetting

SHORTEST_S, LONGEST_S = 1e-9, 1e9
"""Seconds that a worker can measure; less is what rounding leaves."""
MOST_BYTES = 1e18


@dataclass(frozen=True)
class Entries:
    """The ends between which the entries of a table lie."""

    least: float = 0.0
    most: float = 1e12
    unknown: bool = False
    """Whether an entry may be NaN: not known."""

    def check(self, name: str, values: Floats | Ints, *shape: int) -> None:
        """Raise unless a table has this shape, and every entry lies within the ends."""
        if values.shape != shape:
            raise InvalidSetting(
                f"{name} has the shape {values.shape}; {shape} is required, by the other numbers"
            )
        inside = (values >= self.least) & (values <= self.most)
        if self.unknown:
            inside |= np.isnan(values)
        if not inside.all():
            wrong = values[~inside].ravel()[0]
            nan = " or unknown" if self.unknown else ""
            raise InvalidSetting(
                f"{name} has {wrong}; numbers from {self.least:g} to {self.most:g}{nan} are "
                "required"
            )


TIMES = Entries(most=LONGEST_S)
BATCHES = Entries(most=float(UNLIMITED))
ANY = Entries(least=-1e12)


def check_within(name: str, value: float, least: float, most: float) -> None:
    """Raise unless a number lies within its ends; NaN does not."""
    if not least <= value <= most:
        raise InvalidSetting(f"{name} is {value}; a number from {least:g} to {most:g} is required")


def check_local_batches(name: str, split: Split, workers: int | None = None) -> None:
    """Raise unless these are local batches, of so many workers or of none."""
    if workers is not None and split and len(split) != workers:
        raise InvalidSetting(f"{name} has {len(split)} local batches for {workers} workers")
    if split and not (min(split) >= 0 and max(split) <= UNLIMITED and sum(split) > 0):
        raise InvalidSetting(f"{name}={list(split)} has local batches that cannot be")

"""How often to look at something that costs time, so that all looks together cost little.

Not every step is looked at, but about one of a power of two, which each worker chooses for itself.
Which ones follows from the number of the step, and those of a rarer look are among those of a more
frequent one: the steps that all workers look at are those of the worker that looks most seldom, and
nothing has to be agreed on.
"""

import math
import statistics
from collections import deque

MOST_COST = 0.002
"""Part of a worker's time that looking may take."""
_RAREST = 64
"""Of so many steps at least one is looked at."""
_REMEMBERED = 9
"""Steps whose time, and looks whose cost, the next choice is made by."""
_GOLDEN = 2654435761
"""Multiples of it spread evenly over 32 bits."""


class Budget:
    """How often to look, so that it takes less than two thousandths of the worker's time."""

    def __init__(self) -> None:
        self._every = 1
        self._costs_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._begun_s = math.inf
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        """How long the last steps took from the batch to the optimizer, by the host's clock."""

    def begin(self, now_s: float) -> None:
        """A step begins."""
        self._begun_s = now_s

    def end(self, now_s: float) -> None:
        """Its gradient is about to be used, perhaps by the first optimizer of several."""
        if self._begun_s < math.inf:
            self._steps_s.append(now_s - self._begun_s)
            self._begun_s = math.inf

    def allows(self, step: int) -> bool:
        """Whether a step is one of those to look at."""
        return _mixed(step) % self._every == 0

    def spend(self, cost_s: float) -> None:
        """A look took so long."""
        self._costs_s.append(cost_s)
        if self._steps_s:
            step_s = statistics.median(self._steps_s)
            dear = statistics.median(self._costs_s) / (MOST_COST * step_s)
            self._every = min(2 ** max(0, math.ceil(math.log2(max(dear, 1e-9)))), _RAREST)


def _mixed(step: int) -> int:
    """Return a number of 6 bits that has nothing to do with how a loop counts its steps.

    A loop that adds up two batches would never be seen where only even steps are looked at.
    """
    return (step * _GOLDEN % 2**32) * _RAREST >> 32

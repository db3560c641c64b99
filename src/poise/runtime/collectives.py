"""What workers of one generation do together: the seam under all control traffic.

Operations are posted in the same order by every worker, by one thread of each; two that cross on
one worker would be paired wrongly without an error. Only numbers travel, in NumPy arrays.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from poise.core.timing import Floats

Numbers = NDArray[np.float64] | NDArray[np.int64] | NDArray[np.uint8]


class Disconnected(Exception):
    """A worker is gone that an operation waits for, or the limit of a wait has passed."""

    def __init__(self, why: str, *, timed_out: bool = False) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class Pending(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Whether its result is there; asking never waits."""

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for its result, or raise Disconnected; None: as long as the group's limit says."""


class Collectives(Protocol):
    """The operations, each posted at once; the arrays hold the result when it is awaited."""

    @property
    def worker(self) -> int:
        """This worker's number."""

    @property
    def workers(self) -> int:
        """How many there are."""

    def sum(self, table: Floats) -> Pending:
        """Add up everybody's table, in place."""

    def broadcast(self, values: Numbers, source: int) -> Pending:
        """Replace everybody's values by those of one worker."""

    def gather(self, row: Floats, rows: Floats | None) -> Pending:
        """Give worker 0 everybody's row, in rows, which is None on the others."""

    def cut(self) -> None:
        """End what waits, here and in the sums of gradients, with Disconnected; from any thread."""

    def close(self) -> None:
        """Let go of the connections; the numbers of the workers are still known."""

"""What is to happen to virtual workers, in the order of its time."""

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["arrive", "apply"]


@dataclass(order=True, frozen=True)
class Happening:
    """Something at a time; of two at the same time, the one that was known first."""

    at_s: float
    order: int
    kind: Kind = field(compare=False)
    worker: int = field(compare=False)
    life: int = field(compare=False)
    """How often the worker had joined or left: what it sent before it left is void."""


class Agenda:
    """A queue of happenings, and the clock that they move."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        self._queue: list[Happening] = []
        self._known = 0
        self._lives: Counter[int] = Counter()

    def __bool__(self) -> bool:
        """Whether anything is to happen."""
        return bool(self._queue)

    def new_life(self, worker: int) -> None:
        """A worker joins or leaves: nothing happens any more that was to happen to it."""
        self._lives[worker] += 1

    def expect(self, at_s: float, kind: Kind, worker: int) -> None:
        """Something is to happen to a worker, unless it leaves before."""
        self._known += 1
        event = Happening(at_s, self._known, kind, worker, self._lives[worker])
        heapq.heappush(self._queue, event)

    def next(self) -> Happening | None:
        """Take the next happening off the queue, and move the clock to it; None: it is void."""
        event = heapq.heappop(self._queue)
        if event.life != self._lives[event.worker]:
            return None
        self.clock_s = max(self.clock_s, event.at_s)
        return event

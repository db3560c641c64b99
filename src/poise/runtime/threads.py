"""Workers as threads of one process: collectives and a rendezvous without a network.

For tests, and for whoever writes an adapter: what passes here needs no processes to be tried.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from poise.core.timing import Floats
from poise.runtime.collectives import Disconnected, Numbers
from poise.runtime.rendezvous import RendezvousLost

_HANG_S = 60.0


class ThreadGroup:
    """Where the threads of one generation meet."""

    def __init__(self, workers: int, hang_s: float = _HANG_S) -> None:
        self._workers = workers
        self._hang_s = hang_s
        self._changed = threading.Condition()
        self._operations: dict[int, _Operation] = {}
        self._posted = [0] * workers
        self._why: str | None = None

    def collectives(self, worker: int) -> "ThreadCollectives":
        """Return one worker's end."""
        return ThreadCollectives(self, worker, self._workers)

    def cut(self, why: str) -> None:
        """End all operations that wait, and all later ones: a worker is gone."""
        with self._changed:
            self._why = self._why or why
            self._changed.notify_all()

    def post(self, worker: int, own: Numbers, take: "Callable[[Sequence[Numbers]], None]") -> int:
        """Add a worker's part to its next operation; take is called with all of them."""
        with self._changed:
            number = self._posted[worker]
            self._posted[worker] += 1
            operation = self._operations.setdefault(number, _Operation())
            operation.parts[worker] = own.copy()
            operation.takers.append(take)
            if len(operation.parts) == self._workers:
                parts = [operation.parts[each] for each in range(self._workers)]
                for each in operation.takers:
                    each(parts)
                operation.over = True
                self._changed.notify_all()
            return number

    def is_over(self, number: int) -> bool:
        """Whether all workers have posted an operation."""
        with self._changed:
            return self._operations[number].over

    def wait(self, number: int, limit_s: float | None) -> None:
        """Wait for an operation, or raise Disconnected."""
        operation = self._operations[number]
        with self._changed:
            limit_s = self._hang_s if limit_s is None else limit_s
            ended = self._changed.wait_for(lambda: operation.over or self._why, limit_s)
            if not operation.over:
                raise Disconnected(self._why or "timed out", timed_out=not ended)


@dataclass
class _Operation:
    parts: dict[int, Numbers] = field(default_factory=dict)
    takers: list[Callable[[Sequence[Numbers]], None]] = field(default_factory=list)
    over: bool = False


@dataclass(frozen=True)
class _Posted:
    group: ThreadGroup
    number: int

    def done(self) -> bool:
        return self.group.is_over(self.number)

    def wait(self, limit_s: float | None = None) -> None:
        self.group.wait(self.number, limit_s)


@dataclass(frozen=True)
class ThreadCollectives:
    """One thread's end of a group."""

    group: ThreadGroup
    worker: int
    workers: int

    def sum(self, table: Floats) -> _Posted:
        """Add up in the order of the workers, so that all get the same number."""
        return self._post(table, lambda parts: np.copyto(table, np.sum(parts, axis=0)))

    def broadcast(self, values: Numbers, source: int) -> _Posted:
        """Copy one worker's values."""
        return self._post(values, lambda parts: np.copyto(values, parts[source]))

    def gather(self, row: Floats, rows: Floats | None) -> _Posted:
        """Copy all rows, if there is room for them."""
        return self._post(row, lambda parts: None if rows is None else np.copyto(rows, parts))

    def close(self) -> None:
        """There are none to let go of."""

    def _post(self, own: Numbers, take: Callable[[Sequence[Numbers]], None]) -> _Posted:
        return _Posted(self.group, self.group.post(self.worker, own, take))


class ThreadRendezvous:
    """Texts that threads leave for each other."""

    def __init__(self, hang_s: float = _HANG_S) -> None:
        self._hang_s = hang_s
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, text: str) -> None:
        """Leave a text."""
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    def get(self, keys: Sequence[str]) -> list[str]:
        """Return texts as soon as all of them are there."""
        with self._changed:
            there = lambda: all(key in self._texts for key in keys)  # noqa: E731
            if not self._changed.wait_for(there, self._hang_s):
                raise RendezvousLost(f"nobody left a text for one of {list(keys)}")
            return [self._texts[key] for key in keys]

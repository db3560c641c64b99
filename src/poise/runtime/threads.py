"""Workers as threads of one process: collectives and a rendezvous without a network.

For tests, and for whoever writes an adapter: what passes here needs no processes to be tried.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from poise.core.timing import Floats
from poise.runtime.collectives import Disconnected, Numbers
from poise.runtime.rendezvous import RendezvousLost

_HANG_S = 60.0
Take = Callable[[Sequence[Numbers]], None]
"""Is called with the parts of all workers, once they are there."""


class ThreadGroup:
    """Where the threads of one generation meet."""

    def __init__(self, workers: int, *others: "ThreadGroup") -> None:
        """Let workers meet; a cut ends the operations of the other groups, too."""
        self._workers = workers
        self._others = others
        self._posted = [0] * workers
        self._operations: dict[int, _Operation] = defaultdict(lambda: _Operation(self))
        self.changed = threading.Condition()
        self.why: str | None = None
        """What ended all operations; None: nothing did."""

    def collectives(self, worker: int) -> "ThreadCollectives":
        """Return one worker's end."""
        return ThreadCollectives(self, worker, self._workers)

    def cut(self, why: str) -> None:
        """End all operations that wait, and all later ones: a worker is gone."""
        with self.changed:
            self.why = self.why or why
            self.changed.notify_all()
        for other in self._others:
            other.cut(why)

    def post(self, worker: int, own: Numbers, take: Take) -> "_Operation":
        """Add a worker's part to its next operation."""
        with self.changed:
            operation = self._operations[self._posted[worker]]
            self._posted[worker] += 1
            operation.parts[worker] = own.copy()
            operation.takers.append(take)
            if len(operation.parts) == self._workers:
                parts = [operation.parts[each] for each in range(self._workers)]
                for each in operation.takers:
                    each(parts)
                operation.over = True
                self.changed.notify_all()
            return operation


@dataclass(eq=False)
class _Operation:
    """What all workers post together; over when the last one has."""

    group: ThreadGroup
    parts: dict[int, Numbers] = field(default_factory=dict)
    takers: list[Take] = field(default_factory=list)
    over: bool = False

    def done(self) -> bool:
        return self.over

    def wait(self, limit_s: float | None = None) -> None:
        group, limit_s = self.group, _HANG_S if limit_s is None else limit_s
        with group.changed:
            ended = group.changed.wait_for(lambda: self.over or group.why, limit_s)
            if not self.over:
                raise Disconnected(group.why or "timed out", timed_out=not ended)


@dataclass(frozen=True)
class ThreadCollectives:
    """One thread's end of a group."""

    group: ThreadGroup
    worker: int
    workers: int

    def sum(self, table: Floats) -> _Operation:
        """Add up in the order of the workers, so that all get the same number."""
        return self._post(table, lambda parts: np.copyto(table, np.sum(parts, axis=0)))

    def broadcast(self, values: Numbers, source: int) -> _Operation:
        """Copy one worker's values."""
        return self._post(values, lambda parts: np.copyto(values, parts[source]))

    def gather(self, row: Floats, rows: Floats | None) -> _Operation:
        """Copy all rows, if there is room for them."""
        return self._post(row, lambda parts: None if rows is None else np.copyto(rows, parts))

    def cut(self) -> None:
        """End what waits, for all threads."""
        self.group.cut("a worker is lost")

    def close(self) -> None:
        """There are none to let go of."""

    def _post(self, own: Numbers, take: Take) -> _Operation:
        return self.group.post(self.worker, own, take)


class ThreadRendezvous:
    """Texts that threads leave for each other."""

    launcher: str | None = None

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._gone = False

    def set(self, key: str, text: str) -> None:
        """Leave a text."""
        with self._asked():
            self._texts[key] = text

    def get(self, keys: Sequence[str]) -> dict[str, str]:
        """Return those texts that are there."""
        with self._asked():
            return {key: self._texts[key] for key in keys if key in self._texts}

    def first(self, key: str, text: str) -> str:
        """Leave a text unless there is one."""
        with self._asked():
            return self._texts.setdefault(key, text)

    def cut(self) -> None:
        """Be gone."""
        self._gone = True

    @contextmanager
    def _asked(self) -> Iterator[None]:
        with self._lock:
            if self._gone:
                raise RendezvousLost("the rendezvous was cut")
            yield

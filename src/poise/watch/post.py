"""How rows get from the workers to worker 0: keys of a store, and nobody ever waits."""

import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import Store

from poise.watch.rows import Row, pack, unpack

_PATIENCE_S = 1.0
"""How long worker 0 looks, at the end, for what others have still to send."""
_PAUSE_S = 0.01


class Outbox:
    """A worker's end: packs of rows, numbered."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._rows: list[Row] = []
        self._packs = 0

    def send(self, store: Store, rows: Sequence[Row], *, last: bool = False) -> None:
        """Write rows as one pack; after the last one, nobody has to look again.

        A store that is gone takes nothing: the rows stay for another one.
        """
        self._rows.extend(rows)
        if not (self._rows or last):
            return
        try:
            store.set(_key(self._worker, self._packs), pack(self._rows))
            if last:
                store.set(_end_key(self._worker), str(self._packs + 1))
        except (RuntimeError, OSError):
            return
        self._packs += 1
        self._rows.clear()


class Inbox:
    """Worker 0's end."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._next = dict.fromkeys(workers, 0)

    def look(self, store: Store, *, last: bool = False) -> dict[int, list[Row]]:
        """Return the rows that arrived from each worker; at last, also what still does."""
        if last:
            self._await_ends(store)
        found: dict[int, list[Row]] = {worker: [] for worker in self._next}
        with suppress(RuntimeError, OSError):  # the store is gone; what was read counts
            for worker, rows in found.items():
                while store.check([key := _key(worker, self._next[worker])]):
                    rows.extend(unpack(store.get(key)))
                    self._next[worker] += 1
                    store.delete_key(key)
        return found

    def _await_ends(self, store: Store) -> None:
        """Wait until all workers ended, but for a moment only, and not if the store is gone."""
        ends = [_end_key(worker) for worker in self._next]
        deadline = time.monotonic() + _PATIENCE_S
        with suppress(RuntimeError, OSError):
            while not store.check(ends) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)


def _key(worker: int, pack_number: int) -> str:
    return f"{worker}/{pack_number}"


def _end_key(worker: int) -> str:
    return f"{worker}/end"

"""The steps that all workers reported, as arrays."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from poise.core.split import Split
from poise.core.timing import Flags, Floats, Ints
from poise.watch.rows import Row

MOST_STEPS = 2000
"""So many of the last steps are kept."""
_LONG, _VERY_LONG = 2.0, 20.0
"""Times the median from which a step is left out: one with evaluation, and any."""


class Steps:
    """Collects the rows of all workers, in whatever order they arrive."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._rows: dict[int, dict[int, Row]] = {worker: {} for worker in workers}

    def add(self, rows: Mapping[int, Iterable[Row]]) -> None:
        """Take rows of some workers, and forget the oldest."""
        for worker, new in rows.items():
            known = self._rows[worker]
            known.update((row.step, row) for row in new)
            while len(known) > MOST_STEPS:
                del known[next(iter(known))]

    def reaches(self, number: int) -> bool:
        """Return whether every worker but the first, which asks, reported this step."""
        _, *others = self._rows.values()
        return all(number in rows for rows in others)

    def table(self) -> "Table | None":
        """Return the steps that every worker reported; None: there is none."""
        every = list(self._rows.values())
        numbers = sorted(set.intersection(*(set(rows) for rows in every)))
        if not numbers:
            return None
        return Table.of(tuple(self._rows), [[rows[number] for rows in every] for number in numbers])


@dataclass(frozen=True, eq=False)
class Table:
    """Steps x workers, only steps that count."""

    workers: tuple[int, ...]
    """Their numbers."""
    numbers: Ints
    """The steps' numbers."""
    batch: Ints
    local_s: Floats
    input_s: Floats
    sync_s: Floats
    reduction_s: Floats
    end_s: Floats
    prefetched: Flags
    left_out: int = 0
    """Steps with evaluation, or much longer than the others for another reason."""
    left_out_s: float = 0.0

    @staticmethod
    def of(workers: Sequence[int], steps: Sequence[Sequence[Row]]) -> "Table":
        """Make a table of steps, each with one row per worker."""

        def column(name: str) -> "np.ndarray[tuple[int, int], np.dtype[Any]]":
            return np.array([[getattr(row, name) for row in rows] for rows in steps])

        lengths, evaluated = column("end_s").max(axis=1), column("evaluated").any(axis=1)
        usual_s = float(np.median(lengths))
        out = (evaluated & (lengths > _LONG * usual_s)) | (lengths > _VERY_LONG * usual_s)
        names = ("batch", "local_s", "input_s", "sync_s", "reduction_s", "end_s", "prefetched")
        return Table(
            workers=tuple(workers),
            numbers=column("step")[~out, 0],
            left_out=int(out.sum()),
            left_out_s=float(lengths[out].sum()),
            **{name: column(name)[~out] for name in names},
        )

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.numbers)

    @cached_property
    def communication_s(self) -> Floats:
        """Seconds of each step that the exchange takes when all are there.

        The worker that comes last waits for nobody: the least over the workers.
        """
        return np.asarray(self.reduction_s.min(axis=1) + self.sync_s.min(axis=1))

    @cached_property
    def waiting_s(self) -> Floats:
        """Steps x workers: seconds spent waiting for others."""
        spent = self.local_s + self.input_s + self.communication_s[:, None]
        return np.maximum(self.end_s - spent, 0.0)

    @cached_property
    def last(self) -> Ints:
        """For each step the place of the worker that waited least."""
        return np.asarray(self.waiting_s.argmin(axis=1))

    @cached_property
    def split(self) -> Split:
        """The most common split."""
        rows = Counter(tuple(row) for row in self.batch.tolist())
        return rows.most_common(1)[0][0]

    @cached_property
    def with_split(self) -> Flags:
        """Which steps have the most common split."""
        return np.asarray((self.batch == np.array(self.split)).all(axis=1))

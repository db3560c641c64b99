"""What a worker measures in one step, and how it travels: JSON, plain numbers."""

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Row:
    """One step of one worker. Times are its own: no clocks are compared."""

    step: int
    """Reductions before this one; the same on all workers, which reduce together."""
    batch: int
    """Samples given to the model; 0: not known."""
    local_s: float
    """Seconds from the end of the previous reduction to the last local gradient, without input
    and without waiting for others."""
    input_s: float
    """Seconds spent in the data loader."""
    sync_s: float
    """Seconds spent in exchanges before the last local gradient, such as those of buffers."""
    end_s: float
    """Seconds from the end of the previous reduction to the end of this one."""
    prefetched: bool = False
    """Whether processes of the loader worked ahead."""
    evaluated: bool = False
    """Whether the model was evaluated in between."""

    @property
    def reduction_s(self) -> float:
        """Seconds from the last local gradient to the end of the reduction."""
        return max(self.end_s - self.local_s - self.input_s - self.sync_s, 0.0)


def pack(rows: Iterable[Row]) -> str:
    """Return rows as one text.

    >>> pack([Row(3, 16, 0.02, 0.0, 0.0, 0.025)])
    '[[3,16,0.02,0.0,0.0,0.025,0,0]]'
    """
    return json.dumps([_numbers(row) for row in rows], separators=(",", ":"))


def unpack(text: str | bytes) -> list[Row]:
    """Return the rows of a text."""
    return [
        Row(step, batch, local_s, input_s, sync_s, end_s, bool(prefetched), bool(evaluated))
        for step, batch, local_s, input_s, sync_s, end_s, prefetched, evaluated in json.loads(text)
    ]


def _numbers(row: Row) -> list[float]:
    """Return the fields in their order, times to the microsecond."""
    return [round(value, 6) if isinstance(value, float) else int(value) for value in astuple(row)]

"""Rows: what one worker reports of a step, as numbers of a fixed width, and back.

A row has the worker's times and, where the global batch may move, norms of its gradients. Worker 0
makes one observation of the rows of all workers.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from poise.core.batch import Batch
from poise.core.noise import GroupSums
from poise.core.observation import Observation
from poise.core.timing import Floats

BUCKETS = 8
"""Neighboring buckets are put together until so many are left: a row has a fixed width."""
_ONCE = ("wait_s", "load_s", "input_s", "update_s", "memory_bytes", "memory_limit_bytes")
"""What a step has once, and not for each bucket; in a row it follows whether it compiled."""
_READY = slice(1 + len(_ONCE), 1 + len(_ONCE) + BUCKETS)
_DONE = slice(_READY.stop, _READY.stop + BUCKETS)
TIMES = _DONE.stop
"""Numbers in a row of times."""
_SUMS = slice(0, len(GroupSums._fields))
_WHOLE, _CLIPPED = len(GroupSums._fields), len(GroupSums._fields) + 1
NORMS = len(GroupSums._fields) + 2
"""Numbers in a row of norms: sums over this worker's groups; on worker 0 the squared norm of the
whole gradient, and whether it was clipped."""


class Reporter(Protocol):
    """Something that measures, and is asked for what it knows of a step."""

    def row(self, step: int) -> Floats:
        """Return what is known of a step that is over; NaN for what is not."""


@dataclass(kw_only=True)
class Times:
    """What the clock tells of one step on one worker; NaN: not measured."""

    compiling: bool = False
    wait_s: float = np.nan
    load_s: float = np.nan
    input_s: float = np.nan
    update_s: float = np.nan
    memory_bytes: float = np.nan
    memory_limit_bytes: float = np.nan
    ready_s: list[float] = field(default_factory=list)
    """Of each bucket, of at most `BUCKETS`."""
    done_s: list[float] = field(default_factory=list)

    def row(self) -> Floats:
        """Return the numbers."""
        row = np.full(TIMES, np.nan)
        row[: _READY.start] = self.compiling, *(getattr(self, name) for name in _ONCE)
        row[_READY][: len(self.ready_s)] = self.ready_s
        row[_DONE][: len(self.done_s)] = self.done_s
        return row


def norms_row(sums: list[float], clipped: float) -> Floats:
    """Return a row of norms: sums over groups and perhaps the whole, and whether it was clipped."""
    row = no_norms()
    row[: len(sums)] = sums
    row[_CLIPPED] = clipped
    return row


def no_norms() -> Floats:
    """Return the row of a step whose gradients nobody looked at."""
    return np.full(NORMS, np.nan)


def observation_of(batch: Batch, rows: Floats) -> Observation:
    """Return a step as all workers saw it, from a row of each."""
    known = np.any(~np.isnan(rows), axis=0)
    measured: dict[str, Any] = {
        name: rows[:, place] for place, name in enumerate(_ONCE, start=1) if known[place]
    }
    if known[TIMES:].any():
        norms = rows[:, TIMES:]
        whole, clipped = norms[0, _WHOLE], norms[0, _CLIPPED]
        measured["group_sums"] = norms[:, _SUMS]
        measured["global_sqnorm"] = None if np.isnan(whole) else float(whole)
        measured["clipped"] = None if np.isnan(clipped) else bool(clipped)
    buckets = int(known[_READY].sum()) or 1
    return Observation(
        step=batch.step,
        split=batch.split,
        epoch=batch.epoch,
        compiling=tuple(np.flatnonzero(rows[:, 0]).tolist()),
        ready_s=rows[:, _READY][:, :buckets],
        done_s=rows[:, _DONE][:, :buckets],
        **measured,
    )


def unmeasured(batch: Batch) -> Observation:
    """Return a step of which nothing but the split is known."""
    return observation_of(batch, np.tile(Times().row(), (len(batch.split), 1)))

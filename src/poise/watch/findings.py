"""How much time is lost waiting, on whom, and why."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from poise.core.timing import Floats
from poise.watch.gain import Gain, find_gain
from poise.watch.table import Table

Cause = Literal["compute", "input", "communication", "nothing"]

LITTLE = 0.03
"""A part of the workers' time that is too small to look for a cause."""


@dataclass(frozen=True)
class WorkerTimes:
    """One worker, in means over the steps."""

    worker: int
    local_batch: int
    """Its most common one."""
    compute_s: float
    input_s: float
    waiting: float
    """Part of its time."""
    last: float
    """Part of the steps in which the others waited for it."""


@dataclass(frozen=True)
class Reason:
    """What the time of a step goes into, seen at the worker that comes last."""

    cause: Cause
    compute_s: float
    """Of the last worker,"""
    others_compute_s: float
    """and the median of the others, in the same steps."""
    input_s: float
    others_input_s: float


@dataclass(frozen=True)
class Findings:
    """What was seen in some steps."""

    first_step: int
    last_step: int
    steps: int
    left_out: int
    left_out_s: float
    step_s: float
    communication_s: float
    waiting: float
    """Part of all workers' time."""
    slowest: int
    """The worker that was last most often."""
    slowest_last: float
    """Part of the steps in which it was."""
    reason: Reason
    workers: tuple[WorkerTimes, ...]
    gain: Gain

    def as_json(self) -> dict[str, Any]:
        """Return plain values; times are in seconds."""
        return asdict(self)


def find(table: Table) -> Findings:
    """Return what a table tells."""
    often = np.bincount(table.last, minlength=len(table.workers)) / table.steps
    waiting_s, end_s = table.waiting_s.sum(axis=0), table.end_s.sum(axis=0)
    slowest = int(often.argmax())
    waiting = float(waiting_s.sum() / end_s.sum())
    return Findings(
        first_step=int(table.numbers[0]),
        last_step=int(table.numbers[-1]),
        steps=table.steps,
        left_out=table.left_out,
        left_out_s=table.left_out_s,
        step_s=float(table.end_s.mean()),
        communication_s=float(table.communication_s.mean()),
        waiting=waiting,
        slowest=table.workers[slowest],
        slowest_last=float(often[slowest]),
        reason=_reason(table, waiting),
        workers=tuple(
            WorkerTimes(
                worker=worker,
                local_batch=table.split[place],
                compute_s=float(table.local_s[:, place].mean()),
                input_s=float(table.input_s[:, place].mean()),
                waiting=float(waiting_s[place] / end_s[place]),
                last=float(often[place]),
            )
            for place, worker in enumerate(table.workers)
        ),
        gain=find_gain(table),
    )


def _reason(table: Table, waiting: float) -> Reason:
    """Compare the last worker of each step with the others in it."""
    compute_s, others_compute_s = _last_and_others(table, table.local_s)
    input_s, others_input_s = _last_and_others(table, table.input_s)
    cause: Cause = "input" if input_s - others_input_s > compute_s - others_compute_s else "compute"
    if float(table.communication_s.mean()) > max(compute_s, input_s):
        cause = "communication"
    elif waiting < LITTLE:
        cause = "nothing"
    return Reason(cause, compute_s, others_compute_s, input_s, others_input_s)


def _last_and_others(table: Table, times_s: Floats) -> tuple[float, float]:
    """Return the mean time of the last workers, and of the medians of the others."""
    rows = np.arange(table.steps)
    of_last = times_s[rows, table.last]
    others = times_s.copy()
    if len(table.workers) > 1:
        others[rows, table.last] = np.nan
    return float(of_last.mean()), float(np.nanmedian(others, axis=1).mean())

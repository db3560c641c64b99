"""How much memory this worker takes and may take, and how many samples fit into it."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from poise.core.memory import MemoryLine

_GROUPS = {
    "": ("sys/fs/cgroup", "max", "current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
}
"""Of control groups with this controller, version 2 and 1: their folder; what names the limit, what
is taken, and what of that can be given back."""
_RESET_PEAK = "5"
"""What Linux takes, in clear_refs, for: forget the peak of resident memory."""


class Memory(Protocol):
    """Peaks of this worker's memory, and its limit."""

    limit_bytes: float
    """What it may take; NaN: not known."""

    def peak_bytes(self) -> float:
        """Return the most it took since this was last asked; NaN where that cannot be seen."""


class HostMemory:
    """The resident memory of this process.

    The limit is what the process takes now and an equal part of what is left: of the machine, or
    of the control group, whichever is less. The kernel's record of the peak is reset whenever it
    is read, so that each step has its own.
    """

    def __init__(self, sharers: int, root: Path = Path("/")) -> None:
        """Look at the limits.

        Args:
            sharers: how many workers share this machine.
            root: where proc and sys are found.
        """
        self._status = root / "proc/self/status"
        self._reset = root / "proc/self/clear_refs"
        self.limit_bytes = _kilobytes(self._status, "VmRSS:") + _left_bytes(root) / sharers
        self.peak_bytes()

    def peak_bytes(self) -> float:
        """Return the peak since the last call."""
        peak = _kilobytes(self._status, "VmHWM:")
        try:
            self._reset.write_text(_RESET_PEAK)
        except OSError:  # a peak that cannot be reset says nothing of one step
            return math.nan
        return peak


class Guard:
    """How many samples this worker computes at once, so that they fit into its memory.

    A plain step computes its local batch at once, and worker 0 keeps that within bounds. In
    micro-batches it is one part of it: there the worker itself chooses the size.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._line = MemoryLine.unknown(1)
        self._in_parts = False
        """Whether the step under way is computed in parts."""

    @property
    def limit_bytes(self) -> float:
        """What the worker may take; NaN: not known."""
        return self._memory.limit_bytes

    @property
    def most_samples(self) -> float:
        """The largest part that fits, at least 1; infinity: nothing is known that limits it."""
        return max(1.0, float(self._line.cap(self._memory.limit_bytes)[0]))

    def begin_parts(self) -> None:
        """A local batch is about to be computed in parts."""
        self._memory.peak_bytes()  # what was before says nothing of it

    def end_parts(self, largest: int) -> None:
        """It is computed, with at most so many samples at once."""
        self._in_parts = True
        self._line = self._line.update([largest], [self._memory.peak_bytes()])

    def ran_out(self, samples: int) -> None:
        """So many samples at once did not fit."""
        self._line = self._line.out_of_memory(0, samples)

    def end_step(self) -> float:
        """Return the peak of a step that computed its local batch at once; NaN for any other."""
        peak, in_parts = self._memory.peak_bytes(), self._in_parts
        self._in_parts = False
        return math.nan if in_parts else peak


def _left_bytes(root: Path) -> float:
    """Return how much more memory all processes here may take together; NaN: not known."""
    machine = _kilobytes(root / "proc/meminfo", "MemAvailable:")
    known = [left for left in (machine, *_groups_left(root)) if not math.isnan(left)]
    return min(known, default=math.nan)


def _groups_left(root: Path) -> Iterator[float]:
    """Yield what is left in each control group that holds this process, version 1 and 2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in _GROUPS.keys() & controllers.split(","):
            base, limit, used, cache = _GROUPS[controller]
            for group in _upwards(root / base, path):
                most = _number(group / f"memory.{limit}")
                taken = _number(group / f"memory.{used}")
                stat = dict(line.split() for line in _lines(group / "memory.stat"))
                # Pages of files can be given back at any time.
                yield most - taken + float(stat.get(cache, 0))


def _upwards(base: Path, path: str) -> Iterator[Path]:
    """Yield a group's folder and those above it; inside a container only the top may be there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:depth])


def _number(path: Path) -> float:
    """Return the number in a file; infinity for "max", NaN if there is none."""
    text = next(iter(_lines(path)), "nan")
    return math.inf if text == "max" else float(text)


def _kilobytes(path: Path, field: str) -> float:
    """Return a field of a file in proc, in bytes; NaN if it is not there."""
    found = (line.split()[1] for line in _lines(path) if line.startswith(field))
    return float(next(found, math.nan)) * 1024


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

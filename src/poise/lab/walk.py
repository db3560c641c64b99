"""Walks: speeds that change while the workers run, declared in TOML.

[[change]]
at_step = 100                 # when worker 0 has made that many steps
speeds = [0.45, 0.45, 0.45]   # one per worker

[[change]]
at_s = 30.0                   # or: so many seconds after all workers are throttled
speeds = [0.9, 0.45, 0.22]
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from poise.cluster_file import read_toml
from poise.errors import InvalidSetting
from poise.lab.speeds import checked_speeds

_KEYS = ("at_step", "at_s", "speeds")


@dataclass(frozen=True, kw_only=True)
class Change:
    """New speeds, and when they begin: at a step of worker 0 or at a time."""

    speeds: tuple[float, ...]
    at_step: int | None = None
    at_s: float | None = None
    """Seconds since all workers are throttled."""

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Whether worker 0 has made that many steps, or that much time has passed."""
        if self.at_step is not None:
            return step >= self.at_step
        assert self.at_s is not None
        return elapsed_s >= self.at_s


@dataclass(frozen=True)
class Walk:
    """The changes that are still to come, in their order."""

    changes: tuple[Change, ...] = ()

    def due(self, step: int, elapsed_s: float) -> tuple[Change | None, "Walk"]:
        """Return the last change that is due, and the walk without those that are.

        >>> walk = Walk((Change(at_step=5, speeds=(1.0,)), Change(at_s=9.0, speeds=(0.5,))))
        >>> change, rest = walk.due(step=7, elapsed_s=0.1)
        >>> change.speeds, rest.next_s
        ((1.0,), 9.0)
        """
        due = [change for change in self.changes if change.is_due(step, elapsed_s)]
        if not due:
            return None, self
        return due[-1], Walk(tuple(change for change in self.changes if change not in due))

    @property
    def next_s(self) -> float | None:
        """The time of the next change that waits for one."""
        return min(
            (change.at_s for change in self.changes if change.at_s is not None), default=None
        )


def read_walk(path: str | Path, workers: int) -> Walk:
    """Return the walk that a file declares for so many workers.

    Raises InvalidSetting, with the file, the table and the key, unless all of it is understood.
    """
    return declared_walk(read_toml(path), str(path), workers)


def declared_walk(tables: Mapping[str, Any], file: str, workers: int) -> Walk:
    """Return the walk in the tables of a file; errors name the file."""
    _check_keys(file, tables, ("change",))
    found = tables.get("change")
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise InvalidSetting(f"{file} declares no changes; write tables [[change]]")
    changes = [
        _change(f"{file}: [[change]] {number}", table, workers)
        for number, table in enumerate(found, 1)
    ]
    _check_order(file, changes)
    return Walk(tuple(changes))


def _change(where: str, table: Mapping[str, Any], workers: int) -> Change:
    _check_keys(where, table, _KEYS)
    if ("at_step" in table) == ("at_s" in table):
        raise InvalidSetting(f"{where} needs one of at_step and at_s; say when it begins")
    speeds = table.get("speeds")
    if not isinstance(speeds, list):
        raise InvalidSetting(f"{where} has speeds={speeds!r}; give a list with one per worker")
    if len(speeds) != workers:
        raise InvalidSetting(
            f"{where} has {len(speeds)} speeds for {workers} workers; give one per worker"
        )
    if "at_step" in table:
        step = table["at_step"]
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise InvalidSetting(f"{where} has at_step={step!r}; give a whole number from 1 up")
        return Change(speeds=checked_speeds(speeds, where), at_step=step)
    return Change(speeds=checked_speeds(speeds, where), at_s=_seconds(where, table["at_s"]))


def _seconds(where: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise InvalidSetting(f"{where} has at_s={value!r}; give seconds from 0 up")
    return float(value)


def _check_order(file: str, changes: Sequence[Change]) -> None:
    for key in ("at_step", "at_s"):
        times = [time for change in changes if (time := getattr(change, key)) is not None]
        if any(later <= sooner for sooner, later in pairwise(times)):
            raise InvalidSetting(
                f"{file} has {key} = {', '.join(map(str, times))}; put its changes in order, "
                "one at a time"
            )


def _check_keys(where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise InvalidSetting(f"{where} has unknown key {key}; {hint}")

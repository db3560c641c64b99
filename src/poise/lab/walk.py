"""Walks: speeds that change while the workers run, declared in TOML.

[[change]]
at_step = 100                 # when worker 0 has made that many steps
speeds = [0.45, 0.45, 0.45]   # one per worker

[[change]]
at_s = 30.0                   # or: so many seconds after all workers are throttled
speeds = [0.9, 0.45, 0.22]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from poise.errors import InvalidSetting
from poise.lab.speeds import checked_speeds
from poise.toml_file import Table, Toml, read_toml


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


def checked_walk(walk: Walk | str | Path | None, workers: int) -> Walk:
    """Return a walk that has speeds for all workers, or raise; from a file if that is given."""
    if walk is None:
        return Walk()
    if not isinstance(walk, Walk):
        return declared_walk(read_toml(walk), workers)
    for change in walk.changes:
        if len(change.speeds) != workers:
            raise InvalidSetting(
                f"the walk has {len(change.speeds)} speeds for {workers} workers; give one each"
            )
    return walk


def declared_walk(toml: Toml, workers: int) -> Walk:
    """Return the walk that a file declares for so many workers.

    Raises InvalidSetting, with the file, the line, the table and the key, unless all of it is
    understood.
    """
    toml.top.check_keys(("change",))
    tables = toml.array("change")
    if not tables:
        raise InvalidSetting(f"{toml.name} declares no changes; write tables [[change]]")
    changes = [_change(table, workers) for table in tables]
    _check_order(toml.name, changes)
    return Walk(tuple(changes))


def _change(table: Table, workers: int) -> Change:
    table.check_keys(("at_step", "at_s", "speeds"))
    values = table.values
    if ("at_step" in values) == ("at_s" in values):
        raise table.wrong("", "needs one of at_step and at_s; say when it begins")
    speeds = values.get("speeds")
    if not isinstance(speeds, list):
        raise table.refused("speeds", "a list with one per worker")
    if len(speeds) != workers:
        raise table.wrong(
            "speeds", f"has {len(speeds)} speeds for {workers} workers; give one per worker"
        )
    found = checked_speeds(speeds, table.where("speeds"))
    if "at_step" in values:
        return Change(speeds=found, at_step=table.whole("at_step", 1, least=1))
    return Change(speeds=found, at_s=table.number("at_s", 0.0))


def _check_order(file: str, changes: Sequence[Change]) -> None:
    for key in ("at_step", "at_s"):
        times = [time for change in changes if (time := getattr(change, key)) is not None]
        if any(later <= sooner for sooner, later in pairwise(times)):
            raise InvalidSetting(
                f"{file} has {key} = {', '.join(map(str, times))}; put its changes in order, "
                "one at a time"
            )

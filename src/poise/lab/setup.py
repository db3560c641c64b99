"""What is stated of a lab, checked before anything is started."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poise.engine.modes import Mode, Sync, mode_of
from poise.errors import InvalidSetting
from poise.lab.pacing import Pace
from poise.lab.walk import Walk, read_walk


@dataclass(frozen=True)
class Setup:
    """The workers of a lab as they are asked for."""

    speeds: tuple[float, ...]
    """Of each worker at the start, in cores."""
    walk: Walk
    pace: Pace | None
    """How workers sleep instead of being throttled; None: they do not."""
    from_start: bool
    mode: Mode | None
    """The mode of a training with a server; None: there is none."""
    rates: Sequence[str] | None
    """What each worker may send; None leaves the network as it is."""

    def __post_init__(self) -> None:
        if self.from_start and self.pace:
            raise InvalidSetting("a paced worker sleeps in training only; leave out from_start")


def checked_walk(walk: Walk | str | Path | None, workers: int) -> Walk:
    """Return a walk that has speeds for all workers, or raise; from a file if that is given."""
    if walk is None:
        return Walk()
    if not isinstance(walk, Walk):
        return read_walk(walk, workers)
    for change in walk.changes:
        if len(change.speeds) != workers:
            raise InvalidSetting(
                f"the walk has {len(change.speeds)} speeds for {workers} workers; give one each"
            )
    return walk


def served_mode(stated: object) -> Mode | None:
    """Return a mode as `Lab` is told it; None if it needs no server."""
    mode = mode_of(stated)
    if mode_of(str(mode)) != mode:
        raise InvalidSetting(
            f'mode={mode!r} has options, which a lab cannot pass on; use mode="{mode}" here, and '
            "state them in the script"
        )
    return None if isinstance(mode, Sync) else mode

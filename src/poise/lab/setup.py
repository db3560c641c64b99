"""What is stated of a lab, checked before anything is started."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poise.engine.modes import Mode, Sync, mode_of
from poise.errors import InvalidSetting
from poise.lab.network import parse_link
from poise.lab.pacing import Pace, parse_pace
from poise.lab.speeds import checked_speeds, parse_speeds
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


def checked_setup(
    speeds: Sequence[float] | str,
    *,
    walk: Walk | str | Path | None,
    link: str | None,
    pace: Pace | str | None,
    from_start: bool,
    mode: str | Mode,
) -> Setup:
    """Return what `Lab` is told, understood; raise InvalidSetting where it makes no sense."""
    each = parse_speeds(speeds) if isinstance(speeds, str) else checked_speeds(speeds)
    walked = _walk(walk, len(each))
    paced = parse_pace(pace) if isinstance(pace, str) else pace
    if from_start and paced:
        raise InvalidSetting("a paced worker sleeps in training only; leave out from_start")
    served = _served_mode(mode)
    rates = None if link is None else parse_link(link, len(each))
    return Setup(each, walked, paced, from_start, served, rates)


def _walk(walk: Walk | str | Path | None, workers: int) -> Walk:
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


def _served_mode(stated: object) -> Mode | None:
    mode = mode_of(stated)
    if mode_of(str(mode)) != mode:
        raise InvalidSetting(
            f'mode={mode!r} has options, which a lab cannot pass on; use mode="{mode}" here, and '
            "state them in the script"
        )
    return None if isinstance(mode, Sync) else mode

"""How workers wait for each other: in every step, never, or at most so many steps."""

import re
from dataclasses import dataclass, field

from poise.errors import InvalidSetting
from poise.numbers import is_whole


@dataclass(frozen=True)
class Sync:
    """All workers take every step together."""

    def __str__(self) -> str:
        return "sync"


@dataclass(frozen=True, kw_only=True)
class Async:
    """Nobody waits: a server applies each worker's gradient as it comes."""

    damped: bool = True
    """Whether a gradient that is staler than usual counts for less."""
    ahead: bool = False
    """Whether a worker computes on while its gradient travels, with weights one exchange older."""

    def __str__(self) -> str:
        return "async"


@dataclass(frozen=True)
class Stale:
    """Workers wait only for one that is more than so many steps behind.

    >>> str(Stale(4)), str(Stale(4, damped=False))
    ('stale:4', 'stale:4')
    """

    steps: int
    damped: bool = field(default=True, kw_only=True)
    """Whether a step counts for less the later its gradients are: as much as is stable."""

    def __post_init__(self) -> None:
        if not is_whole(self.steps) or self.steps < 0:
            raise InvalidSetting(
                f"Stale({self.steps!r}) is no bound; give a whole number of steps from 0"
            )

    def __str__(self) -> str:
        return f"stale:{self.steps}"


Mode = Sync | Async | Stale
"""One of the three."""


def mode_of(stated: object) -> Mode:
    """Return the mode that a name or a mode says.

    >>> mode_of("stale:4")
    Stale(steps=4, damped=True)
    """
    if isinstance(stated, Mode):
        return stated
    if stated == "sync":
        return Sync()
    if stated == "async":
        return Async()
    bound = re.fullmatch(r"stale:(\d{1,9})", stated) if isinstance(stated, str) else None
    if bound is None:
        raise InvalidSetting(
            f'mode={stated!r} is unknown; use "sync", "async", or "stale:4" for workers that may '
            "be 4 steps apart"
        )
    return Stale(int(bound[1]))

"""When workers report what they measured, and when a plan that follows from it starts.

Every step while a split is new, and of some steps one later: by a rule that all workers follow
alike, since they know the same plans. What was measured up to a step is posted together, and
decided on when the next exchange is due.
"""

from itertools import count

from poise.core.plan import Timetable

SETTLING = 8
"""Steps after a change of the split in which every step is exchanged,"""
SELDOM = 4
"""and of so many steps one, later."""


def delay(lead: int) -> int:
    """Return how many steps after its announcement a plan starts, for the largest lead."""
    return lead + 2


def is_due(timetable: Timetable, step: int, first_step: int = 0) -> bool:
    """Whether all workers post at a step; first_step is where this run of the training began."""
    since = max(timetable.settled_since(step), first_step)
    return step - since < SETTLING or step % SELDOM == 0


def next_due(timetable: Timetable, step: int, first_step: int = 0) -> int:
    """Return the first step, from this one on, at which all workers post."""
    return next(each for each in count(step) if is_due(timetable, each, first_step))

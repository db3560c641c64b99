"""A decision of an asynchronous training, and what it was made on."""

from dataclasses import dataclass

from poise.core.observation import Event
from poise.core.plan import Plan
from poise.engine.bsp import Engine


@dataclass(frozen=True)
class Round:
    """What a decision was made on, for the record."""

    events: tuple[Event, ...]
    start_step: int
    plan: Plan | None
    loaded: Engine | None = None
    """The engine of before a resume, from which this one goes on."""

"""Events of a scenario on pictures: where they are felt, and what they are called."""

from collections.abc import Sequence

from poise.cli.plot_sheet import counted, name_of
from poise.engine.modes import Sync
from poise.sim.outcome import Point
from poise.sim.scenario import MOVES, Event, Scenario


def felt_at(scenario: Scenario, course: Sequence[Point]) -> list[int]:
    """Return the points of a course at which events are first felt.

    None of an asynchronous one, in which workers are at different steps.
    """
    if not isinstance(scenario.mode, Sync):
        return []
    places = (felt_first(course, event) for event in scenario.events)
    return [place for place in places if place is not None]


def felt_first(course: Sequence[Point], event: Event) -> int | None:
    """Return the first point of a course at which an event is due; None: it comes later."""
    due = (number for number, point in enumerate(course) if event.is_due(point.step, point.end_s))
    return next(due, None)


def in_words(scenario: Scenario, event: Event) -> str:
    """Return what happens, as a label says it."""
    whom = _whom(scenario, event)
    if event.what in MOVES:
        many = len(event.workers) > 1
        return f"{whom} {event.what[:-1] if many else event.what}"
    part = {"slower_network": "network", "slower_link": "link of ", "slower_loader": "loader of "}
    subject = part.get(event.what, "") + ("" if event.what == "slower_network" else whom)
    factors = set(event.factors)
    if len(factors) > 1:
        return "speeds change"
    (factor,) = factors
    how = "as declared" if factor == 1 else f"{factor:.3g}× as slow"
    lasting = f" for {counted(event.for_steps, 'step')}" if event.for_steps else ""
    return f"{subject} {how}{lasting}"


def _whom(scenario: Scenario, event: Event) -> str:
    if len(event.workers) == 1:
        return name_of(scenario.names[event.workers[0]])
    if len(event.workers) == scenario.workers:
        return "all workers"
    for kind in scenario.cluster.kinds:
        if tuple(kind.workers) == event.workers:
            return f"all {name_of(kind.name)}"
    return f"{len(event.workers):,} workers"

"""The tables [[event]] and [[walk]] of a scenario: what happens, when, and to whom."""

from collections.abc import Mapping, Sequence
from typing import Any

from poise.cluster_file import DeclaredCluster
from poise.numbers import is_number
from poise.sim.scenario import MOVES, SLOWER, Event
from poise.toml_file import Table, Toml, nearest

_WHAT = (*SLOWER, *MOVES)
_EVENT = ("at_step", "at_s", "worker", "over_steps", "for_steps")
_WALK = ("at_step", "at_s", "speeds")
_EVERYONE = "all"
_MOST_LISTED = 50
"""Names that an error lists; of more, those of the kinds alone."""


def declared_events(toml: Toml, cluster: DeclaredCluster, steps: int) -> tuple[Event, ...]:
    """Return all that happens within so many steps, in its order: by step, then by time."""
    kinds = {kind.name: kind.workers for kind in cluster.kinds}
    names = {worker.name: [number] for number, worker in enumerate(cluster.workers)}
    everyone = range(len(cluster.workers))
    groups = {**kinds, **names, _EVERYONE: everyone}
    hinted = [*kinds, *(name for name in names if name not in kinds)]
    hinted = hinted if len(hinted) < _MOST_LISTED else list(kinds)
    events = [_event(table, steps, groups, hinted) for table in toml.array("event")]
    events += [_walk(table, steps, everyone) for table in toml.array("walk")]
    return tuple(sorted(events, key=lambda e: (e.at_step is None, e.at_step or 0, e.at_s or 0.0)))


def _event(
    table: Table, steps: int, groups: Mapping[str, Sequence[int]], hinted: list[str]
) -> Event:
    table.check_keys((*_EVENT, *_WHAT))
    what = [each for each in _WHAT if each in table.values]
    if len(what) != 1:
        raise table.wrong("", f"needs one of {', '.join(_WHAT)}; say what happens")
    (kind,) = what
    when = _when(table, steps)
    workers = () if kind == "slower_network" else _concerned(table, groups, hinted)
    if kind in MOVES:
        if table.values[kind] is not True:
            raise table.refused(kind, "true, or leave it out")
        for key in ("over_steps", "for_steps"):
            if key in table.values:
                raise table.refused(key, f"it to what gets slower, no {kind}")
        return Event(what=kind, workers=workers, **when)
    factor = table.number(kind, 1.0, least=1e-6, most=1e6)
    return Event(
        what=kind,
        workers=workers,
        factors=(factor,) * max(1, len(workers)),
        over_steps=table.whole("over_steps", 0),
        for_steps=table.whole("for_steps", None, least=1),
        **when,
    )


def _walk(table: Table, steps: int, everyone: range) -> Event:
    table.check_keys(_WALK)
    found = table.values.get("speeds")
    speeds = found if isinstance(found, list) else []
    allowed = all(is_number(each) and 1e-6 <= each <= 1e6 for each in speeds)  # noqa: PLR2004
    if len(speeds) != len(everyone) or not allowed:
        raise table.refused("speeds", f"{len(everyone)} numbers above 0: 1 is as fast as declared")
    when = _when(table, steps)
    factors = tuple(1 / speed for speed in speeds)
    return Event(what="slower", workers=tuple(everyone), factors=factors, **when)


def _when(table: Table, steps: int) -> dict[str, Any]:
    if ("at_step" in table.values) == ("at_s" in table.values):
        raise table.wrong("", "needs one of at_step and at_s; say when it happens")
    if "at_s" in table.values:
        return {"at_s": table.number("at_s", 0.0)}
    step = table.whole("at_step", 0)
    if step >= steps:
        raise table.wrong(
            "at_step",
            f"has at_step={step}, beyond the end: there are {steps} steps; give an earlier one, "
            "or raise steps",
        )
    return {"at_step": step}


def _concerned(
    table: Table, groups: Mapping[str, Sequence[int]], hinted: list[str]
) -> tuple[int, ...]:
    """Return the workers of a name, a kind, or a list of these."""
    found = table.values.get("worker", _EVERYONE)
    workers: list[int] = []
    for word in found if isinstance(found, list) else [found]:
        if not isinstance(word, str):
            raise table.refused("worker", "a name, or a list of names")
        if word not in groups:
            hint = nearest(word, hinted)
            raise table.wrong("worker", f"has worker={word!r}, who is not there; {hint}")
        workers += groups[word]
    if not workers:
        raise table.refused("worker", "a name, or leave it out for all")
    return tuple(dict.fromkeys(workers))

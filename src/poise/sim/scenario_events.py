"""The tables [[event]] and [[walk]] of a scenario: what happens, when, and to whom."""

from collections.abc import Mapping
from typing import Any

from poise.errors import InvalidSetting
from poise.numbers import is_number
from poise.sim.scenario import MOVES, Event, What
from poise.sim.scenario_keys import Keys
from poise.toml_file import nearest

_SLOWER: tuple[What, ...] = ("slower", "slower_network", "slower_link", "slower_loader")
_EVENT = ("at_step", "at_s", "worker", "over_steps", "for_steps")
_WALK = ("at_step", "at_s", "speeds")
_EVERYONE = "all"


def declared_events(keys: Keys, steps: int) -> tuple[Event, ...]:
    """Return all that happens within so many steps, in its order: by step, then by time."""
    names = {worker.name: number for number, worker in enumerate(keys.cluster.workers)}
    happening, walks = (range(1, len(keys.toml.array(name)) + 1) for name in ("event", "walk"))
    events = [_event(keys, steps, names, number) for number in happening]
    events += [_walk(keys, steps, number) for number in walks]
    by_step = sorted((e for e in events if e.at_step is not None), key=lambda e: e.at_step or 0)
    by_time = sorted((e for e in events if e.at_step is None), key=lambda e: e.at_s or 0.0)
    return (*by_step, *by_time)


def _event(keys: Keys, steps: int, names: Mapping[str, int], number: int) -> Event:
    toml = keys.toml
    toml.check_keys((*_EVENT, *_SLOWER, *MOVES), "event", number)
    table = toml.table("event", number)
    what = [each for each in (*_SLOWER, *MOVES) if each in table]
    if len(what) != 1:
        raise InvalidSetting(
            f"{toml.where('event', number)} needs one of {', '.join((*_SLOWER, *MOVES))}; "
            "say what happens"
        )
    (kind,) = what
    when = _when(keys, steps, "event", number)
    workers = () if kind == "slower_network" else _concerned(keys, names, number)
    if kind in MOVES:
        if table[kind] is not True:
            raise keys.toml.refused("event", number, kind, "true, or leave it out")
        for key in ("over_steps", "for_steps"):
            if key in table:
                raise keys.toml.refused("event", number, key, f"it to what gets slower, no {kind}")
        return Event(what=kind, workers=workers, **when)
    factor = keys.number(kind, 1.0, "event", number, least=1e-6, most=1e6)
    return Event(
        what=kind,
        workers=workers,
        factors=(factor,) * max(1, len(workers)),
        over_steps=keys.whole("over_steps", 0, "event", number),
        for_steps=keys.whole("for_steps", None, "event", number, least=1),
        **when,
    )


def _walk(keys: Keys, steps: int, number: int) -> Event:
    toml = keys.toml
    toml.check_keys(_WALK, "walk", number)
    found, workers = toml.table("walk", number).get("speeds"), len(keys.cluster.workers)
    speeds = found if isinstance(found, list) else []
    allowed = all(is_number(each) and 1e-6 <= each <= 1e6 for each in speeds)  # noqa: PLR2004
    if len(speeds) != workers or not allowed:
        raise keys.toml.refused(
            "walk", number, "speeds", f"{workers} numbers above 0: 1 is as fast as declared"
        )
    when = _when(keys, steps, "walk", number)
    factors = tuple(1 / speed for speed in speeds)
    return Event(what="slower", workers=tuple(range(workers)), factors=factors, **when)


def _when(keys: Keys, steps: int, table: str, number: int) -> dict[str, Any]:
    toml = keys.toml
    found = toml.table(table, number)
    if ("at_step" in found) == ("at_s" in found):
        where = toml.where(table, number)
        raise InvalidSetting(f"{where} needs one of at_step and at_s; say when it happens")
    if "at_s" in found:
        return {"at_s": keys.number("at_s", 0.0, table, number)}
    step = keys.whole("at_step", 0, table, number)
    if step >= steps:
        where = toml.where(table, number, "at_step")
        raise InvalidSetting(
            f"{where} has at_step={step}, beyond the end: there are {steps} steps; "
            "give an earlier one, or raise steps"
        )
    return {"at_step": step}


def _concerned(keys: Keys, names: Mapping[str, int], number: int) -> tuple[int, ...]:
    """Return the workers of a name, a kind, or a list of these."""
    found = keys.toml.table("event", number).get("worker", _EVERYONE)
    where = keys.toml.where("event", number, "worker")
    words = found if isinstance(found, list) else [found]
    kinds = {kind.name: kind.workers for kind in keys.cluster.kinds}
    workers: list[int] = []
    for word in words:
        if not isinstance(word, str):
            raise keys.toml.refused("event", number, "worker", "a name, or a list of names")
        if word == _EVERYONE:
            workers += names.values()
        elif word in names:
            workers.append(names[word])
        elif word in kinds:
            workers += kinds[word]
        else:
            known = [*kinds, *(name for name in names if name not in kinds)]
            hint = nearest(str(word), known if len(known) < 50 else list(kinds))  # noqa: PLR2004
            raise InvalidSetting(f"{where} has worker={word!r}, who is not there; {hint}")
    if not workers:
        raise keys.toml.refused("event", number, "worker", "a name, or leave it out for all")
    return tuple(dict.fromkeys(workers))

"""Damage to what users hand in: plain values, texts, keyword arguments and command lines.

Everything here is a pure function of a `Random`, so that a case is known by its number alone:
`Random(number)` draws the same damage again.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 64, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, -0.5, 1.5, 1e-9, 1e-30, 1e-320, 1e9, 1e20, 1e30, 1e100, 1e200, 1e308),
    *(-1e-9, -1e9, -1e308, math.nan, math.inf, -math.inf),
)
TEXTS = (
    *("", " ", "x", "inf", "nan", "-1", "1e308", "0", "auto", "a\0b", "a\nb", "\ud800", "é"),
    *("../..", "x" * 300, "[bold]", "%s", "{}", "None", "true"),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], [0], [[0, 0]], ["x"], [math.nan], {"x": 1}),
    *([1, [2, [3]]], {"": {}}, {"1": 2}),
)

Path = tuple[Any, ...]
"""Keys and places on the way to a value inside of another one."""


@dataclass(frozen=True)
class Damage:
    """What a value has become, and in words what was done to it."""

    value: Any
    what: str
    places: frozenset[str] = frozenset()
    """Names of what was changed, of which an error has to name one; none: all was changed."""


def odd(draw: Random) -> Any:
    """Return some value that is rarely meant."""
    return draw.choice(draw.choice((NUMBERS, NUMBERS, TEXTS, OTHERS)))


def damaged(value: Any, draw: Random, *, most: int = 2) -> Damage:
    """Return plain values with one place changed, or now and then a few."""
    done, places = [], set[str]()
    for _ in range(1 if draw.random() < 0.8 else draw.randint(1, most)):
        path = _somewhere(value, draw)
        before = _at(value, path)
        after = _changed(before, draw)
        value = _put(value, path, after)
        place = ".".join(map(str, path)) or "all of it"
        new = {each for each in path if isinstance(each, str)} | _keys_apart(before, after)
        places = places | new if path or isinstance(after, dict) else set()
        done.append(f"{place}: {_short(before)} -> {_short(after)}")
    return Damage(value, "; ".join(done), frozenset(places))


def damaged_text(text: str, draw: Random) -> Damage:
    """Return a text with lines or characters missing, doubled, moved or replaced."""
    lines = text.split("\n")
    here, there = draw.randrange(len(lines)), draw.randrange(len(lines))
    start = draw.randrange(len(text))
    stop = min(len(text), start + draw.randint(1, 12))
    junk = draw.choice(("\0", "=", "[", "]", "{", '"', "\\", "\r", "NaN", "e999", "é", "#", "\n"))
    name, changed = draw.choice(
        (
            ("a line is missing", "\n".join(lines[:here] + lines[here + 1 :])),
            ("a line comes twice", "\n".join([*lines[:here], lines[here], *lines[here:]])),
            ("a line is moved", "\n".join([*lines[:here], lines[there], *lines[here + 1 :]])),
            ("it ends early", text[:start]),
            ("characters are missing", text[:start] + text[stop:]),
            (f"{junk!r} comes in between", text[:start] + junk + text[start:]),
            (f"{junk!r} stands there instead", text[:start] + junk + text[stop:]),
        )
    )
    return Damage(changed, f"{name}, from character {start} or line {here + 1}")


def damaged_words(words: Sequence[str], draw: Random) -> Damage:
    """Return a command line with a word missing, doubled, replaced, or in another place."""
    found = list(words)
    here = draw.randrange(len(found))
    match draw.randrange(6):
        case 0:
            del found[here]
        case 1:
            found.insert(here, found[here])
        case 2:
            other = draw.randrange(len(found))
            found[here], found[other] = found[other], found[here]
        case 3:
            found.insert(here, _word(draw))
        case _:
            found[here] = _word(draw)
    return Damage(found, f"{list(words)} -> {found}")


def toml_of(tables: Mapping[str, Any]) -> str:
    """Write tables as TOML, in which None has no place: such keys are left out."""
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in tables.items() if _is_plain(value)]
    for key, value in tables.items():
        for table in value if _is_array(value) else [value] if isinstance(value, dict) else []:
            lines += ["", f"[[{_key(key)}]]" if _is_array(value) else f"[{_key(key)}]"]
            inner = {name: each for name, each in table.items() if each is not None}
            lines += [f"{_key(name)} = {_toml(each)}" for name, each in inner.items()]
    return "\n".join(lines) + "\n"


def json_of(value: Any) -> str:
    """Write a value as JSON, with the words NaN and Infinity that Python itself reads."""
    return json.dumps(value, separators=(",", ":"), default=str)


def _somewhere(value: Any, draw: Random) -> Path:
    """Return the path of a value inside, found by going down at random."""
    path: list[Any] = []
    while isinstance(value, dict | list) and value and (not path or draw.random() < 0.85):
        step = draw.choice(sorted(value)) if isinstance(value, dict) else draw.randrange(len(value))
        path.append(step)
        value = value[step]
    return tuple(path) if draw.random() < 0.97 else ()


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _put(value: Any, path: Path, new: Any) -> Any:
    """Return a copy in which something else stands at a path."""
    if not path:
        return new
    step, *rest = path
    if isinstance(value, dict):
        return {**value, step: _put(value[step], tuple(rest), new)}
    return [*value[:step], _put(value[step], tuple(rest), new), *value[step + 1 :]]


def _keys_apart(before: Any, after: Any) -> set[str]:
    """Return the keys under which two tables have something else."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return set()
    every = before.keys() | after.keys()
    return {key for key in every if before.get(key, every) is not after.get(key, every)}


def _changed(value: Any, draw: Random) -> Any:
    """Return something else than a value: of its own kind, or of any."""
    if draw.random() < 0.4:
        return odd(draw)
    found: Any = None
    match value:
        case int() | float() if abs(value) < 1e290 and not isinstance(value, bool):
            found = _other_number(value, draw)
        case str():
            found = draw.choice((value[:-1], value + "x", value.upper(), value * 2, *TEXTS))
        case list():
            found = _other_list(value, draw)
        case dict():
            found = _other_table(value, draw)
        case _:
            found = odd(draw)
    return found


def _other_number(value: float, draw: Random) -> Any:
    ways: tuple[Callable[[], Any], ...] = (
        lambda: -value,
        lambda: value + 1,
        lambda: value - 1,
        lambda: value * draw.choice((2, 10, 1000, 1e6, 1e12)),
        lambda: value / draw.choice((2, 10, 1000, 1e6, 1e12)),
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice(NUMBERS),
        lambda: str(value),
        lambda: [value],
        lambda: float(value),
    )
    return draw.choice(ways)()


def _other_list(value: list[Any], draw: Random) -> list[Any]:
    here = draw.randrange(len(value) + 1)
    ways: tuple[list[Any], ...] = (
        [],
        value[:-1],
        value[::-1],
        [*value, *value],
        [*value[:here], odd(draw), *value[here:]],
        [*value[:here], *value[here + 1 :]],
        [value],
        [odd(draw) for _ in value],
    )
    return draw.choice(ways)


def _other_table(value: dict[str, Any], draw: Random) -> dict[str, Any]:
    if not value:
        return {"x": odd(draw)}
    key = draw.choice(sorted(value))
    rest = {name: each for name, each in value.items() if name != key}
    ways: tuple[dict[str, Any], ...] = (
        rest,
        rest,
        {**rest, key + "x": value[key]},
        {**rest, key[::-1]: value[key]},
        {**value, draw.choice(("x", "", "0", "a b")): odd(draw)},
        {**value, key: value[draw.choice(sorted(value))]},
        {},
    )
    return draw.choice(ways)


def _word(draw: Random) -> str:
    """Return an odd word of a command line; one with a null cannot be typed."""
    found = odd(draw)
    return (found if isinstance(found, str) else str(found)).replace("\0", "") or "-"


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(e, dict) for e in value)


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, dict) and not _is_array(value)


def _key(name: str) -> str:
    bare = name.isascii() and bool(name) and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else json.dumps(name)


def _toml(value: Any) -> str:
    match value:
        case None:
            return date(2026, 11, 18).isoformat()  # what TOML has and JSON has not
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value.replace("\ud800", "?"), ensure_ascii=True)
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return str(value)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."

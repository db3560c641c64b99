"""Frozen values with some fields changed, quickly."""

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def revised(value: T, **changes: Any) -> T:
    """Return a copy of a frozen dataclass with other values in some fields.

    Like `dataclasses.replace`, for states that are revised many times in every step: a tenth of
    its time, since no constructor runs. What the value has cached is not taken over.
    """
    kind: Any = type(value)
    made: T = object.__new__(kind)
    known, contents = value.__dict__, made.__dict__
    for name in _names(kind):
        contents[name] = known[name]
    contents.update(changes)
    return made


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))

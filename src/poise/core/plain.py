"""Frozen data as plain values that survive JSON, and back.

Covers what states and rows are made of: numbers, text, None, tuples, mappings with whole-number
keys, arrays, and frozen dataclasses of these. NaN becomes null inside arrays, infinity a word.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from poise.errors import StateMismatch
from poise.numbers import is_number, is_whole

T = TypeVar("T")
MOST_COUNTED = 2**53
"""Beyond this, whole numbers are not exact as real ones, and workers tell each other reals."""
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DAMAGED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What reading something else may raise."""


class _Wrong(ValueError):
    """Something is wrong inside of a field."""

    def __init__(self, field: str, error: Exception) -> None:
        deeper = isinstance(error, _Wrong)
        super().__init__(f"{field}.{error}" if deeper else f"{field}: {error}")


def to_plain(value: Any) -> Any:
    """Return the value as lists, dicts, numbers, text and None.

    >>> to_plain((1, np.array([0.5, np.nan, np.inf])))
    [1, [0.5, None, 'inf']]
    """
    match value:
        case np.ndarray():
            plain = _array_to_plain(value)
        case tuple() | list():
            plain = [to_plain(each) for each in value]
        case Mapping():
            plain = {str(key): to_plain(each) for key, each in value.items()}
        case np.generic():
            plain = to_plain(value.item())
        case float() if not math.isfinite(value):
            plain = str(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            plain = {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
        case _:
            plain = value
    return plain


def from_plain(kind: type[T], data: Any, called: str = "") -> T:
    """Return the value of a type that `to_plain` made plain, or raise StateMismatch.

    Errors call it by the name that is given, or else by that of its type. Types are as strict as
    they say. What else the numbers of a type must keep is its own to say: in `__post_init__`, or,
    where that would take time whenever a state is revised, in `check_loaded`, which is called here
    alone.
    """
    try:
        found: T = _read(kind, data)
    except _DAMAGED as error:
        name = called or getattr(kind, "__name__", str(kind))
        raise StateMismatch(
            f"this is not a saved {name}: {error}; it is damaged or of another version"
        ) from None
    return found


def check_state(state: object) -> None:
    """Raise StateMismatch unless a saved state has names for what it holds."""
    if not isinstance(state, Mapping):
        raise StateMismatch(
            f"the state to load is a {type(state).__name__}; give what state_dict returned"
        )


def whole_in(state: Mapping[str, Any], key: str) -> int:
    """Return a whole number from 0 that a saved state has, or raise StateMismatch."""
    value = state.get(key)
    if not is_whole(value) or not 0 <= value <= MOST_COUNTED:
        raise StateMismatch(
            f"the state has {key}={value!r}, which is not a whole number from 0 to 2**53; "
            "it is damaged, load another one"
        )
    return value


def to_json(value: Any) -> str:
    """Return the value as one line of standard JSON."""
    return json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"))


def _array_to_plain(values: np.ndarray[Any, Any]) -> Any:
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return values.tolist()
    words = values.astype(object)
    words[np.isnan(values)] = None
    words[np.isposinf(values)] = "inf"
    words[np.isneginf(values)] = "-inf"
    return words.tolist()


def _read(kind: Any, data: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _read_one_of(inner, data)
    if origin is np.ndarray:
        return _read_array(get_args(inner[1])[0], data)
    if origin is tuple:
        _expect(isinstance(data, list | tuple), data)
        each = inner[:1] * len(data) if inner[1:] == (Ellipsis,) else inner
        return tuple(_read(one, value) for one, value in zip(each, data, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(data, Mapping), data)
        return {inner[0](key): _read(inner[1], value) for key, value in data.items()}
    return _read_dataclass(kind, data) if is_dataclass(kind) else _read_single(kind, data)


def _read_single(kind: Any, data: Any) -> Any:
    """Read a number, text, None, or anything where the type says so."""
    if kind is Any:
        return data
    if kind is float:
        return _number(data)
    return _expect(is_whole(data) if kind is int else isinstance(data, kind), data)


def _read_one_of(kinds: tuple[Any, ...], data: Any) -> Any:
    if data is None and NoneType in kinds:
        return None
    errors = []
    for kind in kinds:
        try:
            return _read(kind, data)
        except _DAMAGED as error:
            errors.append(error)
    raise errors[0]


def _read_dataclass(kind: Any, data: Any) -> Any:
    hints = get_type_hints(kind)
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r} is not a {kind.__name__}")
    if unknown := sorted(map(str, set(data) - set(hints))):
        raise ValueError(f"{kind.__name__} has no {', '.join(unknown)}")
    made = object.__new__(kind)  # a frozen value is restored as it was, past its constructor
    for field in fields(kind):
        optional = NoneType in get_args(hints[field.name])
        if field.name not in data and not optional:
            raise ValueError(f"{kind.__name__} needs {field.name}")
        try:
            value = _read(hints[field.name], data.get(field.name))
        except _DAMAGED as error:
            raise _Wrong(field.name, error) from None
        object.__setattr__(made, field.name, value)
    for name in ("__post_init__", "check_loaded"):
        check = getattr(made, name, None)
        if check is not None:
            check()
    return made


def _read_array(dtype: Any, data: Any) -> Any:
    """Read a table of numbers, in which null stands for NaN."""
    _expect(isinstance(data, list | tuple | np.ndarray), data)
    exact = np.array(data, dtype=object)
    entries = exact.ravel().tolist()
    if dtype is np.float64:
        found = [math.nan if each is None else _number(each) for each in entries]
    else:
        found = [_expect(is_whole(each), each) for each in entries]
    return np.array(found, dtype=dtype).reshape(exact.shape)


def _number(data: Any) -> float:
    """Return a number; the words for what is not finite are numbers, too."""
    if isinstance(data, str) and data in _WORDS:
        return _WORDS[data]
    return float(_expect(is_number(data), data))


def _expect(right: bool, data: Any) -> Any:
    if not right:
        raise ValueError(f"{data!r} is of another type")
    return data

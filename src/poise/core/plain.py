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
from poise.numbers import is_whole

T = TypeVar("T")


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


def from_plain(kind: type[T], data: Any) -> T:
    """Return the value of a type that `to_plain` made plain, or raise StateMismatch."""
    try:
        found: T = _read(kind, data)
    except (TypeError, ValueError, KeyError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise StateMismatch(
            f"this is not a saved {name}: {error}; it is damaged or of another version"
        ) from None
    return found


def whole_in(state: Mapping[str, Any], key: str) -> int:
    """Return a whole number from 0 that a saved state has, or raise StateMismatch."""
    value = state.get(key)
    if not is_whole(value) or value < 0:
        raise StateMismatch(
            f"the state has {key}={value!r}, which is not a whole number from 0; "
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
        dtype = get_args(inner[1])[0]
        return np.array(_no_words(data) if dtype is np.float64 else data, dtype=dtype)
    if origin is tuple:
        each = inner[:1] * len(data) if inner[1:] == (Ellipsis,) else inner
        return tuple(_read(one, value) for one, value in zip(each, data, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {inner[0](key): _read(inner[1], value) for key, value in data.items()}
    return _read_dataclass(kind, data) if is_dataclass(kind) else _read_single(kind, data)


def _read_single(kind: Any, data: Any) -> Any:
    """Read a number, text, None, or anything where the type says so."""
    if kind is Any:
        return data
    if kind is float:
        return float(_expect(isinstance(data, int | float | str), data))
    return _expect(is_whole(data) if kind is int else isinstance(data, kind), data)


def _read_one_of(kinds: tuple[Any, ...], data: Any) -> Any:
    if data is None and NoneType in kinds:
        return None
    errors = []
    for kind in kinds:
        try:
            return _read(kind, data)
        except (TypeError, ValueError, KeyError) as error:
            errors.append(error)
    raise errors[0]


def _read_dataclass(kind: Any, data: Any) -> Any:
    hints = get_type_hints(kind)
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r} is not a {kind.__name__}")
    if unknown := sorted(set(data) - set(hints)):
        raise ValueError(f"{kind.__name__} has no {', '.join(unknown)}")
    made = object.__new__(kind)  # a frozen value is restored as it was, past its constructor
    for field in fields(kind):
        optional = NoneType in get_args(hints[field.name])
        if field.name not in data and not optional:
            raise ValueError(f"{kind.__name__} needs {field.name}")
        object.__setattr__(made, field.name, _read(hints[field.name], data.get(field.name)))
    check = getattr(made, "__post_init__", None)
    if check is not None:
        check()
    return made


def _no_words(data: Any) -> Any:
    if isinstance(data, list):
        return [_no_words(each) for each in data]
    return math.nan if data is None else float(data)


def _expect(right: bool, data: Any) -> Any:
    if not right:
        raise ValueError(f"{data!r} is of another type")
    return data

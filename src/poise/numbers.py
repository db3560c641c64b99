"""What counts as a number: to Python, true and false do; to us, they are a mistake."""

from typing import TypeGuard

from poise.errors import InvalidSetting


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(who: str, name: str, value: object, least: float, most: float) -> None:
    """Raise unless a setting is a number within its ends.

    >>> check_number("Auto", "least_gain", -1, 0, 1)
    Traceback (most recent call last):
    poise.errors.InvalidSetting: Auto has least_gain=-1; give a number from 0 to 1
    """
    if not (is_number(value) and least <= value <= most):
        raise InvalidSetting(
            f"{who} has {name}={value!r}; give a number from {least:g} to {most:g}"
        )


def check_whole(who: str, name: str, value: object, least: int, most: int) -> None:
    """Raise unless a setting is a whole number within its ends."""
    if not (is_whole(value) and least <= value <= most):
        raise InvalidSetting(
            f"{who} has {name}={value!r}; give a whole number from {least} to {most}"
        )

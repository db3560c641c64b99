"""What counts as a number: to Python, true and false do; to us, they are a mistake."""

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)

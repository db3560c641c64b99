"""How fast the workers of a lab are: one number each, in cores."""

import re
from collections.abc import Iterable

from poise.errors import InvalidSetting
from poise.numbers import is_number

SLOWEST = 0.001
"""The kernel grants at least 1 ms of every second."""

FASTEST = 1e6
"""More cores than any machine has."""

MOST = 1000
"""More workers than one machine can start."""

_REPEATED = re.compile(r"(?P<speed>.+)x(?P<times>\d+)")


def parse_speeds(text: str) -> tuple[float, ...]:
    """Return the speeds written as numbers with commas; `0.5x8` means 0.5 eight times.

    >>> parse_speeds("0.9,0.45x2")
    (0.9, 0.45, 0.45)
    """
    speeds: list[float] = []
    for part in text.split(","):
        repeated = _REPEATED.fullmatch(part.strip())
        number, times = (repeated["speed"], int(repeated["times"])) if repeated else (part, 1)
        if not 1 <= times <= MOST:
            raise InvalidSetting(
                f"--speeds has {part.strip()!r}; repeat a speed 1 to {MOST} times, as in 0.45x2"
            )
        try:
            speeds += [float(number)] * times
        except ValueError:
            raise InvalidSetting(
                f"--speeds has {part.strip()!r}; give numbers with commas, as in 0.9,0.45x2"
            ) from None
    return checked_speeds(speeds, "--speeds")


def checked_speeds(speeds: Iterable[float], where: str = "speeds") -> tuple[float, ...]:
    """Return the speeds as a tuple; raise unless each of them can be kept."""
    checked = tuple(checked_speed(speed, where) for speed in speeds)
    if not checked:
        raise InvalidSetting(f"{where} is empty; give one speed per worker")
    return checked


def checked_speed(speed: object, where: str = "speeds") -> float:
    """Return a speed as a number; raise unless it can be kept."""
    if not is_number(speed) or not SLOWEST <= speed <= FASTEST:
        raise InvalidSetting(
            f"{where} has {speed!r}; give a number of cores from {SLOWEST} up, such as 0.5"
        )
    return float(speed)


def shown(speeds: Iterable[float]) -> str:
    """Write speeds for people.

    >>> shown((0.9, 0.45, 1.0))
    '0.9, 0.45, 1'
    """
    return ", ".join(f"{speed:g}" for speed in speeds)

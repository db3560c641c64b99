"""What several commands take from the command line, and need beyond the base install."""

import math
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from importlib.util import find_spec

from poise.errors import InvalidSetting


def whole(what: str, least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return how to read a whole number.

    >>> whole("a number of steps", 1)("12")
    12
    """

    def read(text: str) -> int:
        if not text.isdigit() or not least <= int(text) <= most:
            end = "up" if most == math.inf else f"to {most}"
            raise ArgumentTypeError(f"{text!r} is not {what} from {least} {end}")
        return int(text)

    return read


def above_0(what: str) -> Callable[[str], float]:
    """Return how to read a quantity that is finite and more than nothing.

    >>> above_0("a number of seconds")("0.5")
    0.5
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < math.inf:
            raise ArgumentTypeError(f"{text!r} is not {what} above 0")
        return value

    return read


def add_script(parser: ArgumentParser, *, more: str = "") -> None:
    """Let all that is left of the line be a script and its own arguments."""
    parser.add_argument(
        "script", nargs=REMAINDER, metavar="SCRIPT", help=f"a training script, its args{more}"
    )


def without_dashes(words: list[str]) -> list[str]:
    """Return a script with its arguments, without the -- that may stand before it."""
    return words[1:] if words[:1] == ["--"] else words


def require(*modules: str, extra: str) -> None:
    """Raise, naming the extra to install, unless all modules can be imported."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise InvalidSetting(
            f"{' and '.join(missing)} cannot be imported, but this command needs it; "
            f'run: pip install "poise[{extra}]"'
        )

"""Words of the command line that several commands understand."""

from argparse import REMAINDER, ArgumentParser, ArgumentTypeError
from collections.abc import Callable


def whole(what: str, least: int) -> Callable[[str], int]:
    """Return how to read a number of something.

    >>> whole("steps", 1)("12")
    12
    """

    def read(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is not a number of {what} from {least} up")
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
        if not 0 < value < float("inf"):
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

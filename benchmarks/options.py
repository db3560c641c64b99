"""The options that every benchmark has: how much it does, and how it prints what it found."""

import argparse
from typing import Literal

Effort = Literal["full", "quick", "smoke"]
"""How much is done. A smoke run does a little of everything, in seconds, and judges nothing."""


def options(description: str, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser that knows --quick, --smoke and --json; `effort` says which was given.

    Args:
        description: what the benchmark measures.
        quick: what --quick leaves out, or how long it takes.

    >>> options("A benchmark.", quick="less").parse_args(["--smoke", "--json"])
    Namespace(effort='smoke', json=True)
    """
    parser = argparse.ArgumentParser(description=description)
    efforts = parser.add_mutually_exclusive_group()
    efforts.add_argument(
        "--quick", dest="effort", action="store_const", const="quick", default="full", help=quick
    )
    efforts.add_argument(
        "--smoke",
        dest="effort",
        action="store_const",
        const="smoke",
        help="seconds: whether everything runs; the figures mean nothing and have no bars",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser

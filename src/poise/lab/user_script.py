"""Running a training script of the user's inside a command."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from poise.errors import InvalidSetting


def check_script(script: Sequence[str]) -> None:
    """Raise unless the script, given with its arguments, is a file."""
    if not Path(script[0]).is_file():
        raise InvalidSetting(f"there is no script {script[0]}; give the path of a Python file")


@contextmanager
def command_line(script: Sequence[str]) -> Iterator[None]:
    """Show the script what `python SCRIPT ARGS` would: its arguments, and its folder first."""
    arguments, path = sys.argv, sys.path
    sys.argv = list(script)
    sys.path = [str(Path(script[0]).resolve().parent), *path[1:]]
    try:
        yield
    finally:
        sys.argv, sys.path = arguments, path


@contextmanager
def replaced(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Put another call in the place of one, until the block is left."""
    original = getattr(owner, name)
    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)

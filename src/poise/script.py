"""The one place that runs a user's training script inside a command."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import open_code
from pathlib import Path
from types import ModuleType, TracebackType

from poise.errors import InvalidSetting


def check_script(script: Sequence[str]) -> None:
    """Raise unless the script, given with its arguments, is a file."""
    try:
        there = Path(script[0]).is_file()
    except (OSError, ValueError):  # a name that no file can have
        there = False
    if not there:
        raise InvalidSetting(f"there is no script {script[0]}; give the path of a Python file")


def run(script: Sequence[str]) -> None:
    """Run a script or, after -m, a module, with its arguments, to its end, as Python itself does.

    What the script raises leaves it unchanged, SystemExit too.
    """
    if script[0] == "-m":
        sys.argv = list(script[1:])
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        return
    path = str(Path(script[0]).absolute())
    with as_main(script) as module, open_code(path) as file:
        module.__file__ = path  # whole, unlike in runpy; the first argument stays as typed
        exec(compile(file.read(), path, "exec"), vars(module))


@contextmanager
def as_main(script: Sequence[str]) -> Iterator[ModuleType]:
    """Show the script what `python SCRIPT ARGS` would: its arguments, and its folder first.

    Makes a module that is `__main__` for everyone, as pickled objects of a script need it.
    """
    arguments, path, ours = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv = list(script)
    sys.path = [str(Path(script[0]).resolve().parent), *path[1:]]
    sys.modules["__main__"] = theirs = ModuleType("__main__")
    try:
        yield theirs
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = arguments, path, ours


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a trace that a script run by itself would show: what `run` called.

    None if nothing of the script ran, as when it is no Python; all, if the error is not from `run`.
    """
    runner = trace
    while runner is not None and runner.tb_frame.f_code is not run.__code__:
        runner = runner.tb_next
    return trace if runner is None else runner.tb_next


def show_error(error: BaseException) -> None:
    """Print an error of a script, which `run` raised, as if it had been run by itself."""
    trace = own_frames(error.__traceback__)
    sys.last_value = error  # as Python notes it; a Balancer learns from it how the script ended
    sys.excepthook(type(error), error.with_traceback(trace), trace)

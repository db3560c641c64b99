"""Processes that tests start elsewhere: which of them run, and waiting for what they do."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LIMIT_S = 120.0
"""For what takes seconds on an idle machine."""


def wait_for(happened: Callable[[], object]) -> None:
    """Return as soon as something has happened; fail if it does not."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def running_from(path: Path | str) -> list[int]:
    """Return the processes whose command line names a path."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            if str(path) in command.read_text(errors="replace"):
                found.append(int(command.parent.name))
    return found

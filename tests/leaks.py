"""What a test can leave behind in a process, and the search for it."""

import gc
import os
import sys
import threading
import time
from collections.abc import Collection
from multiprocessing import resource_tracker
from pathlib import Path

_NOT_OURS = ("PYTEST_", "TORCHINDUCTOR_")
"""Variables that pytest and torch set by themselves."""

Belongings = dict[str, set[str]]


def belongings() -> Belongings:
    """What this process holds, by kind."""
    return {
        "environment variable": {
            f"{key}={value}" for key, value in os.environ.items() if not key.startswith(_NOT_OURS)
        },
        "thread": {thread.name for thread in threading.enumerate()},
        "process": _children(os.getpid()),
        "process group": _groups(),
    }


def leaks_since(
    before: Belongings, *, ignored_processes: Collection[int] = (), grace_s: float = 3.0
) -> tuple[str, ...]:
    """Return what is new since before and does not go away within a moment."""
    ignored = {str(pid) for pid in ignored_processes}
    ignored.add(str(getattr(resource_tracker._resource_tracker, "_pid", None)))
    deadline = time.monotonic() + grace_s
    while True:
        now = belongings()
        now["process"] = {child for child in now["process"] if child.split()[-1] not in ignored}
        leaks = tuple(f"{kind} {new}" for kind in now for new in sorted(now[kind] - before[kind]))
        if not leaks or time.monotonic() > deadline:
            return leaks
        gc.collect()  # takes a tenth of a second with torch loaded, so only when it may help
        time.sleep(0.05)


def _children(pid: int) -> set[str]:
    """Names and ids of the child processes that still run."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = status.read_text().partition(" (")
        except (FileNotFoundError, ProcessLookupError):
            continue
        name, _, fields = rest.rpartition(") ")
        state, parent = fields.split()[:2]
        if int(parent) == pid and state != "Z":
            found.add(f"{name} {number}")
    return found


def group_threads() -> set[str]:
    """Threads of process groups, which Python does not see."""
    names = set()
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            name = task.read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "gloo" in name:
            names.add(f"{name} {task.parent.name}")
    return names


def _groups() -> set[str]:
    dist = sys.modules.get("torch.distributed")
    return {"default"} if dist is not None and dist.is_initialized() else set()

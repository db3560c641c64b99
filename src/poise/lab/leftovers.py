"""What a lab makes outside of its own process, and how all of it is removed again."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from poise.lab.quota import Quota, places

_NAME = re.compile(r"poise-lab-(?P<pid>\d+)-(?P<start>\d+)-(?P<number>\d+)(-.+)?")
_GRACE_S = 3.0
_NAMESPACES = Path("/run/netns")


@dataclass
class Belongings:
    """Processes, control groups and network namespaces of one lab."""

    workers: list[tuple[int, int]] = field(default_factory=list)
    """Leaders of sessions: process id and start time."""
    groups: list[str] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)

    def add(self, kind: str, value: object) -> None:
        """Add one; its kind is the name of a field."""
        getattr(self, kind).append(value)


def lab_name(number: int) -> str:
    """Return a name that tells which process made a thing, and the how many-th lab of it."""
    return f"poise-lab-{os.getpid()}-{start_time(os.getpid())}-{number}"


def is_stale(name: str) -> bool:
    """Whether a thing was made by a lab that is gone.

    >>> is_stale("poise-lab-1-999999999-0-hub"), is_stale("cron.service"), is_stale(lab_name(0))
    (True, False, False)
    """
    made_by = _NAME.fullmatch(name)
    return made_by is not None and start_time(int(made_by["pid"])) != int(made_by["start"])


def start_time(pid: int) -> int | None:
    """Return when a process began, in ticks since the machine did, or None if it is gone."""
    status = _status(pid)
    return None if status is None else status.start


def stale_belongings() -> Belongings:
    """Return what labs left behind whose guard was ended too."""
    return Belongings(
        groups=[str(path) for place in places() for path in _stale_in(place)],
        namespaces=[path.name for path in _stale_in(_NAMESPACES)],
    )


def clear(belongings: Belongings) -> list[str]:
    """End all processes, remove all groups and namespaces; return what could not be removed."""
    groups = [Quota(path) for name in belongings.groups for path in _with_children(Path(name))]
    for group in groups:
        with suppress(OSError):
            group.lift()  # a worker that is throttled would take long to end
    _end(belongings.workers, groups)
    removals = [(str(group.path), group.remove) for group in groups]
    for name in belongings.namespaces:
        if (_NAMESPACES / name).exists():
            removals.append((f"namespace {name}", partial(_delete, name)))
    failures = []
    for what, remove in removals:
        try:
            remove()
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{what}: {error}")
    return failures


def members(session: int, start: int) -> list[int]:
    """Return the live processes of the session that a process with this start time leads or led."""
    leader = start_time(session)
    if leader is not None and leader != start:  # the number belongs to somebody else by now
        return []
    statuses = ((int(pid), _status(int(pid))) for pid in os.listdir("/proc") if pid.isdigit())
    return [pid for pid, status in statuses if status and status.session == session]


def _end(workers: Iterable[tuple[int, int]], groups: Iterable[Quota]) -> None:
    """Ask all processes to end; after a grace, end them."""
    if not _signal(workers, groups, signal.SIGTERM, signal.SIGCONT):
        return
    for signals in ((), (signal.SIGKILL,)):
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            if not _signal(workers, groups, *signals):
                return
            time.sleep(0.02)


def _signal(
    workers: Iterable[tuple[int, int]], groups: Iterable[Quota], *signals: signal.Signals
) -> set[int]:
    """Send signals to all live processes and return their ids."""
    alive = {pid for session, start in workers for pid in members(session, start)}
    for group in groups:
        with suppress(OSError):
            alive |= {pid for pid in group.processes() if pid > 0 and _status(pid)}
    alive.discard(os.getpid())
    for pid in alive:
        for each in signals:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, each)
    return alive


def _delete(namespace: str) -> None:
    command = ["ip", "netns", "delete", namespace]
    subprocess.run(command, check=True, capture_output=True, timeout=10)


def _with_children(group: Path) -> Iterator[Path]:
    """Yield a group after those in it, as they must be removed."""
    with suppress(OSError):  # not made after all, or removed by somebody else
        yield from (path for path in sorted(group.iterdir()) if path.is_dir())
        yield group


def _stale_in(place: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (path for path in place.iterdir() if is_stale(path.name))


class _Status(NamedTuple):
    session: int
    start: int


def _status(pid: int) -> _Status | None:
    """Return what the kernel says about a process, or None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, _, _, session, *rest = text.rpartition(") ")[2].split()
    return None if state in "ZX" else _Status(int(session), int(rest[15]))

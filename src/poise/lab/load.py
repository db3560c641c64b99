"""Watches what the machine's cores are used for while a lab's workers are throttled."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from poise.lab.contention import Contention, Sample
from poise.lab.crew import Crew
from poise.lab.speed_control import SpeedControl

_EVERY_S = 2.0
_OVER_S = 6.0
"""A shortage is said once it lasted so long: shorter ones are somebody's start-up."""
_TICKS = os.sysconf("SC_CLK_TCK")


class LoadWatch:
    """Says once that workers cannot get what they are to get, because others take it."""

    def __init__(self, crew: Crew, control: SpeedControl, say: Callable[[str], None]) -> None:
        self._crew = crew
        self._control = control
        self._say = say
        self._cores = sorted(os.sched_getaffinity(0))
        self._since: Sample | None = None
        """From where on the cores are looked at; None: workers are not throttled yet."""
        self._ended = Event()
        self._thread = Thread(target=self._run, name="poise-lab-load", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            found = self._look()
            if found is not None and found.is_short:
                self._say(found.remark())
                return

    def _look(self) -> Contention | None:
        """Return the use of the cores, when enough time has passed."""
        crew, control = self._crew, self._control
        if not control.all_are_throttled or not all(
            member.process.poll() is None for member in crew.workers
        ):
            self._since = None
            return None
        now = self._sample()
        since = self._since
        if since is None or since.speeds != now.speeds:
            self._since = now
            return None
        if now.at_s - since.at_s < _OVER_S:
            return None
        self._since = now
        return Contention.between(since, now, len(self._cores))

    def _sample(self) -> Sample:
        crew = self._crew
        sessions = cpu_s_by_session()
        server = 0 if crew.server is None else crew.server.process.pid
        return Sample(
            at_s=time.monotonic(),
            busy_s=busy_s(Path("/proc/stat").read_text(), self._cores),
            workers_s=tuple(sessions.get(each.process.pid, 0.0) for each in crew.workers),
            server_s=sessions.get(server, 0.0) + time.process_time(),
            speeds=self._control.speeds,
        )


def busy_s(statistics: str, cores: Sequence[int]) -> float:
    r"""Return the seconds that some cores computed, by the text of /proc/stat.

    What the machine below took away from a virtual one counts, too.

    >>> busy_s("cpu 9 9 9 9 9\ncpu0 100 20 30 5000 7 3 2 10 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0", [0])
    1.65
    """
    ticks = 0
    for line in statistics.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, *interrupts = map(int, numbers[:8])
            ticks += user + nice + system + sum(interrupts)
    return ticks / _TICKS


def cpu_s_by_session() -> dict[int, float]:
    """Return the seconds that the processes of each session computed, by its leader."""
    seconds: dict[int, float] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            session, times = int(fields[3]), fields[11:15]  # its own, and of children that ended
            seconds[session] = seconds.get(session, 0.0) + sum(map(int, times)) / _TICKS
    return seconds

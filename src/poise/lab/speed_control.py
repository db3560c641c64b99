"""Keeping the workers of a lab at their speeds, which may change at any time."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock

from poise.errors import InvalidSetting
from poise.lab.member import Member
from poise.lab.speeds import checked_speeds, shown
from poise.lab.throttle import Throttling
from poise.lab.walk import Walk


class SpeedControl:
    """Throttles workers, and changes their speeds as a walk or the user says.

    Args:
        speeds: of each worker, in cores.
        walk: how they change.
        members: the workers, of whom some may not be started yet.
        say: what to do with a remark.
    """

    def __init__(
        self,
        speeds: tuple[float, ...],
        walk: Walk,
        members: Sequence[Member],
        say: Callable[[str], None],
    ) -> None:
        self.speeds = speeds
        """How fast the workers are, or will be once they are throttled."""
        self._walk = walk
        self._members = members
        self._say = say
        self._lock = RLock()
        self._throttled = 0
        self._throttled_at_s: float | None = None
        """When all workers were throttled."""

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Change all speeds from now on; a worker that is not throttled yet begins with its new."""
        if len(speeds) != len(self.speeds):
            raise InvalidSetting(
                f"{len(speeds)} speeds for {len(self.speeds)} workers; give one per worker"
            )
        with self._lock:
            self.speeds = checked_speeds(speeds)
            for member, speed in zip(self._members, self.speeds, strict=False):
                if member.throttle is not None:
                    member.throttle.set_speed(speed)

    def throttle(self, worker: int, begin: Throttling) -> None:
        """Throttle a worker from now on, unless it is already."""
        member = self._members[worker]
        if member.throttle is not None:
            return
        with self._lock, suppress(ProcessLookupError):  # it has ended, which is seen elsewhere
            member.throttle = begin(worker, member.process, member.end, self.speeds[worker])
            self._throttled += 1
            if self._throttled == len(self.speeds):
                self._throttled_at_s = time.monotonic()

    def follow_walk(self) -> float | None:
        """Make the change that is due; return in how many seconds the next one may be."""
        step = self._members[0].steps
        change, self._walk = self._walk.due(step, self._elapsed_s())
        if change is not None:
            self.set_speeds(change.speeds)
            self._say(f"speeds are {shown(change.speeds)} from step {step} on")
        if self._walk.next_s is None or self._throttled_at_s is None:
            return None
        return max(0.0, self._walk.next_s - self._elapsed_s())

    def lift(self) -> None:
        """Let all workers run as fast as they can, for good."""
        for member in self._members:
            member.lift()

    def _elapsed_s(self) -> float:
        """Seconds since all workers are throttled; less than 0 before."""
        return -1.0 if self._throttled_at_s is None else time.monotonic() - self._throttled_at_s

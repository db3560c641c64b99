"""Keeping the workers of a lab at their speeds, which may change at any time."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock

from poise.errors import InvalidSetting
from poise.lab.crew import Member
from poise.lab.speeds import checked_speeds, shown
from poise.lab.throttle import Throttling
from poise.lab.walk import Walk


@dataclass
class SpeedControl:
    """Throttles workers, and changes their speeds as a walk or the user says."""

    speeds: tuple[float, ...]
    """How fast the workers are, in cores, or will be once they are throttled."""
    walk: Walk
    """How the speeds have still to change."""
    members: Sequence[Member]
    """The workers, of whom some may not be started yet."""
    say: Callable[[str], None]
    """What to do with a remark."""
    _throttled_at_s: float | None = None
    """When all workers were throttled."""

    def __post_init__(self) -> None:
        self._lock = RLock()

    @property
    def all_are_throttled(self) -> bool:
        """Whether no worker is left that is not."""
        return self._throttled_at_s is not None

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Change all speeds from now on; a worker that is not throttled yet begins with its new."""
        if len(speeds) != len(self.speeds):
            raise InvalidSetting(
                f"{len(speeds)} speeds for {len(self.speeds)} workers; give one per worker"
            )
        with self._lock:
            self.speeds = checked_speeds(speeds)
            for member, speed in zip(self.members, self.speeds, strict=False):
                if member.throttle is not None:
                    member.throttle.set_speed(speed)

    def throttle(self, worker: int, begin: Throttling) -> None:
        """Throttle a worker from now on, unless it is already."""
        member = self.members[worker]
        if member.throttle is not None:
            return
        with self._lock, suppress(ProcessLookupError):  # it has ended, which is seen elsewhere
            member.throttle = begin(member, self.speeds[worker])
            if sum(each.throttle is not None for each in self.members) == len(self.speeds):
                self._throttled_at_s = time.monotonic()

    def follow_walk(self) -> float | None:
        """Make the change that is due; return in how many seconds the next one may be."""
        step = self.members[0].steps
        change, self.walk = self.walk.due(step, self._elapsed_s())
        if change is not None:
            self.set_speeds(change.speeds)
            self.say(f"speeds are {shown(change.speeds)} from step {step} on")
        if self.walk.next_s is None or self._throttled_at_s is None:
            return None
        return max(0.0, self.walk.next_s - self._elapsed_s())

    def lift(self) -> None:
        """Let all workers run as fast as they can, for good."""
        for member in self.members:
            if member.throttle is not None:
                with suppress(OSError):
                    member.throttle.lift()

    def _elapsed_s(self) -> float:
        """Seconds since all workers are throttled; less than 0 before."""
        return -1.0 if self._throttled_at_s is None else time.monotonic() - self._throttled_at_s

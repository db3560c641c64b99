"""How the training of a lab ends: who is waited for, how long, and with which exit code."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from poise.lab.crew import Crew, Member
from poise.lab.processes import how_ended

_GRACE_S = 5.0
"""How long the others may go on when one has failed, or workers when their server has ended."""
_LOOK_S = 0.05
_FAILED = 1
_SIGNALED = 128


@dataclass(frozen=True)
class Ending:
    """Waits for the end of a training, and says who failed."""

    crew: Crew
    order: Sequence[int]
    """The workers that have ended, in this order, as far as it is known."""
    check: Callable[[], None]
    """Raises if the lab itself has failed."""
    lift: Callable[[], None]
    """Ends all throttling, so that workers can end, or say their own error, in time."""
    say: Callable[[str], None]
    """What to do with a remark."""
    said: set[int] = field(default_factory=set)
    """Workers that were said to have failed."""

    def of_workers(self) -> int:
        """Wait until all workers have ended, or some seconds longer than the first that fails.

        Returns 0, or the exit code of that one.
        """
        while self.crew.running() and not self.crew.failed():
            self.check()
            time.sleep(_LOOK_S)
        self._await_workers()
        failed = self.crew.failed()
        if not failed:
            return 0
        order = list(self.order)
        first = min(failed, key=lambda w: order.index(w) if w in order else len(order))
        self.say(f"worker {first} ended first, with {how_ended(failed[first])}")
        return _as_exit_code(failed[first])

    def of_server(self, server: Member) -> int:
        """Wait until the server has ended, and some seconds for its workers to end as well.

        Returns its exit code; or that of a worker without which the training cannot go on.
        """
        deadline: float | None = None
        while server.process.poll() is None:
            self.check()
            self._say_who_failed()
            missing = self.crew.missing()
            if missing is None:
                deadline = None
            elif deadline is None:
                deadline = time.monotonic() + _GRACE_S  # the server may be about to end, too
            elif time.monotonic() > deadline:
                return self._give_up(missing)
            time.sleep(_LOOK_S)
        code = server.process.returncode
        if code:
            self.say(f"the server ended with {how_ended(code)}")
        self._await_workers()
        if not code:
            self._say_who_failed()
        return _as_exit_code(code)

    def _await_workers(self) -> None:
        """Wait some seconds for the workers that are left."""
        self.lift()
        deadline = time.monotonic() + _GRACE_S
        while self.crew.running() and time.monotonic() < deadline:
            self.check()
            time.sleep(_LOOK_S)
        self.check()

    def _give_up(self, missing: int) -> int:
        """Return the exit code of a worker without which the server waits forever, and say why."""
        self.say(
            f"worker {self.crew.number(missing)} ended before training started, which takes all "
            f"{len(self.crew.workers)}; the rest is ended"
        )
        return _as_exit_code(self.crew.workers[missing].process.returncode) or _FAILED

    def _say_who_failed(self) -> None:
        """Say once of each worker that it has failed."""
        for worker, code in self.crew.failed().items():
            if worker not in self.said:
                self.said.add(worker)
                self.say(f"worker {self.crew.number(worker)} ended with {how_ended(code)}")


def _as_exit_code(code: int) -> int:
    """Return an exit code, of a shell's kind for a process that a signal ended."""
    return code if code >= 0 else _SIGNALED - code

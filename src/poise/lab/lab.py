"""A lab: real workers on one machine that are as unequal as one wants."""

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Self

from poise.engine.modes import Mode
from poise.errors import InvalidSetting, OutOfOrder
from poise.lab.crew import Crew, Member
from poise.lab.ending import Ending
from poise.lab.guard import Guard
from poise.lab.launching import Launching, Setup, served_mode
from poise.lab.leftovers import clear, lab_name, stale_belongings
from poise.lab.listener import Listener
from poise.lab.load import LoadWatch
from poise.lab.network import Network, check_privileges, parse_link
from poise.lab.output import Output
from poise.lab.pacing import Pace, parse_pace
from poise.lab.quota import make_parent, places
from poise.lab.speed_control import SpeedControl
from poise.lab.speeds import checked_speeds, parse_speeds
from poise.lab.throttle import DutyCycle, Paced, Throttling, by_quota
from poise.lab.walk import Walk, checked_walk
from poise.script import check_script

_REAP_S = 5.0
_numbers = itertools.count()


class Lab:
    """Starts workers with speeds, links and a walk; leaves nothing behind, however it ends.

    Args:
        speeds: of each worker, in cores; a sequence, or text as in `0.9,0.45x2`.
        walk: how the speeds change; a walk, or the path of its file.
        link: rates as in `100mbit` or `100mbit,20mbit`; None leaves the network as it is.
        pace: seconds per sample and fixed, or text as in `4ms+20ms`: workers then sleep instead
            of being throttled, so that there can be more of them than cores.
        from_start: whether to throttle at once, and not when training is prepared.
        mode: "sync", or "async" or "stale:S": a server is started too, without a limit, and the
            workers, which then count from 1, join it.
        say: what to do with remarks, each a line; by default they go to stderr.
    """

    def __init__(
        self,
        speeds: Sequence[float] | str,
        *,
        walk: Walk | str | Path | None = None,
        link: str | None = None,
        pace: Pace | str | None = None,
        from_start: bool = False,
        mode: str | Mode = "sync",
        say: Callable[[str], None] | None = None,
    ) -> None:
        each = parse_speeds(speeds) if isinstance(speeds, str) else checked_speeds(speeds)
        self._setup = Setup(
            workers=len(each),
            pace=parse_pace(pace) if isinstance(pace, str) else pace,
            from_start=from_start,
            mode=served_mode(mode),
        )
        self._say = say or _to_stderr
        self._name = lab_name(next(_numbers))
        self._network: Network | None = None
        if link is not None:
            rates = parse_link(link, len(each))
            self._network = Network(self._name, rates, has_server=self._setup.mode is not None)
        self._crew = Crew()
        changes = checked_walk(walk, len(each))
        self._control = SpeedControl(each, changes, self._crew.workers, self._say)
        self._listener: Listener | None = None
        self._load: LoadWatch | None = None
        self._output = Output()

    def __enter__(self) -> Self:
        if self._network is not None:
            check_privileges()
        clear(stale_belongings())
        self._guard = Guard()
        try:
            self._throttling = self._choose_throttling()
            if self._network is not None:
                for name in self._network.namespaces:
                    self._guard.watch("namespaces", name)
                self._network.build()
        except BaseException:
            self._guard.close()
            raise
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._say_who_was_not_throttled()
        if self._load is not None:
            self._load.close()
        if self._listener is not None:
            self._listener.close()
            if self._listener.failure not in (None, error):  # nobody waited to hear of it
                self._say(str(self._listener.failure))
        self._control.lift()
        self._guard.close()
        for member in self._crew.everybody():
            member.close(_REAP_S)
        self._output.finish()
        if self._output.lost:
            self._say(f"{self._output.lost} lines of the workers could not be written")
        for member in self._crew.everybody():
            for pipe in (member.process.stdout, member.process.stderr):
                if pipe is not None and not self._output.copies(pipe):
                    pipe.close()

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast the workers are, or will be once they are throttled."""
        return self._control.speeds

    @property
    def steps(self) -> tuple[int, ...]:
        """How many training steps each worker has begun."""
        return tuple(member.steps for member in self._crew.workers)

    @property
    def server(self) -> "Popen[str] | None":
        """The server's process, once started; None without a server."""
        return None if self._crew.server is None else self._crew.server.process

    def start(
        self,
        arguments: Sequence[str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "list[Popen[str]]":
        """Start a script with its arguments, or `-m` and a module with its, once per worker.

        Args:
            arguments: what would follow `python`.
            stdout: None passes lines on with the worker's number in front; else as in
                `subprocess`, such as PIPE for text that the caller reads. A server's likewise.
            stderr: the same for errors.
            environment: more variables for the workers, and for their server.
        """
        crew = self._crew
        if crew.workers:
            raise OutOfOrder("this lab has started its workers already; make a new one")
        if not arguments:
            raise InvalidSetting("the lab has nothing to run; give the path of a Python file")
        if arguments[0] != "-m":
            check_script(arguments)
        self._warn_of_too_much()
        launching = Launching(
            self._setup, self._network, arguments, stdout, stderr, environment or {}
        )
        if self._setup.mode is not None:
            crew.server = launching.server()
            self._look_after(crew.server, "server", launching)
            crew.server.let_go()
        for worker, speed in enumerate(self.speeds):
            member = launching.worker(worker, speed)
            crew.workers.append(member)
            self._look_after(member, crew.number(worker), launching)
            if self._setup.from_start:
                self._control.throttle(worker, self._throttling)
            member.let_go()  # only now, so that none runs that the guard does not know
        self._listener = Listener(crew.workers, self._prepared, self._control.follow_walk)
        if self._setup.pace is None:  # who is paced sleeps, and needs no share of the cores
            self._load = LoadWatch(crew, self._control, self._say)
        return [member.process for member in crew.workers]

    def wait(self) -> int:
        """Wait until all workers have ended, or some seconds longer than the first that fails.

        Returns 0, or the exit code of that one; leaving the lab ends the others. With a server,
        waits until that has ended, whoever of the workers fails, and returns its exit code.
        """
        order = () if self._listener is None else self._listener.ended
        ending = Ending(
            self._crew, order, check=self._raise_failure, lift=self._control.lift, say=self._say
        )
        server = self._crew.server
        return ending.of_workers() if server is None else ending.of_server(server)

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Change all speeds from now on; a worker that is not throttled yet begins with its new."""
        self._control.set_speeds(speeds)

    def _choose_throttling(self) -> Throttling:
        if self._setup.pace is not None:
            return Paced
        for place in places():
            self._guard.watch("groups", str(place / self._name))
        parent = make_parent(self._name)
        if parent is not None:
            return by_quota(parent)
        self._say(
            "no control group can be made here, so workers are stopped and continued every 20 ms "
            "instead; run as root for exact CPU quotas"
        )
        return DutyCycle

    def _look_after(self, member: Member, name: int | str, launching: Launching) -> None:
        """Have a new process ended with the lab, and its lines passed on if nobody else does."""
        self._guard.watch_worker(member.process.pid)
        if launching.stdout is None and member.process.stdout is not None:
            self._output.pass_on(name, member.process.stdout)
        if launching.stderr is None and member.process.stderr is not None:
            self._output.pass_on(name, member.process.stderr, errors=True)

    def _prepared(self, worker: int) -> None:
        self._control.throttle(worker, self._throttling)
        self._crew.workers[worker].let_go()

    def _raise_failure(self) -> None:
        if self._output.broken:
            raise BrokenPipeError
        if self._listener is not None and self._listener.failure is not None:
            raise self._listener.failure

    def _warn_of_too_much(self) -> None:
        cores, wanted = len(os.sched_getaffinity(0)), sum(self.speeds)
        if self._setup.pace is None and wanted > cores:
            self._say(
                f"the speeds add up to {wanted:g}, but there are {cores} cores, so workers will "
                "be slower than asked for; lower the speeds, or pace the workers"
            )

    def _say_who_was_not_throttled(self) -> None:
        free = [
            str(self._crew.number(worker))
            for worker, member in enumerate(self._crew.workers)
            if member.throttle is None and member.process.poll() is not None
        ]
        why = (
            "no DistributedDataParallel was built; throttle from the start (--from-start) if the "
            "script builds none"
            if self._setup.mode is None
            else "Balancer.prepare did not return there"
        )
        if free:
            self._say(
                f"{'workers' if len(free) > 1 else 'worker'} {', '.join(free)} ended without ever "
                f"having been throttled, since {why}"
            )


def _to_stderr(text: str) -> None:
    with suppress(OSError):  # on a full disk; the workers go on
        sys.stderr.write(f"poise lab: {text}\n")
        sys.stderr.flush()

"""A lab: real workers on one machine that are as unequal as one wants."""

import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from threading import RLock
from types import TracebackType
from typing import Self

from poise.engine.modes import Mode, Sync, mode_of
from poise.environment import for_joining, for_secret, for_server, for_worker
from poise.errors import InvalidSetting, OutOfOrder
from poise.lab.guard import Guard
from poise.lab.leftovers import clear, lab_name, stale_belongings
from poise.lab.listener import Listener
from poise.lab.member import Member, launch
from poise.lab.network import Network, check_privileges, parse_link
from poise.lab.output import Output
from poise.lab.pacing import Pace, parse_pace
from poise.lab.processes import free_port
from poise.lab.quota import make_parent, places
from poise.lab.speeds import checked_speeds, parse_speeds, shown
from poise.lab.throttle import Throttling, by_duty_cycle, by_pace, by_quota
from poise.lab.walk import Walk, read_walk
from poise.script import check_script

_GRACE_S = 5.0
"""How long the others may go on when one has failed, or workers when their server has ended."""
_LOOK_S = 0.05
_REAP_S = 5.0
_FAILED = 1
_SIGNALED = 128
_LOOPBACK = "127.0.0.1"
_numbers = itertools.count()
_ALIKE = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(1024**3),
}
"""What makes equal workers equally fast, unless the user says otherwise. By default glibc's malloc
gives memory back to the system after a step or keeps it, depending on the sizes it has seen; the
page faults of the next step then take a third of a small step's time, on some workers."""


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
        self._speeds = parse_speeds(speeds) if isinstance(speeds, str) else checked_speeds(speeds)
        workers = len(self._speeds)
        self._walk = _walk(walk, workers)
        self._pace = parse_pace(pace) if isinstance(pace, str) else pace
        self._from_start = from_start
        if from_start and self._pace:
            raise InvalidSetting("a paced worker sleeps in training only; leave out from_start")
        self._mode = _served_mode(mode)
        self._say = say or _to_stderr
        self._name = lab_name(next(_numbers))
        self._network = (
            None
            if link is None
            else Network(self._name, parse_link(link, workers), server=self._mode is not None)
        )
        self._members: list[Member] = []
        self._server: Member | None = None
        self._listener: Listener | None = None
        self._output = Output()
        self._lock = RLock()
        self._throttled = 0
        self._throttled_at_s: float | None = None
        """When all workers were throttled."""

    def __enter__(self) -> Self:
        if self._network is not None:
            check_privileges()
        clear(stale_belongings())
        self._guard = Guard()
        try:
            self._throttling = self._choose_throttling()
            if self._network is not None:
                for name in self._network.namespaces:
                    self._guard.watch_namespace(name)
                self._network.build()
        except BaseException:
            self._guard.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._say_who_was_not_throttled()
        if self._listener is not None:
            self._listener.close()
            if self._listener.failure not in (None, error):  # nobody waited to hear of it
                self._say(str(self._listener.failure))
        self._lift()
        self._guard.close()
        for member in self._everybody():
            member.close(_REAP_S)
        self._output.finish()
        for member in self._everybody():
            for pipe in (member.process.stdout, member.process.stderr):
                if pipe is not None and not self._output.copies(pipe):
                    pipe.close()

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast the workers are, or will be once they are throttled."""
        return self._speeds

    @property
    def steps(self) -> tuple[int, ...]:
        """How many training steps each worker has begun."""
        return tuple(member.steps for member in self._members)

    @property
    def server(self) -> "Popen[str] | None":
        """The server's process, once started; None without a server."""
        return None if self._server is None else self._server.process

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
        if self._members:
            raise OutOfOrder("this lab has started its workers already; make a new one")
        if not arguments:
            raise InvalidSetting("the lab has nothing to run; give the path of a Python file")
        if arguments[0] != "-m":
            check_script(arguments)
        self._warn_of_too_much()
        port, workers, more = free_port(), len(self._speeds), dict(environment or {})
        address = f"{_LOOPBACK}:{port}"
        if self._mode is not None:
            if self._network is not None:
                address = f"{self._network.server_host}:{port}"
                more = for_secret(secrets.token_hex(16)) | more
            self._start_server(arguments, address, {**for_server(), **more}, stdout, stderr)
        for worker in range(workers):
            placed = (
                for_worker(worker, workers, port)
                if self._mode is None
                else for_joining(self._number(worker), workers, address)
            )
            self._start(worker, arguments, {**placed, **more}, stdout, stderr)
        self._listener = Listener(self._members, self._prepared, self._follow_walk)
        return [member.process for member in self._members]

    def wait(self) -> int:
        """Wait until all workers have ended, or some seconds longer than the first that fails.

        Returns 0, or the exit code of that one; leaving the lab ends the others. With a server,
        waits until that has ended, whoever of the workers fails, and returns its exit code.
        """
        if self._server is not None:
            return self._wait_for(self._server)
        deadline: float | None = None
        while self._running() and (deadline is None or time.monotonic() < deadline):
            self._raise_failure()
            if deadline is None and self._first_failed() is not None:
                deadline = time.monotonic() + _GRACE_S
                self._lift()  # so that the others can say their own error in time
            time.sleep(_LOOK_S)
        self._raise_failure()
        failed = self._first_failed()
        if failed is None:
            return 0
        code = self._members[failed].process.returncode
        self._say(f"worker {failed} ended first, with {_ending(code)}")
        return _as_exit_code(code)

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Change all speeds from now on; a worker that is not throttled yet begins with its new."""
        if len(speeds) != len(self._speeds):
            raise InvalidSetting(
                f"{len(speeds)} speeds for {len(self._speeds)} workers; give one per worker"
            )
        with self._lock:
            self._speeds = checked_speeds(speeds)
            for member, speed in zip(self._members, self._speeds, strict=False):
                if member.throttle is not None:
                    member.throttle.set_speed(speed)

    def _choose_throttling(self) -> Throttling:
        if self._pace is not None:
            return by_pace
        for place in places():
            self._guard.watch_group(str(place / self._name))
        parent = make_parent(self._name)
        if parent is not None:
            return by_quota(parent)
        self._say(
            "no control group can be made here, so workers are stopped and continued every 20 ms "
            "instead; run as root for exact CPU quotas"
        )
        return by_duty_cycle

    def _start(
        self,
        worker: int,
        arguments: Sequence[str],
        environment: dict[str, str],
        stdout: int | None,
        stderr: int | None,
    ) -> None:
        environment = _ALIKE | environment
        if self._network is not None:
            environment |= self._network.environment()
        member = launch(
            arguments,
            environment,
            inside=() if self._network is None else self._network.inside(worker),
            pace=self._pace,
            speed=self._speeds[worker],
            stdout=stdout,
            stderr=stderr,
        )
        self._members.append(member)
        self._look_after(member, self._number(worker), stdout, stderr)
        if self._from_start:
            self._throttle(worker)
        member.let_go()  # only now, so that none runs that the guard does not know

    def _start_server(
        self,
        arguments: Sequence[str],
        address: str,
        environment: dict[str, str],
        stdout: int | None,
        stderr: int | None,
    ) -> None:
        host, port = address.split(":")
        options = ["--host", host, "--port", port, "--workers", str(len(self._speeds)), "--closed"]
        self._server = launch(
            ["-m", "poise", "serve", *options, "--mode", str(self._mode), "--", *arguments],
            _ALIKE | environment,
            inside=() if self._network is None else self._network.inside(self._network.server),
            pace=None,
            speed=1.0,
            stdout=stdout,
            stderr=stderr,
        )
        self._look_after(self._server, "server", stdout, stderr)
        self._server.let_go()

    def _look_after(
        self, member: Member, name: int | str, stdout: int | None, stderr: int | None
    ) -> None:
        """Have a new process ended with the lab, and its lines passed on if nobody else does."""
        self._guard.watch_worker(member.process.pid)
        if stdout is None and member.process.stdout is not None:
            self._output.pass_on(name, member.process.stdout)
        if stderr is None and member.process.stderr is not None:
            self._output.pass_on(name, member.process.stderr, errors=True)

    def _wait_for(self, server: Member) -> int:
        """Wait until the server has ended, and some seconds for its workers to end as well.

        Returns its exit code; or that of a worker without which the training cannot go on.
        """
        said: set[int] = set()
        deadline: float | None = None
        while server.process.poll() is None:
            self._raise_failure()
            self._say_who_failed(said)
            missing = self._missing()
            if missing is None:
                deadline = None
            elif deadline is None:
                deadline = time.monotonic() + _GRACE_S  # the server may be about to end, too
            elif time.monotonic() > deadline:
                return self._give_up(missing)
            time.sleep(_LOOK_S)
        code = server.process.returncode
        if code:
            self._say(f"the server ended with {_ending(code)}")
        self._lift()  # so that workers can end, or say their own error, in time
        self._wait_for_workers(said, failing=code != 0)
        return _as_exit_code(code)

    def _wait_for_workers(self, said: set[int], *, failing: bool) -> None:
        deadline = time.monotonic() + _GRACE_S
        while self._running() and time.monotonic() < deadline:
            self._raise_failure()
            time.sleep(_LOOK_S)
        self._raise_failure()
        if not failing:
            self._say_who_failed(said)

    def _give_up(self, missing: int) -> int:
        """Return the exit code of a worker without which the server waits forever, and say why."""
        self._say(
            f"worker {self._number(missing)} ended before training started, which takes all "
            f"{len(self._members)}; the rest is ended"
        )
        return _as_exit_code(self._members[missing].process.returncode) or _FAILED

    def _missing(self) -> int | None:
        """Return a worker that has ended and without which training never starts.

        Once it has, the server ends by itself when all workers are lost.
        """
        if any(member.steps for member in self._members):  # training has started
            return None
        ended = (n for n, member in enumerate(self._members) if member.process.poll() is not None)
        return next(ended, None)

    def _say_who_failed(self, said: set[int]) -> None:
        """Say once of each worker that it has failed."""
        for worker, member in enumerate(self._members):
            code = member.process.poll()
            if code and worker not in said:
                said.add(worker)
                self._say(f"worker {self._number(worker)} ended with {_ending(code)}")

    def _number(self, worker: int) -> int:
        """Return what a worker is called: with a server, that is 0."""
        return worker if self._mode is None else worker + 1

    def _everybody(self) -> list[Member]:
        return [*self._members, *(() if self._server is None else (self._server,))]

    def _prepared(self, worker: int) -> None:
        self._throttle(worker)
        self._members[worker].let_go()

    def _throttle(self, worker: int) -> None:
        member = self._members[worker]
        if member.throttle is not None:
            return
        with self._lock, suppress(ProcessLookupError):  # it has ended, which is seen elsewhere
            member.throttle = self._throttling(
                worker, member.process, member.end, self._speeds[worker]
            )
            self._throttled += 1
            if self._throttled == len(self._speeds):
                self._throttled_at_s = time.monotonic()

    def _follow_walk(self) -> float | None:
        """Make the change that is due; return in how many seconds the next one may be."""
        change, self._walk = self._walk.due(self.steps[0], self._elapsed_s())
        if change is not None:
            self.set_speeds(change.speeds)
            self._say(f"speeds are {shown(change.speeds)} from step {self.steps[0]} on")
        if self._walk.next_s is None or self._throttled_at_s is None:
            return None
        return max(0.0, self._walk.next_s - self._elapsed_s())

    def _elapsed_s(self) -> float:
        """Seconds since all workers are throttled; less than 0 before."""
        return -1.0 if self._throttled_at_s is None else time.monotonic() - self._throttled_at_s

    def _running(self) -> bool:
        return any(member.process.poll() is None for member in self._members)

    def _first_failed(self) -> int | None:
        failed = [worker for worker, each in enumerate(self._members) if each.process.poll()]
        order = list(self._listener.ended) if self._listener else []
        return min(failed, key=lambda w: order.index(w) if w in order else len(order), default=None)

    def _raise_failure(self) -> None:
        if self._output.broken:
            raise BrokenPipeError
        if self._listener is not None and self._listener.failure is not None:
            raise self._listener.failure

    def _lift(self) -> None:
        for member in self._members:
            member.lift()

    def _warn_of_too_much(self) -> None:
        cores, wanted = len(os.sched_getaffinity(0)), sum(self._speeds)
        if self._pace is None and wanted > cores:
            self._say(
                f"the speeds add up to {wanted:g}, but there are {cores} cores, so workers will "
                "be slower than asked for; lower the speeds, or pace the workers"
            )

    def _say_who_was_not_throttled(self) -> None:
        free = [
            str(self._number(worker))
            for worker, member in enumerate(self._members)
            if member.throttle is None and member.process.poll() is not None
        ]
        why = (
            "no DistributedDataParallel was built; throttle from the start (--from-start) if the "
            "script builds none"
            if self._mode is None
            else "Balancer.prepare did not return there"
        )
        if free:
            self._say(
                f"{'workers' if len(free) > 1 else 'worker'} {', '.join(free)} ended without ever "
                f"having been throttled, since {why}"
            )


def _walk(walk: Walk | str | Path | None, workers: int) -> Walk:
    if walk is None:
        return Walk()
    if not isinstance(walk, Walk):
        return read_walk(walk, workers)
    for change in walk.changes:
        if len(change.speeds) != workers:
            raise InvalidSetting(
                f"the walk has {len(change.speeds)} speeds for {workers} workers; give one each"
            )
    return walk


def _served_mode(stated: object) -> Mode | None:
    """Return the mode of a training with a server; None: there is none."""
    mode = mode_of(stated)
    if mode_of(str(mode)) != mode:
        raise InvalidSetting(
            f'mode={mode!r} has options, which a lab cannot pass on; use mode="{mode}" here, and '
            "state them in the script"
        )
    return None if isinstance(mode, Sync) else mode


def _as_exit_code(code: int) -> int:
    """Return an exit code, of a shell's kind for a process that a signal ended."""
    return code if code >= 0 else _SIGNALED - code


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"poise lab: {text}\n")
    sys.stderr.flush()

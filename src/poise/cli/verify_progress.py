"""How far the runs of `poise verify` are: shown while they last, and the end of patience."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from poise.cli.worker_messages import Message, receive

LOOK_S = 1.0
"""How often to look while nothing is heard."""
_LINE_S = 15.0
"""How often to say how far it is where there is no terminal."""
_ANSWER_S, _POLL_S = 5.0, 0.1


class StandsStill(Exception):
    """No worker of a run made progress for as long as the patience lasts."""


@dataclass
class Run:
    """One run of the script on some workers, and what was heard of each."""

    title: str
    workers: int
    steps: int
    patience_s: float
    clock: Callable[[], float] = time.monotonic
    begun: dict[int, int] = field(default_factory=dict)
    """Steps that each worker has begun, of those that are prepared."""

    def __post_init__(self) -> None:
        self.began_s = self._heard_s = self.clock()

    def hear(self, worker: int, message: Message) -> None:
        """A worker made progress."""
        self._heard_s = self.clock()
        self.begun[worker] = message.get("begun", 0)

    def look(self) -> None:
        """Raise if all have been silent for too long."""
        if self.clock() - self._heard_s > self.patience_s:
            raise StandsStill

    def progress(self) -> str:
        """Say how far it is: as far as the last of its workers."""
        if len(self.begun) < self.workers:
            return "not prepared yet"
        done = max(0, min(min(self.begun.values()) - 1, self.steps))
        return f"{done} of {self.steps} steps done"

    def stage(self, worker: int) -> str:
        """Say how far one worker is."""
        if worker not in self.begun:
            return "before Balancer.prepare was done"
        begun = self.begun[worker]
        return f"in step {begun - 1}" if begun else "before its first step"


class Display:
    """Shows progress on stderr: a line that changes on a terminal, else a new line now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._clock = clock
        self._said_s = clock()

    def follow(self, run: Run, processes: "Sequence[Popen[str]]") -> None:
        """Wait for a run's processes to end, and show how far they are.

        Raises WorkerEnded if one fails, and StandsStill if all make no progress.
        """
        with self._line() as line:

            def look() -> None:
                self._show(run, line)
                run.look()

            look()
            for worker, message in receive(processes, every_s=LOOK_S, meanwhile=look):
                run.hear(worker, message)
                self._show(run, line)

    @contextmanager
    def _line(self) -> Iterator[Status | None]:
        if not self._console.is_terminal:
            yield None
            return
        with self._console.status("") as status:
            yield status

    def _show(self, run: Run, line: Status | None) -> None:
        text = f"{run.title}: {run.progress()}, {self._clock() - run.began_s:.0f} s"
        if line is not None:
            line.update(escape(text))
        elif self._clock() - self._said_s >= _LINE_S:
            self._said_s = self._clock()
            sys.stderr.write(f"poise verify: {text}\n")
            sys.stderr.flush()


def asked(
    processes: "Sequence[Popen[str]]", signal_number: int, files: Sequence[Path]
) -> list[str]:
    """Have processes write down where they stand; return what each of them wrote in its file.

    One that has not begun to listen is left alone: the signal would end it before it could say so.
    """
    for process, file in zip(processes, files, strict=True):
        if file.exists() and process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal_number)
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline and not all(map(_is_written, files)):
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # for the rest of what the last one writes
    return [file.read_text(errors="replace") if file.exists() else "" for file in files]


def _is_written(file: Path) -> bool:
    return not file.exists() or file.stat().st_size > 0

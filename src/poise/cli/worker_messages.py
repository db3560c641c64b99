"""What worker processes tell the command that started them: JSON objects, one per line."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from subprocess import Popen
from threading import Thread
from typing import Any

from poise.lab.processes import how_ended

Message = dict[str, Any]


class WorkerEnded(Exception):
    """A worker process ended before its work was done."""

    def __init__(self, worker: int, exit_code: int) -> None:
        super().__init__(f"worker {worker} ended with {how_ended(exit_code)}")
        self.worker = worker


def send(**message: Any) -> None:
    """Tell the parent something."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def receive(
    processes: Sequence[Popen[str]],
    *,
    every_s: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Message]]:
    """Yield (worker, message) as they come, until all workers have ended.

    While nothing comes, meanwhile is called every so many seconds. Raises WorkerEnded as soon as
    a worker fails.
    """
    lines: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
    for worker, process in enumerate(processes):
        Thread(target=_read, args=(worker, process, lines), daemon=True).start()
    running = len(processes)
    while running:
        try:
            worker, line = lines.get(timeout=every_s)
        except Empty:
            meanwhile()
            continue
        if line is not None:
            yield worker, json.loads(line)
        elif exit_code := processes[worker].wait():
            raise WorkerEnded(worker, exit_code)
        else:
            running -= 1


def _read(worker: int, process: Popen[str], lines: "SimpleQueue[tuple[int, str | None]]") -> None:
    """Pass on a worker's lines, then None; a thread each, since reading a pipe waits."""
    assert process.stdout is not None
    with suppress(ValueError):  # the pipe is closed here when the command stops early
        for line in process.stdout:
            lines.put((worker, line))
    lines.put((worker, None))

"""Passing on what workers print, line by line, with their numbers in front."""

import sys
from collections.abc import Iterable
from threading import Lock, Thread
from typing import IO

_REST_S = 2.0


class Output:
    """Copies the standard output and errors of workers to those of this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads: list[Thread] = []
        self.broken = False
        """Whether nobody reads our own output any more."""

    def pass_on(self, worker: int, lines: IO[str], *, errors: bool = False) -> None:
        """Copy lines until they end, in a thread of its own."""
        copy = Thread(
            target=self._copy, args=(worker, lines, errors), name="poise-output", daemon=True
        )
        self._threads.append(copy)
        copy.start()

    def finish(self) -> None:
        """Wait for the last lines, unless somebody keeps them open who is not a worker."""
        for thread in self._threads:
            thread.join(_REST_S)

    def _copy(self, worker: int, lines: Iterable[str], errors: bool) -> None:
        for line in lines:
            stream = sys.stderr if errors else sys.stdout
            try:
                with self._lock:
                    stream.write(f"[{worker}] {line}" + ("" if line.endswith("\n") else "\n"))
                    stream.flush()
            except BrokenPipeError:
                self.broken = True

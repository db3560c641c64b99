"""Passing on what workers print, line by line, with their names in front."""

import sys
from collections.abc import Iterable
from threading import Lock, Thread
from typing import IO

_REST_S = 2.0


class Output:
    """Copies the standard output and errors of workers to those of this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._copies: list[tuple[Thread, IO[str]]] = []
        self.broken = False
        """Whether nobody reads our own output any more."""
        self.lost = 0
        """Lines that could not be written."""

    def pass_on(self, name: int | str, lines: IO[str], *, errors: bool = False) -> None:
        """Copy lines until they end, in a thread of its own."""
        copy = Thread(
            target=self._copy, args=(name, lines, errors), name="poise-output", daemon=True
        )
        self._copies.append((copy, lines))
        copy.start()

    def copies(self, lines: IO[str]) -> bool:
        """Whether these lines are passed on, and closed, here."""
        return any(each is lines for _, each in self._copies)

    def finish(self) -> None:
        """Wait for the last lines, unless somebody keeps them open who is not a worker."""
        for thread, lines in self._copies:
            thread.join(_REST_S)
            if not thread.is_alive():
                lines.close()  # to close what is still being read would wait for its end

    def _copy(self, name: int | str, lines: Iterable[str], errors: bool) -> None:
        for line in lines:
            stream = sys.stderr if errors else sys.stdout
            try:
                with self._lock:
                    stream.write(f"[{name}] {line}" + ("" if line.endswith("\n") else "\n"))
                    stream.flush()
            except BrokenPipeError:
                self.broken = True
            except OSError:  # a full disk; a worker whose lines nobody takes would wait for ever
                self.lost += 1

"""The file that a server saves to: complete at any time, whatever the disk does.

A disk that is full, gone or read-only ends no training. What was saved before stays, the next save
is tried as ever, and the end of the training says how old the file is.
"""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from poise.runtime.training import Saved

_log = logging.getLogger("poise")


class SaveFile:
    """Replaces a file by a newer one as a whole, or leaves it as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failures = 0
        """Saves that failed since the last one that did not."""
        self._why = ""

    def write(self, state: Saved) -> None:
        """Save a state, or warn that it could not be saved, the first time only."""
        try:
            self._replace(state)
        except OSError as error:
            self._why = error.strerror or str(error)
            self._failures += 1
            if self._failures == 1:
                _log.warning(
                    "the training cannot be saved to %s: %s; it goes on, saving is tried again, "
                    "and %s",
                    self.path,
                    self._why,
                    self._what_is_there(),
                )
            return
        if self._failures:
            _log.warning("the training is saved to %s again", self.path)
        self._failures = 0

    def close(self) -> None:
        """Say so if the last save failed."""
        if self._failures:
            saves = "save" if self._failures == 1 else f"{self._failures} saves"
            _log.warning(
                "the last %s to %s failed: %s; %s",
                saves,
                self.path,
                self._why,
                self._what_is_there(),
            )

    def _replace(self, state: Saved) -> None:
        """Write a state beside the file, and put it in its place when it is on the disk."""
        beside = self.path.with_name(self.path.name + ".new")
        try:
            with beside.open("wb") as file:
                _save(state, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise

    def _what_is_there(self) -> str:
        try:
            age_s = time.time() - self.path.stat().st_mtime
        except OSError:
            return "there is no earlier save"
        return f"what was saved {max(age_s, 0.0):,.0f} s ago is still there"


def _save(state: Saved, file: BinaryIO) -> None:
    """Save by torch, which reports an error of the disk as one of its own."""
    told = _Told(file)
    try:
        torch.save(state, told)  # type: ignore[arg-type] # all that it needs of a file
    except RuntimeError:
        if told.error is None:
            raise
        raise told.error from None


class _Told:
    """A file that keeps what the disk has said."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()

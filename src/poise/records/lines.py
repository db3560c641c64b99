"""A file that grows by whole lines, whatever the disk does.

Where a line cannot be written it waits in memory, up to a bound, and the file ends with the last
whole line. Nothing is raised: a full disk is no reason to end a training. A file that was removed,
as with its directory, is written again as a whole once that can be done.
"""

import errno
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from itertools import islice
from pathlib import Path

MOST_BYTES = 16 * 2**20
"""Of lines that wait in memory."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Why a file that cannot be made now can perhaps be made later."""
_AGAIN_S = 1.0
"""How long after an attempt that failed the next one is made."""
_AT_ONCE = 2**16
"""Bytes of lines that are written together."""
_log = logging.getLogger("poise")


class LineFile:
    """Lines in a file, or on their way there."""

    def __init__(
        self,
        create: Callable[[], FileIO],
        path: Path,
        *,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the file, or raise OSError unless it is for want of room or descriptors.

        Args:
            create: makes a file that can be read and written, or raises OSError.
            path: its place, to be named until there is a file.
            most_bytes: of lines that wait in memory.
            clock: seconds that only grow.
        """
        self.path = path
        """Where the lines go."""
        self.why = ""
        """What the disk said when it last failed; empty: nothing waits."""
        self._create = create
        self._most_bytes = most_bytes
        self._clock = clock
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._end = 0
        """Where the last whole line ends."""
        self._torn = False
        """Whether half a line follows it."""
        self._failed_s = 0.0
        self._file: FileIO | None = None
        try:
            self._file = self._made()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            self._fail(error)

    def write(self, lines: Sequence[str]) -> bool:
        """Add lines, all or none of them; False: too many wait, and these are not kept."""
        data = [line.encode() + b"\n" for line in lines]
        size = sum(len(each) for each in data)
        if self._held and self._held_bytes + size > self._most_bytes:
            self._try()
            if self._held and self._held_bytes + size > self._most_bytes:
                return False
        self._held.extend(data)
        self._held_bytes += size
        self._try()
        return True

    def close(self) -> list[str]:
        """Try for the last time, and let go of the file; return the lines that are not in it."""
        self._failed_s = -math.inf
        self._try()
        file, self._file, self._create = self._file, None, _closed
        if file is not None:
            if not self._end:  # an empty file is no record
                with suppress(OSError):
                    os.unlink(file.name)
            try:
                _close(file)
            except OSError as error:
                _log.warning("the last lines of %s may be missing: %s", file.name, error.strerror)
        left = [line.decode().rstrip("\n") for line in self._held]
        self._held.clear()
        return left

    def _try(self) -> None:
        """Write what waits, unless that has failed a moment ago."""
        if not self._held or (self.why and self._clock() - self._failed_s < _AGAIN_S):
            return
        try:
            file = self._present()
            while self._held:
                self._put(file)
        except OSError as error:
            self._fail(error)
            return
        if self.why:
            self.why = ""
            _log.warning("%s is written again", self.path)

    def _fail(self, error: OSError) -> None:
        if not self.why:
            _log.warning(
                "%s cannot be written: %s; its lines wait in memory, and training goes on",
                self.path,
                error.strerror or error,
            )
        self.why, self._failed_s = error.strerror or str(error), self._clock()

    def _present(self) -> FileIO:
        """Return the file, which is made, or made again with all that was in it, if need be."""
        if self._file is None:
            self._file = self._made()
        elif not os.fstat(self._file.fileno()).st_nlink:
            self._file = _copied(self._file, self._made())
        return self._file

    def _made(self) -> FileIO:
        file = self._create()
        self.path = Path(file.name)
        return file

    def _put(self, file: FileIO) -> None:
        """Write some of the lines that wait; after an error the file ends with a whole line."""
        lines, size = 0, 0
        for line in self._held:
            if lines and size + len(line) > _AT_ONCE:
                break
            lines, size = lines + 1, size + len(line)
        data = b"".join(islice(self._held, lines))
        if self._torn:
            os.ftruncate(file.fileno(), self._end)
        self._torn = True
        done, error = _write_at(file, data, self._end)
        if error is not None:
            self._let_go(data[: data.rfind(b"\n", 0, done) + 1])
            with suppress(OSError):  # else it is done before the next attempt
                os.ftruncate(file.fileno(), self._end)
                self._torn = False
            raise error
        self._torn = False
        self._let_go(data)

    def _let_go(self, data: bytes) -> None:
        """Forget lines that are in the file."""
        for _ in range(data.count(b"\n")):
            self._held.popleft()
        self._held_bytes -= len(data)
        self._end += len(data)


def _write_at(file: FileIO, data: bytes, place: int) -> tuple[int, OSError | None]:
    """Write bytes to a place; return how many are written, and what the disk said if not all."""
    done = 0
    try:
        while done < len(data):
            done += os.pwrite(file.fileno(), data[done:], place + done)
    except OSError as error:
        return done, error
    return done, None


def _copied(removed: FileIO, new: FileIO) -> FileIO:
    """Return a new file with what is in one that has no name any more, which is closed."""
    end = 0
    try:
        while data := os.pread(removed.fileno(), _AT_ONCE, end):
            done, error = _write_at(new, data, end)
            if error is not None:
                raise error
            end += done
    except OSError:
        with suppress(OSError):
            os.unlink(new.name)
        new.close()
        raise
    removed.close()
    return new


def _closed() -> FileIO:
    raise ValueError("the file is closed")


def _close(file: FileIO) -> None:
    """Close a file; what a disk or a server of files says only then is raised."""
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno != errno.EINVAL:  # not every file can be asked
            raise
    finally:
        file.close()

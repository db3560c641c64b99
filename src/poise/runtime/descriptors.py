"""File descriptors that a process has left, and one that it holds in reserve."""

import errno
import os
from contextlib import suppress

from poise.errors import Disagreement

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Of this process, and of the machine."""
_FOR_A_WORKER = 16
"""The gloo pair takes five; the rest is for others who join at the same moment, and for saves."""


class Reserve:
    """A descriptor that is given up for a moment when there is no other."""

    def __init__(self) -> None:
        self._held: int | None = None
        self.take()

    def take(self) -> None:
        """Hold a descriptor, if there is one."""
        if self._held is None:
            with suppress(OSError):
                self._held = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give(self) -> bool:
        """Let go of it; False: there was none."""
        if self._held is None:
            return False
        os.close(self._held)
        self._held = None
        return True


def check_descriptors() -> None:
    """Raise Disagreement unless there are enough descriptors for one more worker."""
    taken: list[int] = []
    try:
        taken.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(_FOR_A_WORKER))
    except OSError as error:
        raise Disagreement(f"the server cannot take another worker: {why_full(error)}") from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


def why_full(error: OSError) -> str:
    """Say what is short on the server, and what to do about it.

    >>> why_full(OSError(errno.EMFILE, "Too many open files"))
    'Too many open files; raise its limit (ulimit -n), or let other workers leave'
    """
    reason = error.strerror or str(error)
    if error.errno in OUT_OF_DESCRIPTORS:
        return f"{reason}; raise its limit (ulimit -n), or let other workers leave"
    return reason

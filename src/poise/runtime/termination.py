"""SIGTERM, heard by a thread: launchers send it to all workers when one of them fails.

Python runs a signal's handler on the main thread, which may wait in torch for a worker that is
gone. So the interpreter is asked to write the signal's number to a socket, too, which it does at
once, and whoever reads there may say a last word before the process ends as it would have.
"""

import ctypes
import os
import signal
import socket
import threading
from contextlib import suppress
from weakref import WeakSet

SIGNAL = signal.SIGTERM


_known: "WeakSet[Termination]" = WeakSet()
_watching: list[bool] = []


class Termination:
    """This process's way to hear of SIGTERM, unless the script has one of its own."""

    def __init__(self, written_to: socket.socket) -> None:
        """Have the number of a signal written to a socket; it must not block."""
        self._installed = False
        self._over = False
        self._written_to = written_to
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
            return  # the script's own handler counts, and that of another training
        others = signal.set_wakeup_fd(written_to.fileno(), warn_on_full_buffer=False)
        if others != -1:  # an event loop's
            signal.set_wakeup_fd(others)
            return
        signal.signal(SIGNAL, self._handle)
        self._installed = True
        _known.add(self)
        if not _watching:
            _watching.append(True)
            os.register_at_fork(
                before=_hold_back, after_in_parent=_let_through, after_in_child=_release_all
            )

    @property
    def counts(self) -> bool:
        """Whether the signal is still ours: a script may have taken it over since."""
        return self._installed and signal.getsignal(SIGNAL) == self._handle

    def release(self) -> None:
        """Leave the signal to the system again."""
        self._over = True
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        with suppress(ValueError):
            others = signal.set_wakeup_fd(-1)
            if others not in (-1, self._written_to.fileno()):  # an event loop's, set since
                signal.set_wakeup_fd(others)
        if signal.getsignal(SIGNAL) == self._handle:
            signal.signal(SIGNAL, signal.SIG_DFL)

    def _handle(self, number: int, frame: object) -> None:
        """Leave it to the thread that reads from the socket, as long as there is one."""
        if self._over:
            end_by_signal()
        with suppress(OSError):  # an event loop may have the interpreter write elsewhere
            self._written_to.send(bytes([number]))


_forking = threading.local()
"""Which signals the thread that forks had held back before."""


def _hold_back() -> None:
    """Before a fork: a signal that comes to the child at once must not reach its parent."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _release_all() -> None:
    """In a process that was just forked: its signals are its own, and not its parent's."""
    for each in list(_known):
        each.release()
    _let_through()


def end_by_signal() -> None:
    """End this process as SIGTERM does; may be called from any thread."""
    # signal.signal is for the main thread only, which may be waiting.
    ctypes.CDLL(None).signal(int(SIGNAL), 0)
    os.kill(os.getpid(), SIGNAL)

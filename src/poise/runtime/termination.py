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

SIGNAL = signal.SIGTERM


class Termination:
    """This process's way to hear of SIGTERM, unless the script has one of its own."""

    def __init__(self, written_to: socket.socket) -> None:
        """Have the number of a signal written to a socket; it must not block."""
        self._installed = False
        self._over = False
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

    def release(self) -> None:
        """Leave the signal to the system again."""
        self._over = True
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
        if signal.getsignal(SIGNAL) == self._handle:
            signal.signal(SIGNAL, signal.SIG_DFL)

    def _handle(self, number: int, frame: object) -> None:
        """Leave it to the thread that reads from the socket, as long as there is one."""
        if self._over:
            end_by_signal()


def end_by_signal() -> None:
    """End this process as SIGTERM does; may be called from any thread."""
    # signal.signal is for the main thread only, which may be waiting.
    ctypes.CDLL(None).signal(int(SIGNAL), 0)
    os.kill(os.getpid(), SIGNAL)

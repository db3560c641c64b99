"""What a worker and its lab tell each other over a socket."""

import os
import signal
import socket
from contextlib import suppress

from poise.lab.pacing import Pacer

GO = b"go\n"
PREPARED = b"p"
STEP = b"s"


class Line:
    """The worker's end of the socket between it and the lab."""

    def __init__(self, end: socket.socket, pacer: Pacer | None = None) -> None:
        self._end = end
        self._pacer = pacer
        self._heard = b""
        self._may_go = False

    def await_go(self) -> bool:
        """Wait until the lab lets us go on; False if there is no lab any more."""
        while not self._may_go:
            if not self._listen():
                return False
        self._may_go = False
        return True

    def prepared(self) -> None:
        """Tell that training is prepared, and wait until we are throttled."""
        self._tell(PREPARED)
        self.await_go()

    def step(self) -> None:
        """Tell of a step, and hear whether our speed changes."""
        self._tell(STEP)
        if self._pacer is not None:
            with suppress(BlockingIOError):
                self._listen(socket.MSG_DONTWAIT)

    def _listen(self, flags: int = 0) -> bool:
        """Do what the lab says, in whole lines: to go on, or to have a speed."""
        piece = self._end.recv(4096, flags)
        *lines, self._heard = (self._heard + piece).split(b"\n")
        for line in lines:
            if line + b"\n" == GO:
                self._may_go = True
            elif self._pacer is not None:
                self._pacer.speed = float(line)
        return bool(piece)

    def _tell(self, what: bytes) -> None:
        try:
            self._end.send(what, socket.MSG_DONTWAIT)
        except BlockingIOError:  # the lab does not listen at the moment; training goes on
            pass
        except OSError:  # the lab is gone, and so is its guard or it would have ended us
            os.kill(os.getpid(), signal.SIGTERM)

"""The guard of a lab: a process that cleans up when the lab ends, however it ends.

It holds the reading end of a pipe; the writing end has the lab alone. The lab names whatever it
makes outside of itself over this pipe, groups and namespaces before they are made. When the pipe
ends, so has the lab, and the guard removes all that was named, and ends.
"""

import json
import os
import subprocess
import sys

from poise.errors import WorkerLost
from poise.lab.leftovers import Belongings, clear, start_time

_CLEARING_S = 30.0


class Guard:
    """Starts the guard and tells it what there is to clean up."""

    def __init__(self) -> None:
        self._belongings = Belongings()
        reading, self._writing = os.pipe()  # neither is inherited unless it is passed on
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "poise.lab.guard_process", str(reading), str(os.getpid())],
            pass_fds=(reading,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reading)

    def watch_worker(self, pid: int) -> None:
        """Have a process and its session ended."""
        start = start_time(pid)
        if start is not None:
            self.watch("workers", (pid, start))

    def watch(self, kind: str, value: object) -> None:
        """Have one thing cleaned up; its kind is the name of a field of `Belongings`."""
        self._belongings.add(kind, value)
        try:
            os.write(self._writing, json.dumps([kind, value]).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerLost(
                "the process that cleans up after the lab has ended, so nothing more can be "
                "started; start the lab again"
            ) from None

    def close(self) -> None:
        """Have everything cleaned up, and wait for it."""
        if self._writing < 0:
            return
        os.close(self._writing)
        self._writing = -1
        try:
            code = self._process.wait(_CLEARING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code < 0:  # somebody ended it before it was done
            clear(self._belongings)

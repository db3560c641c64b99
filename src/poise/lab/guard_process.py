"""What the guard of a lab does: `python -m poise.lab.guard_process PIPE LAB`."""

import json
import os
import select
import signal
import sys
from contextlib import suppress

from poise.lab.leftovers import Belongings, clear

_LOOK_S = 1.0


def main(reading: int, lab: int) -> int:
    """Wait until the lab has ended, then clean up."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    belongings = Belongings()
    for line in _all_of(reading, lab).splitlines():
        belongings.add(*json.loads(line))
    failures = clear(belongings)
    for failure in failures:
        with suppress(OSError):
            sys.stderr.write(f"poise lab: could not remove {failure}\n")
    return 1 if failures else 0


def _all_of(pipe: int, lab: int) -> bytes:
    """Read until the pipe ends; or the lab, should a process forked from it hold the pipe open."""
    heard = b""
    while True:
        gone = os.getppid() != lab
        if select.select([pipe], [], [], 0 if gone else _LOOK_S)[0]:
            piece = os.read(pipe, 65536)
            heard += piece
            if not piece:
                return heard
        elif gone:
            return heard


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

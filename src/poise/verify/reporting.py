"""What a run under observation tells the command that waits for it: how far it is, and where.

Each sign of progress is a line of JSON on the pipe to the parent. Where a process stands it cannot
say itself while it is stuck: a signal makes Python write its stack to a file.
"""

import faulthandler
import json
import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from poise.runtime.events import Events, HandedOut, Prepared
from poise.verify.observation import Variant

ASK = signal.SIGUSR1
"""Has a process write down where it stands."""
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>\S+)')


class Reporting:
    """Tells the parent of every step that begins."""

    def __init__(self, pipe: int) -> None:
        """Tell it on the pipe of this number."""
        self._pipe = pipe
        self._begun = 0

    def listen(self, events: Events) -> None:
        """Hear of trainings."""
        events.on(Prepared, lambda _: self._tell(prepared=True))
        events.on(HandedOut, self._handed_out)

    def _handed_out(self, _: HandedOut) -> None:
        self._begun += 1
        self._tell(begun=self._begun)

    def _tell(self, **facts: Any) -> None:
        with suppress(BrokenPipeError):  # the command has ended, and ends us
            os.write(self._pipe, (json.dumps(facts) + "\n").encode())


def stack_file(directory: Path, variant: Variant, worker: int) -> Path:
    """Where a worker writes where it stands, when it is asked."""
    return directory / f"{variant}-{worker}.stack"


def answer_when_asked(path: Path) -> None:
    """Have this process write its stacks to a file when it gets the signal."""
    faulthandler.register(ASK, file=path.open("w"), all_threads=True)


def place(stacks: str, script: str) -> str:
    """Say where a script stands, by the stacks that Python wrote: the innermost line of its own.

    >>> place('''Current thread 0x1 (most recent call first):
    ...   File "/lib/socket.py", line 9 in recv
    ...   File "/me/train.py", line 31 in fetch
    ...   File "/me/train.py", line 40 in <module>''', "train.py")
    'at train.py line 31 in fetch (socket.py line 9 in recv)'
    """
    threads = [_frames(text) for text in re.split(r"(?:Current thread|Thread) 0x", stacks)]
    name = Path(script).name
    for frames in threads:
        for file, line, function in frames:
            if Path(file).name == name:
                inner_file, inner_line, inner = frames[0]
                where = f"at {name} line {line} in {function}"
                if frames[0] == (file, line, function):
                    return where
                return f"{where} ({Path(inner_file).name} line {inner_line} in {inner})"
    return "outside of the script's own lines" if any(threads) else "it does not say where"


def _frames(text: str) -> Sequence[tuple[str, str, str]]:
    """Return the frames of a stack, the innermost first."""
    return [(each["file"], each["line"], each["function"]) for each in _FRAME.finditer(text)]

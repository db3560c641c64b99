"""One worker of a lab: `python -m poise.lab.worker SOCKET PACE SPEED SCRIPT ARGS...`.

Runs the script (or `-m MODULE`) as `python SCRIPT ARGS...` would, and tells the lab over a socket
when training is prepared, which is when the first DistributedDataParallel is built, and of every
step. PACE is `-` or the seconds per sample and fixed seconds, with a comma.
"""

import functools
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from poise.lab.line import Line, set_line
from poise.lab.pacing import Pacer
from poise.script import own_frames, run


def watch_training(line: Line, pacer: Pacer | None) -> None:
    """Have the line told of the first DistributedDataParallel and of the steps of all."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    build: Any = DistributedDataParallel.__init__
    forward: Any = DistributedDataParallel.forward
    built = False

    @functools.wraps(build)
    def watched_build(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal built
        build(self, *args, **kwargs)
        if pacer is not None:
            pacer.attach(self)
        if not built:
            built = True
            line.prepared()

    @functools.wraps(forward)
    def watched_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            line.step()
        return forward(self, *args, **kwargs)

    setattr(DistributedDataParallel, "__init__", watched_build)  # noqa: B010 (mypy forbids =)
    setattr(DistributedDataParallel, "forward", watched_forward)  # noqa: B010 (the same)


def main(arguments: Sequence[str]) -> None:
    """Run one worker."""
    number, pace, speed, *script = arguments
    end = socket.socket(fileno=int(number))
    end.set_inheritable(False)
    pacer = None if pace == "-" else _pacer(pace, float(speed))
    line = Line(end, pacer)
    if not line.await_go():
        return
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # both are text files
    _show_own_frames_only()  # before torch keeps the hook that it finds
    set_line(line)
    if find_spec("torch") is not None:
        watch_training(line, pacer)
    run(script)


def _show_own_frames_only() -> None:
    """Show an error of the script as if it had been run by itself."""
    show = sys.excepthook

    def shortened(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        own = own_frames(trace)
        show(kind, error.with_traceback(own), own)

    sys.excepthook = shortened


def _pacer(pace: str, speed: float) -> Pacer:
    per_sample_s, fixed_s = map(float, pace.split(","))
    return Pacer(per_sample_s, fixed_s, speed)


if __name__ == "__main__":
    main(sys.argv[1:])

"""One worker of a lab: `python -m poise.lab.worker SOCKET PACE SPEED SCRIPT ARGS...`.

Runs the script (or `-m MODULE`) as `python SCRIPT ARGS...` would, and tells the lab over a socket
when training is prepared, which is when the first DistributedDataParallel is built, and of every
step. PACE is `-` or the seconds per sample and fixed seconds, with a comma.
"""

import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from poise.lab.line import Line
from poise.lab.pacing import Pacer
from poise.patching import Patch, followed, patched, preceded
from poise.runtime.events import Events, HandedOut, Prepared
from poise.runtime.instruments import Instrument, instrumented
from poise.script import own_frames, run


class TrainingWatch:
    """Has the line told when training is prepared, and of its steps.

    Training is prepared when the first DistributedDataParallel is built. With a server there is
    none: then a Balancer tells.
    """

    def __init__(self, line: Line, pacer: Pacer | None) -> None:
        self._line = line
        self._pacer = pacer
        self._built = False

    def patches(self) -> list[Patch]:
        """Return what shows every DistributedDataParallel of this process."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        def called(ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
            if ddp.training and torch.is_grad_enabled():
                self._line.step()

        return [
            Patch(DistributedDataParallel, "__init__", followed(self._built_ddp)),
            Patch(DistributedDataParallel, "forward", preceded(called)),
        ]

    def listen(self, events: Events) -> None:
        """Hear of trainings without DistributedDataParallel."""
        events.on(Prepared, self._prepared)
        events.on(HandedOut, self._handed_out)

    def _built_ddp(self, ddp: Any, *_: Any, **__: Any) -> None:
        self._pace([ddp])
        if not self._built:
            self._built = True
            self._line.prepared()

    def _prepared(self, event: Prepared) -> None:
        if not self._built and event.models:  # a server computes nothing, and is not throttled
            self._pace(event.models)
            self._line.prepared()

    def _pace(self, models: Sequence[Any]) -> None:
        if self._pacer is not None:
            for model in models:
                self._pacer.attach(model)

    def _handed_out(self, _: HandedOut) -> None:
        if not self._built:
            self._line.step()


def main(arguments: Sequence[str]) -> None:
    """Run one worker."""
    number, pace, speed, *script = arguments
    end = socket.socket(fileno=int(number))
    end.set_inheritable(False)
    pacer = None if pace == "-" else Pacer(*map(float, (*pace.split(","), speed)))
    line = Line(end, pacer)
    if not line.await_go():
        return
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # both are text files
    _show_own_frames_only()  # before torch keeps the hook that it finds
    watch = TrainingWatch(line, pacer)
    patches = watch.patches() if find_spec("torch") is not None else []
    with patched(patches), instrumented(Instrument(listen=watch.listen)):
        run(script)


def _show_own_frames_only() -> None:
    """Show an error of the script as if it had been run by itself.

    It is not caught: a Balancer learns from Python how the script ended.
    """
    show = sys.excepthook

    def shortened(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        own = own_frames(trace)
        show(kind, error.with_traceback(own), own)

    sys.excepthook = shortened


if __name__ == "__main__":
    main(sys.argv[1:])

"""What each worker does for `poise doctor`: look at itself, and time the all-reduce with others.

As a program, `python -m poise.cli.doctor_worker`, it is one of the local processes that stand in
for workers when no launcher started any.
"""

import json
import os
import platform
import socket
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from poise import __version__, environment
from poise.cli.doctor_facts import Examination, Facts
from poise.cli.worker_messages import send
from poise.core.plain import from_plain, to_json, to_plain
from poise.errors import InvalidSetting
from poise.runtime.clocks import Waits
from poise.runtime.events import Begun, Events, Prepared, Preparing
from poise.runtime.instruments import Instrument, instrumented
from poise.runtime.peers import Peers
from poise.script import check_script, run
from poise.torch.groups import Groups

_HANG_S = 60.0
_WARM_UPS = 2
_REPEATS = {4_000: 21, 64_000: 21, 1_000_000: 9, 16_000_000: 5}
"""How often to time an all-reduce, by its bytes; the same on all workers."""


def examine_group() -> Examination | None:
    """Join the launcher's group, or be alone, and examine it. None except on worker 0."""
    device = _chosen_device()
    groups = Groups(_HANG_S)
    peers = Peers(groups.generation, groups.rendezvous, Events(), Waits(), count=None)
    group = groups.gradients(peers.control.texts(device.type, "doctor"))
    peers.generation = replace(peers.generation, gradients=group)
    examination = examine(peers, device)
    peers.liveness.finish()
    peers.leave(groups.leave)
    return examination


def examine_script(script: Sequence[str]) -> Examination | None:
    """Run a script, given with its arguments, up to prepare. None except on worker 0."""
    check_script(script)
    stop = _Stop()
    with instrumented(Instrument(listen=stop.listen)), stop.catching:
        try:
            run(script)
            ending = "ended"
        except _Prepared as prepared:
            return prepared.examination
        except SystemExit as left:
            ending = f"called sys.exit({'' if left.code is None else repr(left.code)})"
        finally:
            if dist.is_initialized():  # the script's own group, which it can no longer destroy
                dist.destroy_process_group()
    raise InvalidSetting(
        f"{script[0]} {ending} without calling Balancer.prepare, where doctor looks at the "
        "loader; give a script, and arguments, that train with a Balancer"
    )


def examine(
    peers: Peers, device: torch.device, lead: int | None = None, warned: Sequence[str] = ()
) -> Examination | None:
    """Examine a group that exists; all workers call it together. None except on worker 0.

    Args:
        peers: the workers.
        device: where this one computes.
        lead: how many steps its loader runs ahead, if it has one.
        warned: what its script was warned of.
    """
    group = peers.generation.gradients
    repeats = _REPEATS if peers.generation.workers > 1 else {}
    timings = {size: _all_reduce_s(group, device, size, repeats[size]) for size in repeats}
    time_s = time.time()  # all are here at the same moment, since the last all-reduce is over
    own = Facts(
        worker=peers.generation.worker,
        host=socket.gethostname(),
        versions={
            "Python": platform.python_version(),
            "Poise": __version__,
            "NumPy": np.__version__,
            "torch": torch.__version__,
        },
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        openmp_threads=environment.openmp_threads(),
        local_workers=environment.local_workers(),
        accelerators=_accelerators(),
        lead=lead,
        warnings=tuple(warned),
        time_s=time_s,
    )
    texts = peers.control.texts(to_json(own), "doctor")
    if peers.generation.worker != 0:
        return None
    everyone = tuple(from_plain(Facts, json.loads(text)) for text in texts)
    return Examination(everyone, str(dist.get_backend(group)), timings)


def main() -> None:
    """Take part in an all-reduce; worker 0 tells the parent how long it took."""
    examination = examine_group()
    if examination is not None:
        send(**to_plain(examination))


def _accelerators() -> str:
    kind = torch.accelerator.current_accelerator(check_available=True)
    return "none" if kind is None else f"{torch.accelerator.device_count()} x {kind.type}"


def _chosen_device() -> torch.device:
    """Give each worker of a machine an accelerator of its own, as a training script does."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    launch = environment.launched_as()
    if kind is None:
        return torch.device("cpu")
    if launch is not None:
        torch.accelerator.set_device_index(launch.worker % torch.accelerator.device_count())
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _all_reduce_s(
    group: dist.ProcessGroup, device: torch.device, size_bytes: int, repeats: int
) -> float:
    """Return the median time of an all-reduce."""
    tensor = torch.zeros(size_bytes // 4, device=device)
    times_s = []
    for _ in range(_WARM_UPS + repeats):
        start_s = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return median(times_s[_WARM_UPS:])


class _Prepared(BaseException):
    """Leaves the script; no `except Exception` of the script catches it."""

    def __init__(self, examination: Examination | None) -> None:
        super().__init__("poise doctor has seen enough")
        self.examination = examination


class _Stop:
    """Lets Balancer.prepare do its work, examines the group, and leaves the script."""

    def __init__(self) -> None:
        self.catching = ExitStack()
        """Ends the catching of warnings."""
        self._caught: list[warnings.WarningMessage] = []

    def listen(self, events: Events) -> None:
        """Hear of a training."""
        made: list[Any] = []
        events.on(Begun, lambda event: made.append(event.balancer))
        events.on(Preparing, self._preparing)
        events.on(Prepared, lambda event: self._prepared(event, made[0]))

    def _preparing(self, _: Preparing) -> None:
        catching = warnings.catch_warnings(record=True)
        self._caught = self.catching.enter_context(catching) or []
        warnings.simplefilter("always")

    def _prepared(self, event: Prepared, balancer: Any) -> None:
        self.catching.close()
        if event.peers is None:
            raise InvalidSetting(
                "doctor looks at workers that train together, and this script trains with a "
                'server; run it with mode="sync", without POISE_SERVER'
            )
        texts = [str(warning.message) for warning in self._caught]
        device = next(event.models[0].parameters()).device
        examination = examine(event.peers, device, event.lead, texts)
        balancer.close()
        raise _Prepared(examination)


if __name__ == "__main__":
    main()

"""What each worker does for `poise doctor`: look at itself, and time the all-reduce with others.

As a program, `python -m poise.cli.doctor_worker`, it is one of the local processes that stand in
for workers when no launcher started any.
"""

import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import astuple
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from poise import __version__, environment
from poise.cli.doctor_facts import Examination, Facts, Timing
from poise.cli.worker_messages import send
from poise.torch.cluster import Cluster

_HANG_S = 60.0
_WARM_UPS = 2
_REPEATS = {4_000: 21, 64_000: 21, 1_000_000: 9, 16_000_000: 5}
"""How often to time an all-reduce, by its bytes; the same on all workers."""


def examine_group() -> Examination | None:
    """Join the launcher's group, or be alone, and examine it. None except on worker 0."""
    _choose_accelerator()
    cluster = Cluster.join(_HANG_S)
    examination = examine(cluster)
    cluster.leave()
    return examination


def examine(
    cluster: Cluster, lead: int | None = None, warnings: Sequence[str] = ()
) -> Examination | None:
    """Examine a group that exists; all workers call it together. None except on worker 0."""
    timings = _time_all_reduces(cluster) if cluster.workers > 1 else []
    everyone = _gather(cluster, _facts(cluster.worker, lead, warnings))
    if cluster.worker != 0:
        return None
    return Examination(everyone, str(dist.get_backend(cluster.gradients)), timings)


def main() -> None:
    """Take part in an all-reduce; worker 0 tells the parent how long it took."""
    examination = examine_group()
    if examination is not None:
        timings = [astuple(timing) for timing in examination.timings]
        send(backend=examination.backend, timings=timings)


def _facts(worker: int, lead: int | None, warnings: Sequence[str]) -> Facts:
    return Facts(
        worker=worker,
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
        warnings=tuple(warnings),
    )


def _accelerators() -> str:
    kind = torch.accelerator.current_accelerator(check_available=True)
    return "none" if kind is None else f"{torch.accelerator.device_count()} x {kind.type}"


def _choose_accelerator() -> None:
    """Give each worker of a machine an accelerator of its own, as a training script does."""
    launch = environment.launched_as()
    if launch is not None and torch.accelerator.is_available():
        torch.accelerator.set_device_index(launch.worker % torch.accelerator.device_count())


def _gather(cluster: Cluster, own: Facts) -> list[Facts]:
    """Return everyone's facts on worker 0, and nothing on the others; text through the store."""
    store, everyone = cluster.store, range(cluster.workers)
    store.set(f"doctor/facts/{cluster.worker}", own.to_json())
    # Nobody goes on, and closes its connections, while others may still be in the all-reduce.
    store.wait([f"doctor/facts/{worker}" for worker in everyone])
    store.set(f"doctor/left/{cluster.worker}", "yes")
    if cluster.worker != 0:
        return []
    store.wait([f"doctor/left/{worker}" for worker in everyone])  # worker 0 may host the store
    return [Facts.from_json(store.get(f"doctor/facts/{worker}")) for worker in everyone]


def _time_all_reduces(cluster: Cluster) -> list[Timing]:
    device = torch.accelerator.current_accelerator() if cluster.on_accelerator else None
    return [
        Timing(size_bytes, _median_s(cluster, torch.zeros(size_bytes // 4, device=device), repeats))
        for size_bytes, repeats in _REPEATS.items()
    ]


def _median_s(cluster: Cluster, tensor: torch.Tensor, repeats: int) -> float:
    for _ in range(_WARM_UPS):
        _all_reduce_s(cluster, tensor)
    return median(_all_reduce_s(cluster, tensor) for _ in range(repeats))


def _all_reduce_s(cluster: Cluster, tensor: torch.Tensor) -> float:
    start_s = time.perf_counter()
    dist.all_reduce(tensor, group=cluster.gradients)
    if cluster.on_accelerator:
        torch.accelerator.synchronize()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()

"""Run a function in worker processes of one gloo group on loopback, and leave none behind."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

_GRACE_S = 5.0


class WorkerFailed(RuntimeError):
    """A worker ended without a result, or not in time."""


def run_workers(
    function: Callable[..., Any], *args: Any, workers: int, limit_s: float
) -> list[Any]:
    """Return what function(*args) returns on each worker of a new group, in order of workers.

    Each worker has one torch thread. Standard output belongs to the caller: what workers print
    goes to standard error.
    """
    # A server that has imported torch once forks the workers: seconds less for each of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.utils.data"])
    port = free_port()
    processes: list[BaseProcess] = []
    results: list[Connection] = []
    try:
        for worker in range(workers):
            receiver, sender = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_work, args=(sender, (worker, workers, port), function, args), daemon=True
            )
            process.start()
            sender.close()  # so that the end of the worker closes the pipe
            processes.append(process)
            results.append(receiver)
        return _collect(results, limit_s)
    finally:
        for process in processes:
            _end(process)
        for receiver in results:
            receiver.close()


def end_on_sigterm() -> None:
    """Make SIGTERM unwind this process like an exception, so that it ends its workers."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python passes both
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def free_port() -> int:
    """Return a port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _collect(results: list[Connection], limit_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    while len(found) < len(results):
        pending = [pipe for worker, pipe in enumerate(results) if worker not in found]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerFailed(f"the workers gave no result within {limit_s:.0f} s")
        for worker, pipe in enumerate(results):
            if pipe in ready:
                try:
                    found[worker] = pipe.recv()
                except EOFError:
                    raise WorkerFailed(
                        f"worker {worker} ended without a result; its error is above"
                    ) from None
    return [found[worker] for worker in range(len(results))]


def _end(process: BaseProcess) -> None:
    """Let a worker that has sent its result leave by itself; end one that does not."""
    process.join(_GRACE_S if process.exitcode is None and sys.exc_info()[0] is None else 0)
    if process.is_alive():
        process.terminate()
        process.join(_GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()


def _work(
    sender: Connection,
    place: tuple[int, int, int],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    worker, workers, port = place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=worker, world_size=workers
    )
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    with suppress(BrokenPipeError):  # the parent failed meanwhile, and says so itself
        sender.send(result)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)

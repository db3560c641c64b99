"""Real worker processes for tests: started once, used by many cases.

Importing torch costs seconds, so four processes stay alive for the whole run, and one that a case
has ended is forked anew from a process that has imported it and does nothing else. Each case is a
module-level function that runs on the first n of them, placed in one group by the variables that
torchrun sets. After each case every worker looks for what the case left behind.
"""

import contextlib
import gc
import io
import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from poise.lab.processes import free_port
from tests.leaks import belongings, leaks_since

CASE_LIMIT_S = 120.0
_START_LIMIT_S = 120.0
_HEAD_START_S = 0.03
"""Of worker 0, whose store takes half a second longer for those that come before it listens."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a named worker and step."""

    worker: int
    step: int
    kind: Literal["raise", "kill", "hang", "exit"]

    def strike(self, worker: int, step: int) -> None:
        """Call it in every step; it strikes at its own."""
        if (worker, step) != (self.worker, self.step):
            return
        if self.kind == "raise":
            raise ValueError("injected fault")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            os._exit(3)
        time.sleep(3600)


@dataclass(frozen=True)
class Outcome:
    """How a case ended on one worker."""

    value: Any = None
    error: str = ""
    """Type and message of the exception, or how the process ended."""
    trace: str = ""
    stderr: str = ""
    leaks: tuple[str, ...] = ()
    seconds: float = 0.0


class Workers:
    """Long-lived worker processes."""

    def __init__(self, size: int = 4) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch._dynamo", "poise.torch"])
        self._size = size
        self._processes: list[Any] = [None] * size
        self._pipes: list[Connection | None] = [None] * size

    def run(self, case: Callable[..., Any], *args: Any, workers: int = 4) -> list[Any]:
        """Run case(*args) on that many workers together; return what each returned."""
        outcomes = self.attempt(case, *args, workers=workers)
        for worker, outcome in enumerate(outcomes):
            if outcome.error:
                raise AssertionError(f"worker {worker}: {outcome.error}\n{outcome.trace}")
        return [outcome.value for outcome in outcomes]

    def attempt(
        self,
        case: Callable[..., Any],
        *args: Any,
        workers: int = 4,
        hanging: int | None = None,
    ) -> list[Outcome]:
        """Run a case that may fail; leaks fail the test in any case.

        A worker that is expected to hang is not waited for.
        """
        self._start(workers)
        port = free_port()
        pipes = [pipe for pipe in self._pipes[:workers] if pipe is not None]
        for worker, pipe in enumerate(pipes):
            pipe.send((case, args, worker, workers, port))
        outcomes = self._collect(pipes, hanging)
        for worker, outcome in enumerate(outcomes):
            assert not outcome.leaks, f"worker {worker} leaks {outcome.leaks}"
        return outcomes

    def process_ids(self) -> list[int]:
        """Processes that run now, and the one that forks them."""
        ours = [process.pid for process in self._processes if process is not None]
        forking = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        return ours if forking is None else [*ours, forking]

    def close(self) -> None:
        """End every worker."""
        for worker in range(self._size):
            self._end(worker)

    def _start(self, workers: int) -> None:
        fresh = []
        for worker in range(workers):
            if self._processes[worker] is None:
                ours, theirs = self._context.Pipe()
                process = self._context.Process(target=_serve, args=(theirs,), name=f"w{worker}")
                process.start()
                theirs.close()
                self._processes[worker], self._pipes[worker] = process, ours
                fresh.append(ours)
        for pipe in fresh:
            assert pipe.poll(_START_LIMIT_S), "a worker did not start"
            pipe.recv()

    def _collect(self, pipes: list[Connection], hanging: int | None) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        if hanging is not None:
            outcomes[hanging] = Outcome(error="hangs")
        deadline = time.monotonic() + CASE_LIMIT_S
        while len(outcomes) < len(pipes):
            open_pipes = [p for i, p in enumerate(pipes) if i not in outcomes]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for worker in range(len(pipes)):
                    if worker not in outcomes:
                        outcomes[worker] = Outcome(error="no answer within the limit of a case")
            for pipe in ready:
                worker = pipes.index(pipe)  # type: ignore[arg-type]
                outcomes[worker] = self._receive(worker, pipe)  # type: ignore[arg-type]
        for worker, outcome in outcomes.items():
            if outcome.error or outcome.leaks:  # its state is not to be trusted any more
                self._end(worker)
        return [outcomes[worker] for worker in range(len(pipes))]

    def _receive(self, worker: int, pipe: Connection) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[worker].join()
            return Outcome(error=f"process ended with {self._processes[worker].exitcode}")
        return outcome

    def _end(self, worker: int) -> None:
        process, pipe = self._processes[worker], self._pipes[worker]
        if process is None or pipe is None:
            return
        pipe.close()
        process.kill()
        process.join()
        self._processes[worker] = self._pipes[worker] = None


def _serve(pipe: Connection) -> None:
    """Run cases until the pipe closes."""
    import torch

    mp.set_start_method("fork", force=True)  # a loader process that is spawned imports torch anew
    torch.set_num_threads(1)
    gc.freeze()  # each end of a training collects garbage, and need not look through all of torch
    pipe.send("ready")
    while True:
        try:
            case, args, worker, workers, port = pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        outcome = _play(case, args, worker, workers, port)
        # Pickled here: a pipe's own pickler would pass tensors as shared memory.
        pipe.send_bytes(pickle.dumps(outcome))
        if outcome.error:
            os._exit(1)  # as a script ends with an error: its connections close


def _play(case: Any, args: Any, worker: int, workers: int, port: int) -> Outcome:
    import torch

    before = belongings()
    placed = {
        "RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ.update(placed)
    if worker:
        time.sleep(_HEAD_START_S)
    torch.manual_seed(0)
    stderr = io.StringIO()
    start = time.monotonic()
    value, error, trace = None, "", ""
    with contextlib.redirect_stderr(stderr):
        try:
            value = case(*args)
        except BaseException as caught:
            error, trace = f"{type(caught).__name__}: {caught}", traceback.format_exc()
    for name in placed:
        os.environ.pop(name, None)
    leaks = () if error else leaks_since(before)
    return Outcome(value, error, trace, stderr.getvalue(), leaks, time.monotonic() - start)

"""Time inside our own code, taken at its borders: where torch or the user's loop enters it.

Nothing of ours is patched, and no name of ours occurs: our code is known by what it registers with
torch, by what torch's loader asks it for, and by the names of its threads. So the same file
measures any version. A border that our code does not cross any more is an error and not a zero.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

MODEL, LOADER = "call of the model", "loader"
HEARTBEAT = "heartbeat"
LAUNCH = "launch"
"""Launching all-reduces in C++, which plain DDP does too: shown, and not counted as ours."""
WAITING = "waiting"
"""For other workers: shown, and not counted."""
_NOT_OURS = "not ours"
_OUR_THREADS = "poise-"
_NANOSECOND = 1e-9


@dataclass(frozen=True)
class OwnCode:
    """Time inside our code, per step."""

    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    step_wall_s: float
    step_cpu_s: float
    """CPU time of the worker, all its threads."""

    @property
    def own_cpu_s(self) -> float:
        """CPU time of what counts as ours."""
        return _counted(self.cpu_s)

    @property
    def wall_share(self) -> float:
        """Part of the step, in wall time."""
        return _counted(self.wall_s) / self.step_wall_s

    @property
    def cpu_share(self) -> float:
        """Part of the step, in CPU time."""
        return self.own_cpu_s / self.step_cpu_s


class ReadySamples(Dataset[Any]):
    """Samples that cost nothing to fetch, so that what fetching takes is our code."""

    def __init__(self, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._samples[index]


class Stopwatch:
    """Exclusive time per named section, over all threads.

    A section entered inside another one pauses it. Time is wall time and CPU time of the thread.
    """

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = defaultdict(float)
        self.cpu_s: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._thread = threading.local()

    def timed(self, section: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, charging its time to a section."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            open_sections: list[str] = self._thread.__dict__.setdefault("open", [])
            self._lap(open_sections[-1] if open_sections else None)
            open_sections.append(section)
            try:
                return function(*args, **kwargs)
            finally:
                self._lap(open_sections.pop())

        return call

    def reset(self) -> None:
        """Forget all times."""
        with self._lock:
            self.wall_s.clear()
            self.cpu_s.clear()

    def _lap(self, section: str | None) -> None:
        """Charge the time since this thread's last lap to a section."""
        wall, cpu = time.perf_counter(), time.thread_time()
        if section is not None:
            last_wall, last_cpu = self._thread.last
            with self._lock:
                self.wall_s[section] += wall - last_wall
                self.cpu_s[section] += cpu - last_cpu
        self._thread.last = (time.perf_counter(), time.thread_time())


_CALLBACKS: tuple[tuple[object, str, str], ...] = (
    (DistributedDataParallel, "register_comm_hook", "hook"),
    (torch._C.Future, "then", "callbacks"),
    (torch._C.Future, "add_done_callback", "callbacks"),
    (Optimizer, "register_step_pre_hook", "optimizer hook"),
    (Optimizer, "register_step_post_hook", "optimizer hook"),
    (Tensor, "register_hook", "gradient hook"),
    (Tensor, "register_post_accumulate_grad_hook", "gradient hook"),
    (nn.Module, "register_forward_pre_hook", MODEL),
    (nn.Module, "register_forward_hook", MODEL),
)
"""Where our code leaves functions for torch to call: the last argument is one."""
_CALLS: tuple[tuple[object, str, str], ...] = (
    (_BaseDataLoaderIter, "_next_index", "cutting"),  # torch asks our batch sampler
    (_MapDatasetFetcher, "fetch", "data set"),  # torch asks our data set, and then collates
    (dist.ProcessGroup, "allreduce", LAUNCH),
    (dist.Work, "wait", WAITING),
    (torch._C.Future, "wait", WAITING),
    (DistributedDataParallel, "__call__", _NOT_OURS),
    (DataLoader, "__iter__", _NOT_OURS),
    (_BaseDataLoaderIter, "__next__", _NOT_OURS),
)
"""Where torch enters our code by itself, and where our code is inside torch's."""
_ENTERED = {
    *(MODEL, LOADER, "hook", "callbacks", "optimizer hook", "gradient hook", "cutting", "data set"),
    *(LAUNCH, _NOT_OURS),
}
"""What every step of a training with several workers goes through."""


@contextmanager
def borders(watch: Stopwatch) -> Iterator[None]:
    """Put the stopwatch to the borders; trainings built inside the block are measured.

    What the user's own loop calls is not among them: the loader and the model.
    """
    with ExitStack() as patches:

        def patch(owner: object, name: str, new: object) -> None:
            patches.enter_context(mock.patch.object(owner, name, new))

        for owner, name, section in _CALLBACKS:
            patch(owner, name, _with_timed_callback(watch, section, getattr(owner, name)))
        for owner, name, section in _CALLS:
            patch(owner, name, watch.timed(section, getattr(owner, name)))
        yield


def collating(watch: Stopwatch) -> Callable[..., Any]:
    """Return torch's own collating, which a loader does without us as well."""
    return watch.timed(_NOT_OURS, default_collate)


def measured(watch: Stopwatch, run: Callable[[int], None], steps: int) -> OwnCode:
    """Run steps, and return the time inside our code.

    Raises:
        AssertionError: a border was not crossed, so that its part would be missing.
    """
    watch.reset()
    wall, cpu, threads = time.perf_counter(), time.process_time(), our_threads_cpu_s()
    run(steps)
    step_wall_s = (time.perf_counter() - wall) / steps
    step_cpu_s = (time.process_time() - cpu) / steps
    heartbeat_s = our_threads_cpu_s() - threads
    missing = sorted(_ENTERED - set(watch.cpu_s))
    assert not missing, f"our code was not entered through: {missing}; mend benchmarks/own_code.py"

    def per_step(sections_s: dict[str, float]) -> dict[str, float]:
        ours = {name: time_s for name, time_s in sections_s.items() if name != _NOT_OURS}
        ours[HEARTBEAT] = heartbeat_s
        return {name: time_s / steps for name, time_s in ours.items()}

    return OwnCode(per_step(watch.wall_s), per_step(watch.cpu_s), step_wall_s, step_cpu_s)


def our_threads_cpu_s() -> float:
    """Return the CPU time of our own threads so far.

    Raises:
        AssertionError: there is none, though every worker has a heartbeat.
    """
    ours = [each.native_id for each in threading.enumerate() if each.name.startswith(_OUR_THREADS)]
    assert ours, f"no thread is called {_OUR_THREADS}..., so that the heartbeat would be missing"
    statistics = [Path(f"/proc/self/task/{each}/schedstat").read_text() for each in ours]
    return sum(int(text.split()[0]) for text in statistics) * _NANOSECOND


def _with_timed_callback(
    watch: Stopwatch, section: str, register: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(register)
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            *first, callback = args
            return register(owner, *first, watch.timed(section, callback), **kwargs)
        assert "hook" in kwargs, f"{register} was called in an unknown way: {sorted(kwargs)}"
        return register(owner, **{**kwargs, "hook": watch.timed(section, kwargs["hook"])})

    return call


def _counted(sections_s: dict[str, float]) -> float:
    return sum(time_s for name, time_s in sections_s.items() if name not in (LAUNCH, WAITING))

"""Let a recorder see what a script does with DistributedDataParallel.

The script is the user's own and stays as it is. Some calls of torch are replaced, while it runs,
by calls that also read the clock. Gradients, buckets and reductions stay DDP's own. Classes are
changed and not models, so that models can be copied and saved as ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from poise.patching import Call, Patch, Wrap, followed, patched, preceded
from poise.torch.devices import DeviceClock
from poise.torch.groups import default_store
from poise.torch.torch_private import (
    BUFFER_BROADCAST,
    LoaderIterator,
    loader_processes,
    queue_callback,
)
from poise.watch.monitor import Monitor
from poise.watch.recorder import Recorder

_MEETINGS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "reduce",
)
"""Exchanges in which a worker may wait for others before its gradients are there."""


@contextmanager
def watching(recorder: Recorder, monitor: Monitor | None = None) -> Iterator[None]:
    """Tell the recorder what happens, until the block is left.

    A monitor also meets the other workers, and may send and show between two steps; without one,
    nobody else learns of it.
    """
    calls = _Calls(recorder, monitor)
    meeting = _timed(lambda *_: recorder.meeting())
    loading = _timed(lambda loader: recorder.loading(prefetched=loader_processes(loader) > 0))
    patches = [
        Patch(DistributedDataParallel, "__init__", followed(calls.made)),
        Patch(DistributedDataParallel, "forward", preceded(calls.running)),
        Patch(torch, "compile", preceded(calls.compiling)),
        Patch(DistributedDataParallel, "train", preceded(calls.switching)),
        Patch(DistributedDataParallel, BUFFER_BROADCAST, meeting),
        Patch(LoaderIterator, "__next__", loading),
        Patch(DataLoader, "__iter__", loading),
        *(Patch(dist, name, meeting) for name in _MEETINGS),
        Patch(dist, "destroy_process_group", preceded(calls.destroying)),
    ]
    with patched(patches):
        yield


def local_batch(values: Any) -> int:
    """Return the length of the first tensor among a model's inputs; 0: there is none.

    >>> local_batch(((), {"mask": None, "words": torch.zeros(4, 7)}))
    4
    """
    if isinstance(values, Tensor):
        return len(values) if values.dim() else 0
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, tuple | list):
        return next((found for found in map(local_batch, values) if found), 0)
    return 0


class _Gradients:
    """Sees the gradients of a model, and the end of each backward."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._queued = False

    def hook(self, _: Tensor) -> None:
        """A gradient is there; at the first one, ask to be called after backward."""
        self._recorder.gradient()
        if not self._queued:
            self._queued = True
            queue_callback(self._computed)

    def _computed(self) -> None:
        """Backward has computed everything; DDP's wait for its reduction is queued behind this.

        What is queued now comes after that. In a backward inside of backward, such as that of
        checkpoints, it may have come already.
        """
        self._recorder.gradients_done()
        queue_callback(self._reduced)

    def _reduced(self) -> None:
        self._queued = False
        self._recorder.backward_done()


class _Calls:
    """Sees the calls of models, and what surrounds them."""

    def __init__(self, recorder: Recorder, monitor: Monitor | None) -> None:
        self._recorder = recorder
        self._monitor = monitor
        self._tell: Call = self._told

    def made(self, model: DistributedDataParallel, *_: Any, **__: Any) -> None:
        """A model was wrapped: meet its workers in the store of the default group."""
        monitor = self._monitor
        if model.device_type != "cpu" and (monitor is None or not monitor.joined):
            self._recorder.timer = DeviceClock(torch.device(model.device_type))
        if monitor is not None and monitor.store is None:
            store = dist.PrefixStore("poise/watch", default_store())
            workers = dist.get_process_group_ranks(model.process_group)
            monitor.join(store, dist.get_rank(), workers)
        gradients = _Gradients(self._recorder)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(gradients.hook)

    def running(self, model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        """A model is called."""
        self._tell(model, (args, kwargs))

    def compiling(self, *_: Any, **__: Any) -> None:
        """Something is compiled, so the compiler must be told what to leave alone.

        Not before: this imports it, which takes seconds.
        """
        self._tell = torch.compiler.disable(self._told)

    def switching(self, _: DistributedDataParallel, mode: bool = True) -> None:
        """A model is put into training or evaluation mode."""
        if not mode:
            self._recorder.evaluating()

    def destroying(self, group: Any = None) -> None:
        """A group ends; with all workers' own, rows can no longer be sent."""
        if self._monitor is not None and (group is None or group is dist.group.WORLD):
            self._monitor.leave()

    def _told(self, model: DistributedDataParallel, inputs: Any) -> None:
        if self._monitor is not None:
            self._monitor.tick()
        self._recorder.forward(
            local_batch(inputs),
            training=model.training,
            grad=torch.is_grad_enabled(),
            reduced=model.require_backward_grad_sync,
        )


def _timed(timing: Callable[..., AbstractContextManager[None]]) -> Wrap:
    """Have the calls of the training's own thread timed."""

    def wrap(original: Call) -> Call:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            compiling = torch.compiler.is_compiling()
            if compiling or threading.current_thread() is not threading.main_thread():
                return original(*args, **kwargs)
            with timing(*args):
                return original(*args, **kwargs)

        return call

    return wrap

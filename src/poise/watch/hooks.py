"""Let a recorder see what a script does with DistributedDataParallel.

The script is the user's own and stays as it is. Some calls of torch are replaced, while it runs,
by calls that also read the clock. Gradients, buckets and reductions stay DDP's own. Classes are
changed and not models, so that models can be copied and saved as ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from poise.torch.devices import DeviceClock
from poise.torch.groups import default_store
from poise.torch.torch_private import (
    BUFFER_BROADCAST,
    LoaderIterator,
    loader_processes,
    queue_callback,
)
from poise.watch.monitor import Monitor
from poise.watch.patching import replaced
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

_Call = Callable[..., Any]


@contextmanager
def watching(recorder: Recorder, monitor: Monitor | None = None) -> Iterator[None]:
    """Tell the recorder what happens, until the block is left.

    A monitor also meets the other workers, and may send and show between two steps; without one,
    nobody else learns of it.
    """
    calls = _Calls(recorder, monitor)
    with ExitStack() as replacing:

        def put(owner: Any, name: str, wrap: Callable[[_Call], _Call]) -> None:
            replacing.enter_context(replaced(owner, name, wrap(getattr(owner, name))))

        put(DistributedDataParallel, "__init__", lambda call: _making(recorder, monitor, call))
        put(DistributedDataParallel, "forward", calls.running)
        put(torch, "compile", calls.compiling)
        put(DistributedDataParallel, "train", lambda call: _switching(recorder, call))
        put(DistributedDataParallel, BUFFER_BROADCAST, lambda call: _meeting(recorder, call))
        put(LoaderIterator, "__next__", lambda call: _loading(recorder, call))
        put(DataLoader, "__iter__", lambda call: _loading(recorder, call))
        for name in _MEETINGS:
            put(dist, name, lambda call: _meeting(recorder, call))
        put(dist, "destroy_process_group", lambda call: _destroying(monitor, call))
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


def _making(recorder: Recorder, monitor: Monitor | None, original: _Call) -> _Call:
    @wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.device_type != "cpu" and (monitor is None or not monitor.joined):
            recorder.timer = DeviceClock(torch.device(self.device_type))
        if monitor is not None and not monitor.connected:
            _meet(monitor, self)
        gradients = _Gradients(recorder)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(gradients.hook)

    return init


def _meet(monitor: Monitor, model: DistributedDataParallel) -> None:
    """Meet the workers of the model in the store of the default group."""
    store = dist.PrefixStore("poise/watch", default_store())
    workers = dist.get_process_group_ranks(model.process_group)
    monitor.join(store, dist.get_rank(), workers)


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
    """Sees the calls of models."""

    def __init__(self, recorder: Recorder, monitor: Monitor | None) -> None:
        self._recorder = recorder
        self._monitor = monitor
        self._tell: _Call = self._told

    def running(self, original: _Call) -> _Call:
        """Wrap the forward of DistributedDataParallel."""

        @wraps(original)
        def forward(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            self._tell(model, (args, kwargs))
            return original(model, *args, **kwargs)

        return forward

    def compiling(self, original: _Call) -> _Call:
        """Wrap torch.compile, after which the compiler must be told what to leave alone.

        Not before: this imports it, which takes seconds.
        """

        @wraps(original)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            self._tell = torch.compiler.disable(self._told)
            return original(*args, **kwargs)

        return compiled

    def _told(self, model: DistributedDataParallel, inputs: Any) -> None:
        if self._monitor is not None:
            self._monitor.tick()
        self._recorder.forward(
            local_batch(inputs),
            training=model.training,
            grad=torch.is_grad_enabled(),
            reduced=model.require_backward_grad_sync,
        )


def _switching(recorder: Recorder, original: _Call) -> _Call:
    @wraps(original)
    def train(self: DistributedDataParallel, mode: bool = True) -> Any:
        if not mode:
            recorder.evaluating()
        return original(self, mode)

    return train


def _meeting(recorder: Recorder, original: _Call) -> _Call:
    @wraps(original)
    def meet(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _in_main_thread():
            return original(*args, **kwargs)
        with recorder.meeting():
            return original(*args, **kwargs)

    return meet


def _loading(recorder: Recorder, original: _Call) -> _Call:
    @wraps(original)
    def load(self: Any) -> Any:
        if not _in_main_thread():
            return original(self)
        with recorder.loading(prefetched=loader_processes(self) > 0):
            return original(self)

    return load


def _destroying(monitor: Monitor | None, original: _Call) -> _Call:
    @wraps(original)
    def destroy(group: Any = None) -> None:
        if monitor is not None and (group is None or group is dist.group.WORLD):
            monitor.leave()
        original(group)

    return destroy


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

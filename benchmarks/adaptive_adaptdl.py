"""One worker of the adaptive benchmark that trains with AdaptDL, in AdaptDL's own environment.

Run by `adaptive.py` in a lab, with the settings as JSON. AdaptDL 0.2.11 is used as its
documentation says: AdaptiveDataLoader with autoscale_batch_size, AdaptiveDataParallel with the
learning-rate rule that it chooses for the optimizer (AdaScale for SGD, its square root for AdamW).
Where it needs help, on newer libraries or in a training of half a minute, a comment says why.
"""

import json
import logging
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from adaptive_tasks import learn, read_train
from adaptive_turns import Settings, Training, serve
from torch import Tensor
from torch.utils.data import Dataset

_DECISIONS = 8
"""How often a training may change its batch,"""
_LEAST_WINDOW = 1500
"""unless it is so short that there are not so many samples from one time to the next."""


class LoopbackSocket(socket.socket):
    """A socket that can be reached from this machine alone."""

    def bind(self, address: Any) -> None:
        """Listen on loopback, whatever the address."""
        super().bind(("127.0.0.1", address[1]))


def import_adaptdl() -> tuple[Any, Any]:
    """Import AdaptDL so that it works with today's libraries; return it and its metrics."""
    np.int = int  # type: ignore[attr-defined]  # it says np.int, which NumPy 1.24 took away
    place = {"REPLICA_RANK": "RANK", "NUM_REPLICAS": "WORLD_SIZE"}
    place |= {"MASTER_ADDR": "MASTER_ADDR", "MASTER_PORT": "MASTER_PORT"}
    for theirs, ours in place.items():
        os.environ[f"ADAPTDL_{theirs}"] = os.environ[ours]
    logging.disable(logging.WARNING)  # it tells of each connection and epoch
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    import adaptdl.reducer
    import adaptdl.torch
    from adaptdl.torch import _metrics

    # Its server for objects listens on all interfaces, and unpickles what comes.
    adaptdl.reducer.socket = SimpleNamespace(**{**vars(socket), "socket": LoopbackSocket})
    # It refits its speed model when 30 s of wall time have passed, other trainings' turns included;
    # here a refit comes before each decision instead.
    _metrics._PREV_REPORT = math.inf
    return adaptdl.torch, _metrics


class Window(Dataset[Any]):
    """Some samples of a data set, others with every move.

    AdaptDL changes its batch between passes over the data, and a training of this benchmark makes
    one or two. It gets to see a window of the data set as if it were all, so that it can decide as
    often as in a training of many passes.
    """

    def __init__(self, data: "Dataset[Any]", length: int, seed: int) -> None:
        self._data, self._length = data, length
        self._generator = torch.Generator().manual_seed(seed)
        self._order = self._drawn()
        self._start = 0

    def move_on(self) -> None:
        """Show the samples that come next."""
        self._start += self._length
        if self._start + self._length > len(self._order):
            self._order, self._start = self._drawn(), 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._order[self._start + index])]

    def _drawn(self) -> Tensor:
        return torch.randperm(len(self._data), generator=self._generator)  # type: ignore[arg-type]


class Peer(Training):
    """AdaptDL."""

    def __init__(self, settings: Settings, name: str, adaptdl: Any, metrics: Any) -> None:
        super().__init__(settings, name)
        self._adaptdl, self._metrics = adaptdl, metrics
        self._workers = torch.distributed.get_world_size()
        self._optimizer = self.task.optimizer(self.model, self.task.learning_rate)
        start, most = self.task.global_batch, self.task.adapt[1]
        data = read_train(Path(settings.data))
        length = max(settings.samples // _DECISIONS, _LEAST_WINDOW)
        self._window = Window(data, length, settings.seed)
        self._loader = adaptdl.AdaptiveDataLoader(
            self._window, batch_size=start, shuffle=True, drop_last=True
        )
        self._loader.autoscale_batch_size(
            most,
            local_bsz_bounds=(1, most // self._workers),
            gradient_accumulation=False,  # with it, optimizers get a sum instead of a mean
        )
        self._shared = adaptdl.AdaptiveDataParallel(self.model, self._optimizer)
        self._sync = self._loader._elastic._sync_local_bsz
        self._loader._elastic._sync_local_bsz = self._decide
        self._paused_s: float | None = None
        self._refit_s = 0.0

    def train(self) -> Iterator[int]:
        """Train for ever."""
        for _ in self._adaptdl.remaining_epochs_until(sys.maxsize):
            for inputs, targets in self._loader:
                learn(self._shared, self._optimizer, inputs, targets)
                self._paused_s = time.time()
                yield len(inputs) * self._workers

    def resume(self) -> None:
        """Leave other trainings' turns out of the step that AdaptDL is timing."""
        if self._paused_s is not None:
            self._metrics._metrics_state().step_start += time.time() - self._paused_s

    def state(self) -> dict[str, Any]:
        """Return noise, learning rate, and the time of all refits."""
        noise, norm = self._shared.gns.var_avg(), self._shared.gns.sqr_avg()
        start = self.task.global_batch  # its variance is that of a batch of this many samples
        return {
            "noise": start * noise / norm if norm > 0 else None,
            "lr_factor": float(self._shared._state.lr_factor),
            "refit_s": self._refit_s,
        }

    def _decide(self) -> Any:
        """Refit, and decide on the batch. The refit's time is left out, in AdaptDL's favour."""
        begun_s = time.perf_counter()
        if torch.distributed.get_rank() == 0 and self._metrics._metrics_state().profile:
            self._metrics._fit_perf_params()
        refit_s = time.perf_counter() - begun_s
        self.left_out_s += refit_s
        self._refit_s += refit_s
        self._window.move_on()
        return self._sync()


def main(settings: Settings) -> None:
    """Train."""
    torch.set_num_threads(1)
    adaptdl, metrics = import_adaptdl()
    adaptdl.init_process_group("gloo")
    (name,) = settings.trainings
    serve({name: Peer(settings, name, adaptdl, metrics)}, settings)


if __name__ == "__main__":
    if sys.argv[1] == "--python":
        # A lab starts its own Python; this takes its place, in the same process and control group.
        python, *rest = sys.argv[2:]
        os.execv(python, [python, __file__, *rest])
    main(Settings(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # its threads would keep the process

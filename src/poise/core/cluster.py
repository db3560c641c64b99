"""Declared clusters: workers and a network whose times are known, not measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from poise.core.limits import UNLIMITED, Limits
from poise.core.memory import MARGIN
from poise.core.timing import SpeedModel
from poise.errors import InfeasibleSplit, InvalidSetting
from poise.numbers import is_number, is_whole

Line = tuple[float, float]
"""Seconds per sample, and fixed seconds."""


_MOST_BYTES = 1e17
_LEAST_S, _MOST_S = 1e-15, 1e9
"""Seconds beyond which a time is a mistake."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker: how long it computes, and what it can take.

    Either forward_s and backward_s, or ready_s with one line per bucket. Lines are pairs:
    seconds per sample, fixed seconds.

    >>> Worker(name="a100", forward_s=(0.0004, 0.004), backward_s=(0.0008, 0.006)).name
    'a100'
    """

    name: str = ""
    forward_s: Line | None = None
    """Input, forward and update."""
    backward_s: Line | None = None
    ready_s: tuple[Line, ...] | None = None
    """For each bucket, when it is handed over."""
    input_s: float = 0.0
    """Seconds a sample takes in the data loader; 0: the loader is no limit."""
    min_batch: int = 1
    max_batch: int | None = None
    multiple_of: int = 1
    micro_batch: int | None = None
    """The most samples computed at once; larger local batches take several passes."""
    memory_bytes: float | None = None
    """The memory it has."""
    fixed_bytes: float = 0.0
    """What weights, gradients and optimizer take of it."""
    bytes_per_sample: float | None = None
    """What each sample of a batch that is computed at once takes."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise InvalidSetting(f"a worker has name={self.name!r}; give text on one line")
        given = [line is not None for line in (self.forward_s, self.backward_s, self.ready_s)]
        if given not in ([True, True, False], [False, False, True]):
            raise InvalidSetting(
                f"{self._who} needs forward_s and backward_s, or ready_s alone; give one of the two"
            )
        for name in ("forward_s", "backward_s"):
            if (line := getattr(self, name)) is not None:
                object.__setattr__(self, name, self._line(name, line))
        if self.ready_s is not None:
            lines = self.ready_s if isinstance(self.ready_s, list | tuple) else [self.ready_s]
            ready = tuple(self._line("ready_s", line) for line in lines)
            object.__setattr__(self, "ready_s", ready)
        for name in ("input_s", "memory_bytes", "fixed_bytes", "bytes_per_sample"):
            value = getattr(self, name)
            most = _MOST_S if name == "input_s" else _MOST_BYTES
            if value is not None and not _is_amount(value, most):
                raise InvalidSetting(
                    f"{self._who} has {name}={value!r}; give a number from 0 up to {most:g}"
                )
        for name, least in (("min_batch", 0), ("max_batch", 0), ("multiple_of", 1)):
            self._check_whole(name, least)
        self._check_whole("micro_batch", 1)

    @property
    def most_in_memory(self) -> float:
        """Samples that can be computed at once: (memory (1 - margin) - fixed) / per sample."""
        if self.memory_bytes is None or not self.bytes_per_sample:
            return math.inf
        room = self.memory_bytes * (1 - MARGIN) - self.fixed_bytes
        return max(0.0, float(np.floor(room / self.bytes_per_sample)))

    @property
    def most_at_once(self) -> float:
        """Samples of one pass; infinity where nothing limits them."""
        return min(self.micro_batch or math.inf, self.most_in_memory)

    @property
    def most_samples(self) -> float:
        """Samples of a local batch; with a micro_batch memory does not limit them."""
        in_memory = math.inf if self.micro_batch and self.most_at_once >= 1 else self.most_in_memory
        return min(math.inf if self.max_batch is None else self.max_batch, in_memory)

    def lines(self, ready: Sequence[float]) -> tuple[Line, ...]:
        """Return the ready lines, one per bucket; ready is how much of backward each takes."""
        if self.ready_s is not None:
            if len(self.ready_s) != len(ready):
                raise InvalidSetting(
                    f"{self._who} has {len(self.ready_s)} lines in ready_s, but the network has "
                    f"{len(ready)} buckets; give one line per bucket"
                )
            return self.ready_s
        assert self.forward_s is not None
        assert self.backward_s is not None
        (q, s), (k, m) = self.forward_s, self.backward_s
        return tuple((q + rho * k, s + rho * m) for rho in ready)

    @property
    def _who(self) -> str:
        return f"worker {self.name}" if self.name else "a worker"

    def _line(self, name: str, line: object) -> Line:
        pair = tuple(line) if isinstance(line, list | tuple) else ()
        if len(pair) != 2 or not all(is_number(each) and each >= 0 for each in pair):  # noqa: PLR2004
            raise InvalidSetting(
                f"{self._who} has {name}={line!r}; give two numbers from 0 up: seconds per "
                "sample, fixed seconds"
            )
        if 0 < pair[0] < _LEAST_S or max(pair) > _MOST_S:
            raise InvalidSetting(
                f"{self._who} has {name}={line!r}; give seconds of at least {_LEAST_S}, or 0, "
                f"and at most {_MOST_S:.0e}"
            )
        return float(pair[0]), float(pair[1])

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        whole = is_whole(value)
        optional = name in ("max_batch", "micro_batch")
        if not (whole and least <= value <= UNLIMITED) and not (optional and value is None):
            raise InvalidSetting(
                f"{self._who} has {name}={value!r}; give a whole number from {least} up"
                + (f" to {UNLIMITED}" if whole and value > UNLIMITED else "")
            )


@dataclass(frozen=True, kw_only=True)
class Network:
    """The reduction of gradients, for the whole cluster; Network() means that it costs nothing."""

    ready: tuple[float, ...] = (1.0,)
    """How much of backward is done when each bucket is handed over; the last is 1."""
    bucket_s: tuple[float, ...] = (0.0,)
    """Seconds that the reduction of each bucket adds."""

    def __post_init__(self) -> None:
        ready, bucket_s = _numbers("ready", self.ready), _numbers("bucket_s", self.bucket_s)
        object.__setattr__(self, "ready", ready)
        object.__setattr__(self, "bucket_s", bucket_s)
        if len(ready) != len(bucket_s):
            raise InvalidSetting(
                f"the network has {len(ready)} numbers in ready and {len(bucket_s)} in bucket_s; "
                "give one of each per bucket"
            )
        if list(ready) != sorted(ready) or ready[-1] != 1.0:
            raise InvalidSetting(
                f"the network has ready={list(ready)}; give parts of backward that rise to 1.0"
            )

    def among(self, before: int, after: int) -> "Network":
        """Return the network of a smaller or larger group.

        A ring sends (n - 1) / n of every bucket twice, so times follow that.
        """
        factor = _ring(after) / _ring(before) if before > 1 else 1.0
        return replace(self, bucket_s=tuple(seconds * factor for seconds in self.bucket_s))


def speed_model(workers: Sequence[Worker], network: Network) -> SpeedModel:
    """Return the arrays that declared workers stand for."""
    if not workers:
        raise InvalidSetting("there are no workers; a cluster needs at least 1")
    for worker in workers:
        if not isinstance(worker, Worker):
            raise InvalidSetting(f"workers has {worker!r}; give Worker(...) for each")
    if not isinstance(network, Network):
        raise InvalidSetting(f"network={network!r} is no network; give Network(...)")
    for number, worker in enumerate(workers):
        if worker.micro_batch and worker.most_at_once < 1:
            raise InfeasibleSplit(
                f"{worker.name or f'worker {number}'} has no memory for a single sample; "
                "remove it, or raise memory_bytes"
            )
    lines = np.array([worker.lines(network.ready) for worker in workers])
    return SpeedModel.of(
        lines[:, :, 1],
        lines[:, :, 0],
        network.bucket_s,
        input_s=[worker.input_s for worker in workers],
        micro_batch=[worker.most_at_once if worker.micro_batch else np.inf for worker in workers],
    )


def limits_of(workers: Sequence[Worker]) -> Limits:
    """Return the bounds of declared workers, those of memory included."""
    names = [worker.name or f"worker {number}" for number, worker in enumerate(workers)]
    for name, worker in zip(names, workers, strict=True):
        if worker.most_samples < worker.min_batch and worker.most_in_memory < worker.min_batch:
            raise InfeasibleSplit(
                f"{name} has memory for {worker.most_in_memory:.0f} samples and "
                f"min_batch={worker.min_batch}; lower min_batch, set micro_batch, or remove it"
            )
    return Limits.of(
        len(workers),
        min_batch=[worker.min_batch for worker in workers],
        max_batch=[int(min(worker.most_samples, UNLIMITED)) for worker in workers],
        multiple_of=[worker.multiple_of for worker in workers],
        names=names,
    )


def _ring(workers: int) -> float:
    return (workers - 1) / workers


def _is_amount(value: object, most: float = _MOST_S) -> bool:
    return is_number(value) and 0 <= value <= most


def _numbers(name: str, values: object) -> tuple[float, ...]:
    found = tuple(values) if isinstance(values, list | tuple) else ()
    if not found or not all(_is_amount(value) for value in found):
        raise InvalidSetting(
            f"the network has {name}={values!r}; give a list of numbers from 0 up to {_MOST_S:g}, "
            "one per bucket"
        )
    return tuple(float(value) for value in found)

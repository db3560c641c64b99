"""Loaders that yield this worker's share of each global batch."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from poise.core.batch import Batch, batches, steps_per_epoch
from poise.core.order import Order
from poise.core.plan import Plan
from poise.errors import InvalidSetting, OutOfOrder
from poise.torch.exchange import Exchange
from poise.torch.run import Run

Idle = Literal["empty", "repeat"]
"""What a worker without a sample gets: an empty batch, or a sample twice at weight 0."""


class Source(Protocol):
    """Where the global batches of a loader come from."""

    def __len__(self) -> int:
        """Batches of a whole pass."""

    def order(self) -> Order:
        """The order that this pass follows."""

    def begin(self) -> Iterator[Batch]:
        """Start a pass and cut its batches, some of them ahead of time."""

    def hand_out(self, batch: Batch) -> None:
        """A batch is about to be yielded."""

    def end(self) -> None:
        """The pass is over."""


class ShareLoader:
    """A DataLoader that yields, for each global batch, the slice of one worker."""

    def __init__(self, loader: DataLoader[Any], source: Source, worker: int, idle: Idle) -> None:
        self.dataset = loader.dataset
        self._source = source
        self._worker = worker
        self._idle = idle
        self._passes = 0
        self._cut: deque[Batch] = deque()
        self._loader = _with_batch_sampler(loader, _Slices(self._indices))

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        this_pass = self._passes
        self._cut = deque()
        for collated in self._loader:
            if this_pass != self._passes:
                raise OutOfOrder("this pass over the loader ended when another one began")
            # Batches arrive in the order in which they were cut, however far ahead that was.
            batch = self._cut.popleft()
            self._source.hand_out(batch)
            yield emptied(collated) if self._is_emptied(batch) else collated
        self._source.end()

    def _indices(self) -> Iterator[list[int]]:
        """Cut the batches of a pass; runs ahead of the yields by the loader's lead."""
        cut = self._cut
        order = self._source.order()
        for batch in self._source.begin():
            cut.append(batch)
            start, stop = batch.slice(self._worker)
            if start < stop:
                yield order.at(start, stop).tolist()
            else:
                stand_in = order.at(batch.start, batch.start + 1).tolist()
                yield stand_in if self._is_emptied(batch) else stand_in * 2

    def _is_emptied(self, batch: Batch) -> bool:
        return self._idle == "empty" and batch.split[self._worker] == 0


class TrainingSource:
    """The rest of the epoch, from the first sample that is not consumed, under changing plans."""

    def __init__(
        self,
        run: Run,
        exchange: Exchange,
        order: Callable[[int], Order],
        *,
        global_batch: int,
        drop_last: bool,
    ) -> None:
        self._run = run
        self._exchange = exchange
        self._order = order
        self._length = order(0).length
        self._global_batch = global_batch
        self._drop_last = drop_last
        self._end = 0

    def __len__(self) -> int:
        return steps_per_epoch(self._length, self._global_batch, drop_last=self._drop_last)

    def order(self) -> Order:
        """Return the order of the current epoch."""
        return self._order(self._run.progress.epoch)

    def begin(self) -> Iterator[Batch]:
        """Start at the first sample that is not consumed."""
        self._run.progress = self._run.progress.begin_pass()
        self._run.compared = False
        self._exchange.drain()
        place = self._run.progress
        self._end = place.position
        for batch in batches(
            self._exchange.plan_at,
            length=self._length,
            drop_last=self._drop_last,
            epoch=place.epoch,
            position=place.position,
            step=place.step,
        ):
            self._end = batch.stop
            yield batch

    def hand_out(self, batch: Batch) -> None:
        """Note the batch, and tell the other workers where that is needed."""
        self._run.progress = self._run.progress.hand_out(batch)
        self._run.plan = self._run.timetable.at(batch.step)
        self._run.backwards = self._run.reductions = 0
        self._run.liveness.step = batch.step
        self._exchange.post(batch)

    def end(self) -> None:
        """The epoch is over if all its samples are consumed."""
        self._run.progress = self._run.progress.end_pass(self._end)


class EvaluationSource:
    """The data set once, in its own order, cut by the shares of the plan in effect."""

    def __init__(
        self, plan: Callable[[], Plan], length: int, *, global_batch: int, drop_last: bool
    ) -> None:
        self._plan = plan
        self._length = length
        self._global_batch = global_batch
        self._drop_last = drop_last

    def __len__(self) -> int:
        return steps_per_epoch(self._length, self._global_batch, drop_last=self._drop_last)

    def order(self) -> Order:
        """Return the order of the data set."""
        return Order(length=self._length, shuffled=False)

    def begin(self) -> Iterator[Batch]:
        """Start at the first sample."""
        plan = self._plan().scaled(self._global_batch)
        return batches(lambda _: plan, length=self._length, drop_last=self._drop_last)

    def hand_out(self, batch: Batch) -> None:
        """Nothing to note."""

    def end(self) -> None:
        """Nothing to note."""


def lead(loader: DataLoader[Any]) -> int:
    """Return how many steps a loader cuts ahead of the one it yields."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def emptied(batch: Any) -> Any:
    """Return a batch of the same form with no sample in it, made from a batch of one sample.

    Tensors and arrays lose the entries of their first dimension; dicts, dataclasses and named
    tuples are emptied part by part, and so is a list or tuple that is the batch itself. A list or
    tuple of one element inside it holds the sample and becomes empty, and so does a batch that
    is a list of one sample.
    """
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        if len(batch) == 1 and not isinstance(batch[0], Tensor | np.ndarray):
            return _sequence_like(batch, [])
        return _sequence_like(batch, [_emptied_part(part) for part in batch])
    return _emptied_part(batch)


def _emptied_part(part: Any) -> Any:
    if isinstance(part, Tensor | np.ndarray):
        return part[:0] if part.ndim else part
    if isinstance(part, Mapping):
        return {key: _emptied_part(value) for key, value in part.items()}
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_emptied_part(value) for value in part))
    if isinstance(part, list | tuple):
        return _sequence_like(part, [] if len(part) == 1 else [_emptied_part(p) for p in part])
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {f.name: _emptied_part(getattr(part, f.name)) for f in dataclasses.fields(part)}
        return dataclasses.replace(part, **fields)
    if part is None or isinstance(part, bool | int | float | str | bytes):
        return part
    raise InvalidSetting(
        f"this worker has no sample in a step, and a {type(part).__name__} cannot be emptied; "
        'use Balancer(..., idle="repeat")'
    )


def _sequence_like(original: list[Any] | tuple[Any, ...], parts: list[Any]) -> Any:
    return parts if isinstance(original, list) else tuple(parts)


class _Slices:
    """A batch sampler that asks for new slices in every pass."""

    def __init__(self, passes: Callable[[], Iterator[list[int]]]) -> None:
        self._passes = passes

    def __iter__(self) -> Iterator[list[int]]:
        return self._passes()


def _with_batch_sampler(loader: DataLoader[Any], batch_sampler: _Slices) -> DataLoader[Any]:
    """Return the user's loader with all its settings, but our batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )

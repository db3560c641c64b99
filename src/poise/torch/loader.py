"""Loaders that yield this worker's share of each global batch."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch.utils.data import DataLoader

from poise.core.batch import Batch, batches, steps_per_epoch
from poise.core.order import DrawnOrder, Order
from poise.errors import OutOfOrder
from poise.torch.exchange import Exchange
from poise.torch.orders import Orders
from poise.torch.run import Run
from poise.torch.seeding import SeededDataset, Wanted
from poise.torch.slicing import Slicer, emptied

_END = object()

Idle = Literal["empty", "repeat"]
"""What a worker without a sample gets: an empty batch, or a sample twice at weight 0."""


@dataclass(frozen=True)
class Cut:
    """This worker's share of a batch, before it is fetched."""

    batch: Any
    """What its source knows the batch by."""
    wanted: Wanted
    emptied: bool = False
    """Whether the samples only stand in, and are taken out again."""


class Source(Protocol):
    """Where the batches of a loader come from."""

    def __len__(self) -> int:
        """Batches of a whole pass."""

    def begin(self) -> Iterator[Cut]:
        """Start a pass: its batches, some of them cut ahead of time."""

    def loading(self) -> AbstractContextManager[None]:
        """Surround the fetching of a batch."""

    def hand_out(self, batch: Any, contents: Any) -> None:
        """A batch is about to be yielded, with these contents on this worker."""

    def end(self) -> None:
        """The pass is over."""


class ShareLoader:
    """A DataLoader that yields one worker's share of each batch."""

    def __init__(
        self,
        loader: DataLoader[Any],
        source: Source,
        *,
        seed: int,
        slicer: Slicer | None,
    ) -> None:
        self.dataset = loader.dataset
        self._source = source
        self._slicer = slicer
        self._passes = 0
        self._cut: deque[Cut] = deque()
        self._loader = DataLoader(
            SeededDataset(loader.dataset, seed),
            batch_sampler=PerPass(self._wanted),
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            **settings_kept(loader),
        )

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        this_pass = self._passes
        self._cut = deque()
        fetching = iter(self._loader)
        while True:
            with self._source.loading():
                collated = next(fetching, _END)
            if collated is _END:
                break
            if this_pass != self._passes:
                raise OutOfOrder("this pass over the loader ended when another one began")
            # Batches arrive in the order in which they were cut, however far ahead that was.
            cut = self._cut.popleft()
            contents = without_samples(collated, self._slicer) if cut.emptied else collated
            self._source.hand_out(cut.batch, contents)
            yield contents
        self._source.end()

    def _wanted(self) -> Iterator[Wanted]:
        """Cut the batches of a pass; runs ahead of the yields by the loader's lead."""
        cut = self._cut
        for each in self._source.begin():
            cut.append(each)
            yield each.wanted


class TrainingSource:
    """The rest of the epoch, from the first sample that is not consumed, under changing plans."""

    def __init__(
        self, run: Run, exchange: Exchange, orders: Orders, *, drop_last: bool, idle: Idle
    ) -> None:
        self._run = run
        self._exchange = exchange
        self._orders = orders
        self._drop_last = drop_last
        self._idle = idle
        self._end = 0

    def __len__(self) -> int:
        """Batches of a whole pass with the global batch in effect."""
        global_batch = self._run.plan.global_batch
        return steps_per_epoch(len(self._orders), global_batch, drop_last=self._drop_last)

    def begin(self) -> Iterator[Cut]:
        """Start at the first sample that is not consumed."""
        place = self._run.begin_pass()
        self._exchange.begin_pass()
        order = self._orders.at(place.epoch)
        self._end = place.position
        for batch in self._batches(order.length):
            yield _cut(batch, order, self._run.cluster.worker, self._idle)

    def loading(self) -> AbstractContextManager[None]:
        """Measure how long it takes."""
        return self._run.loading()

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Note the batch, and tell the other workers where that is needed."""
        self._run.hand_out(batch, contents)
        self._exchange.post(batch)

    def end(self) -> None:
        """The epoch is over if all its samples are consumed."""
        self._run.progress = self._run.progress.end_pass(self._end)

    def _batches(self, length: int) -> Iterator[Batch]:
        place = self._run.progress
        for batch in batches(
            self._exchange.plan_at,
            length=length,
            drop_last=self._drop_last,
            epoch=place.epoch,
            position=place.position,
            step=place.step,
        ):
            self._end = batch.stop
            yield batch


class EvaluationSource:
    """The data set once, in the loader's order, cut by the shares of the plan in effect."""

    def __init__(self, run: Run, orders: Orders, *, global_batch: int, drop_last: bool) -> None:
        self._run = run
        self._orders = orders
        self._global_batch = global_batch
        self._drop_last = drop_last

    def __len__(self) -> int:
        return steps_per_epoch(len(self._orders), self._global_batch, drop_last=self._drop_last)

    def begin(self) -> Iterator[Cut]:
        """Start at the first sample."""
        self._run.disturb()
        plan = self._run.plan.scaled(self._global_batch)
        order = self._orders.at(0)
        for batch in batches(lambda _: plan, length=order.length, drop_last=self._drop_last):
            yield _cut(batch, order, self._run.cluster.worker, "empty")

    def loading(self) -> AbstractContextManager[None]:
        """Nothing is measured."""
        return nullcontext()

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Nothing to note."""

    def end(self) -> None:
        """Nothing to note."""


class PerPass:
    """A batch sampler that starts anew in every pass."""

    def __init__(self, passes: Callable[[], Iterator[Any]]) -> None:
        self._passes = passes

    def __iter__(self) -> Iterator[Any]:
        return self._passes()


def lead(loader: DataLoader[Any]) -> int:
    """Return how many steps a loader cuts ahead of the one it yields."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def _cut(batch: Batch, order: Order | DrawnOrder, worker: int, idle: Idle) -> Cut:
    """Return a worker's share of a batch; without a sample of its own it fetches the first."""
    start, stop = batch.slice(worker)
    if start < stop:
        return Cut(batch, Wanted(batch.epoch, order.at(start, stop).tolist()))
    stand_in = order.at(batch.start, batch.start + 1).tolist()
    if idle == "empty":
        return Cut(batch, Wanted(batch.epoch, stand_in), emptied=True)
    return Cut(batch, Wanted(batch.epoch, stand_in * 2))


def without_samples(batch: Any, slicer: Slicer | None) -> Any:
    """Return a batch of the same form with no sample in it."""
    return emptied(batch) if slicer is None else slicer(batch, 0, 0)


def settings_kept(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of a user's loader that hold for ours as they are."""
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "pin_memory_device": loader.pin_memory_device,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }

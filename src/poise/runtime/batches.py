"""Batches without a loader: which samples this worker takes in each step.

Of a map (epoch, step, indices, emptied), cut out of one global order; of a stream (epoch, step,
counts), of which every worker reads its own part and nobody knows beforehand how long that is.
Both go by a `Pass`, of a training or of an evaluation.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol

from poise.core.batch import Batch, batches, steps_per_epoch
from poise.core.order import DrawnOrder, Order
from poise.core.plan import Plan
from poise.runtime.orders import Orders
from poise.runtime.peers import Peers

Idle = Literal["empty", "repeat"]
"""What a worker without a sample gets: an empty batch, or a sample twice at weight 0."""


class Place(NamedTuple):
    """Where a pass begins."""

    epoch: int
    position: int
    """Samples of the epoch that are consumed."""
    step: int


class Pass(Protocol):
    """The steps of a pass over some data: who gets how many samples, and what is noted of it."""

    @property
    def global_batch(self) -> int:
        """Samples of a step with the plan in effect."""

    def begin(self, *, anew: bool = False) -> Place:
        """Start a pass where the last one stands, or anew at the next epoch's first sample."""

    def await_plan(self, step: int) -> Plan:
        """Return the plan of a step that is about to be cut, once it is known."""

    def loading(self) -> AbstractContextManager[None]:
        """Surround the fetching of a batch."""

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """A batch is about to be yielded, with these contents on this worker."""

    def end(self, position: int) -> None:
        """The pass is over at this position."""


@dataclass(frozen=True)
class Cut:
    """This worker's share of a batch, before it is fetched."""

    batch: Any
    """What its source knows the batch by."""
    epoch: int
    samples: list[int]
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


@dataclass(eq=False)
class MapBatches:
    """The rest of an epoch, from the first sample that is not consumed, under changing plans."""

    passes: Pass
    orders: Orders
    peers: Peers
    _: KW_ONLY
    drop_last: bool
    idle: Idle = "empty"
    _end: int = field(default=0, init=False)
    """The position after the last batch that was cut."""

    def __len__(self) -> int:
        """Batches of a whole epoch with the global batch in effect."""
        length, global_batch = len(self.orders), self.passes.global_batch
        return steps_per_epoch(length, global_batch, drop_last=self.drop_last)

    def begin(self) -> Iterator[Cut]:
        """Cut the batches; waits for the plan of each."""
        place = self.passes.begin()
        order = self.orders.at(place.epoch)
        self._end = place.position
        for batch in batches(
            self.passes.await_plan,
            length=order.length,
            drop_last=self.drop_last,
            epoch=place.epoch,
            position=place.position,
            step=place.step,
        ):
            self._end = batch.stop
            yield cut(batch, order, self.peers.generation.worker, self.idle)

    def loading(self) -> AbstractContextManager[None]:
        """Surround the fetching of a batch."""
        return self.passes.loading()

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Note the batch."""
        self.passes.hand_out(batch, contents)

    def end(self) -> None:
        """All batches were taken."""
        self.passes.end(self._end)


@dataclass(eq=False)
class StreamBatches:
    """A pass over a stream: each worker takes what its plan says, or what is left.

    The workers tell each other how many samples that were: these are the counts of the step. A
    worker whose part is exhausted goes on with weight 0 until all are.
    """

    passes: Pass
    peers: Peers
    _place: Place = field(default=Place(0, 0, 0), init=False)

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.peers.generation.worker

    def begin(self, *, resumed: bool) -> int:
        """Start a pass, where the stream stands if it is resumed; return its epoch."""
        self._place = self.passes.begin(anew=not resumed)
        return self._place.epoch

    def asked(self) -> Iterator[int]:
        """Yield how many samples to fetch in each step; runs ahead as far as the loader does.

        A share of 0 asks for one sample all the same: nobody else can read this worker's part.
        """
        for step in count(self._place.step):
            yield max(1, self.passes.await_plan(step).split[self.worker])

    def loading(self) -> AbstractContextManager[None]:
        """Surround the fetching of a batch.

        Also when nothing is asked for any more: all workers follow the plans alike.
        """
        self.passes.await_plan(self._place.step)
        return self.passes.loading()

    def agreed(self, samples: int) -> Batch | None:
        """Return the batch, of which this worker has so many samples; None: all parts are over."""
        epoch, position, step = self._place
        taken = self.peers.control.table([samples], f"step {step} of the stream")
        split = tuple(int(row[0]) for row in taken)
        return Batch(step=step, epoch=epoch, start=position, split=split) if any(split) else None

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Note the batch."""
        self._place = self._place._replace(step=batch.step + 1, position=batch.stop)
        self.passes.hand_out(batch, contents)

    def end(self) -> None:
        """All parts are exhausted."""
        self.passes.end(self._place.position)


def cut(batch: Batch, order: Order | DrawnOrder, worker: int, idle: Idle) -> Cut:
    """Return a worker's share of a batch; without a sample of its own it fetches the first."""
    start, stop = batch.slice(worker)
    if start < stop:
        return Cut(batch, batch.epoch, order.at(start, stop).tolist())
    stand_in = order.at(batch.start, batch.start + 1).tolist()
    if idle == "empty":
        return Cut(batch, batch.epoch, stand_in, emptied=True)
    return Cut(batch, batch.epoch, stand_in * 2)

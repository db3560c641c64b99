"""Batches without a loader: which samples this worker takes in each step.

Of a map (epoch, step, indices, emptied), cut out of one global order; of a stream (epoch, step,
counts), of which every worker reads its own part and nobody knows beforehand how long that is.
Both are steps of a training, by its `Session`, or of an `Evaluation`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from poise.core.batch import Batch, batches, steps_per_epoch
from poise.core.order import DrawnOrder, Order
from poise.core.plan import Plan
from poise.core.revised import revised
from poise.engine.progress import Progress
from poise.runtime.events import Disturbed
from poise.runtime.orders import Orders
from poise.runtime.session import Session
from poise.runtime.settings import Arrangement, Idle


class Evaluation:
    """The steps of an evaluation, by the shares of the plan in effect: nothing of it is noted."""

    def __init__(self, session: Session, global_batch: int) -> None:
        self._session = session
        self.peers = session.peers
        self.plan = session.plan.scaled(global_batch)
        """The plan in effect when the pass began, for the evaluation's own batch size."""

    def begin_pass(self, *, anew: bool = False) -> Progress:
        """Start at the beginning."""
        session = self._session
        session.events.tell(session.stamped(Disturbed))
        self.plan = session.plan.scaled(self.plan.global_batch)
        return Progress()

    def await_plan(self, step: int) -> Plan:
        """Return the plan of all steps."""
        return self.plan

    def loading(self) -> AbstractContextManager[None]:
        """Nothing is measured."""
        return nullcontext()

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Nothing to note."""

    def end_pass(self, position: int) -> None:
        """Nothing to note."""


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

    steps: Session | Evaluation
    orders: Orders
    _: KW_ONLY
    drop_last: bool
    idle: Idle = "empty"
    arranged: Arrangement | None = None
    """Puts the samples of each share into another order; None: they stay as they are."""
    _end: int = field(default=0, init=False)
    """The position after the last batch that was cut."""

    def __len__(self) -> int:
        """Batches of a whole epoch with the global batch in effect."""
        global_batch = self.steps.plan.global_batch
        return steps_per_epoch(len(self.orders), global_batch, drop_last=self.drop_last)

    def begin(self) -> Iterator[Cut]:
        """Cut the batches; waits for the plan of each."""
        place = self.steps.begin_pass()
        order = self.orders.at(place.epoch)
        self._end = place.position
        for batch in batches(
            self.steps.await_plan,
            length=order.length,
            drop_last=self.drop_last,
            epoch=place.epoch,
            position=place.position,
            step=place.step,
        ):
            self._end = batch.stop
            share = cut(batch, order, self.steps.peers.generation.worker, self.idle)
            if self.arranged is not None:
                share = replace(share, samples=self.arranged(share.samples))
            yield share

    def loading(self) -> AbstractContextManager[None]:
        """Surround the fetching of a batch."""
        return self.steps.loading()

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Note the batch."""
        self.steps.hand_out(batch, contents)

    def end(self) -> None:
        """All batches were taken."""
        self.steps.end_pass(self._end)


@dataclass(eq=False)
class StreamBatches:
    """A pass over a stream: each worker takes what its plan says, or what is left.

    The workers tell each other how many samples that were: these are the counts of the step. A
    worker whose part is exhausted goes on with weight 0 until all are.
    """

    steps: Session | Evaluation
    _place: Progress = field(default=Progress(), init=False)
    """Where the next batch begins."""

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.steps.peers.generation.worker

    def begin(self, *, resumed: bool) -> int:
        """Start a pass, where the stream stands if it is resumed; return its epoch."""
        self._place = self.steps.begin_pass(anew=not resumed)
        return self._place.epoch

    def asked(self) -> Iterator[int]:
        """Yield how many samples to fetch in each step; runs ahead as far as the loader does.

        A share of 0 asks for one sample all the same: nobody else can read this worker's part.
        """
        for step in count(self._place.step):
            yield max(1, self.steps.await_plan(step).split[self.worker])

    def loading(self) -> AbstractContextManager[None]:
        """Surround the fetching of a batch.

        Also when nothing is asked for any more: all workers follow the plans alike.
        """
        self.steps.await_plan(self._place.step)
        return self.steps.loading()

    def agreed(self, samples: int) -> Batch | None:
        """Return the batch, of which this worker has so many samples; None: all parts are over."""
        place = self._place
        taken = self.steps.peers.control.table([samples], f"step {place.step} of the stream")
        split = tuple(int(row[0]) for row in taken)
        return Batch(place.step, place.epoch, place.position, split) if any(split) else None

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Note the batch."""
        self._place = revised(self._place, step=batch.step + 1, position=batch.stop)
        self.steps.hand_out(batch, contents)

    def end(self) -> None:
        """All parts are exhausted."""
        self.steps.end_pass(self._place.position)


def cut(batch: Batch, order: Order | DrawnOrder, worker: int, idle: Idle) -> Cut:
    """Return a worker's share of a batch; without a sample of its own it fetches the first."""
    start, stop = batch.slice(worker)
    if start < stop:
        return Cut(batch, batch.epoch, order.at(start, stop).tolist())
    stand_in = order.at(batch.start, batch.start + 1).tolist()
    if idle == "empty":
        return Cut(batch, batch.epoch, stand_in, emptied=True)
    return Cut(batch, batch.epoch, stand_in * 2)

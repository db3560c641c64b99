"""What happens in a training, told to whoever listens.

**The contract.** An event carries its step, and a stamp of when it happened. It is told on the
thread on which it happens, which for buckets can be a thread of the framework, and may be told
late: a subscriber goes by the stamp and never by the moment at which it hears. Subscribers are
called one after the other in the order in which they subscribed; they are quick, never wait for
others, and call nothing that all workers must call together, but for `Prepared`, at which all
workers are alike.

**Errors.** What a subscriber raises on the training's own thread passes on to whoever told the
event, and so to the user's script: this is how a command leaves a script that it has seen enough
of. On any other thread it would disturb a reduction, or be lost; it is kept, and raised after the
next event on the training's own thread. That is the thread which prepares and asks for batches.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from poise.core.batch import Batch
from poise.core.observation import Change, Observation
from poise.core.plan import Plan
from poise.engine.bsp import Engine
from poise.runtime.clocks import Stamp


class Event(Protocol):
    """What all events have."""

    @property
    def step(self) -> int:
        """The step under way."""

    @property
    def stamp(self) -> Stamp:
        """When it happened."""


class Begun(NamedTuple):
    """A script has made its Balancer."""

    step: int
    stamp: Stamp
    balancer: Any
    """What the script holds: it can be closed, and left with an error, as `with` leaves it."""


class Preparing(NamedTuple):
    """The script hands in its model, optimizer and loader, which are checked next."""

    step: int
    stamp: Stamp


class Prepared(NamedTuple):
    """All workers are ready to train."""

    step: int
    stamp: Stamp
    peers: Any
    """The other workers: a `poise.runtime.peers.Peers`; None with a server."""
    models: Sequence[Any]
    """What this process computes with, as the script gets it back; nothing on a server."""
    optimizers: Sequence[Any]
    streams: bool
    """Whether the data is a stream."""
    lead: int
    """How many steps this worker's loader runs ahead."""


class PassBegan(NamedTuple):
    """A pass over the training loader begins."""

    step: int
    stamp: Stamp
    epoch: int
    position: int
    """Samples of the epoch that are consumed."""


class Disturbed(NamedTuple):
    """Something that is no training step runs between two of them."""

    step: int
    stamp: Stamp


class HandedOut(NamedTuple):
    """The training loader yields a batch."""

    step: int
    stamp: Stamp
    batch: Batch
    samples: int
    """This worker's part of it."""
    whole: bool
    """Whether the global batch has its full size."""
    contents: Any
    asked_s: float
    """When the loader was asked for it, by the host's clock,"""
    fetch_s: float
    """and how long it took, without waiting for other workers."""
    compiled: bool
    """Whether a compiler was at work in the step before, which is over now."""
    fresh: bool
    """Whether the gradient starts from nothing; else that of the batch before is part of it."""


class PartComputed(NamedTuple):
    """The gradient of a part of the local batch is there, not weighted yet."""

    step: int
    stamp: Stamp
    gradients: Sequence[Any]
    counted: float
    """What its mean loss was divided by."""
    samples: int


class BucketReady(NamedTuple):
    """A bucket of this worker's gradient is handed over, not weighted yet."""

    step: int
    stamp: Stamp
    number: int
    """Tells it from other buckets."""
    bucket: Any
    """What the framework hands over: index(), is_last(), buffer(), parameters(), gradients()."""
    first: bool
    """Whether a backward begins with it."""


class BucketDone(NamedTuple):
    """The sum of a bucket over the workers is there; stamped when it arrived."""

    step: int
    stamp: Stamp
    number: int
    """As it was handed over."""
    gradient: Any


class NotFinite(NamedTuple):
    """This worker's own part of a gradient, before it is summed, has NaN or infinity in it."""

    step: int
    stamp: Stamp
    weights: bool
    """Whether the weights were still finite."""
    used: bool
    """Whether an optimizer has used the gradient already: told late. Else `Applied` tells."""


class Reduced(NamedTuple):
    """The gradient of the global batch is there; stamped when its last bucket arrived."""

    step: int
    stamp: Stamp
    weights: Sequence[float]
    """Every worker's factor in it."""


class Applying(NamedTuple):
    """An optimizer is about to use the gradient."""

    step: int
    stamp: Stamp
    optimizer: Any


class Applied(NamedTuple):
    """An optimizer has used the gradient."""

    step: int
    stamp: Stamp
    optimizer: Any


class Decided(NamedTuple):
    """Worker 0 has learned from steps, and decided on them."""

    step: int
    stamp: Stamp
    observations: Sequence[Observation]
    start_step: int
    """The first step that could still change."""
    plan: Plan | None
    """None: nothing changes."""


class Resumed(NamedTuple):
    """Training goes on at a saved place; on worker 0, with what an engine knew."""

    step: int
    stamp: Stamp
    engine: Engine | None
    change: Change | None
    start_step: int
    plan: Plan | None


class Closed(NamedTuple):
    """This process takes part in the training no more."""

    step: int
    stamp: Stamp


class Joined(NamedTuple):
    """A worker takes part from now on."""

    step: int
    stamp: Stamp
    worker: int
    label: str


class Left(NamedTuple):
    """A worker is done, and takes part no more."""

    step: int
    stamp: Stamp
    worker: int


class Lost(NamedTuple):
    """A worker is gone that others wait for, or that had work to do."""

    step: int
    stamp: Stamp
    worker: int
    why: str


EventT = TypeVar("EventT", bound=Event)


class Events:
    """Tells subscribers what happens in one training."""

    def __init__(self) -> None:
        self._calls: dict[type, tuple[Callable[[Any], None], ...]] = {}
        self._thread = threading.get_ident()
        self._failure: BaseException | None = None

    def on(self, kind: type[EventT], call: Callable[[EventT], None]) -> None:
        """Have events of a kind told to a subscriber, after those that are there."""
        self._calls[kind] = (*self._calls.get(kind, ()), call)

    def heard(self, kind: type[EventT]) -> bool:
        """Whether anybody listens to events of a kind; others need not be made."""
        return kind in self._calls

    def train_here(self) -> None:
        """Take the thread that calls this for the training's own."""
        self._thread = threading.get_ident()

    def tell(self, event: Event) -> None:
        """Tell an event."""
        calls = self._calls.get(type(event), ())
        if threading.get_ident() == self._thread:
            for call in calls:
                call(event)
            if self._failure is not None:
                self.raise_kept()
            return
        try:
            for call in calls:
                call(event)
        except BaseException as error:
            self._failure = self._failure or error

    def raise_kept(self) -> None:
        """Raise what a subscriber raised on another thread, if any did."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

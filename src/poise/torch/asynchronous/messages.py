"""What a worker and its server say to each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from poise.core.order import DrawnOrder, Order
from poise.core.plain import from_plain, to_plain
from poise.engine.member import Share
from poise.engine.pool import Ranges
from poise.engine.round import Report
from poise.errors import Disagreement, StateMismatch

_LARGEST_COUNT = 1e18
"""Sums of some of them are still numbers."""


@dataclass(frozen=True)
class About:
    """A worker introduces itself."""

    version: str
    mode: str | None
    """As its script says; None: as the server says."""
    number: int | None
    """What its launcher calls it; None: nothing."""
    host: str


@dataclass(frozen=True)
class Begin:
    """A worker is about to take batches of an epoch: the first, or more than it was given."""

    epoch: int
    wanted: int
    """How many local batches, as its loader runs ahead."""
    skipped: tuple[int, ...]
    """Local batches that it computed and whose gradient it threw away."""
    kept: tuple[int, ...]
    """Others that it has computed, whose gradients are added up and pushed later."""


@dataclass(frozen=True)
class Push:
    """A gradient follows, and then the running statistics of normalization layers."""

    numbers: tuple[int, ...]
    """The local batches that it is of, usually one."""
    skipped: tuple[int, ...]
    """Others that were computed in vain."""
    versions: tuple[int, ...]
    """Of the weights that it was computed with."""
    present: str
    """For each parameter 1 or 0: whether it has a gradient."""
    count: float
    """What the loss was divided by."""
    report: Report | None
    """What was measured in the iteration before."""

    def check(self, parameters: int, versions: Sequence[int], global_batch: int) -> None:
        """Raise unless it can be a push to a server with so many parameters and these versions."""
        alike = len(self.present) == parameters and len(self.versions) == len(versions)
        if not alike or not set(self.present) <= {"0", "1"}:
            raise Disagreement("a worker pushed the gradient of another model")
        past = all(0 <= then <= now for then, now in zip(self.versions, versions, strict=True))
        possible = self.report is None or self.report.is_possible(global_batch)
        if not past or not possible or not 0 <= self.count <= _LARGEST_COUNT:
            raise Disagreement("a worker pushed numbers that cannot be")


@dataclass(frozen=True)
class Handed:
    """A local batch as it travels."""

    share: Share
    whole: bool
    """Whether it has as many samples as the plan says; the last of an epoch may have fewer."""
    samples: tuple[int, ...] | None
    """Its samples, where the order is not one that every worker can compute."""

    @staticmethod
    def of(share: Share, global_batch: int, order: Order | DrawnOrder | None) -> "Handed":
        """Return a local batch of a global batch, with samples if there is an order to tell."""
        whole = share.samples == round(share.part * global_batch)
        return Handed(share, whole, None if order is None else samples_of(order, share.ranges))


@dataclass(frozen=True)
class Leave:
    """A worker leaves."""


@dataclass(frozen=True)
class Weights:
    """New weights follow."""

    handed: tuple[Handed, ...]
    """What to compute next."""
    versions: tuple[int, ...]
    rates: tuple[float, ...]
    """The learning rates, which follow the progress of the training and not of one process."""
    factor: float
    """What they were multiplied by for the last push."""
    samples: int
    """Pushed so far, over all workers."""
    dropped: int
    """Pushes of this worker that were not finite."""
    split: tuple[int, ...]
    queued_s: float
    """How long the push waited in the server, for it or for other workers."""
    counted: bool = False
    """Whether what the worker keeps, to be pushed later, counts as pushed by now."""


@dataclass(frozen=True)
class NoMore:
    """There is nothing to compute."""

    epoch: int
    """The epoch that comes next."""
    done: bool
    """Whether the training is over."""


Message = About | Begin | Push | Leave | Weights | NoMore
_KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def text_of(message: Message) -> dict[str, Any]:
    """Return a message as it travels."""
    return {type(message).__name__.lower(): to_plain(message)}


def message_of(text: Mapping[str, Any]) -> Message:
    """Return the message that a text holds, or raise."""
    for name, kind in _KINDS.items():
        if name in text:
            try:
                message: Message = from_plain(kind, text[name])
            except (StateMismatch, OverflowError) as error:
                raise Disagreement(f"the other end of a connection sent {error}") from None
            return message
    raise Disagreement(f"the other end of a connection sent {sorted(text)[:3]}")


def about_of(text: Mapping[str, Any]) -> About:
    """Return what a newcomer says of itself, or raise."""
    about = message_of(text)
    if not isinstance(about, About):
        raise Disagreement(f"a newcomer sent {type(about).__name__}")
    return about


def samples_of(order: Order | DrawnOrder, ranges: Ranges) -> tuple[int, ...]:
    """Return the samples that stand in some ranges of an order."""
    return tuple(sample for span in ranges for sample in order.at(*span).tolist())

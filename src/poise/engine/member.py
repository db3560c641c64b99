"""Workers as the server of an asynchronous training knows them, and the local batches they have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from poise.engine.pool import Ranges, count_of
from poise.engine.round import Report
from poise.errors import Disagreement


@dataclass(frozen=True)
class Share:
    """A local batch that is a worker's to compute."""

    number: int
    """Counted over the whole training."""
    epoch: int
    step: int
    """With a bound: the step that it is part of. Without: the worker's own step."""
    ranges: Ranges
    part: float
    """The worker's part of the global batch as planned; a smaller last batch counts in full."""

    @property
    def samples(self) -> int:
        """How many there are."""
        return count_of(self.ranges)


@dataclass(frozen=True)
class Tally:
    """What one worker contributed so far."""

    updates: int = 0
    samples: int = 0
    dropped: int = 0
    """Pushes that were not finite."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """How many of its updates were so stale."""
    waited_s: float = 0.0
    """Seconds that its pushes waited: for the server, and with a bound for other workers."""

    @property
    def mean_staleness(self) -> float:
        """The mean over its updates; NaN before the first."""
        total = sum(self.staleness.values())
        stale = sum(updates * count for updates, count in self.staleness.items())
        return stale / total if total else float("nan")

    def updated(self, staleness: int) -> "Tally":
        """Return the tally after one more update, with so stale a gradient."""
        seen = {**self.staleness, staleness: self.staleness.get(staleness, 0) + 1}
        return replace(self, updates=self.updates + 1, staleness=seen)


@dataclass(frozen=True)
class Member:
    """One worker as the server knows it."""

    worker: int
    label: str = ""
    """Host and kind of device, by which its speed is known again after a resume."""
    epoch: int = 0
    """The one that it last asked for samples of."""
    steps: int = 0
    """Local batches that it was given."""
    cut: tuple[Share, ...] = ()
    """Its parts of steps that others have begun, and that it has not asked for."""
    out: tuple[Share, ...] = ()
    """Handed out and not pushed, in their order."""
    reports: tuple[Report, ...] = ()
    """Of this round, all with the same local batch."""
    tally: Tally = field(default_factory=Tally)

    @property
    def unpushed(self) -> tuple[Share, ...]:
        """Everything that waits for its push."""
        return (*self.out, *self.cut)

    def shares(self, numbers: Sequence[int]) -> tuple[Share, ...]:
        """Return local batches that were handed to it, or raise if they were not."""
        found = tuple(share for share in self.out if share.number in numbers)
        if len(found) != len(numbers) or not found:
            raise Disagreement(
                f"worker {self.worker} pushed the local batches {list(numbers)} and has "
                f"{[share.number for share in self.out]}; it does not follow the protocol"
            )
        return found


@dataclass(frozen=True)
class Group:
    """With a bound: the pushes of one step."""

    expected: frozenset[int]
    """Workers that take part."""
    arrived: Mapping[int, int] = field(default_factory=dict)
    """The number of the local batch that each of them pushed."""

    @property
    def complete(self) -> bool:
        """Whether all of them are there."""
        return self.expected <= self.arrived.keys()

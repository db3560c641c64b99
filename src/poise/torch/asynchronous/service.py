"""What a server does, as values that can be shown and recorded."""

from collections.abc import Mapping
from dataclasses import dataclass

from poise.engine.member import Tally


@dataclass(frozen=True)
class Pushed:
    """What is pushed so far, over all workers; nobody says which samples teach more."""

    samples: int

    @property
    def effective_samples(self) -> float:
        """The same."""
        return float(self.samples)


@dataclass(frozen=True)
class ServedWorker:
    """One worker, at one moment."""

    worker: int
    label: str
    local_batch: int
    iteration_s: float
    """Its last iteration, without waiting; NaN: not measured yet."""
    tally: Tally


@dataclass(frozen=True)
class Service:
    """A server, at one moment."""

    mode: str
    epoch: int
    pushed: int
    """Samples of this epoch that are pushed,"""
    length: int
    """and all of them."""
    updates: int
    seconds: float
    """Since the first push."""
    busy_s: float
    """Of those, in which it applied gradients or copied weights; shards count each by itself."""
    workers: tuple[ServedWorker, ...]
    gone: Mapping[int, Tally]
    """Workers that have left."""
    waiting_for: int = 0
    """Workers that must join before training starts."""

"""The contract behind the facade `Balancer`, whichever kind of training stands there."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from poise.core.noise import NoiseTrack
from poise.core.plan import Plan

Saved = dict[str, Any]
"""Numbers and text; for a stream also what its data set says of itself."""


class Schedule(Protocol):
    """A schedule of learning rates that can be saved; `BySamples` is one."""

    def follow(self) -> None:
        """Follow the samples."""

    def state_dict(self) -> dict[str, Any]:
        """Return how far it has come."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Consumed(Protocol):
    """How much was trained on; it never falls, but for going back to a saved place."""

    @property
    def samples(self) -> int:
        """Samples consumed."""

    @property
    def effective_samples(self) -> float:
        """The same, each counted by what it teaches compared with one at the start."""


class Training(Protocol):
    """One kind of training, in one of its processes.

    `Balancer` documents what each member means to the user; here stands what it must keep. Models,
    optimizers and loaders are the framework's.
    """

    @property
    def worker(self) -> int:
        """This worker's number, from 0; a server is 0, and its workers count from 1."""

    @property
    def workers(self) -> int:
        """How many take part now."""

    @property
    def plan(self) -> Plan:
        """The plan of the batch handed out last; before the first, the plan to start with."""

    @property
    def progress(self) -> Consumed:
        """What is consumed so far, over the whole training and all workers."""

    @property
    def noise(self) -> NoiseTrack | None:
        """What is known of the gradient noise, where it is known."""

    @property
    def learning_rate_factor(self) -> float:
        """What the last step's learning rate was multiplied by."""

    @property
    def skipped(self) -> int:
        """Steps whose gradient no optimizer used."""

    def prepare(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Return model, optimizer and loader to train with; once. All workers call it together."""

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs that are left of so many."""

    def evaluation(self, loader: Any) -> Any:
        """Return a loader that shows every sample to one worker."""

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Iterate over parts of the batch under way, whose gradients are reduced together."""

    def mean(self, value: Any, count: float) -> float:
        """Return the mean over those who call it together."""

    def state_dict(self) -> Saved:
        """Return the place in the training. Never communicates."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place; on every worker."""

    def follow(self, schedule: Schedule) -> bool:
        """Whether the training itself lets a schedule follow the samples, and not the loop."""

    def close(self) -> None:
        """Wait for the others to be done, and let go of everything; a second time does nothing."""

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process stops, and let go of everything."""

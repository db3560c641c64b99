"""Scenarios: a cluster that is only described, and what happens to it while it trains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from poise.cluster_file import DeclaredCluster
from poise.core.cluster import Worker, speed_model
from poise.core.limits import UNLIMITED, Limits
from poise.core.timing import Floats, Ints, SpeedModel
from poise.engine.adaptation import Adaptation
from poise.engine.modes import Mode, Sync
from poise.errors import InvalidSetting
from poise.policy import Bounds, Fixed, Policy, Static, policy_named
from poise.policy.bounds import NO_BOUNDS
from poise.sim.cluster import Cluster
from poise.sim.reduction import Ring, Together
from poise.sim.truth import Bend, Bent, Truth, slowed

What = Literal[
    "slower", "slower_network", "slower_link", "slower_loader", "leaves", "fails", "joins"
]
SLOWER: tuple[What, ...] = ("slower", "slower_network", "slower_link", "slower_loader")
"""What takes longer."""
MOST_CV, MOST_SPIKE = 2.0, 1e6
"""Of noise; more is a mistake."""
MOVES: tuple[What, ...] = ("leaves", "fails", "joins")
"""What changes who is there."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How times scatter around the truth: log-normal, with mean 1, and now and then a spike."""

    cv: float = 0.0
    """Standard deviation, relative to the mean."""
    correlation: float = 0.0
    """Between a worker's neighboring steps."""
    spike_chance: float = 0.0
    """Of each worker in each step,"""
    spike: float = 1.0
    """to take so many times as long."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Speeds that wander: the logarithm of each worker's times is a random walk that is drawn back.

    After a while it spreads by per_step sqrt(memory_steps / 2).
    """

    per_step: float = 0.0
    """Standard deviation of the change in one step."""
    memory_steps: float = 500.0
    """Steps after which a change has faded to 1/e."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Workers that fail at random and come back."""

    mean_steps: float = math.inf
    """Steps between two failures of one worker, on average."""
    down_steps: int = 50
    """Steps until it is back."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happens once."""

    what: What
    workers: tuple[int, ...] = ()
    """Whom it concerns."""
    factors: tuple[float, ...] = ()
    """For what gets slower: how many times as slow as declared, one per worker."""
    at_step: int | None = None
    at_s: float | None = None
    over_steps: int = 0
    """Steps in which it comes little by little."""
    for_steps: int | None = None
    """Steps after which it is over; None: it stays."""

    def is_due(self, step: int, clock_s: float) -> bool:
        """Whether the step is there, or the time."""
        if self.at_step is not None:
            return step >= self.at_step
        assert self.at_s is not None
        return clock_s >= self.at_s


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What a step teaches: the gradient noise over the course of a training, and its goal."""

    noise_scale: tuple[tuple[float, float], ...]
    """(Part of the goal that is reached, phi in samples), rising from 0 in the first number."""
    start_batch: int
    """The global batch that the learning rate is chosen for."""
    target_samples: float | None = None
    """The goal: samples to train on with the global batch of the start; None: there is none."""
    adapt: Adaptation | None = None
    """Lets the global batch follow the noise, with policies that can predict."""

    def phi(self, effective_samples: float) -> float:
        """Return the noise scale after so many samples, each counted by what it teaches.

        Between two numbers the logarithm of phi is a line.

        >>> course = ((0.0, 100.0), (1.0, 10_000.0))
        >>> round(Learning(noise_scale=course, start_batch=1, target_samples=10.0).phi(5.0))
        1000
        """
        reached, scales = np.array(self.noise_scale).T
        done = effective_samples / self.target_samples if self.target_samples else 0.0
        return float(np.exp(np.interp(done, reached, np.log(scales))))


@dataclass(frozen=True, kw_only=True)
class Server:
    """What an exchange with the server of an asynchronous training takes."""

    exchange_s: float = 0.0
    """Seconds in which a gradient travels there and weights travel back."""
    update_s: float = 0.0
    """Seconds in which the server applies a gradient, one after another."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """All that a simulation needs to know."""

    cluster: DeclaredCluster
    global_batch: int
    steps: int = 1000
    seed: int = 0
    mode: Mode = field(default_factory=Sync)
    policies: tuple[str, ...] = ("even", "proportional", "auto")
    split: tuple[int, ...] = ()
    """Of the policy fixed."""
    resources: tuple[float, ...] = ()
    """Of the policy static, one per worker."""
    noise: Noise = field(default_factory=Noise)
    drift: Drift = field(default_factory=Drift)
    failures: Failures = field(default_factory=Failures)
    events: tuple[Event, ...] = ()
    learning: Learning | None = None
    bend: Bend = field(default_factory=Bend.of)
    """One entry per worker, or one for all."""
    ring: Ring | None = None
    """Of all declared workers; None: collectives take what the network says."""
    drag: float = 0.0
    queue: int = 2
    """Local batches that a loader keeps ready."""
    lead: int = 0
    """Steps by which a loader runs ahead, before which a plan cannot start."""
    restart_s: float = 0.0
    """Seconds that pass when workers join, leave or fail."""
    epoch_samples: int | None = None
    """Samples of an epoch; None: a hundred global batches."""
    stride: int = 1
    """For how many steps one stands, once nothing has been decided for long."""
    server: Server = field(default_factory=Server)
    prices: tuple[float, ...] = ()
    """Per hour, one per worker; empty: not known."""
    error: float | None = None
    """By how much step times of a calibrated cluster were mispredicted, relative to them."""
    notes: tuple[str, ...] = ()
    """What its record did not show."""

    @property
    def workers(self) -> int:
        """How many are declared."""
        return len(self.cluster.workers)

    @property
    def names(self) -> tuple[str, ...]:
        """What people call them."""
        return tuple(worker.name for worker in self.cluster.workers)

    @cached_property
    def limits(self) -> Limits:
        """The bounds that all declared workers state.

        Memory is none of them: what does not fit at once takes several passes.
        """
        return Limits.of(self.workers, **_stated(self.cluster.workers), names=self.names)

    @property
    def epoch(self) -> int:
        """Samples of an epoch."""
        return self.epoch_samples or 100 * self.global_batch

    @cached_property
    def first(self) -> Ints:
        """The workers that are there at the start: all but those that join first."""
        moves = [event for event in self.events if event.what in MOVES]
        first = {worker: event.what for event in reversed(moves) for worker in event.workers}
        return np.array([worker for worker in range(self.workers) if first.get(worker) != "joins"])

    @cached_property
    def kind_of(self) -> Ints:
        """The number of each worker's table."""
        kinds = self.cluster.kinds
        return np.repeat(np.arange(len(kinds)), [kind.count for kind in kinds])

    @cached_property
    def model(self) -> SpeedModel:
        """The lines of all declared workers; what exceeds their memory takes several passes."""
        model = speed_model(self.cluster.workers, self.cluster.network)
        fits = [
            math.floor((worker.memory_bytes - worker.fixed_bytes) / worker.bytes_per_sample)
            if worker.memory_bytes is not None and worker.bytes_per_sample
            else math.inf
            for worker in self.cluster.workers
        ]
        most = np.minimum(model.micro_batch, np.maximum(fits, 1))
        return replace(model, micro_batch=most)

    def cluster_of(
        self,
        workers: Ints,
        slowness: Floats,
        *,
        network: float = 1.0,
        links: Floats | float = 1.0,
        loaders: Floats | float = 1.0,
    ) -> Cluster:
        """Return the cluster of some workers, each so many times as slow as declared."""
        everyone = len(workers) == self.workers
        model = self.model if everyone else self.model.take(workers)
        model = slowed(model, slowness)
        bucket_s = np.array(self.cluster.network.among(self.workers, len(workers)).bucket_s)
        loading = np.broadcast_to(loaders, self.workers)[workers]
        model = replace(model, bucket_s=bucket_s * network, input_s=model.input_s * loading)
        truth: Truth = model
        if not self.bend.is_straight:
            truth = Bent(model, self.bend.take(workers))
        if self.ring is None:
            return Cluster(truth, Together(truth.bucket_s), self.drag)
        slower = np.broadcast_to(links, self.workers) * network
        each = self.ring.link_bytes_per_s / slower
        return Cluster(truth, replace(self.ring, link_bytes_per_s=each[workers]), self.drag)

    @cached_property
    def _memory(self) -> Floats:
        """Workers x 3: fixed bytes, bytes per sample, and the memory there is; NaN: not known."""
        return np.array(
            [
                (worker.fixed_bytes, worker.bytes_per_sample or np.nan, worker.memory_bytes)
                if worker.memory_bytes is not None
                else (np.nan,) * 3
                for worker in self.cluster.workers
            ],
            dtype=np.float64,
        )

    def memory_of(self, workers: Ints, batches: Ints) -> tuple[Floats, Floats]:
        """Return the peak that local batches take on workers, and what these have."""
        fixed, each, limit = self._memory[workers].T
        at_once = np.minimum(batches, self.model.micro_batch[workers])
        return np.asarray(fixed + each * at_once), limit

    def policy(self, name: str) -> Policy:
        """Return a policy with the bounds that the workers declare."""
        if name == "fixed":
            return Fixed(list(self.split))
        bounds = self.bounds
        if name == "static":
            return Static([self.resources[worker] for worker in self.first], bounds=bounds)
        found = policy_named(name)
        if bounds == NO_BOUNDS or name == "even":
            return found
        return replace(found, bounds=bounds)  # type: ignore[type-var]

    @cached_property
    def bounds(self) -> Bounds:
        """What a user states for the workers that are there at the start."""
        stated = _stated([self.cluster.workers[worker] for worker in self.first])
        different = {key: tuple(values) for key, values in stated.items() if len(set(values)) > 1}
        if self.changes_members and different:
            raise InvalidSetting(
                "workers come and go, and have different min_batch, max_batch or multiple_of; "
                "give all of them the same, since a policy knows bounds by a worker's place"
            )
        bounds = Bounds(**{key: values[0] for key, values in stated.items()} | different)
        return replace(bounds, max_batch=None) if bounds.max_batch == UNLIMITED else bounds

    @property
    def changes_members(self) -> bool:
        """Whether workers come and go."""
        moves = any(event.what in MOVES for event in self.events)
        return moves or math.isfinite(self.failures.mean_steps)

    @property
    def changes_over_steps(self) -> bool:
        """Whether anything but noise depends on the step."""
        return bool(self.events or self.drift.per_step) or self.changes_members


def _stated(workers: Sequence[Worker]) -> dict[str, list[int]]:
    """Return the bounds that workers state, by their names in `Limits` and `Bounds`."""
    most = [worker.max_batch for worker in workers]
    return {
        "min_batch": [worker.min_batch for worker in workers],
        "max_batch": [UNLIMITED if each is None else each for each in most],
        "multiple_of": [worker.multiple_of for worker in workers],
    }

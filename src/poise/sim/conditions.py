"""What workers are like at each step: events, drift, failures and noise, all from one seed.

Every source of chance has a generator of its own and draws for all declared workers, so that the
same seed brings the same noise and the same failures whatever is decided.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from poise.core.timing import Flags, Floats, Ints
from poise.errors import InvalidSetting
from poise.sim.cluster import Cluster
from poise.sim.scenario import MOVES, SLOWER, Drift, Event, Noise, Scenario


@dataclass(frozen=True, eq=False)
class Moment:
    """The cluster at one step."""

    present: Ints
    """Who is there, by the number in the scenario."""
    cluster: Cluster
    """The same object while nothing changes."""
    network: float = 1.0
    """How many times as slow the network is."""
    failed: bool = False
    """Whether somebody failed in the step before, which is lost."""


class Scatter:
    """Noise, step by step: log-normal with mean 1, correlated between neighbors, and spikes."""

    def __init__(self, noise: Noise, workers: int, seed: int | list[int]) -> None:
        self._noise = noise
        self._draw = np.random.default_rng(seed)
        self._level = self._draw.standard_normal(workers)

    def next(self) -> Floats:
        """Return what each worker's times are multiplied by in the next step."""
        noise, workers = self._noise, len(self._level)
        factor = np.exp(noise.cv * self._level - noise.cv**2 / 2)
        if noise.spike_chance:
            struck = self._draw.random(workers) < noise.spike_chance
            factor = np.where(struck, factor * noise.spike, factor)
        if noise.cv:
            kept, fresh = noise.correlation, self._draw.standard_normal(workers)
            self._level = kept * self._level + math.sqrt(1 - kept**2) * fresh
        return factor


class Wandering:
    """Drift, step by step."""

    def __init__(self, drift: Drift, workers: int, seed: list[int]) -> None:
        self._drift = drift
        self._draw = np.random.default_rng(seed)
        self._level = np.zeros(workers)

    @property
    def slowness(self) -> Floats:
        """How many times as slow as declared each worker has become."""
        return np.exp(self._level)

    def go_on(self) -> None:
        """A step is over."""
        if self._drift.per_step:
            kept = 1 - 1 / self._drift.memory_steps
            fresh = self._draw.standard_normal(len(self._level))
            self._level = kept * self._level + self._drift.per_step * fresh


class Conditions:
    """The course of a scenario; asked once for each step, in order."""

    def __init__(self, scenario: Scenario) -> None:
        workers, seed = scenario.workers, scenario.seed
        self._scenario = scenario
        self.scatter = Scatter(scenario.noise, workers, [seed, 1])
        self._wandering = Wandering(scenario.drift, workers, [seed, 2])
        self._fate = np.random.default_rng([seed, 3])
        self._waiting = list(scenario.events)
        self._running: list[tuple[int, Event]] = []
        """Events that have begun, and when."""
        self._there = np.zeros(workers, dtype=bool)
        self._there[scenario.first] = True
        self._back_at: dict[int, int] = {}
        """When workers that failed at random come back."""
        self._steps = 0
        self._moment: Moment | None = None
        self._last: tuple[Floats, ...] = ()

    def at(self, step: int, clock_s: float) -> Moment:
        """Return the cluster at a step that begins at some time."""
        before, failed = self._there.copy(), False
        while self._steps <= step:
            failed |= self._chance(self._steps)
            if self._steps:
                self._wandering.go_on()
            self._steps += 1
        failed |= self._begun(step, clock_s)
        factors = self._factors(step)
        alike = not self._scenario.drift.per_step and (self._there == before).all()
        known = all((one == other).all() for one, other in zip(self._last, factors, strict=False))
        if self._moment is not None and alike and known:
            return self._moment
        self._last = factors
        present = np.flatnonzero(self._there)
        if not present.size:
            raise InvalidSetting(
                f"at step {step} the last worker is gone; let one stay, or another join before"
            )
        slowness, network, links, loaders = factors
        slower, network_slower = self._wandering.slowness * slowness, float(network[0])
        cluster = self._scenario.cluster_of(
            present, slower[present], network=network_slower, links=links, loaders=loaders
        )
        self._moment = Moment(present, cluster, network_slower)
        return replace(self._moment, failed=failed)

    def _begun(self, step: int, clock_s: float) -> bool:
        """Begin what is due; whether somebody failed."""
        due = [event for event in self._waiting if event.is_due(step, clock_s)]
        failed = False
        for event in due:
            self._waiting.remove(event)
            workers = list(event.workers)
            if event.what in MOVES:
                self._back_at = {w: at for w, at in self._back_at.items() if w not in workers}
            if event.what in ("leaves", "fails"):
                failed |= event.what == "fails" and bool(self._there[workers].any())
                self._there[workers] = False
            elif event.what == "joins":
                self._there[workers] = True
            else:
                self._running.append((step, event))
        return failed

    def _chance(self, step: int) -> bool:
        """Let workers fail and come back at random; whether one failed."""
        failures = self._scenario.failures
        if not math.isfinite(failures.mean_steps):
            return False
        for worker in [each for each, back in self._back_at.items() if back <= step]:
            del self._back_at[worker]
            self._there[worker] = True
        struck: Flags = self._fate.random(len(self._there)) < 1 / failures.mean_steps
        struck &= self._there
        if not step or not struck.any() or struck.sum() == self._there.sum():
            return False
        for worker in np.flatnonzero(struck).tolist():
            self._back_at[worker] = step + failures.down_steps
        self._there &= ~struck
        return True

    def _factors(self, step: int) -> tuple[Floats, ...]:
        """Return how many times as slow everything is: workers, network, links, loaders."""
        workers = len(self._there)
        slower = {what: np.ones(1 if what == "slower_network" else workers) for what in SLOWER}
        for begun, event in self._running:
            if event.for_steps is not None and step >= begun + event.for_steps:
                continue
            part = 1.0 if not event.over_steps else min(1.0, (step - begun + 1) / event.over_steps)
            values = slower[event.what]
            where = list(event.workers) if event.what != "slower_network" else [0]
            before = values[where]
            values[where] = before * (np.array(event.factors) / before) ** part
        return tuple(slower.values())

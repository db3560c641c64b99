"""Training of virtual workers with a server: nobody waits, or only for those too far behind.

The server is `poise.engine.asp.AsyncEngine`, as in live training. Workers draw local batches,
compute, and push; pushes are applied one after another in the order in which they arrive. The
events are kept in a queue by their time.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from poise.core.timing import Floats
from poise.engine.asp import AsyncEngine
from poise.engine.member import Share
from poise.engine.modes import Async, Stale
from poise.engine.report import Report
from poise.engine.round import Round
from poise.policy import Policy
from poise.records import Recorder
from poise.sim.bsp import engine_of
from poise.sim.cluster import Cluster
from poise.sim.conditions import Conditions, Moment, Scatter
from poise.sim.learning import Lessons
from poise.sim.scenario import Scenario
from poise.sim.step import Step

Kind = Literal["arrive", "apply"]


@dataclass(order=True)
class _Happens:
    """Something at a time; of two at the same time, the one that was known first."""

    at_s: float
    order: int
    kind: Kind = field(compare=False)
    worker: int = field(compare=False)
    life: int = field(compare=False)
    """How often the worker had joined: what it sent before it left is void."""


@dataclass
class _Worker:
    """What a worker is doing."""

    share: Share
    version: int
    """Updates that its weights have seen."""
    iteration_s: float
    wait_s: float
    """For input."""


@dataclass
class _Window:
    """What happened since the last global batch was complete."""

    begin_s: float = 0.0
    pushed: int = 0
    idle_s: Floats = field(default_factory=lambda: np.zeros(0))
    """How long each worker waited."""
    decided: Round | None = None


def asynchronous(
    scenario: Scenario, policy: Policy, *, recorder: Recorder | None = None
) -> Iterator[Step]:
    """Train virtually, and yield a step whenever a global batch of samples has been pushed."""
    return _Asynchronous(scenario, policy, recorder).steps()


class _Asynchronous:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, policy: Policy, recorder: Recorder | None) -> None:
        assert isinstance(scenario.mode, Async | Stale)
        self._scenario = scenario
        self._conditions = Conditions(scenario)
        self._scatters = [
            Scatter(scenario.noise, 1, [scenario.seed, 1, worker])
            for worker in range(scenario.workers)
        ]
        learning = scenario.learning
        self._lessons = None if learning is None else Lessons(learning, scenario.seed)
        self._recorder = recorder
        engine = engine_of(scenario, policy)
        self._engine = AsyncEngine.begin(scenario.mode, engine, scenario.epoch)
        self._queue: list[_Happens] = []
        self._known = 0
        self._clock_s = 0.0
        self._free_s = 0.0
        """When the server has applied everything that has arrived."""
        self._busy_s = 0.0
        self._doing: dict[int, _Worker] = {}
        self._waiting: dict[int, tuple[float, Share | None]] = {}
        """Workers that cannot go on, since when, and the local batch that they were given."""
        self._lives: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        """With a bound: the updates that the weights of each pushed local batch had seen."""
        self._moment: Moment | None = None
        self._window = _Window()

    def steps(self) -> Iterator[Step]:
        """Yield the steps."""
        self._window = self._fresh()
        self._come_and_go()
        for number in range(self._scenario.steps):
            while self._window.pushed < self._scenario.global_batch:
                if not self._queue:
                    return
                self._next()
                if self._lessons is not None and self._lessons.reached:
                    break
            yield self._step(number)
            if self._lessons is not None and self._lessons.reached:
                return
            self._come_and_go()

    @property
    def staleness(self) -> dict[int, float]:
        """The mean staleness of each worker that made an update."""
        tallies = {member.worker: member.tally for member in self._engine.members}
        tallies = {**self._engine.gone, **tallies}
        return {worker: each.mean_staleness for worker, each in tallies.items() if each.updates}

    def _fresh(self) -> _Window:
        return _Window(self._clock_s, 0, np.zeros(self._scenario.workers))

    def _step(self, number: int) -> Step:
        """Close the window of a global batch."""
        window, moment = self._window, self._moment
        assert moment is not None
        for worker, (since_s, share) in self._waiting.items():
            window.idle_s[worker] += self._clock_s - since_s
            self._waiting[worker] = (self._clock_s, share)
        present = moment.present
        lasts_s = max(self._clock_s - window.begin_s, 1e-12)
        # A window may hold parts of iterations: what a worker did not wait it computed.
        idle = np.minimum(window.idle_s[present], lasts_s)
        step = Step(
            number=number,
            workers=present,
            split=self._split(),
            samples=min(window.pushed, self._scenario.global_batch),
            begin_s=window.begin_s,
            lasts_s=lasts_s,
            computed_s=lasts_s - idle,
            input_s=np.zeros(len(present)),
            idle_s=idle,
            clean_s=_free_s(moment.cluster, self._split()),
            best_s=float("nan"),
            effective_samples=0.0 if self._lessons is None else self._lessons.effective_samples,
            plan=None if window.decided is None else window.decided.plan,
        )
        self._window = self._fresh()
        self._window.pushed = max(0, window.pushed - self._scenario.global_batch)
        return step

    def _split(self) -> tuple[int, ...]:
        return self._engine.plan.split

    def _come_and_go(self) -> None:
        """Let workers join and leave that do so now."""
        moment = self._conditions.at(self._engine.step, self._clock_s)
        before = set() if self._moment is None else set(self._moment.present.tolist())
        self._moment = moment
        now = set(moment.present.tolist())
        for worker in sorted(before - now):
            decided, self._engine = self._engine.leave(worker)
            self._note(decided)
            self._doing.pop(worker, None)
            self._waiting.pop(worker, None)
        for worker in sorted(now - before):
            self._lives[worker] = self._lives.get(worker, 0) + 1
            decided, self._engine = self._engine.join(worker, self._scenario.names[worker])
            self._note(decided)
            self._waiting[worker] = (self._clock_s, None)
        if before - now:
            self._apply_steps()
        self._go_on()

    def _next(self) -> None:
        """Let the next thing happen."""
        event = heapq.heappop(self._queue)
        if event.life != self._lives[event.worker] or event.worker not in self._doing:
            return
        self._clock_s = max(self._clock_s, event.at_s)
        if event.kind == "arrive":
            begin_s = max(event.at_s, self._free_s)
            self._free_s = begin_s + self._scenario.server.update_s
            self._busy_s += self._scenario.server.update_s
            self._engine = self._engine.waited(event.worker, begin_s - event.at_s)
            self._window.idle_s[event.worker] += begin_s - event.at_s
            self._expect(self._free_s, "apply", event.worker)
            return
        self._pushed(event.worker)
        self._waiting[event.worker] = (event.at_s, None)
        self._go_on()

    def _pushed(self, worker: int) -> None:
        """A gradient is applied, or waits for the rest of its step."""
        done = self._doing.pop(worker)
        numbers = [done.share.number]
        if isinstance(self._engine.mode, Stale):
            self._versions[done.share.number] = done.version
            self._engine = self._engine.pushed(worker, numbers)
            self._apply_steps()
        else:
            staleness = self._engine.updates - done.version
            self._engine = self._engine.pushed(worker, numbers, staleness=staleness)
            factor = self._engine.factor(done.share, staleness)
            self._taught(done.share.samples, factor / done.share.part)
        samples = done.share.samples
        taken, limit = self._scenario.memory_of(np.array([worker]), np.array([samples]))
        report = Report(
            samples,
            iteration_s=done.iteration_s,
            wait_s=done.wait_s,
            input_s=(done.iteration_s + done.wait_s) / samples if done.wait_s else np.nan,
            memory_bytes=float(taken[0]),
            memory_limit_bytes=float(limit[0]),
        )
        decided, self._engine = self._engine.reported(worker, report)
        self._note(decided)

    def _apply_steps(self) -> None:
        """Apply the steps whose pushes are all there."""
        while (step := self._engine.complete()) is not None:
            arrived = dict(self._engine.groups[step].arrived)
            samples = self._engine.samples
            late = {
                worker: self._engine.updates - self._versions.pop(number)
                for worker, number in arrived.items()
            }
            factor = self._engine.step_factor(float(np.mean(list(late.values()))))
            self._engine = self._engine.applied(step, late)
            self._taught(self._engine.samples - samples, factor)

    def _taught(self, samples: int, factor: float) -> None:
        """Count samples; what a smaller step of the optimizer makes of them, too."""
        self._window.pushed += samples
        if self._lessons is not None:
            batch = self._engine.engine.global_batch
            self._lessons.taught(self._lessons.worth(samples, batch) * factor)

    def _go_on(self) -> None:
        """Let workers start that can."""
        if self._engine.gathering:
            return
        if self._engine.over:
            self._engine = self._engine.next_epoch()
        for worker in list(self._waiting):
            self._try(worker)
        if self._waiting and not self._queue:
            self._end_epoch()

    def _try(self, worker: int) -> None:
        """Start a worker's next local batch, if there is one and it may."""
        since_s, share = self._waiting[worker]
        if share is None:
            share, self._engine = self._engine.draw(worker)
            if share is None:
                self._engine = self._engine.unused(worker, self._engine.epoch + 1)
                self._apply_steps()
                return
            self._waiting[worker] = (since_s, share)
        if not self._engine.may_start(worker):
            return
        del self._waiting[worker]
        waited_s = max(0.0, self._clock_s - since_s)
        if waited_s:
            self._engine = self._engine.waited(worker, waited_s)
            self._window.idle_s[worker] += waited_s
        iteration_s, input_s = self._iteration_s(worker, share.samples)
        self._doing[worker] = _Worker(share, self._engine.updates, iteration_s, input_s)
        assert self._moment is not None
        travels_s = self._scenario.server.exchange_s * self._moment.network
        self._expect(self._clock_s + iteration_s + input_s + travels_s, "arrive", worker)

    def _end_epoch(self) -> None:
        """Nobody computes and nobody can start: the epoch is over for all."""
        if not self._engine.over:
            return
        self._engine = self._engine.next_epoch()
        for worker in list(self._waiting):
            self._engine = self._engine.unused(worker, self._engine.epoch)
            self._try(worker)

    def _iteration_s(self, worker: int, samples: int) -> tuple[float, float]:
        """Return how long a worker computes, and how long it waits for its loader."""
        assert self._moment is not None
        place = int(np.searchsorted(self._moment.present, worker))
        truth = self._moment.cluster.truth
        batches = np.zeros(len(self._moment.present))
        batches[place] = samples
        computes = float(truth.ready_s(batches)[place, -1])
        computes *= float(self._scatters[worker].next()[0])
        loads = float(truth.input_s[place]) * samples
        return computes, max(0.0, loads - computes)

    def _expect(self, at_s: float, kind: Kind, worker: int) -> None:
        self._known += 1
        event = _Happens(at_s, self._known, kind, worker, self._lives[worker])
        heapq.heappush(self._queue, event)

    def _note(self, decided: Round | None) -> None:
        if decided is None:
            return
        if decided.plan is not None:
            self._window.decided = decided
        if self._recorder is not None:
            self._recorder.write_round(decided, self._engine, self._busy_s)


def _free_s(cluster: Cluster, split: tuple[int, ...]) -> float:
    """Return the seconds of a global batch at the rate of a split: sum of b_i / t_i(b_i).

    No split is called best: where nobody waits, local batches change the rate by their fixed
    costs alone, and equal iteration times are wanted for what they do to staleness.
    """
    batches = np.array(split, dtype=np.float64)
    times = cluster.truth.ready_s(batches)[:, -1]
    return float(batches.sum() / (batches / np.maximum(times, 1e-12)).sum())

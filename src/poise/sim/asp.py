"""Training of virtual workers with a server: nobody waits, or only for those too far behind.

The server is `poise.engine.asp.AsyncEngine`, as in live training. Workers draw local batches,
compute, and push; pushes are applied one after another in the order in which they arrive. The
events are kept in a queue by their time.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from poise.core.plan import Plan
from poise.core.timing import Floats
from poise.engine.asp import AsyncEngine
from poise.engine.member import Share
from poise.engine.modes import Async, Stale
from poise.engine.round import Report, Round
from poise.policy import Policy
from poise.records import Recorder
from poise.sim.bsp import engine_of
from poise.sim.cluster import Cluster
from poise.sim.conditions import Conditions, Scatter
from poise.sim.learning import Lessons
from poise.sim.scenario import Scenario
from poise.sim.step import Step


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

    begin_s: float
    idle_s: Floats
    """How long each worker waited."""
    pushed: int = 0
    plan: Plan | None = None
    """What was decided last."""


class _Happening(NamedTuple):
    """Something at a time; of two at the same time, the one that was known first."""

    at_s: float
    order: int
    kind: Literal["arrive", "apply"]
    worker: int


class _Agenda:
    """What is to happen to workers, and the clock that it moves."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        self._queue: list[_Happening] = []
        self._known = 0

    def __bool__(self) -> bool:
        """Whether anything is to happen."""
        return bool(self._queue)

    def expect(self, at_s: float, kind: Literal["arrive", "apply"], worker: int) -> None:
        """Something is to happen to a worker, unless it leaves before."""
        self._known += 1
        heapq.heappush(self._queue, _Happening(at_s, self._known, kind, worker))

    def forget(self, worker: int) -> None:
        """A worker leaves: nothing happens any more that was to happen to it."""
        self._queue = [event for event in self._queue if event.worker != worker]
        heapq.heapify(self._queue)

    def next(self) -> _Happening:
        """Take the next happening off the queue, and move the clock to it."""
        event = heapq.heappop(self._queue)
        self.clock_s = event.at_s
        return event


@dataclass
class _Server:
    """The server as a queue: it applies one gradient after another."""

    update_s: float
    free_s: float = 0.0
    """When it has applied everything that has arrived."""
    busy_s: float = 0.0

    def take(self, at_s: float) -> float:
        """Return when it begins to apply a gradient that arrives at a time."""
        begin_s = max(at_s, self.free_s)
        self.free_s = begin_s + self.update_s
        self.busy_s += self.update_s
        return begin_s


class _Machines:
    """The workers' devices, as they are now."""

    def __init__(self, scenario: Scenario) -> None:
        self._conditions = Conditions(scenario)
        self._scatters = [
            Scatter(scenario.noise, 1, [scenario.seed, 1, worker])
            for worker in range(scenario.workers)
        ]
        self.now = self._conditions.at(0, 0.0)
        self._present: set[int] = set()

    def go_on(self, step: int, clock_s: float) -> tuple[list[int], list[int]]:
        """Return who has left and who has joined since the last time."""
        before = self._present
        self.now = self._conditions.at(step, clock_s)
        self._present = set(self.now.present.tolist())
        return sorted(before - self._present), sorted(self._present - before)

    def iteration_s(self, worker: int, samples: int) -> tuple[float, float]:
        """Return how long a worker computes, and how long it waits for its loader."""
        place = int(np.searchsorted(self.now.present, worker))
        truth = self.now.cluster.truth
        batches = np.zeros(len(self.now.present))
        batches[place] = samples
        computes = float(truth.ready_s(batches)[place, -1])
        computes *= float(self._scatters[worker].next()[0])
        loads = float(truth.input_s[place]) * samples
        return computes, max(0.0, loads - computes)


def asynchronous(
    scenario: Scenario, policy: Policy, *, recorder: Recorder | None = None
) -> Iterator[Step]:
    """Train virtually, and yield a step whenever a global batch of samples has been pushed."""
    return Asynchronous(scenario, policy, recorder).steps()


class Asynchronous:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, policy: Policy, recorder: Recorder | None) -> None:
        assert isinstance(scenario.mode, Async | Stale)
        self._scenario = scenario
        self._machines = _Machines(scenario)
        self._server = _Server(scenario.server.update_s)
        self._agenda = _Agenda()
        self._lessons = Lessons(scenario.learning, scenario.seed)
        self._recorder = recorder
        engine = engine_of(scenario, policy)
        self._engine = AsyncEngine.begin(scenario.mode, engine, scenario.epoch)
        self._doing: dict[int, _Worker] = {}
        self._waiting: dict[int, tuple[float, Share | None]] = {}
        """Workers that cannot go on, since when, and the local batch that they were given."""
        self._versions: dict[int, int] = {}
        """With a bound: the updates that the weights of each pushed local batch had seen."""
        self._window = _Window(0.0, np.zeros(scenario.workers))

    def steps(self) -> Iterator[Step]:
        """Train virtually, and yield a step whenever a global batch has been pushed."""
        self._come_and_go()
        for number in range(self._scenario.steps):
            while self._window.pushed < self._scenario.global_batch:
                if not self._agenda:
                    return
                self._next()
                if self._lessons.reached:
                    break
            yield self._step(number)
            if self._lessons.reached:
                return
            self._come_and_go()

    def _step(self, number: int) -> Step:
        """Close the window of a global batch."""
        window, moment, now_s = self._window, self._machines.now, self._agenda.clock_s
        for worker, (since_s, share) in self._waiting.items():
            window.idle_s[worker] += now_s - since_s
            self._waiting[worker] = (now_s, share)
        present, split = moment.present, self._engine.plan.split
        lasts_s = max(now_s - window.begin_s, 1e-12)
        # A window may hold parts of iterations: what a worker did not wait it computed.
        idle = np.minimum(window.idle_s[present], lasts_s)
        batch = self._scenario.global_batch
        left_over = max(0, window.pushed - batch)
        self._window = _Window(now_s, np.zeros_like(window.idle_s), left_over)
        return Step(
            number=number,
            workers=present,
            split=split,
            samples=min(window.pushed, batch),
            begin_s=window.begin_s,
            lasts_s=lasts_s,
            computed_s=lasts_s - idle,
            input_s=np.zeros(len(present)),
            idle_s=idle,
            clean_s=_free_s(moment.cluster, split),
            best_s=float("nan"),
            effective_samples=self._lessons.effective_samples,
            plan=window.plan,
        )

    def _come_and_go(self) -> None:
        """Let workers join and leave that do so now."""
        left, joined = self._machines.go_on(self._engine.step, self._agenda.clock_s)
        for worker in left:
            self._agenda.forget(worker)
            self._follow(*self._engine.leave(worker))
            self._doing.pop(worker, None)
            self._waiting.pop(worker, None)
        for worker in joined:
            self._follow(*self._engine.join(worker, self._scenario.names[worker]))
            self._waiting[worker] = (self._agenda.clock_s, None)
        if left:
            self._apply_steps()
        self._go_on()

    def _next(self) -> None:
        """Let the next thing happen."""
        event = self._agenda.next()
        if event.kind == "arrive":
            waited_s = self._server.take(event.at_s) - event.at_s
            self._waited(event.worker, waited_s)
            self._agenda.expect(self._server.free_s, "apply", event.worker)
            return
        self._pushed(event.worker)
        self._waiting[event.worker] = (event.at_s, None)
        self._go_on()

    def _waited(self, worker: int, seconds: float) -> None:
        self._engine = self._engine.waited(worker, seconds)
        self._window.idle_s[worker] += seconds

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
        self._follow(*self._engine.reported(worker, report))

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
        self._lessons.taught(samples, self._engine.engine.global_batch, factor)

    def _go_on(self) -> None:
        """Let workers start that can."""
        if self._engine.gathering:
            return
        if self._engine.over:
            self._engine = self._engine.next_epoch()
        for worker in list(self._waiting):
            self._try(worker)
        if self._waiting and not self._agenda and self._engine.over:
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
        waited_s = max(0.0, self._agenda.clock_s - since_s)
        if waited_s:
            self._waited(worker, waited_s)
        iteration_s, input_s = self._machines.iteration_s(worker, share.samples)
        self._doing[worker] = _Worker(share, self._engine.updates, iteration_s, input_s)
        travels_s = self._scenario.server.exchange_s * self._machines.now.network
        self._agenda.expect(
            self._agenda.clock_s + iteration_s + input_s + travels_s, "arrive", worker
        )

    def _end_epoch(self) -> None:
        """Nobody computes and nobody can start: the epoch is over for all."""
        self._engine = self._engine.next_epoch()
        for worker in list(self._waiting):
            self._engine = self._engine.unused(worker, self._engine.epoch)
            self._try(worker)

    def _follow(self, decided: Round | None, engine: AsyncEngine) -> None:
        """Go on with an engine, and note what it has decided."""
        self._engine = engine
        if decided is None:
            return
        if decided.plan is not None:
            self._window.plan = decided.plan
        if self._recorder is not None:
            self._recorder.write_round(decided, self._engine, self._server.busy_s)


def _free_s(cluster: Cluster, split: tuple[int, ...]) -> float:
    """Return the seconds of a global batch at the rate of a split: sum of b_i / t_i(b_i).

    No split is called best: where nobody waits, local batches change the rate by their fixed
    costs alone, and equal iteration times are wanted for what they do to staleness.
    """
    batches = np.array(split, dtype=np.float64)
    times = cluster.truth.ready_s(batches)[:, -1]
    return float(batches.sum() / (batches / np.maximum(times, 1e-12)).sum())

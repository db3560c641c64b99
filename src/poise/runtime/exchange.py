"""How a decision of worker 0 takes effect on the same step everywhere.

At yields all workers post one small exchange: each sends worker 0 a row of what it measured, and
worker 0 sends all its latest plan, usually "no change". When that is due, what it is about and
when a plan starts is `poise.engine.start_step`'s to say; here it travels. A loader that cuts a
step waits for every exchange that can concern it, so it has heard of every plan that does, however
far it runs ahead.
"""

import logging
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from poise.core.batch import Batch
from poise.core.observation import Observation
from poise.core.plan import Forecast, Plan, Timetable
from poise.core.reduction_watch import Episode, ReductionWatch
from poise.core.timing import Floats
from poise.engine.bsp import Engine
from poise.engine.start_step import Announcements, Posted
from poise.errors import Disagreement, PoiseWarning
from poise.policy import Forecasting
from poise.runtime.clocks import Stopwatch
from poise.runtime.collectives import Disconnected, Pending
from poise.runtime.events import Decided, Resumed
from poise.runtime.generation import Generation
from poise.runtime.learned import Known
from poise.runtime.peers import Peers
from poise.runtime.rows import Reporter, observation_of, unmeasured

_NO_CHANGE = -1
_LAST_WAIT_S = 5.0
_log = logging.getLogger("poise")


@dataclass(frozen=True, eq=False)
class _Traveling:
    """What completes an exchange that is posted."""

    message: Floats
    """From worker 0: the step; a new plan: its start step or none, gain and split."""
    rows: Floats | None
    """On worker 0, of each worker: the step, then what it measured; None on the others."""
    pending: tuple[Pending, Pending]

    def done(self) -> bool:
        return all(each.done() for each in self.pending)

    def wait(self, limit_s: float | None = None) -> None:
        for each in self.pending:
            each.wait(limit_s)


@dataclass(eq=False)
class Exchange:
    """The exchanges of one generation. A silent one posts nothing: nobody learns anything."""

    peers: Peers
    stopwatch: Stopwatch
    _: KW_ONLY
    engine: Engine
    """What was learned; on worker 0 alone."""
    announcements: Announcements
    reporters: Sequence[Reporter]
    silent: bool
    """Whether nothing is posted."""
    _reductions: ReductionWatch = field(default_factory=ReductionWatch, init=False)
    """On worker 0: whether they take what they took before."""
    _traveling: deque[_Traveling] = field(default_factory=deque, init=False)
    """One for each exchange that is posted."""

    def forecast(self) -> Forecast | None:
        """Return what is predicted by all that is known on worker 0; None where nothing is."""
        if self.peers.generation.worker or not isinstance(self.engine.policy, Forecasting):
            return None
        return self.engine.policy.forecast(self.engine.state)

    def await_plan(self, step: int) -> Plan:
        """Return the plan for a step that is about to be cut, once it is known."""
        while self.announcements.due(step) is not None:
            self._absorb()
        return self.announcements.timetable.at(step)

    def handed_out(self, batch: Batch) -> None:
        """Tell the others of a batch that is handed out, and on worker 0 of a new plan."""
        if self.silent:
            return
        due = self.announcements.is_due(batch.step)
        if due and self.peers.generation.worker == 0:
            while self._traveling and self._traveling[0].done():
                self._absorb()  # so that what is decided on it goes out with this post
        self.announcements = self.announcements.handed_out(batch)
        if due:
            self._post(batch.step)

    def begin_pass(self, step: int) -> None:
        """Absorb everything posted: afterwards all workers know the same plans.

        A batch that was handed out and not trained on comes again.
        """
        self._drain()
        self.announcements = self.announcements.abort(step)

    def resume(self, step: int, timetable: Timetable, known: Known | None) -> None:
        """Training goes on at another step, with what was known of workers before, if anything."""
        self._drain()
        self.announcements = self.announcements.resume(step, timetable)
        start_step = self.announcements.start_step
        engine, change, plan = None, None, None
        if known is not None and self.peers.generation.worker == 0:
            plan, self.engine = known.go_on(start_step)
            engine, change = known.engine, known.change
            self.announcements = self.announcements.decide(plan)
        stamp = self.stopwatch.stamp()
        self.peers.events.tell(Resumed(step, stamp, engine, change, start_step, plan))

    def finish(self) -> None:
        """Tell of the last steps; all workers have posted what they will ever post."""
        if not self.peers.events.heard(Decided):
            return
        while self._traveling:
            try:
                self._traveling[0].wait(_LAST_WAIT_S)
            except Disconnected:  # a worker ended a step early: nothing can be said of it
                break
            self._take_in()
        self._decide([unmeasured(batch) for batch in self.announcements.unreported])

    def _drain(self) -> None:
        while self._traveling:
            self._absorb()

    def _post(self, step: int) -> None:
        collectives = self.peers.generation.collectives
        posted, self.announcements = self.announcements.post(step)
        measured = [each.row(batch.step) for batch in posted.reported for each in self.reporters]
        row = np.concatenate([[float(step)], *measured])
        rows = np.full((collectives.workers, len(row)), np.nan) if collectives.worker == 0 else None
        message = self._message(posted)
        with self.peers.liveness.watch(f"the exchange of step {step}"):
            # Together 2 (n - 1) messages; an all-reduce of a table is 2 n (n - 1).
            pending = collectives.gather(row, rows), collectives.broadcast(message, 0)
        self._traveling.append(_Traveling(message, rows, pending))

    def _message(self, posted: Posted) -> Floats:
        """Return what worker 0 says; on the others, room for it."""
        message = np.zeros(3 + self.peers.generation.workers)
        message[0], message[1] = posted.step, _NO_CHANGE
        if posted.plan is not None:
            message[1], message[2] = posted.plan.start_step, posted.plan.gain
            message[3:] = posted.plan.split
        return message

    def _absorb(self) -> None:
        step = self.announcements.posted[0].step
        with self.peers.liveness.watch(f"the exchange of step {step}"):
            self._traveling[0].wait()
        self._take_in()

    def _take_in(self) -> None:
        posted, arrived = self.announcements.posted[0], self._traveling.popleft()
        said, start_step, gain, *local_batches = arrived.message.tolist()
        rows = np.empty((0, 1)) if arrived.rows is None else arrived.rows
        steps = {int(said), *rows[:, 0].astype(int).tolist()}
        if steps != {posted.step}:
            raise Disagreement(
                f"workers are at steps {sorted({*steps, posted.step})}; every worker must take "
                "every batch of the loader"
            )
        plan = posted.plan  # worker 0 knows more of its own plan than travels
        if plan is not None:
            _log.info("from step %d on: %s, %s", plan.start_step, list(plan.split), plan.why)
        elif start_step != _NO_CHANGE:
            plan = Plan(tuple(int(each) for each in local_batches), int(start_step), gain)
        self.announcements = self.announcements.absorb(plan)
        if posted.reported and len(rows):
            measured = rows[:, 1:].reshape(len(rows), len(posted.reported), -1)
            seen = zip(posted.reported, np.moveaxis(measured, 1, 0), strict=True)
            self._decide([observation_of(batch, each) for batch, each in seen])

    def _decide(self, seen: Sequence[Observation]) -> None:
        """Let the engine learn from steps; its plan is announced with the next post."""
        if not seen:
            return
        start_step = self.announcements.start_step
        plan, self.engine = self.engine.update(seen, start_step)
        self.announcements = self.announcements.decide(plan)
        stamp = self.stopwatch.stamp()
        self.peers.events.tell(Decided(seen[-1].step, stamp, seen, start_step, plan))
        episodes, self._reductions = self._reductions.update(seen)
        for episode in episodes:
            _say(episode, self.peers.generation)


def _say(episode: Episode, generation: Generation) -> None:
    """Say that reductions take long, or do so no more; times do not tell which link it is."""
    text = str(episode)
    if not episode.over:
        hosts: dict[str, list[str]] = {}
        for worker, member in enumerate(generation.members):
            hosts.setdefault(member.host, []).append(str(worker))
        where = "; ".join(f"{host}: {', '.join(workers)}" for host, workers in hosts.items())
        text += (
            f". A link between workers is slower than it was, or a machine is too busy to serve "
            f"it; a sum waits for the slowest, so times do not tell which (workers by host: "
            f"{where})"
        )
    warnings.warn(text, PoiseWarning, stacklevel=2)

"""How a decision of worker 0 takes effect on the same step everywhere.

At yields all workers post one small exchange: each sends worker 0 a row of what it measured, and
worker 0 sends all its latest plan, usually "no change". That is every step while a split is new,
and every few steps later, by a rule that all workers follow alike. A loader may cut step s only
after it has absorbed every exchange up to step s - delay, where delay is the largest lead of any
worker plus 2, and a plan posted at step t starts at step t + delay. So a loader that cuts a step
has heard of every plan that concerns it, however far it runs ahead.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from poise.core.batch import Batch
from poise.core.observation import Observation
from poise.core.plan import Forecast, Plan
from poise.core.timing import Floats
from poise.engine.bsp import Engine
from poise.engine.rhythm import SELDOM, delay, is_due, next_due
from poise.errors import Disagreement
from poise.policy import Forecasting
from poise.records import Recorder
from poise.torch import norms
from poise.torch.learned import Known
from poise.torch.meter import WIDTH, Meter, observation_of, unmeasured
from poise.torch.run import Run

_NO_CHANGE = -1
_LAST_WAIT = timedelta(seconds=5)
_log = logging.getLogger("poise")


@dataclass(frozen=True)
class _Posted:
    step: int
    reported: tuple[Batch, ...]
    """The batches that the rows are about."""
    message: torch.Tensor
    """From worker 0: the step; a new plan: its start step or none, gain and split."""
    rows: list[torch.Tensor]
    """On worker 0, of each worker: the step, then what it measured; empty on the others."""
    works: tuple[dist.Work, ...]
    """What completes when message and rows are there."""


class Exchange:
    """The start-step protocol. For policies that learn nothing, nothing is exchanged.

    If the training is recorded, all workers report in any case; worker 0 has the recorder.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        lead: int,
        meter: Meter,
        *,
        lag: int,
        recorded: bool,
        recorder: Recorder | None,
    ) -> None:
        self.engine = engine
        """What was learned; on worker 0 alone."""
        self._run = run
        self._meter = meter
        self._delay = delay(lead)
        self._lag = lag
        """After how many steps every worker knows what it measured."""
        # One worker has nothing to share.
        learns = engine.policy.online and run.cluster.workers > 1
        self._silent = not (recorded or learns or engine.adapt is not None)
        self._recorder = recorder
        self._posted: deque[_Posted] = deque()
        self._unreported: deque[Batch] = deque()
        """Batches handed out that no row was about."""
        self._first_step = 0
        self._next_step = 0
        self._decided: Plan | None = None
        self._announced: Plan | None = None
        if not self._silent:
            run.meter = meter

    def forecast(self) -> Forecast | None:
        """Return what is predicted by all that is known on worker 0; None where nothing is."""
        if self._run.cluster.worker or not isinstance(self.engine.policy, Forecasting):
            return None
        return self.engine.policy.forecast(self.engine.state)

    def plan_at(self, step: int) -> Plan:
        """Return the plan for a step that is about to be cut."""
        while self._posted and self._posted[0].step <= step - self._delay:
            self._absorb(self._posted.popleft())
        return self._run.timetable.at(step)

    def post(self, batch: Batch) -> None:
        """Tell the others of a batch that is handed out, and on worker 0 of a new plan."""
        if self._silent:
            return
        self._unreported.append(batch)
        self._next_step = batch.step
        if self._is_due(batch.step):
            self._post(batch.step)
        self._next_step = batch.step + 1

    def begin_pass(self) -> None:
        """Absorb everything posted: afterwards all workers know the same plans.

        A batch that was handed out and not trained on comes again.
        """
        self._drain()
        step = self._run.progress.step
        self._unreported = deque(batch for batch in self._unreported if batch.step < step)

    def resume(self, step: int, known: Known | None) -> None:
        """Training goes on at another step, with what was known of workers before, if anything."""
        self._drain()
        self._decided = self._announced = None
        self._unreported.clear()
        self._first_step = self._next_step = step
        self._meter.forget()
        if self._run.norms is not None:
            self._run.norms.forget()
        if known is not None and self._run.cluster.worker == 0:
            self._decided, self.engine = known.go_on(step + self._delay)
            if self._recorder is not None:
                self._recorder.resume(known.engine, known.change, step + self._delay, self._decided)

    def finish(self) -> None:
        """Write the rest of the record; all workers have posted what they will ever post."""
        if self._recorder is None:
            return
        for posted in self._posted:
            try:
                for work in posted.works:
                    work.wait(_LAST_WAIT)
            except RuntimeError:  # a worker ended a step early: nothing can be said of it
                break
            self._take_in(posted)
        self._decide([unmeasured(batch) for batch in self._unreported])
        self._recorder.close()

    def _drain(self) -> None:
        while self._posted:
            self._absorb(self._posted.popleft())

    def _is_due(self, step: int) -> bool:
        """Whether all workers post at a step; they all know the plan that holds there."""
        return is_due(self._run.timetable, step, self._first_step)

    def _post(self, step: int) -> None:
        if self._run.cluster.worker == 0:
            while self._posted and all(work.is_completed() for work in self._posted[0].works):
                self._absorb(self._posted.popleft())
        over = [batch for batch in self._unreported if batch.step <= step - self._lag]
        for _ in over:
            self._unreported.popleft()
        reported = tuple(over[-SELDOM:])
        cluster = self._run.cluster
        measured = [self._row(batch.step) for batch in reported]
        row = torch.from_numpy(np.concatenate([[float(step)], *measured]))
        receivers = range(cluster.workers if cluster.worker == 0 else 0)
        rows = [torch.full_like(row, torch.nan) for _ in receivers]
        message = self._message(step)
        with self._run.liveness.watch(f"the exchange of step {step}"):
            # Together 2 (n - 1) messages; an all-reduce of a table is 2 n (n - 1).
            works = (
                dist.gather(row, rows or None, group_dst=0, group=cluster.control, async_op=True),
                dist.broadcast(message, group_src=0, group=cluster.control, async_op=True),
            )
        self._posted.append(_Posted(step, reported, message, rows, works))

    def _row(self, step: int) -> Floats:
        """Return what this worker measured in a step."""
        times, looked = self._meter.row(step), self._run.norms
        return times if looked is None else np.concatenate([times, looked.row(step)])

    def _message(self, step: int) -> torch.Tensor:
        """Return what worker 0 says; on the others, room for it."""
        workers = self._run.cluster.workers
        message = torch.zeros(3 + workers, dtype=torch.float64)
        if self._run.cluster.worker == 0:
            message[0], message[1] = step, _NO_CHANGE
            if self._decided is not None:
                message[1] = max(self._decided.start_step, step + self._delay)
                message[2] = self._decided.gain
                message[3:] = torch.tensor(self._decided.split, dtype=torch.float64)
                self._announced, self._decided = self._decided, None
        return message

    def _absorb(self, posted: _Posted) -> None:
        with self._run.liveness.watch(f"the exchange of step {posted.step}"):
            for work in posted.works:
                work.wait()
        self._take_in(posted)

    def _take_in(self, posted: _Posted) -> None:
        said, start_step, gain, *local_batches = posted.message.tolist()
        rows: Floats = np.array([row.numpy() for row in posted.rows])
        steps = {int(said), *(int(row[0]) for row in rows)}
        if steps != {posted.step}:
            raise Disagreement(
                f"workers are at steps {sorted({*steps, posted.step})}; every worker must take "
                "every batch of the loader"
            )
        if start_step != _NO_CHANGE:
            self._hear(Plan(tuple(int(b) for b in local_batches), int(start_step), gain))
        if self._run.cluster.worker == 0:
            width = WIDTH if self._run.norms is None else WIDTH + norms.WIDTH
            measured = rows[:, 1:].reshape(len(rows), len(posted.reported), width)
            seen = zip(posted.reported, np.moveaxis(measured, 1, 0), strict=True)
            self._decide(
                [
                    norms.with_norms(observation_of(batch, each[:, :WIDTH]), each[:, WIDTH:])
                    for batch, each in seen
                ]
            )

    def _hear(self, plan: Plan) -> None:
        """A plan is announced."""
        announced = self._announced
        if announced is not None and (announced.split, announced.gain) == (plan.split, plan.gain):
            # Worker 0 knows more of its own plan than travels.
            plan = replace(announced, start_step=plan.start_step)
            _log.info("from step %d on: %s, %s", plan.start_step, list(plan.split), plan.why)
        self._run.timetable = self._run.timetable.announce(plan)

    def _decide(self, seen: Sequence[Observation]) -> None:
        """Let the engine learn from steps; its plan is announced with the next post."""
        if not seen:
            return
        due = next_due(self._run.timetable, self._next_step, self._first_step)
        start_step = due + self._delay
        plan, self.engine = self.engine.update(seen, start_step)
        if self._recorder is not None:
            self._recorder.write(seen, start_step, plan)
        self._decided = plan or self._decided

"""How a decision of worker 0 takes effect on the same step everywhere.

At each yield all workers post one small all-reduce of a table in which each fills its own row;
worker 0's row also carries its latest plan. A loader may cut step s only after it has absorbed
every exchange up to step s - delay, where delay is the largest lead of any worker plus 2, and a
plan posted at step t starts at step t + delay. So a loader that cuts a step has heard of every
plan that concerns it, however far it runs ahead.
"""

from collections import deque
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from poise.core.batch import Batch
from poise.core.observation import Observation
from poise.core.plan import Plan
from poise.engine.bsp import Engine
from poise.errors import Disagreement
from poise.records import Recorder
from poise.torch.run import Run

_NO_CHANGE = -1
_LAST_WAIT = timedelta(seconds=5)


@dataclass(frozen=True)
class _Posted:
    batch: Batch
    table: torch.Tensor
    work: dist.Work


def delay(lead: int) -> int:
    """Return how many steps after its announcement a plan starts, for the largest lead."""
    return lead + 2


class Exchange:
    """The start-step protocol. For policies that learn nothing, nothing is exchanged.

    If the training is recorded, all workers report in any case; worker 0 has the recorder.
    """

    def __init__(
        self, run: Run, engine: Engine, lead: int, *, recorded: bool, recorder: Recorder | None
    ) -> None:
        self._run = run
        self._engine = engine
        self._delay = delay(lead)
        self._silent = not (engine.policy.online or recorded)
        self._recorder = recorder
        self._posted: deque[_Posted] = deque()
        self._next_step = 0
        self._decided: Plan | None = None
        self._announced: Plan | None = None

    def plan_at(self, step: int) -> Plan:
        """Return the plan for a step that is about to be cut."""
        while self._posted and self._posted[0].batch.step <= step - self._delay:
            self._absorb(self._posted.popleft())
        return self._run.timetable.at(step)

    def post(self, batch: Batch) -> None:
        """Tell the others of a batch that is handed out, and on worker 0 of a new plan."""
        if self._silent:
            return
        if self._run.cluster.worker == 0:
            while self._posted and self._posted[0].work.is_completed():
                self._absorb(self._posted.popleft())
        table = self._table(batch)
        with self._run.liveness.watch(f"the exchange of step {batch.step}"):
            work = dist.all_reduce(table, group=self._run.cluster.control, async_op=True)
        assert work is not None
        self._posted.append(_Posted(batch, table, work))
        self._next_step = batch.step + 1

    def drain(self) -> None:
        """Absorb everything posted: afterwards all workers know the same plans."""
        while self._posted:
            self._absorb(self._posted.popleft())

    def finish(self) -> None:
        """Write the rest of the record; all workers have posted what they will ever post."""
        if self._recorder is None:
            return
        for posted in self._posted:
            try:
                posted.work.wait(_LAST_WAIT)
            except RuntimeError:  # a worker ended a step early: nothing can be said of it
                break
            self._take_in(posted)
        self._recorder.close()

    def _table(self, batch: Batch) -> torch.Tensor:
        """Columns: the step; whether it compiled; a new plan: start step or none, factor, split.

        The last ones are worker 0's alone.
        """
        workers, worker = self._run.cluster.workers, self._run.cluster.worker
        table = torch.zeros(workers, 4 + workers, dtype=torch.float64)
        table[worker, 0] = batch.step
        table[worker, 1] = self._run.compiled()
        table[worker, 2] = _NO_CHANGE
        if self._decided is not None:
            table[worker, 2] = max(self._decided.start_step, batch.step + self._delay)
            table[worker, 3] = self._decided.learning_rate_factor
            table[worker, 4:] = torch.tensor(self._decided.split, dtype=torch.float64)
            self._announced, self._decided = self._decided, None
        return table

    def _absorb(self, posted: _Posted) -> None:
        step = posted.batch.step
        with self._run.liveness.watch(f"the exchange of step {step}"):
            posted.work.wait()
        self._take_in(posted)

    def _take_in(self, posted: _Posted) -> None:
        step = posted.batch.step
        rows = posted.table.tolist()
        steps = [int(row[0]) for row in rows]
        if any(other != step for other in steps):
            raise Disagreement(
                f"workers are at steps {steps}; every worker must take every batch of the loader"
            )
        start_step, factor, *local_batches = rows[0][2:]
        if start_step != _NO_CHANGE:
            plan = Plan(tuple(int(local) for local in local_batches), int(start_step), factor)
            if self._announced is not None and self._announced.split == plan.split:
                # Worker 0 knows more of its own plan than travels.
                plan = replace(self._announced, start_step=plan.start_step)
            self._run.timetable = self._run.timetable.announce(plan)
        if self._run.cluster.worker == 0:
            self._decide(
                Observation(
                    step=step,
                    split=posted.batch.split,
                    epoch=posted.batch.epoch,
                    compiling=tuple(worker for worker, row in enumerate(rows) if row[1]),
                )
            )

    def _decide(self, observation: Observation) -> None:
        """Let the engine learn from a step; its plan is announced with the next post."""
        start_step = self._next_step + self._delay
        plan, self._engine = self._engine.update([observation], start_step)
        if self._recorder is not None:
            self._recorder.write(observation, start_step, plan)
        self._decided = plan or self._decided

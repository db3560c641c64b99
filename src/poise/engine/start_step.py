"""How a decision of worker 0 takes effect on the same step everywhere.

At yields all workers post one small exchange: each sends worker 0 what it measured, and worker 0
sends all its latest plan, usually none. When they do is `poise.engine.rhythm`.

**The delay rule.** A loader cuts step s only after it has absorbed every exchange up to step
s - delay, and a plan posted at step t starts at step t + delay or later. An exchange that a loader
has not absorbed therefore carries no plan that starts by the step it cuts: loaders that have
absorbed more and loaders that have absorbed less cut the same split, and agree on whether an
exchange is due there.

`Announcements` is that protocol as a value. It sends nothing and measures nothing; a driver does,
in this order for each step:

    while announcements.due(step): wait for the exchange, then absorb   before the step is cut
    announcements.handed_out(batch)                                     at the yield
    if announcements.is_due(step): post                                 at the yield

Worker 0 may absorb what has arrived at any time before the yield. It lets the engine decide with
`start_step`, and passes the plan to `decide` at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from poise.core.batch import Batch
from poise.core.plain import from_plain, to_plain
from poise.core.plan import Plan, Timetable
from poise.core.revised import revised
from poise.engine.rhythm import SELDOM, is_due, next_due


@dataclass(frozen=True)
class Posted:
    """An exchange under way."""

    step: int
    """At whose yield all workers posted it."""
    reported: tuple[Batch, ...]
    """The batches that the workers' rows are about."""
    plan: Plan | None = None
    """What worker 0 announces with it; on the others None, until it is absorbed."""


@dataclass(frozen=True)
class Announcements:
    """The start-step protocol as one worker sees it. Frozen: each call returns the next one."""

    timetable: Timetable
    """The plans of all exchanges that were absorbed."""
    delay: int
    """Of `poise.engine.rhythm.delay`, for the largest lead of any worker."""
    lag: int = 1
    """After how many steps every worker knows what it measured."""
    first_step: int = 0
    """Where this run of the training began."""
    next_step: int = 0
    """The next step that is handed out."""
    unreported: tuple[Batch, ...] = ()
    """Batches handed out that no exchange was about, in order."""
    posted: tuple[Posted, ...] = ()
    """Exchanges that were not absorbed, the oldest first."""
    decided: Plan | None = None
    """On worker 0: what goes out with the next exchange."""

    @property
    def start_step(self) -> int:
        """On worker 0: the first step that a decision made now can change.

        Nothing else computes it. A plan goes out with the next exchange and starts `delay` steps
        later. Worker 0 knows when that is: only plans decide when exchanges are due, and it made
        those under way.
        """
        timetable = self.timetable
        for posted in self.posted:
            if posted.plan is not None:
                timetable = timetable.announce(posted.plan)
        return next_due(timetable, self.next_step, self.first_step) + self.delay

    def is_due(self, step: int) -> bool:
        """Whether all workers post at a step, which must have been cut."""
        assert self.due(step) is None
        return is_due(self.timetable, step, self.first_step)

    def due(self, step: int) -> Posted | None:
        """Return the oldest exchange, if it must be absorbed before a step may be cut."""
        oldest = self.posted[0] if self.posted else None
        return oldest if oldest is not None and oldest.step <= step - self.delay else None

    def handed_out(self, batch: Batch) -> "Announcements":
        """Return what follows when the loader yields a batch."""
        unreported = (*self.unreported, batch)
        return revised(self, unreported=unreported, next_step=batch.step + 1)

    def post(self, step: int) -> tuple[Posted, "Announcements"]:
        """Return the exchange to send at a step, with what is known of the batches before."""
        assert self.decided is None or self.decided.start_step >= step + self.delay
        known = [batch for batch in self.unreported if batch.step <= step - self.lag]
        posted = Posted(step, tuple(known[-SELDOM:]), self.decided)
        return posted, revised(
            self,
            unreported=self.unreported[len(known) :],
            posted=(*self.posted, posted),
            next_step=step + 1,
            decided=None,
        )

    def absorb(self, plan: Plan | None) -> "Announcements":
        """Return what follows when the oldest exchange has arrived, with this plan or none.

        Worker 0 keeps its own copy of the plan, which says more than travels.
        """
        oldest, *rest = self.posted
        plan = oldest.plan if oldest.plan == plan else plan
        timetable = self.timetable if plan is None else self.timetable.announce(plan)
        return revised(self, timetable=timetable, posted=tuple(rest))

    def decide(self, plan: Plan | None) -> "Announcements":
        """Return what follows when worker 0 decided now; None keeps what was decided before."""
        assert plan is None or plan.start_step == self.start_step
        return revised(self, decided=plan or self.decided)

    def abort(self, step: int) -> "Announcements":
        """Return what follows when a step is given up: batches from it on come again.

        Exchanges under way are void. Their batches are reported again. No step before this one was
        trained by a plan among them: the last such plan is decided again, unless a later one was,
        and starts when it now can. One worker may have absorbed what another has not, so either
        all absorb everything first, or all go on with a copy of worker 0's.
        """
        reported = (batch for posted in self.posted for batch in posted.reported)
        plans = (*(posted.plan for posted in self.posted), self.decided)
        aborted = revised(
            self,
            unreported=tuple(b for b in (*reported, *self.unreported) if b.step < step),
            posted=(),
            next_step=step,
            decided=None,
        )
        plan = next((each for each in reversed(plans) if each is not None), None)
        if plan is None:
            return aborted
        start_step = max(plan.start_step, aborted.start_step)
        return revised(aborted, decided=replace(plan, start_step=start_step))

    def resume(
        self, step: int, timetable: Timetable, decided: Plan | None = None
    ) -> "Announcements":
        """Return what follows when training goes on at another step, or with other workers.

        Everything is forgotten: it is about steps that were not made, or about other workers.
        """
        return Announcements(
            timetable, self.delay, self.lag, first_step=step, next_step=step, decided=decided
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that survive JSON, for another worker to go on with.

        What plans predict is left out: no step depends on it.
        """
        state: dict[str, Any] = to_plain(
            revised(
                self,
                timetable=Timetable(tuple(_bare(plan) for plan in self.timetable.plans)),
                posted=tuple(
                    replace(each, plan=each.plan and _bare(each.plan)) for each in self.posted
                ),
                decided=self.decided and _bare(self.decided),
            )
        )
        return state

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> "Announcements":
        """Return the value that `state_dict` made plain, or raise StateMismatch."""
        return from_plain(Announcements, state)


def _bare(plan: Plan) -> Plan:
    return replace(plan, forecast=None)

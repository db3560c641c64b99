"""The engine of training with a server: who computes what, what a push is worth, who may go on.

Local batches are decided by the same engine and policies as in synchronous training. The workers'
measurements since the last decision, at least one of each worker, make one round, and a round is to
a policy what a step is there: equal iteration times are the fastest split of the global batch,
and the one without a tail of stale gradients.

Without a bound every push is an update of its own. With a bound of s steps, the pushes of one
step are one update, weighted by their counts as in synchronous training, and a worker starts a
step only if the slowest is no more than s steps behind. With s = 0 that is the synchronous mode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from poise.core.membership import Identity, origins
from poise.core.observation import Change, Event
from poise.core.plain import check_state, whole_in
from poise.core.plan import Plan, Timetable
from poise.core.revised import revised
from poise.core.split import apportion
from poise.core.staleness import rate_factor, stable_part, usual_staleness
from poise.engine.bsp import Engine
from poise.engine.member import Group, Member, Share, Tally
from poise.engine.modes import Async, Stale
from poise.engine.pool import Pool, count_of
from poise.engine.round import Report, Round, observation_of
from poise.errors import OutOfOrder, StateMismatch

_MOST_REPORTS = 64
"""Of a worker in one round: the last ones, while another takes its time."""


@dataclass(frozen=True)
class AsyncEngine:
    """The state of the training on the server. Frozen: each call returns the next one."""

    mode: Async | Stale
    engine: Engine
    """Decides the local batches."""
    timetable: Timetable
    length: int
    """Samples of an epoch."""
    pool: Pool
    epoch: int = 0
    members: tuple[Member, ...] = ()
    gone: Mapping[int, Tally] = field(default_factory=dict)
    """What workers contributed that have left."""
    gathering: int = 0
    """Workers to wait for before training starts; 0 once it has."""
    updates: int = 0
    samples: int = 0
    """Pushed so far, over the whole training."""
    next_number: int = 0
    next_step: int = 0
    """With a bound: the first step that is not cut."""
    rounds: int = 0
    finished: bool = False
    """Whether all workers have left because they were done."""
    resumed: tuple[str, ...] | None = None
    """After a resume, until training starts: the labels of the workers that the engine knows."""
    groups: Mapping[int, Group] = field(default_factory=dict)

    @staticmethod
    def begin(mode: Async | Stale, engine: Engine, length: int) -> "AsyncEngine":
        """Return the engine of a training that waits for as many workers as the engine has."""
        timetable, started = engine.start()
        return AsyncEngine(mode, started, timetable, length, Pool(length), gathering=engine.workers)

    @property
    def step(self) -> int:
        """How many global batches have been begun."""
        if isinstance(self.mode, Stale):
            return self.next_step
        return self.samples // self.engine.global_batch

    @property
    def plan(self) -> Plan:
        """The plan for what is handed out next."""
        return self.timetable.at(self.step)

    @property
    def over(self) -> bool:
        """Whether the epoch is: every sample is pushed, or no worker wants the rest.

        Loops may leave a pass before its end, or end before the server's.
        """
        gone_on = all(member.epoch > self.epoch for member in self.members)
        return self.pool.over or self.finished or (bool(self.members) and gone_on)

    @property
    def abandoned(self) -> bool:
        """Whether training has started, and all workers are gone that were not done."""
        return not (self.gathering or self.members or self.finished)

    @property
    def usual_staleness(self) -> int:
        """Without a bound: the updates by which gradients are late on average."""
        ahead = isinstance(self.mode, Async) and self.mode.ahead
        return usual_staleness(len(self.members), ahead=ahead)

    def member(self, worker: int) -> Member:
        """Return a worker that is here."""
        return self.members[self._place(worker)]

    def join(self, worker: int, label: str = "") -> tuple[Round | None, "AsyncEngine"]:
        """A worker is here and wants to compute."""
        member = Member(worker, label, self.epoch, tally=self.gone.get(worker, Tally()))
        gone = {key: tally for key, tally in self.gone.items() if key != worker}
        engine = revised(self, members=(*self.members, member), gone=gone, finished=False)
        if not self.gathering:
            return engine._changed((*range(len(self.members)), None))
        if len(engine.members) < self.gathering:
            return None, engine
        engine = revised(engine, gathering=0, resumed=None)
        if self.resumed is None:
            return None, engine
        before = [Identity(label) for label in self.resumed]
        now = [Identity(member.label) for member in engine.members]
        decided, engine = engine._changed(origins(before, now))
        return replace(decided, loaded=self.engine), engine

    def leave(self, worker: int, *, done: bool = False) -> tuple[Round | None, "AsyncEngine"]:
        """A worker is gone, perhaps because it was done: what it did not push is free again."""
        place = self._place(worker)
        member = self.members[place]
        left = revised(
            self._without(member.unpushed, worker),
            members=self.members[:place] + self.members[place + 1 :],
            gone={**self.gone, worker: member.tally},
        )
        if self.gathering:
            return None, left
        if not left.members:
            return None, revised(left, finished=done)
        stay = (number for number in range(len(self.members)) if number != place)
        return left._changed(tuple(stay))

    def draw(self, worker: int) -> tuple[Share | None, "AsyncEngine"]:
        """Hand the next local batch to a worker; None: there is nothing to hand out now."""
        if self.gathering:
            return None, self
        place = self._place(worker)
        member = self.members[place]
        if isinstance(self.mode, Stale):
            engine = self if member.cut else self._with_step_cut(place)
            member = engine.members[place]
            if not member.cut:
                return None, engine
            share, *rest = member.cut
            return share, engine._with(worker, cut=tuple(rest), out=(*member.out, share))
        plan = self.plan
        local = max(1, plan.split[place])
        share, engine = self._taken(local, member.steps, local / plan.global_batch)
        if not share.ranges:
            return None, self
        return share, engine._with(worker, steps=member.steps + 1, out=(*member.out, share))

    def may_start(self, worker: int) -> bool:
        """Whether a worker may start the step that it is at: nobody is too far behind."""
        if self.gathering or not isinstance(self.mode, Stale):
            return not self.gathering
        slowest = min(self._at(member) for member in self.members)
        return self._at(self.member(worker)) - slowest <= self.mode.steps

    def factor(self, share: Share, staleness: int) -> float:
        """Without a bound: return what the learning rate of a push is multiplied by."""
        return rate_factor(share.part, staleness, self.usual_staleness, damped=self.mode.damped)

    def step_factor(self, staleness: float) -> float:
        """With a bound: return the same for a step of so much staleness on average."""
        return stable_part(staleness) if self.mode.damped else 1.0

    def pushed(
        self, worker: int, numbers: Sequence[int], *, finite: bool = True, staleness: int = 0
    ) -> "AsyncEngine":
        """A worker pushed the gradient of some of its local batches, usually one.

        Without a bound that is an update, and with one the push waits for the rest of its step.
        One that is not finite is dropped, and its samples count as pushed all the same: what is
        wrong with them would be wrong again.
        """
        engine = self.accounted(worker, numbers)
        updates = finite and not isinstance(self.mode, Stale)
        tally = engine.member(worker).tally
        tally = tally.updated(staleness) if updates else tally
        tally = replace(tally, dropped=tally.dropped + (not finite))
        return revised(engine, updates=self.updates + updates)._with(worker, tally=tally)

    def accounted(self, worker: int, numbers: Sequence[int]) -> "AsyncEngine":
        """Some of a worker's local batches count as pushed: now, or with its next push.

        With a bound they count when the step is applied that they are part of.
        """
        member = self.member(worker)
        shares = member.shares(numbers)
        pool, groups, samples = self.pool, dict(self.groups), self.samples
        for share in shares:
            if isinstance(self.mode, Stale):
                group = groups[share.step]
                arrived = {**group.arrived, worker: share.number}
                groups[share.step] = replace(group, arrived=arrived)
            else:
                pool, samples = pool.push(share.number), samples + share.samples
        own = sum(share.samples for share in shares)
        tally = replace(member.tally, samples=member.tally.samples + own)
        out = tuple(share for share in member.out if share not in shares)
        engine = revised(self, pool=pool, groups=groups, samples=samples)
        return engine._with(worker, out=out, tally=tally)

    def complete(self) -> int | None:
        """Return the next step that can be applied; None: it is not complete, or there is none."""
        first = min(self.groups, default=None)
        return first if first is not None and self.groups[first].complete else None

    def applied(self, step: int, staleness: Mapping[int, int]) -> "AsyncEngine":
        """The update of a complete step is made, with so stale a gradient of each worker.

        Nothing is updated if no push of it was finite.
        """
        pool, samples = self.pool, self.samples
        for number in self.groups[step].arrived.values():
            samples += count_of(pool.out[number])
            pool = pool.push(number)
        engine = revised(
            self,
            pool=pool,
            samples=samples,
            groups={key: group for key, group in self.groups.items() if key != step},
            updates=self.updates + bool(staleness),
        )
        for member in self.members:
            if member.worker in staleness:
                tally = member.tally.updated(staleness[member.worker])
                engine = engine._with(member.worker, tally=tally)
        return engine

    def waited(self, worker: int, seconds: float) -> "AsyncEngine":
        """A worker waited for others before it could go on."""
        tally = self.member(worker).tally
        return self._with(worker, tally=replace(tally, waited_s=tally.waited_s + seconds))

    def unused(self, worker: int, epoch: int, kept: Sequence[int] = ()) -> "AsyncEngine":
        """A worker begins to take batches of an epoch: what it was given before is free again.

        What it has computed, to be pushed later, is kept. Its parts of steps that others have
        begun wait for it, unless it is done with this epoch.
        """
        member = self.member(worker)
        given = member.unpushed if epoch > self.epoch else member.out
        back = [share for share in given if share.number not in kept]
        out = tuple(share for share in member.out if share not in back)
        cut = tuple(share for share in member.cut if share not in back)
        return self._without(back, worker)._with(worker, out=out, cut=cut, epoch=epoch)

    def reported(self, worker: int, report: Report) -> tuple[Round | None, "AsyncEngine"]:
        """A worker tells what it measured; once all have, the local batches are thought over."""
        if np.isnan(report.iteration_s) or self.gathering:
            return None, self
        before = self.member(worker).reports
        alike = tuple(each for each in before if each.samples == report.samples)
        engine = self._with(worker, reports=(*alike[1 - _MOST_REPORTS :], report))
        if not all(each.reports or engine._is_idle(each) for each in engine.members):
            return None, engine
        observation = observation_of(self.rounds, [each.reports for each in engine.members])
        engine = revised(
            engine,
            rounds=self.rounds + 1,
            members=tuple(revised(each, reports=()) for each in engine.members),
        )
        return engine._decided((observation,))

    def next_epoch(self) -> "AsyncEngine":
        """The next epoch starts at its first sample."""
        return revised(self, epoch=self.epoch + 1, pool=Pool(self.length), groups={})

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the training and what was learned, as plain values."""
        pool = self.pool.all_back()
        return {
            "epoch": self.epoch,
            "position": pool.position,
            "returned": [list(each) for each in pool.returned],
            "updates": self.updates,
            "samples": self.samples,
            "step": self.next_step,
            "labels": [member.label for member in self.members] or list(self.resumed or ()),
            "engine": self.engine.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> "AsyncEngine":
        """Return an engine that goes on from a saved place, before any worker joins."""
        if self.members:
            raise OutOfOrder("a state is loaded before workers join; call it after prepare")
        check_state(state)
        known = self.engine.load_state_dict(state.get("engine", {}))
        if known.global_batch != self.engine.global_batch:
            raise StateMismatch(
                f"the engine of the state has global_batch={known.global_batch} and this training "
                f"{self.engine.global_batch}; load the state of this training"
            )
        labels = _labels(state.get("labels"))
        return revised(
            self,
            engine=known if known.workers == len(labels) else self.engine,
            resumed=labels if known.workers == len(labels) else None,
            epoch=whole_in(state, "epoch"),
            pool=Pool.of(state, self.length),
            updates=whole_in(state, "updates"),
            samples=whole_in(state, "samples"),
            next_step=whole_in(state, "step"),
        )

    def _place(self, worker: int) -> int:
        return next(i for i, member in enumerate(self.members) if member.worker == worker)

    def _is_idle(self, member: Member) -> bool:
        """With a bound: whether a worker has no part of the steps that come."""
        idle = self.plan.split[self._place(member.worker)] == 0
        return idle and not member.unpushed and isinstance(self.mode, Stale)

    def _with(self, worker: int, **changes: Any) -> "AsyncEngine":
        """Return the engine that knows something else of a worker."""
        place = self._place(worker)
        member = revised(self.members[place], **changes)
        return revised(self, members=(*self.members[:place], member, *self.members[place + 1 :]))

    def _without(self, shares: Sequence[Share], worker: int) -> "AsyncEngine":
        """Return the engine that does not wait for a worker's shares: they are free again."""
        pool, groups = self.pool, dict(self.groups)
        for share in shares:
            pool = pool.give_back(share.number)
            if share.step in groups:
                group = groups[share.step]
                groups[share.step] = replace(group, expected=group.expected - {worker})
        groups = {step: group for step, group in groups.items() if group.expected or group.arrived}
        return revised(self, pool=pool, groups=groups)

    def _at(self, member: Member) -> int:
        """With a bound: the step that a worker computes or would be given next."""
        return member.unpushed[0].step if member.unpushed else self.next_step

    def _with_step_cut(self, place: int) -> "AsyncEngine":
        """Cut the next global batch, if this worker has a part of it.

        Workers that have left this epoch have none, and would not push it.
        """
        plan, step = self.plan, self.next_step
        wanted = [member.epoch <= self.epoch for member in self.members]
        planned = [local * wants for local, wants in zip(plan.split, wanted, strict=True)]
        if not any(planned):
            planned = [int(wants) for wants in wanted]
        count = min(sum(planned), self.pool.free)
        split = planned if count == sum(planned) else apportion(planned, count)
        if not split[place]:
            return self
        engine, members = self, list(self.members)
        for number, (local, whole) in enumerate(zip(split, planned, strict=True)):
            if local:
                share, engine = engine._taken(local, step, whole / plan.global_batch)
                cut, steps = (*members[number].cut, share), members[number].steps + 1
                members[number] = revised(members[number], cut=cut, steps=steps)
        takers = frozenset(each.worker for each, local in zip(members, split, strict=True) if local)
        groups = {**self.groups, step: Group(takers)}
        return revised(engine, members=tuple(members), next_step=step + 1, groups=groups)

    def _taken(self, local: int, step: int, part: float) -> tuple[Share, "AsyncEngine"]:
        """Take so many samples out of the pool, or as many as are free, for somebody's step."""
        ranges, pool = self.pool.take(self.next_number, local)
        share = Share(self.next_number, self.epoch, step, ranges, part)
        return share, revised(self, pool=pool, next_number=self.next_number + 1)

    def _changed(self, origin: tuple[int | None, ...]) -> tuple[Round, "AsyncEngine"]:
        return self._decided((Change(origin, self.engine.global_batch),))

    def _decided(self, events: tuple[Event, ...]) -> tuple[Round, "AsyncEngine"]:
        step = self.step
        plan, engine = self.engine.update(events, step)
        timetable = self.timetable if plan is None else self.timetable.announce(plan)
        return Round(events, step, plan), revised(self, engine=engine, timetable=timetable)


def _labels(saved: object) -> tuple[str, ...]:
    """Return the labels of the workers that a state knows, or raise StateMismatch."""
    if not isinstance(saved, list | tuple) or not all(isinstance(each, str) for each in saved):
        raise StateMismatch(
            f"the state has labels={saved!r}, which is not a list of texts; it is damaged, load "
            "another one"
        )
    return tuple(saved)

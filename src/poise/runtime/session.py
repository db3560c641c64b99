"""One training in one process: where it stands, and what happens in it, without a framework.

An adapter brings what only it can know (`Equipment`), calls the verbs below as its framework gets
there, and does what they cannot: tensors, hooks, devices. Whoever wants to know what happens
subscribes to `events`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from poise.core.batch import Batch
from poise.core.membership import Identity, origins
from poise.core.observation import Change
from poise.core.plan import Plan, Timetable
from poise.engine.bsp import Engine
from poise.engine.progress import Progress
from poise.engine.rhythm import delay
from poise.engine.start_step import Announcements
from poise.errors import OutOfOrder
from poise.runtime.clocks import Clock, HostClock, Stamp, Stopwatch, Waits
from poise.runtime.events import (
    Applied,
    Closed,
    Events,
    HandedOut,
    PassBegan,
    Reduced,
    Resumed,
)
from poise.runtime.exchange import Exchange
from poise.runtime.generation import Generation, Member
from poise.runtime.meter import Meter
from poise.runtime.peers import Peers
from poise.runtime.rendezvous import Rendezvous
from poise.runtime.rows import Reporter
from poise.runtime.settings import Settings

_UNMEASURED = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """What an adapter brings to a training on this worker."""

    clock: Clock
    """Of the device that computes."""
    meter: Meter
    norms: Reporter | None = None
    """What looks at gradients; None unless the global batch may move."""
    lead: int = 0
    """How many steps its loader runs ahead."""
    usable: Callable[[], bool]
    """Whether there is a gradient that an optimizer could still use: finite, and not cleared."""
    compiled: Callable[[], bool] = lambda: False
    """Whether a compiler was at work since this was last asked."""


class Session:
    """A synchronous training, as one worker takes part in it."""

    def __init__(
        self, settings: Settings, generation: Generation, rendezvous: Rendezvous, events: Events
    ) -> None:
        self.settings = settings
        self.events = events
        self.stopwatch = Stopwatch(HostClock(), Waits())
        waits, limits = self.stopwatch.waits, settings.limits
        self.peers = Peers(generation, rendezvous, events, waits, settings.count, limits)
        try:
            self.first_plans, self.engine = _started(settings, generation)
        except BaseException as error:
            self.peers.liveness.fail(_said(error))
            self.peers.liveness.leave()
            raise
        self.plan: Plan = self.first_plans.at(0)
        """That of the batch handed out last: what all workers know to be in effect."""
        self.progress = Progress()
        self.fetching = Fetching(self.stopwatch)
        self._equipment: Equipment | None = None
        self._exchange: Exchange | None = None

    @property
    def generation(self) -> Generation:
        """Who trains now."""
        return self.peers.generation

    @property
    def exchange(self) -> Exchange:
        """What learns of the steps, and announces plans."""
        if self._exchange is None:
            raise OutOfOrder("training has no data set yet; call prepare first")
        return self._exchange

    @property
    def is_prepared(self) -> bool:
        """Whether training has what it needs."""
        return self._exchange is not None

    def equip(self, equipment: Equipment) -> None:
        """Take what the adapter brings; all workers call it together."""
        self._equipment = equipment
        self.stopwatch.clock = equipment.clock
        self._exchange = _exchange(self, equipment, self.engine, self.first_plans, 0)
        if not self._exchange.silent:
            equipment.meter.listen(self.events)

    def stamped(self, kind: Callable[..., Any], *facts: Any) -> Any:
        """Return an event of a kind at the step under way, stamped now."""
        batch = self.progress.batch
        step = self.progress.step if batch is None else batch.step
        return kind(step, self.stopwatch.stamp(), *facts)

    def begin_pass(self, *, anew: bool = False) -> Progress:
        """A pass over the training data begins; return where.

        It goes on where training stands; anew, with the next epoch if this one was left early.
        """
        self.events.train_here()
        if anew and self.progress.position:
            self.progress = self.progress.next_epoch()
        self.progress = self.progress.begin_pass()
        self.events.tell(self.stamped(PassBegan, self.progress.epoch, self.progress.position))
        self.exchange.begin_pass(self.progress.step)
        return self.progress

    def await_plan(self, step: int) -> Plan:
        """Return the plan of a step that is about to be cut, once it is known."""
        return self.exchange.await_plan(step)

    def loading(self) -> AbstractContextManager[None]:
        """Surround the fetching of a batch: measure how long it takes, if anybody wants to know."""
        return _UNMEASURED if self.exchange.silent else self.fetching

    def end_pass(self, position: int) -> None:
        """A pass is over; so is the epoch, if its samples up to this position are consumed."""
        self.progress = self.progress.end_pass(position)

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs from 0 to total - 1, after a resume over the rest of them."""
        while (epoch := self.progress.epoch) < total:
            yield epoch
            if self.progress.epoch == epoch:  # the loop left the loader before its end
                self.progress = self.progress.next_epoch()

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """The training loader yields a batch, with these contents on this worker."""
        assert self._equipment is not None
        self.settle()
        exchange, fresh = self.exchange, not self.progress.unapplied
        self.progress = self.progress.hand_out(batch)
        self.plan = exchange.announcements.timetable.at(batch.step)
        self.events.tell(
            HandedOut(
                batch.step,
                self.stopwatch.stamp(),
                batch,
                batch.split[self.generation.worker],
                batch.split == self.plan.split,
                contents,
                self.fetching.asked_s,
                self.fetching.fetch_s,
                not exchange.silent and self._equipment.compiled(),
                fresh,
            )
        )
        self.peers.counts.begin(batch, contents)
        exchange.handed_out(batch)

    def reducing(self) -> Batch:
        """A gradient is about to be summed over the workers; return the batch that it is of."""
        batch = self.progress.batch_to_reduce()
        self.peers.liveness.here.reductions += 1
        return batch

    def reduced(self, step: int, stamp: Stamp | None, weights: Sequence[float]) -> None:
        """The gradient of the batch under way is summed; without a stamp, just now."""
        self.peers.liveness.here.reduced += 1
        plan = self.plan
        worth = plan.gain * self.settings.global_batch / plan.global_batch
        self.progress = self.progress.reduced(worth)
        if self.events.heard(Reduced):
            self.events.tell(Reduced(step, stamp or self.stopwatch.stamp(), weights))

    def applied(self, optimizer: Any) -> None:
        """An optimizer has used the gradient; raise if it was not that of the global batch."""
        self.progress = self.progress.applied()
        batch = self.progress.batch
        if batch is not None and self.events.heard(Applied):
            self.events.tell(Applied(batch.step, self.stopwatch.stamp(), optimizer))

    def settle(self) -> None:
        """Find out what became of a gradient that no optimizer has used.

        A GradScaler that finds a gradient too large leaves the optimizer out, and its hooks are
        not called. The gradient is not finite then, or cleared already. A finite one waits for
        the next batch to be added.
        """
        equipment = self._equipment
        if equipment is not None and self.progress.unapplied and not equipment.usable():
            self.progress = self.progress.skip()

    def rebuild(self, generation: Generation) -> None:
        """Go on with other workers, from the first sample that is not consumed.

        A step under way is given up: its samples come again. Worker 0 of the new generation
        decides by what it knows of its workers, or of others of their kind. All workers call it
        together.
        """
        assert self._equipment is not None
        members, me = self.generation.members, self.generation.worker
        self.peers.meet(generation)
        self.peers.introduce(members[me])
        origin = origins(_identities(members), _identities(self.generation.members))
        self.first_plans, self.engine = _started(self.settings, generation)
        step, before = self.progress.step, self.exchange
        change = Change(origin, self.plan.global_batch)
        plan, engine = before.engine.update([change], step)
        assert plan is not None  # a change demands a decision
        said = self.peers.control.table([plan.gain, *plan.split], "the next generation")
        gain, *split = said[0]  # worker 0 alone decides
        self.plan = replace(plan, split=tuple(int(each) for each in split), gain=gain)
        timetable = before.announcements.timetable.announce(self.plan)
        self._exchange = _exchange(self, self._equipment, engine, timetable, step)
        known = before.engine if generation.worker == 0 else None
        told = (known, change, step, self.plan)
        self.events.tell(Resumed(step, self.stopwatch.stamp(), *told))

    def close(self, disconnect: Callable[[], None] = lambda: None) -> None:
        """Wait for the other workers to be done, tell of the last steps, and leave.

        Disconnect ends the connections that the adapter holds, by which others see that.
        """
        try:
            self.peers.liveness.finish()
            if self._exchange is not None:
                self._exchange.finish()
            self.events.tell(self.stamped(Closed))
        finally:
            self.peers.leave(disconnect)

    def fail(self, error: BaseException, disconnect: Callable[[], None] = lambda: None) -> None:
        """Tell the others why this worker stops, and leave."""
        try:
            self.peers.liveness.fail(_said(error))
            self.events.tell(self.stamped(Closed))
        finally:
            self.peers.leave(disconnect)


class Fetching:
    """How long the loader took for the last batch, without what was waited for other workers."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.asked_s = 0.0
        """When it was asked, by the host's clock."""
        self.fetch_s = 0.0
        self._stopwatch = stopwatch
        self._excused_s = 0.0

    def __enter__(self) -> None:
        self.asked_s = self._stopwatch.clock.host_s()
        self._excused_s = self._stopwatch.waits.seconds

    def __exit__(self, *_: object) -> None:
        excused_s = self._stopwatch.waits.seconds - self._excused_s
        self.fetch_s = self._stopwatch.clock.host_s() - self.asked_s - excused_s


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _identities(members: Sequence[Member]) -> list[Identity]:
    return [Identity(member.kind, member.name) for member in members]


def _started(settings: Settings, generation: Generation) -> tuple[Timetable, Engine]:
    """Return the plans known before the first step, and an engine that knows nothing yet."""
    return Engine(
        settings.policy, generation.workers, settings.global_batch, settings.adapt
    ).start()


def _exchange(
    session: Session, equipment: Equipment, engine: Engine, timetable: Timetable, step: int
) -> Exchange:
    """Return what learns from a step on, for the largest lead and lag of all workers."""
    table = session.peers.control.table([equipment.lead, equipment.clock.lag], "prepare")
    lead, lag = (int(max(column)) for column in zip(*table, strict=True))
    learns = engine.policy.online and session.generation.workers > 1  # one has nothing to share
    announcements = Announcements(timetable, delay(lead), lag, first_step=step, next_step=step)
    return Exchange(
        session.peers,
        session.stopwatch,
        engine=engine,
        announcements=announcements,
        reporters=[each for each in (equipment.meter, equipment.norms) if each is not None],
        silent=not (learns or session.settings.record is not None or engine.adapt is not None),
    )

"""Where workers are served: who gets which samples, and what becomes of their gradients.

One lock guards the state of the training; whoever changes it tells all who wait. Gradients are
applied and weights copied outside of it, under the locks of their shards.
"""

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from poise.core.order import DrawnOrder, Order
from poise.engine.asp import AsyncEngine
from poise.engine.member import Share
from poise.engine.modes import Stale
from poise.engine.round import Round
from poise.errors import Disagreement, PoiseError
from poise.records import Recorder
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.link import Link
from poise.torch.asynchronous.messages import Begin, Handed, NoMore, Push, Weights
from poise.torch.asynchronous.parameters import Applied, Parameters, momentum_notice
from poise.torch.asynchronous.service import ServedWorker, Service
from poise.torch.asynchronous.steps import OpenSteps

LOOK_S = 0.2
"""How often who waits looks whether the other end is still there."""
_MOST_AHEAD = 4096
"""Local batches that a worker may ask for at once."""
_log = logging.getLogger("poise")


class Failed(Exception):
    """Something of the server's own went wrong; the cause says what."""


@dataclass
class Guest:
    """A worker that is here."""

    link: Link
    worker: int
    label: str
    gradient: Flat
    """Where its pushes arrive."""
    weights: Flat
    """From where its copies leave."""
    factor: float = 1.0
    iteration_s: float = math.nan
    done: bool = False
    """Whether it has said that it leaves."""


class Desk:
    """The training, as it is served."""

    def __init__(
        self,
        engine: AsyncEngine,
        parameters: Parameters,
        state: threading.Condition,
        recorder: Recorder | None,
    ) -> None:
        self.engine = engine
        self.parameters = parameters
        self.ended: NoMore | str | None = None
        """What workers are told that ask for more: that it is done, or what went wrong."""
        self.order: Order | DrawnOrder | None = None
        """Of this epoch's samples, if it is not one that workers can compute themselves."""
        self.is_open = False
        """Whether samples are handed out."""
        self.broken = False
        """Whether an update failed, perhaps half-way, so that the weights are not to be kept."""
        self._state = state
        self._recorder = recorder
        self._open_steps = OpenSteps(parameters)
        self._guests: dict[int, Guest] = {}
        self._paused = False
        self._in_flight = 0
        """Pushes that are being applied."""
        self._began_s: float | None = None

    @property
    def empty(self) -> bool:
        """Whether no worker is here."""
        return not self._guests

    def join(self, guest: Guest) -> None:
        """A worker is here."""
        with self._state:
            try:
                decided, self.engine = self.engine.join(guest.worker, guest.label)
            except PoiseError as error:  # the policy cannot follow
                raise Disagreement(str(error)) from error
            self._guests[guest.worker] = guest
            self._record(decided)
            self._state.notify_all()
            workers = len(self.engine.members)
        _log.info("worker %d is here: %s", guest.worker, guest.label)
        notice = momentum_notice(self.engine.mode, self.parameters.optimizer, workers)
        if notice and decided is not None:  # those that were expected are known before
            _log.warning("%s", notice)

    def leave(self, guest: Guest) -> None:
        """A worker is gone; what it has not pushed is handed to others."""
        with self._state:
            del self._guests[guest.worker]
            decided, self.engine = self.engine.leave(guest.worker, done=guest.done)
            self._record(decided)
            self._apply_steps()
            self._state.notify_all()
        if guest.done or self.ended is not None:
            _log.info("worker %d has left", guest.worker)
        else:
            _log.warning("worker %d is lost; what it had not pushed goes to others", guest.worker)

    def begin(self, guest: Guest, asked: Begin) -> None:
        """Give a worker its first local batches of an epoch, or more after all were given."""
        with self._state:
            self._skip(guest, asked.skipped)
            self.engine = self.engine.unused(guest.worker, asked.epoch, asked.kept)
            self._apply_steps()
            self._state.notify_all()
            shares: list[Share] = []
            kept = asked.kept
            while self.ended is None and self.engine.epoch <= asked.epoch and not shares:
                if self.is_open and self.engine.epoch == asked.epoch:
                    shares = self._draw(guest, asked.wanted)
                if not shares and kept:  # the epoch would wait for a push that waits for the next
                    self.engine = self.engine.accounted(guest.worker, kept)
                    self._apply_steps()
                    kept = ()
                elif not shares:
                    self._look_after(guest)
            if not shares:
                self.tell_no_more(guest)
                return
            queued_s = self._await_turn(guest)
        self._send_weights(guest, shares, queued_s, counted=bool(asked.kept) and not kept)

    def push(self, guest: Guest, push: Push) -> None:
        """Take a worker's gradient, and give it new weights and its next local batch."""
        parameters = self.parameters
        global_batch = self.engine.engine.global_batch
        push.check(len(parameters.trained), parameters.versions, global_batch)
        if self._began_s is None:
            self._began_s = time.monotonic()
        guest.link.receive(guest.gradient.bytes)
        if isinstance(self.ended, str):
            self.tell_no_more(guest)
            return
        finite = guest.gradient.is_finite(len(parameters.trained))
        with self._state:
            self._skip(guest, push.skipped)
        if isinstance(self.engine.mode, Stale):
            queued_s = self._push_to_step(guest, push, finite=finite)
        else:
            queued_s = self._push_alone(guest, push, finite=finite)
        with self._state:
            if push.report is not None:
                guest.iteration_s = push.report.iteration_s
                decided, self.engine = self.engine.reported(guest.worker, push.report)
                self._record(decided)
            here = self.engine.member(guest.worker).epoch == self.engine.epoch
            shares = self._draw(guest, 1) if self.is_open and here else []
            queued_s += self._await_turn(guest)
            self.engine = self.engine.waited(guest.worker, queued_s)
            self._state.notify_all()
        self._send_weights(guest, shares, queued_s)

    def tell_no_more(self, guest: Guest) -> None:
        """Say that the epoch is over, or the training, or what went wrong."""
        match self.ended:
            case str() as reason:
                guest.link.tell({"failed": f"the server failed: {reason}"})
            case NoMore() as done:
                guest.link.say(done)
            case None:
                guest.link.say(NoMore(self.engine.epoch, done=False))

    @contextmanager
    def still(self) -> Iterator[None]:
        """Have no push applied, so that weights and place fit each other."""
        with self._state:
            before, self._paused = self._paused, True
            while self._in_flight:
                self._state.wait()
            try:
                yield
            finally:
                self._paused = before
                self._state.notify_all()

    def service(self, address: str) -> Service:
        """Return what the server at an address does, at this moment."""
        engine = self.engine
        split = engine.plan.split
        known = len(split) == len(engine.members)
        return Service(
            address=address,
            mode=str(self.engine.mode),
            epoch=engine.epoch,
            pushed=engine.pool.pushed,
            length=engine.length,
            updates=engine.updates,
            seconds=0.0 if self._began_s is None else time.monotonic() - self._began_s,
            busy_s=self.parameters.busy_s,
            workers=tuple(
                ServedWorker(
                    member.worker,
                    member.label,
                    split[place] if known else 0,
                    guest.iteration_s if (guest := self._guests.get(member.worker)) else math.nan,
                    member.tally,
                )
                for place, member in enumerate(engine.members)
            ),
            gone=engine.gone,
            waiting_for=max(0, engine.gathering - len(engine.members)),
        )

    def close(self) -> None:
        """Let go of the record."""
        if self._recorder is not None:
            self._recorder.close()

    def _push_alone(self, guest: Guest, push: Push, *, finite: bool) -> float:
        """Make an update of one push; return the seconds spent waiting."""
        start_s = time.perf_counter()
        with self._state:
            while self._paused:
                self._state.wait()
            engine = self.engine
            share = engine.shares(guest.worker, push.numbers)[-1]
            self._in_flight += 1
        queued_s = time.perf_counter() - start_s
        applied = Applied(0, 0.0)
        try:
            if finite:
                with self._own_errors():
                    applied = self.parameters.apply(
                        guest.gradient,
                        [each == "1" for each in push.present],
                        since=push.versions,
                        factor=partial(engine.factor, share),
                        late=engine.usual_staleness,
                        part=share.part,
                    )
            with self._state:  # not where that failed: a push that was not applied does not count
                self.engine = self.engine.pushed(
                    guest.worker, push.numbers, finite=finite, staleness=applied.staleness
                )
        finally:
            with self._state:
                self._in_flight -= 1
                self._state.notify_all()
        guest.factor = engine.factor(share, applied.staleness)
        return queued_s + applied.waited_s

    def _push_to_step(self, guest: Guest, push: Push, *, finite: bool) -> float:
        """Add a push to its step, and apply what is complete; return the seconds of waiting."""
        start_s = time.perf_counter()
        with self._state:
            queued_s = time.perf_counter() - start_s
            (share, *_) = self.engine.shares(guest.worker, push.numbers)
            if finite:
                self._open_steps.add(share.step, guest.worker, guest.gradient, push)
            self.engine = self.engine.pushed(guest.worker, push.numbers, finite=finite)
            self._apply_steps()
        return queued_s

    def _apply_steps(self) -> None:
        while (step := self.engine.complete()) is not None:
            with self._own_errors():
                applied = self._open_steps.apply(step, self.engine.step_factor)
            self.engine = self.engine.applied(step, applied.staleness)
            for worker in applied.staleness.keys() & self._guests.keys():
                self._guests[worker].factor = applied.factor
            self._state.notify_all()

    def _skip(self, guest: Guest, numbers: Sequence[int]) -> None:
        if numbers:
            self.engine = self.engine.pushed(guest.worker, numbers, finite=False)
            self._apply_steps()

    def _draw(self, guest: Guest, wanted: int) -> list[Share]:
        shares: list[Share] = []
        while len(shares) < min(max(wanted, 1), _MOST_AHEAD):
            share, self.engine = self.engine.draw(guest.worker)
            if share is None:
                break
            shares.append(share)
        return shares

    def _await_turn(self, guest: Guest) -> float:
        """Wait until a worker may start its next step; return the seconds."""
        start_s = time.perf_counter()
        while self.ended is None and not self.engine.may_start(guest.worker):
            self._look_after(guest)
        return time.perf_counter() - start_s

    def _look_after(self, guest: Guest) -> None:
        """Wait a little for news, and see whether a worker that waits is still there."""
        self._state.wait(LOOK_S)
        if guest.link.ended():
            raise EOFError("the connection is closed")

    def _send_weights(
        self, guest: Guest, shares: Sequence[Share], queued_s: float, *, counted: bool = False
    ) -> None:
        copied = self.parameters.copy(guest.weights)
        with self._state:
            engine = self.engine
            said = Weights(
                handed=tuple(self._handed(share) for share in shares),
                versions=copied.versions,
                rates=copied.rates,
                factor=guest.factor,
                samples=engine.samples,
                dropped=engine.member(guest.worker).tally.dropped,
                split=engine.plan.split,
                queued_s=queued_s + copied.waited_s,
                counted=counted,
            )
        guest.link.say(said)
        guest.link.send(guest.weights.bytes)

    def _handed(self, share: Share) -> Handed:
        planned = round(share.part * self.engine.engine.global_batch)
        samples = None
        if self.order is not None:
            parts = [self.order.at(start, stop).tolist() for start, stop in share.ranges]
            samples = tuple(sample for part in parts for sample in part)
        return Handed(share.number, share.epoch, share.ranges, planned, samples)

    def _record(self, decided: Round | None) -> None:
        if decided is None:
            return
        if decided.plan is not None:
            _log.info("local batches %s: %s", list(decided.plan.split), decided.plan.why)
        if self._recorder is not None:
            try:
                self._recorder.write_round(decided, self.engine, self.parameters.busy_s)
            except OSError as error:  # of the disk, not of a connection
                raise Failed from error

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Tell an error of the user's optimizer or schedule from the end of a connection."""
        try:
            yield
        except Exception as error:
            self.broken = True
            raise Failed from error

"""Where workers are served: who gets which samples, and what becomes of their gradients."""

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from poise.engine.member import Share
from poise.engine.modes import Stale
from poise.engine.round import Round
from poise.errors import Disagreement, PoiseError
from poise.records import Recorder
from poise.runtime.clocks import host_stamp
from poise.runtime.events import Events, Joined, Left, Lost
from poise.torch.asynchronous.course import Course
from poise.torch.asynchronous.facts import Given
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.link import Link
from poise.torch.asynchronous.messages import Begin, Handed, Leave, NoMore, Push, Weights
from poise.torch.asynchronous.parameters import Parameters, momentum_notice
from poise.torch.asynchronous.service import ServedWorker, Service
from poise.torch.asynchronous.updates import Updates

_MOST_AHEAD = 4096
"""Local batches that a worker may ask for at once."""
_log = logging.getLogger("poise")


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
    done: bool = False
    """Whether it has said that it leaves."""


class Desk:
    """Serves each worker in a thread of its own."""

    def __init__(
        self, course: Course, given: Given, recorder: Recorder | None, events: Events
    ) -> None:
        self.course = course
        self.given = given
        self.events = events
        most_shards = 1 if isinstance(course.engine.mode, Stale) else len(os.sched_getaffinity(0))
        self.parameters = Parameters(given.models, given.optimizer, most_shards)
        self._updates = Updates(course, self.parameters)
        self._recorder = recorder
        self._iteration_s: dict[int, float] = {}
        """Of each worker that has told it, the last one."""
        self._began_s: float | None = None
        """When the first push came."""

    def serve(self, link: Link, worker: int, label: str) -> None:
        """Do what a worker asks for until it leaves, or raise."""
        guest = Guest(link, worker, label, self.parameters.buffer(), self.parameters.buffer())
        self._join(guest)
        try:
            while not guest.done:
                match link.listen():
                    case Leave():
                        guest.done = True
                    case Begin() as asked:
                        self._begin(guest, asked)
                    case Push() as push:
                        self._push(guest, push)
                    case other:
                        raise Disagreement(f"worker {worker} sent {type(other).__name__}")
        finally:
            self._leave(guest)

    def service(self) -> Service:
        """Return what the server does, at this moment."""
        engine = self.course.engine
        split = engine.plan.split
        known = len(split) == len(engine.members)
        return Service(
            mode=str(engine.mode),
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
                    self._iteration_s.get(member.worker, math.nan),
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

    def _join(self, guest: Guest) -> None:
        course = self.course
        with course.changing():
            try:
                decided, course.engine = course.engine.join(guest.worker, guest.label)
            except PoiseError as error:  # the policy cannot follow
                raise Disagreement(str(error)) from error
            self._updates.factors[guest.worker] = 1.0
            self._record(decided)
            workers = len(course.engine.members)
        step = course.engine.updates
        self.events.tell(Joined(step, host_stamp(), guest.worker, guest.label))
        _log.info("worker %d is here: %s", guest.worker, guest.label)
        notice = momentum_notice(course.engine.mode, self.parameters.optimizer, workers)
        if notice and decided is not None:  # those that were expected are known before
            _log.warning("%s", notice)

    def _leave(self, guest: Guest) -> None:
        """A worker is gone; what it has not pushed is handed to others."""
        course = self.course
        with course.changing():
            self._iteration_s.pop(guest.worker, None)
            decided, course.engine = course.engine.leave(guest.worker, done=guest.done)
            self._record(decided)
            self._updates.apply_complete()
            self._updates.factors.pop(guest.worker, None)
        step = course.engine.updates
        if guest.done or course.ended is not None:
            self.events.tell(Left(step, host_stamp(), guest.worker))
            _log.info("worker %d has left", guest.worker)
        else:
            why = "what it had not pushed goes to others"
            self.events.tell(Lost(step, host_stamp(), guest.worker, why))
            _log.warning("worker %d is lost; %s", guest.worker, why)

    def _begin(self, guest: Guest, asked: Begin) -> None:
        """Give a worker its first local batches of an epoch, or more after all were given."""
        course, worker = self.course, guest.worker
        with course.changing():
            self._updates.skip(worker, asked.skipped)
            course.engine = course.engine.unused(worker, asked.epoch, asked.kept)
            self._updates.apply_complete()
            shares: list[Share] = []
            kept = asked.kept
            while course.ended is None and course.engine.epoch <= asked.epoch and not shares:
                if course.is_open and course.engine.epoch == asked.epoch:
                    shares = self._draw(worker, asked.wanted)
                if not shares and kept:  # the epoch would wait for a push that waits for the next
                    course.engine = course.engine.accounted(worker, kept)
                    self._updates.apply_complete()
                    kept = ()
                elif not shares:
                    course.look_after(guest.link.channel)
            queued_s = self._await_turn(guest) if shares else 0.0
        if shares:
            self._send_weights(guest, shares, queued_s, counted=bool(asked.kept) and not kept)
        else:
            self._tell_no_more(guest)

    def _push(self, guest: Guest, push: Push) -> None:
        """Take a worker's gradient, and give it new weights and its next local batch."""
        course, worker = self.course, guest.worker
        trained = len(self.parameters.trained)
        push.check(trained, self.parameters.versions, course.global_batch)
        if self._began_s is None:
            self._began_s = time.monotonic()
        guest.link.receive(guest.gradient.bytes)
        if isinstance(course.ended, str):
            self._tell_no_more(guest)
            return
        finite = guest.gradient.is_finite(trained)
        self._updates.skip(worker, push.skipped)
        queued_s = self._updates.push(worker, push, guest.gradient, finite=finite)
        with course.changing():
            if push.report is not None:
                self._iteration_s[worker] = push.report.iteration_s
                decided, course.engine = course.engine.reported(worker, push.report)
                self._record(decided)
            here = course.engine.member(worker).epoch == course.engine.epoch
            shares = self._draw(worker, 1) if course.is_open and here else []
            queued_s += self._await_turn(guest)
            course.engine = course.engine.waited(worker, queued_s)
        self._send_weights(guest, shares, queued_s)

    def _tell_no_more(self, guest: Guest) -> None:
        """Say that the epoch is over, or the training, or what went wrong."""
        ended = self.course.ended
        if isinstance(ended, str):
            guest.link.channel.tell({"failed": f"the server failed: {ended}"})
        else:
            guest.link.say(ended or NoMore(self.course.engine.epoch, done=False))

    def _draw(self, worker: int, wanted: int) -> list[Share]:
        shares: list[Share] = []
        while len(shares) < min(max(wanted, 1), _MOST_AHEAD):
            share, self.course.engine = self.course.engine.draw(worker)
            if share is None:
                break
            shares.append(share)
        return shares

    def _await_turn(self, guest: Guest) -> float:
        """Wait until a worker may start its next step; return the seconds."""
        start_s = time.perf_counter()
        while self.course.ended is None and not self.course.engine.may_start(guest.worker):
            self.course.look_after(guest.link.channel)
        return time.perf_counter() - start_s

    def _send_weights(
        self, guest: Guest, shares: Sequence[Share], queued_s: float, *, counted: bool = False
    ) -> None:
        course = self.course
        versions, rates, waited_s = self.parameters.copy(guest.weights)
        with course.changing():
            engine = course.engine
            said = Weights(
                handed=tuple(Handed.of(each, course.global_batch, course.order) for each in shares),
                versions=versions,
                rates=rates,
                factor=self._updates.factors[guest.worker],
                samples=engine.samples,
                dropped=engine.member(guest.worker).tally.dropped,
                split=engine.plan.split,
                queued_s=queued_s + waited_s,
                counted=counted,
            )
        guest.link.say(said)
        guest.link.send(guest.weights.bytes)

    def _record(self, decided: Round | None) -> None:
        if decided is None:
            return
        if decided.plan is not None:
            _log.info("local batches %s: %s", list(decided.plan.split), decided.plan.why)
        if self._recorder is not None:
            self._recorder.write_round(decided, self.course.engine, self.parameters.busy_s)

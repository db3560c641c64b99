"""A virtual training in the rhythm of a live one: the same exchanges, the same start steps."""

from collections.abc import Sequence

from poise.core.batch import Batch
from poise.core.observation import Change, Event, Observation
from poise.core.plan import Plan
from poise.engine.bsp import Engine
from poise.engine.rhythm import delay
from poise.engine.start_step import Announcements
from poise.records import Recorder


class Training:
    """Worker 0 of a virtual training: an engine, its announcements, and the record.

    An exchange has arrived when the next one is due. What it tells of is decided on then, also if
    its plan had to be known before.
    """

    def __init__(self, engine: Engine, lead: int, recorder: Recorder | None = None) -> None:
        timetable, self.engine = engine.start()
        self._announcements = Announcements(timetable, delay(lead))
        self._recorder = recorder
        self._measured: dict[int, Observation] = {}
        """Steps that are over, and not told to the engine."""
        self._arrived: list[Observation] = []
        """Steps to decide on."""

    def plan_at(self, step: int) -> Plan:
        """Return the plan for a step that is about to be made."""
        while self._announcements.due(step) is not None:
            self._absorb()
        return self._announcements.timetable.at(step)

    def tell(self, observation: Observation) -> Plan | None:
        """A step is over; return what was decided, on steps before."""
        batch = Batch(observation.step, observation.epoch, 0, observation.split)
        self._announcements = self._announcements.handed_out(batch)
        self._measured[observation.step] = observation
        step = observation.step + 1
        self.plan_at(step)
        if not self._announcements.is_due(step):
            return None
        while self._announcements.posted:
            self._absorb()
        plan = None
        if self._arrived:
            plan = self._decided(self._arrived, self._announcements.start_step)
            self._arrived = []
        _, self._announcements = self._announcements.decide(plan).post(step)
        return plan

    def change(self, change: Change, step: int) -> Plan | None:
        """Other workers go on from a step: what is under way belongs to those before."""
        self._measured, self._arrived = {}, []
        plan = self._decided([change], step)
        before = self._announcements
        timetable = before.timetable if plan is None else before.timetable.announce(plan)
        self._announcements = Announcements(timetable, before.delay, next_step=step)
        return plan

    def _absorb(self) -> None:
        posted = self._announcements.posted[0]
        self._announcements = self._announcements.absorb(posted.plan)
        self._arrived += [self._measured.pop(batch.step) for batch in posted.reported]

    def _decided(self, events: Sequence[Event], start_step: int) -> Plan | None:
        plan, self.engine = self.engine.update(events, start_step)
        if self._recorder is not None:
            self._recorder.write(events, start_step, plan)
        return plan

"""The engine of synchronous training: from what happened to plans with a start step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poise.core.learning_rate import gain_within
from poise.core.observation import Change, Event
from poise.core.plain import to_plain
from poise.core.plan import Plan, Timetable
from poise.core.revised import revised
from poise.core.split import Split, check_split
from poise.engine.adaptation import Adaptation, AdaptationState
from poise.engine.saved_engine import SavedEngine
from poise.errors import InvalidSetting
from poise.policy import Decision, Forecasting, Policy


@dataclass(frozen=True)
class Engine:
    """A policy at work on one cluster. Frozen: each update returns the next engine."""

    policy: Policy
    workers: int
    global_batch: int
    adapt: Adaptation | None = None
    """Lets the global batch follow the gradient noise; None: it stays what it is."""
    start_batch: int = 0
    """The global batch at the start, for which the user chose the learning rate."""
    state: Any = None
    """The policy's."""
    adapted: AdaptationState | None = None
    split: Split = ()
    """The split decided last; it may not have started yet."""

    @property
    def gain(self) -> float:
        """How many steps of the start's global batch one step is worth."""
        if self.adapted is None:
            return 1.0
        return gain_within(self.adapted.gain, self.global_batch / self.start_batch)

    def nearest(self, global_batch: int) -> int:
        """Return the global batch nearest to that which this engine may choose."""
        if self.adapt is None:
            return self.global_batch
        return min(max(global_batch, self.adapt.lowest), self.adapt.highest)

    def start(self) -> tuple[Timetable, "Engine"]:
        """Return the plans known before the first step, and the engine ready to learn."""
        if self.workers < 1:
            raise InvalidSetting(f"there are {self.workers} workers; training needs at least 1")
        if self.adapt is not None and not isinstance(self.policy, Forecasting):
            raise InvalidSetting(
                f"the policy {type(self.policy).__name__} cannot predict step times, and without "
                'them no global batch can be chosen; use policy="auto"'
            )
        schedule, state = self.policy.init(self.workers, self.global_batch)
        plans = tuple(
            Plan(check_split(schedule[step], self.workers, self.global_batch), step)
            for step in sorted(schedule)
        )
        adapted = None if self.adapt is None else self.adapt.start(self.global_batch)
        engine = revised(
            self,
            start_batch=self.global_batch,
            state=state,
            adapted=adapted,
            split=plans[-1].split,
        )
        return Timetable(plans), engine

    def update(self, events: Sequence[Event], start_step: int) -> tuple[Plan | None, "Engine"]:
        """Learn from what happened; return a plan, or None to keep the one in effect.

        start_step is the first step that can still change, which the driver alone knows. A step
        in which a worker compiled says nothing of its speed: the policy does not see it, and the
        split stays.
        """
        engine, seen = self._taken_in(events)
        if not seen:
            return None, engine
        decision, engine = engine._decided(seen)
        other, engine = engine._thought_over()
        decision = other or decision
        if decision is None and engine.gain == self.gain:
            return None, engine
        if decision is None:
            decision = Decision(engine.split, f"a step is worth {engine.gain:.2f} of the start's")
        split = check_split(decision.split, engine.workers, engine.global_batch)
        plan = Plan(split, start_step, engine.gain, why=decision.why, forecast=decision.forecast)
        return plan, revised(engine, split=split)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain values that survive JSON."""
        return {
            "workers": self.workers,
            "global_batch": self.global_batch,
            "start_batch": self.start_batch,
            "policy": to_plain(self.state),
            "adapted": to_plain(self.adapted),
            "split": list(self.split),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> "Engine":
        """Return the engine with what another one of the same policy had learned.

        Whether the global batch may move is this engine's own to say, and so is the global batch
        of the start, for which the learning rate is chosen.
        """
        saved = SavedEngine.of(state)
        start_batch = self.start_batch or saved.start_batch
        adapted = saved.adaptation()  # read in any case: who saved it may have let it move
        if self.adapt is None:
            adapted = None
        elif adapted is None:
            adapted = self.adapt.start(start_batch)
        return revised(
            self,
            workers=saved.workers,
            global_batch=saved.global_batch,
            start_batch=start_batch,
            state=saved.learned(self.policy.state_type),
            adapted=adapted,
            split=saved.split or (),
        )

    def _taken_in(self, events: Sequence[Event]) -> tuple["Engine", list[Event]]:
        """Check what happened, and keep what concerns the policy."""
        engine: Engine = self
        seen: list[Event] = []
        for event in events:
            if isinstance(event, Change):
                event.check(engine.workers)
                workers, global_batch = len(event.origin), event.global_batch
                engine = revised(engine, workers=workers, global_batch=global_batch)
                seen.append(event)
            elif not event.compiling:
                check_split(event.split, engine.workers, sum(event.split))
                event.check()
                if engine.adapt is not None and engine.adapted is not None:
                    engine = revised(engine, adapted=engine.adapt.learn(engine.adapted, event))
                seen.append(event)
        return engine, seen

    def _decided(self, events: list[Event]) -> tuple[Decision | None, "Engine"]:
        decision, state = self.policy.update(self.state, events)
        return decision, revised(self, state=state)

    def _thought_over(self) -> tuple[Decision | None, "Engine"]:
        """Return a split of a global batch that learns faster, if it is time and there is one."""
        if self.adapt is None or self.adapted is None or not self.adapt.due(self.adapted):
            return None, self
        assert isinstance(self.policy, Forecasting)
        before, start = self.global_batch, self.start_batch
        batch = self.adapt.choose(self.adapted, self.policy.forecast(self.state), before, start)
        decision, engine = None, self
        if batch is not None:
            engine = revised(self, global_batch=batch)
            decision, engine = engine._decided([Change(tuple(range(self.workers)), batch)])
            assert decision is not None
            low, high = self.adapted.noise.interval()
            scale = f"{low:.0f} or more" if high is None else f"{low:.0f} to {high:.0f}"
            why = f"the noise scale is {scale}: {before} samples a step become {batch}"
            decision = replace(decision, why=why)
        adapted = self.adapt.thought_over(
            self.adapted, engine.global_batch, start, moved=batch is not None
        )
        return decision, revised(engine, adapted=adapted)

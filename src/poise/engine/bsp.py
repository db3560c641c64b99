"""The engine of synchronous training: from a policy's word to plans with a start step."""

from dataclasses import dataclass, replace
from typing import Any

from poise.core.observation import Observation
from poise.core.plan import Plan, Timetable
from poise.core.split import Split, check_split
from poise.policy import Policy


@dataclass(frozen=True)
class Engine:
    """A policy at work on one cluster. Frozen: each update returns the next engine."""

    policy: Policy
    workers: int
    global_batch: int
    state: Any = None

    def start(self) -> tuple[Timetable, "Engine"]:
        """Return the plans known before the first step, and the engine ready to learn."""
        schedule, state = self.policy.init(self.workers, self.global_batch)
        plans = tuple(
            Plan(check_split(schedule[step], self.workers, self.global_batch), step)
            for step in sorted(schedule)
        )
        return Timetable(plans), replace(self, state=state)

    def update(self, observation: Observation) -> tuple[Split | None, "Engine"]:
        """Learn from one step; return a new split, or None to keep the one in effect.

        The driver makes it a plan, since it alone knows the first step that can still change.
        A step in which a worker compiled says nothing of its speed: the policy does not see it,
        and the split stays.
        """
        if observation.compiling:
            return None, self
        split, state = self.policy.update(self.state, observation)
        if split is not None:
            split = check_split(split, self.workers, self.global_batch)
        return split, replace(self, state=state)

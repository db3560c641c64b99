"""Plans: a split and the step from which it holds."""

from bisect import bisect_right
from dataclasses import dataclass

from poise.core.split import Split, apportion


@dataclass(frozen=True)
class Plan:
    """Who gets how many samples, from which step on."""

    split: Split
    """Local batches, one per worker."""
    start_step: int = 0
    """The first step that uses this split."""

    @property
    def global_batch(self) -> int:
        """Samples per step, over all workers."""
        return sum(self.split)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each worker's part of the global batch; they add up to 1."""
        return tuple(local / self.global_batch for local in self.split)

    def scaled(self, global_batch: int) -> "Plan":
        """Return the plan that divides another global batch by the same shares."""
        return Plan(apportion(self.split, global_batch), self.start_step)


@dataclass(frozen=True)
class Timetable:
    """The plans known so far, by their first step; past ones too, since training may go back.

    >>> timetable = Timetable((Plan((2, 2), 0), Plan((1, 3), 7)))
    >>> timetable.at(6).split, timetable.at(7).split
    ((2, 2), (1, 3))
    """

    plans: tuple[Plan, ...]

    def at(self, step: int) -> Plan:
        """Return the plan in effect at a step."""
        place = bisect_right(self.plans, step, key=lambda plan: plan.start_step)
        if place == 0:
            raise LookupError(f"no plan is known for step {step}")
        return self.plans[place - 1]

    def announce(self, plan: Plan) -> "Timetable":
        """Return the timetable with a plan that replaces all later ones."""
        kept = tuple(known for known in self.plans if known.start_step < plan.start_step)
        return Timetable((*kept, plan))

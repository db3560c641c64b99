"""Plans: a split, what is predicted of it, and the step from which it holds."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from poise.core.limits import Limits
from poise.core.split import Split, apportion, check_split, optimal_split
from poise.core.timing import Bound, Floats, SpeedModel
from poise.core.weight import weights
from poise.errors import OutOfOrder

_POINTS = 65
_FAR = 4.0
"""Standard deviations beyond which nothing is expected."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a speed model says of splits."""

    model: SpeedModel
    limits: Limits
    poured_s: float
    """The step time at which samples are poured: more is in vain, less leaves some over."""
    scatter: Floats | None = None
    """By how much each worker's time varies, standard deviation relative to it; None: not."""

    def step_s(self, split: Split) -> float:
        """Return how long a step takes on average.

        A step lasts as long as its latest worker, and where times scatter that is later than any
        worker's average: the mean of the largest of independent normal variables.
        """
        latest_s = self.model.step_s(split)
        if self.scatter is None:
            return latest_s
        local_s = self.model.local_s(split)
        work_s = np.maximum(local_s - self.model.bucket_s[-1], 0.0)
        spread_s = np.maximum(self.scatter * work_s, 1e-12)
        end_s = float((local_s + _FAR * spread_s).max())
        times_s = np.linspace(latest_s, end_s, _POINTS)
        all_there = _normal((times_s[:, None] - local_s) / spread_s).prod(axis=1)
        early_s = np.linspace(latest_s - (end_s - latest_s), latest_s, _POINTS)
        sooner = _normal((early_s[:, None] - local_s) / spread_s).prod(axis=1)
        later = np.trapezoid(1 - all_there, times_s) - np.trapezoid(sooner, early_s)
        return latest_s + float(later)

    def bounds(self, split: Split) -> tuple[Bound, ...]:
        """Return what bounds each worker.

        Min or max: its local batch would be smaller or larger without that bound. Otherwise what
        decides its time: compute, communication or input.
        """
        room, _ = self.model.capacity(self.poured_s)
        inner = self.model.bounds(split)
        found: list[Bound] = []
        for worker, local in enumerate(split):
            if local == self.limits.low[worker] and room[worker] < local:
                found.append("min")
            elif local == self.limits.high[worker] and room[worker] > local:
                found.append("max")
            else:
                found.append(inner[worker])
        return tuple(found)


def _normal(z: Floats) -> Floats:
    """Return the normal distribution function, to three digits."""
    return np.asarray(0.5 * (1 + np.tanh(0.7978845608 * (z + 0.044715 * z**3))))


@dataclass(frozen=True)
class Plan:
    """Who gets how many samples, from which step on, and how long a step is to take."""

    split: Split
    """Local batches, one per worker."""
    start_step: int = 0
    """The first step that uses this split."""
    gain: float = 1.0
    """How many steps with the global batch of the start one step is worth, as far as is known."""
    why: str = field(default="", compare=False)
    """One sentence for people."""
    forecast: Forecast | None = field(default=None, compare=False, repr=False)
    """None where no speeds are known."""

    @property
    def global_batch(self) -> int:
        """Samples per step, over all workers."""
        return sum(self.split)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each worker's part of the global batch; they add up to 1."""
        return weights(self.split)

    @property
    def step_s(self) -> float:
        """The predicted step time."""
        return self.predict(self.split)

    @property
    def local_s(self) -> Floats:
        """For each worker, how long a step takes at least because of it."""
        return self._predictions.model.local_s(self.split)

    @property
    def bound(self) -> tuple[Bound, ...]:
        """What bounds each worker: compute, communication, input, min or max."""
        return self._predictions.bounds(self.split)

    def predict(self, split: Sequence[int]) -> float:
        """Return the step time of a split, in seconds."""
        checked = check_split(split, len(self.split), sum(split))
        return self._predictions.step_s(checked)

    def scaled(self, global_batch: int) -> "Plan":
        """Return the plan that divides another global batch by the same shares."""
        return Plan(apportion(self.split, global_batch), self.start_step)

    @property
    def _predictions(self) -> Forecast:
        if self.forecast is None:
            raise OutOfOrder(
                "this plan predicts nothing, since no speeds are known; "
                "use poise.plan with workers whose times are given"
            )
        return self.forecast


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

    def settled_since(self, step: int) -> int:
        """Return the first step of the split in effect at a step, whatever the gain was.

        >>> Timetable((Plan((2, 2), 0), Plan((1, 3), 7), Plan((1, 3), 9, 1.5))).settled_since(12)
        7
        """
        split, since = self.at(step).split, step
        for plan in reversed(self.plans):
            if plan.start_step <= step:
                if plan.split != split:
                    break
                since = plan.start_step
        return since

    def announce(self, plan: Plan) -> "Timetable":
        """Return the timetable with a plan that replaces all later ones."""
        kept = tuple(known for known in self.plans if known.start_step < plan.start_step)
        return Timetable((*kept, plan))


def best_plan(model: SpeedModel, limits: Limits, global_batch: int) -> Plan:
    """Return the plan with the shortest step."""
    best = optimal_split(model, global_batch, limits)
    return Plan(best.split, forecast=Forecast(model, limits, best.poured_s))

"""What comes of `poise simulate`, before anything is printed or drawn."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from poise.cli.durations import duration, three_digits
from poise.core.split import even_split
from poise.engine.modes import Sync
from poise.sim.conditions import Conditions
from poise.sim.outcome import Outcome
from poise.sim.scenario import Scenario
from poise.sim.what_if import WhatIf

_SURE = 2.0
"""Standard errors of an interval that is shown."""


@dataclass(frozen=True)
class Findings:
    """What comes of a scenario, and of the same without a change that was asked about."""

    scenario: Scenario
    outcomes: Sequence[Outcome]
    before: Sequence[Outcome]
    what_if: WhatIf

    def rows(self) -> list[list[str]]:
        """Return the table, its heading first."""
        columns = _columns(self.scenario)
        return [
            ["policy", *columns],
            *([each.policy, *_cells(each, columns)] for each in self.outcomes),
        ]

    def sentences(self) -> Iterator[str]:
        """Yield what the table does not say."""
        yield from self._gain()
        yield from self._difference()
        yield from (f"note: {each}" for each in self.scenario.notes)
        latest_s = max((each.clock_s for each in self.outcomes), default=0.0)
        for event in self.scenario.events:
            if event.at_s is not None and event.at_s > latest_s:
                yield f"what is to happen at {duration(event.at_s)} never did: all was over before"
        if self.scenario.error is not None:
            yield (
                f"this cluster was calibrated: held-out steps were mispredicted by "
                f"{_percent(self.scenario.error)} on average"
            )
        for each in self.outcomes:
            if each.refused:
                yield f"{each.policy} cannot follow: {each.refused}"
        goal = self.scenario.learning and self.scenario.learning.target_samples
        ran = [each for each in self.outcomes if not each.refused]
        if missed := [each.policy for each in ran if goal and each.target_s is None]:
            yield (
                f"the goal is not reached within {self.scenario.steps:,} steps by "
                f"{', '.join(missed)}; raise steps"
            )

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        scenario = self.scenario
        ceiling, unknown = self._ceiling()
        return {
            "title": scenario.cluster.title,
            "workers": scenario.workers,
            "global_batch": scenario.global_batch,
            "mode": str(scenario.mode),
            "seed": scenario.seed,
            "error": scenario.error,
            "ceiling": ceiling,
            "ceiling_unknown": unknown,
            "outcomes": [_plain(each) for each in self.outcomes],
            "what_if": str(self.what_if) or None,
            "before": [_plain(each) for each in self.before],
        }

    def _ceiling(self) -> tuple[float | None, str | None]:
        """Return how many times as fast as even the best split makes a step, or why not.

        It is what no split of the same global batch exceeds, from the first step to the last.
        """
        scenario = self.scenario
        if not isinstance(scenario.mode, Sync):
            return None, "workers do not wait for each other"
        if scenario.changes_over_steps:
            return None, "the cluster changes, and the best split with it"
        moment = Conditions(scenario).at(0, 0.0)
        if not moment.cluster.is_plain:
            return None, "the best split is only the best that was found"
        limits = scenario.limits.take(moment.present.tolist())
        even = even_split(len(moment.present), scenario.global_batch)
        if not limits.allow(even):
            return None, "an even split does not fit"
        _, best_s = moment.cluster.best(scenario.global_batch, limits)
        return moment.cluster.step_s(even) / best_s, None

    def _gain(self) -> Iterator[str]:
        """Yield how much faster the fastest is than even."""
        known = {each.policy: each for each in self.outcomes if not each.refused}
        even = known.pop("even", None)
        if even is None or not known:
            return
        reached = all(each.target_s is not None for each in known.values())
        best = min(known.values(), key=attrgetter("target_s" if reached else "step_s"))
        yield f"{self._compared(best, even)} as even"
        ceiling, unknown = self._ceiling()
        if ceiling is None:
            yield f"no ceiling is known: {unknown}"
        else:
            yield (
                "no split of the same global batch can make steps more than "
                f"{ceiling:.2f} times as fast as even"
            )

    def _difference(self) -> Iterator[str]:
        """Yield what a change brings to each policy."""
        for was, now in zip(self.before, self.outcomes, strict=False):
            if not was.refused and not now.refused:
                hours = now.worker_hours / was.worker_hours
                yield (
                    f"with {self.what_if}, {self._compared(now, was)}, for {hours:.2f} times the "
                    "worker-hours"
                )

    def _compared(self, now: Outcome, was: Outcome) -> str:
        """Say how many times as fast one is, by the time to the goal if both reach it.

        Where steps are known to be mispredicted, also what that means for it.
        """
        if now.target_s is not None and was.target_s is not None:
            does, ratio = "reaches the goal", was.target_s / now.target_s
        else:
            does, ratio = "makes steps", was.step_s / now.step_s
        error = self.scenario.error
        sure = "" if error is None else f" (± {_SURE * math.sqrt(2) * error * ratio:.2f})"
        return f"{now.policy} {does} {ratio:.2f}{sure} times as fast"


def _columns(scenario: Scenario) -> list[str]:
    columns = ["step", "waiting", "regret", "changes"]
    if not isinstance(scenario.mode, Sync):
        columns.remove("regret")
    if scenario.learning is not None and scenario.learning.target_samples is not None:
        columns.append("to goal")
    columns += ["worker h"]
    return [*columns, "cost"] if scenario.prices else columns


def _cells(outcome: Outcome, columns: Sequence[str]) -> list[str]:
    """Return a policy's row."""
    if outcome.refused:
        return ["-"] * len(columns)
    cells = {
        "step": duration(outcome.step_s),
        "waiting": _percent(outcome.waiting),
        "regret": _percent(outcome.regret),
        "changes": f"{outcome.changes:,}",
        "to goal": "-" if outcome.target_s is None else duration(outcome.target_s),
        "worker h": three_digits(outcome.worker_hours),
        "cost": f"{outcome.money or 0.0:,.2f}",
    }
    return [cells[column] for column in columns]


def _plain(outcome: Outcome) -> dict[str, Any]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "policy": outcome.policy,
        "refused": outcome.refused or None,
        "steps": outcome.steps,
        "seconds": outcome.clock_s,
        "step_s": finite(outcome.step_s),
        "samples_per_s": finite(outcome.samples_per_s),
        "waiting": finite(outcome.waiting),
        "regret": finite(outcome.regret),
        "changes": outcome.changes,
        "lost_s": outcome.lost_s,
        "settled_step": outcome.settled_step,
        "settled_s": finite(outcome.settled_s),
        "target_s": finite(outcome.target_s),
        "worker_hours": outcome.worker_hours,
        "cost": finite(outcome.money),
        "last_split": list(outcome.last_split),
    }


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"

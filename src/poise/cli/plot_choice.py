"""Which of many workers or kinds are drawn."""

from collections.abc import Sequence

import numpy as np

from poise.sim.scenario import Scenario
from poise.sim.step import Step

MOST_ROWS = 24
"""Workers of a timeline."""


def chosen_workers(scenario: Scenario, steps: Sequence[Step]) -> list[int]:
    """Return the workers to show: of too many, some of each kind, from slowest to fastest."""
    everyone = everyone_in(steps)
    if len(everyone) <= MOST_ROWS:
        return everyone
    waited_s = np.zeros(scenario.workers)
    for step in steps:
        waited_s[step.workers] += step.idle_s
    by_kind: dict[int, list[int]] = {}
    for worker in sorted(everyone, key=lambda each: waited_s[each]):
        by_kind.setdefault(int(scenario.kind_of[worker]), []).append(worker)
    kinds = spread(sorted(by_kind), MOST_ROWS)
    seats = _seats([len(by_kind[kind]) for kind in kinds], MOST_ROWS)
    return sorted(
        worker
        for kind, count in zip(kinds, seats, strict=True)
        for worker in spread(by_kind[kind], count)
    )


def everyone_in(steps: Sequence[Step]) -> list[int]:
    """Return all workers that took part in a step."""
    return sorted({worker for step in steps for worker in step.workers.tolist()})


def spread(values: Sequence[int], count: int) -> list[int]:
    """Return so many of the values, the first and the last of them included."""
    if len(values) <= count:
        return list(values)
    places = np.linspace(0, len(values) - 1, count).round().astype(int)
    return [values[place] for place in places.tolist()]


def _seats(sizes: Sequence[int], seats: int) -> list[int]:
    """Return how many of each group get a seat: one at least, beyond that by their sizes."""
    given = [1] * len(sizes)
    while sum(given) < min(seats, sum(sizes)):
        claims = [size / got if got < size else 0.0 for size, got in zip(sizes, given, strict=True)]
        given[int(np.argmax(claims))] += 1
    return given

"""Figures of the asynchronous benchmark: what has to be met, and what explains it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from asynchronous_load import Loaded, enough
from asynchronous_runs import Amount, Runs, Trained
from asynchronous_tasks import BALANCED, DAMPED, SYNC, UNIFORM, WORKERS, speeds
from figures import Figure, Interval, bootstrap
from rich.table import Table

RECOVERED_BAR = 0.9
STALENESS_BAR = 0.2
LEAST_COST = 1.0
"""Points of accuracy that heterogeneity must cost for a recovered part to mean something."""
LEAST_NOISE = 0.5
"""Points that seeds are taken to differ by, at least."""

_POINTS = 100.0


@dataclass(frozen=True)
class Moot(Figure):
    """A figure that there is nothing to measure of, so that another one decides."""

    decided: bool = False

    @property
    def ok(self) -> bool:
        """Whether the other one is met."""
        return self.decided


@dataclass(frozen=True)
class Found:
    """All trainings."""

    amount: Amount
    runs: Runs

    def each(self, level: int, kind: str) -> list[Trained]:
        """Return a training with every seed."""
        return [self.runs[level, seed][kind] for seed in self.amount.seeds]

    def finals(self, level: int, kind: str) -> list[float]:
        """Return the accuracies after all samples, in points."""
        return [_POINTS * each.final for each in self.each(level, kind)]

    def gained(self, level: int) -> list[float]:
        """Return by how much balanced is above uniform, in points, for each seed."""
        return _differences(self.finals(level, BALANCED), self.finals(level, UNIFORM))

    def times(self, level: int, kind: str) -> list[float | None]:
        """Return the seconds to the target, for each seed."""
        return [each.seconds_to(self.amount.target) for each in self.each(level, kind)]

    def staleness(self, level: int, kind: str) -> list[float]:
        """Return each worker's mean staleness, over seeds; empty without a server."""
        own = [list(each.mean_staleness.values()) for each in self.each(level, kind)]
        return [statistics.mean(column) for column in zip(*own, strict=True)]

    def noise(self, level: int) -> float:
        """Return by how many points uniform differs over seeds, or is taken to."""
        finals = self.finals(level, UNIFORM)
        return max(LEAST_NOISE, max(finals) - min(finals))

    @property
    def cost(self) -> Interval | None:
        """What the last level costs uniform training against the first, in points."""
        first, *_, last = (self.amount.levels[0], *self.amount.levels)
        if first == last:
            return None
        return bootstrap(_differences(self.finals(first, UNIFORM), self.finals(last, UNIFORM)))


def figures(found: Found) -> list[Figure]:
    """Return what the trainings have to meet."""
    levels, last = found.amount.levels, found.amount.levels[-1]
    result = [_not_below(found, level) for level in levels]
    off = _deviation(found.staleness(last, BALANCED))
    label = f"HL{last}: balanced, a worker's mean staleness off {WORKERS - 1}, largest part"
    staleness = Figure(label, off, "at most", STALENESS_BAR)
    cost = found.cost
    if cost is None:
        return [*result, staleness]
    if cost.median <= LEAST_COST or cost.low <= 0:
        name = f"HL{last}: recovered part (nothing to recover: staleness decides)"
        return [
            *result,
            Moot(name, float("nan"), "at least", RECOVERED_BAR, staleness.ok is True),
            staleness,
        ]
    part = statistics.median(found.gained(last)) / cost.median
    name = f"HL{last}: recovered part of what heterogeneity costs"
    return [*result, Figure(name, part, "at least", RECOVERED_BAR), staleness]


def _not_below(found: Found, level: int) -> Figure:
    label = f"HL{level}: balanced - uniform, points, lower end"
    low = bootstrap(found.gained(level)).low
    return Figure(label, low, "at least", -found.noise(level))


def _deviation(staleness: Sequence[float]) -> float:
    """Return how far the worst worker is from the mean staleness of all, relative to it."""
    usual = WORKERS - 1
    return max(abs(each - usual) / usual for each in staleness)


def _differences(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(some, others, strict=True)]


def notes(found: Found) -> dict[str, str]:
    """Return what helps to read the figures."""
    last, cost = found.amount.levels[-1], found.cost
    cores = speeds(last)
    result = {
        f"HL{level}: quotas in cores": ", ".join(f"{each:.2f}" for each in speeds(level))
        for level in found.amount.levels
    }
    if cost is not None:
        gained = bootstrap(found.gained(last))
        result[f"HL{last}: heterogeneity costs uniform, points"] = _shown(cost)
        result[f"HL{last}: balanced - uniform, points"] = _shown(gained)
    expected = [sum(cores) / each - 1 for each in cores]
    uniform, balanced = (found.staleness(last, kind) for kind in (UNIFORM, BALANCED))
    damped = found.staleness(last, DAMPED) if DAMPED in found.amount.kinds else []
    result |= {
        f"HL{last}: mean staleness of each worker, uniform": f"{_list(uniform)} "
        f"(by the quotas alone {_list(expected)}), off {_deviation(uniform):.0%}",
        f"HL{last}: balanced": _list(balanced) + (f", damped {_list(damped)}" if damped else ""),
    }
    return result


def _shown(interval: Interval) -> str:
    return f"{interval.median:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{each:.2f}" for each in values)


def table_of(found: Found, level: int) -> Table:
    """Return all trainings at one level."""
    amount = found.amount
    table = Table(
        title=f"HL{level}: {amount.samples:,} samples, target {amount.target:.0%}, "
        f"seeds {', '.join(map(str, amount.seeds))}",
        title_justify="left",
    )
    table.add_column("training", no_wrap=True)
    for heading in ("accuracy", "to target s", "/ uniform", "all s", "staleness", "split"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in amount.kinds:
        trained, finals = found.each(level, kind), found.finals(level, kind)
        last = trained[-1].points
        table.add_row(
            kind,
            _spread(finals),
            _times(found.times(level, kind)),
            _ratios(found.times(level, kind), found.times(level, UNIFORM)),
            f"{statistics.mean(each.seconds for each in trained):.1f}",
            "" if kind == SYNC else " ".join(f"{s:.1f}" for s in found.staleness(level, kind)),
            " ".join(map(str, last[-2].split if len(last) > 1 else last[-1].split)),
        )
    return table


def _times(times: Sequence[float | None]) -> str:
    """Return the median time, with least and largest; "never" where one is missing."""
    found = [each for each in times if each is not None]
    return _spread(found) if len(found) == len(times) else "never"


def _ratios(mine: Sequence[float | None], its: Sequence[float | None]) -> str:
    """Return the median ratio of times; "" where a time is missing."""
    found = [a / b for a, b in zip(mine, its, strict=True) if a is not None and b is not None]
    return f"{statistics.median(found):.2f}" if len(found) == len(mine) else ""


def _spread(values: Sequence[float]) -> str:
    """Return the median, with least and largest if there are several."""
    ends = f" ({min(values):.1f}-{max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{ends}"


def load_table(loads: Sequence[Loaded]) -> Table:
    """Return what servers did."""
    table = Table(title="Server: updates/s of workers that only push", title_justify="left")
    for heading in ("model MB", "workers", "updates/s", "holds weights", "cores", "limit"):
        table.add_column(heading, justify="right")
    for each in sorted(loads, key=lambda each: (each.megabytes, each.workers)):
        table.add_row(
            f"{each.megabytes:g}",
            str(each.workers),
            f"{each.updates_per_s:.0f}",
            f"{each.busy:.0%}",
            f"{each.cores:.2f}",
            f"{each.limit:.0f}",
        )
    return table


def load_notes(loads: Sequence[Loaded]) -> dict[str, str]:
    """Return from where on the server is the bottleneck."""
    result = {}
    for megabytes in sorted({each.megabytes for each in loads}):
        own = [each for each in loads if each.megabytes == megabytes]
        turning, most = enough(own), max(each.updates_per_s for each in own)
        limit = float(np.median([each.limit for each in own]))
        grows = turning is own[-1]
        result[f"server, {megabytes:g} MB"] = (
            f"at most {most:.0f} updates/s, "
            + ("which more workers may raise" if grows else f"enough are {turning.workers} workers")
            + f"; by its own work it is the bottleneck from {limit:.0f} updates/s on, which is "
            f"{limit / 10:.0f} workers with iterations of 0.1 s"
        )
    return result

"""A picture of what workers did in the last steps of a simulation."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poise.cli.durations import duration
from poise.cli.plot_sheet import FAINT, Sheet, counted, name_of, noted, spread, thousands
from poise.core.timing import Floats
from poise.engine.modes import Sync
from poise.sim.outcome import Outcome
from poise.sim.scenario import Scenario
from poise.sim.step import Step

MOST_ROWS = 24
"""Workers that are shown."""
_ACTIVITIES = {
    "waiting for input": "#e3b04b",
    "computing": "#3b78a8",
    "waiting for others": "#f0cfc4",
    "waiting": "#f0cfc4",
    "reducing gradients": "#62a06f",
    "not there": "#ededed",
}
"""What workers do, and its color."""
_FEW_ROWS, _ROW_IN, _LOW_ROW_IN = 12, 0.27, 0.22
"""Inches of a row of few workers, and of more."""


def timeline(scenario: Scenario, outcome: Outcome) -> Figure:
    """Draw what workers did in the last steps, a row for each.

    Steps stand end to end, from 0. Asynchronous ones are the times in which a global batch was
    pushed: how long a worker waited in each is known, not when, so that it is drawn at the end.
    """
    steps = outcome.timeline
    everyone = sorted({worker for step in steps for worker in step.workers.tolist()})
    workers = _chosen(scenario, steps, everyone)
    row_in = _ROW_IN if len(workers) <= _FEW_ROWS else _LOW_ROW_IN
    sheet = Sheet(2.0 + row_in * len(workers))
    axes = sheet.axes
    begins_ms = 1e3 * np.cumsum([0.0, *(step.lasts_s for step in steps)])
    used = _draw_bars(axes, scenario, steps, workers, begins_ms)
    axes.vlines(begins_ms[1:-1], -0.5, len(workers) - 0.5, color=FAINT, linewidth=0.7, zorder=0.5)
    axes.set_xlim(0, begins_ms[-1])
    axes.set_xlabel(f"milliseconds from the begin of {_unit(scenario)} {steps[0].number:,}")
    axes.xaxis.set_major_formatter(thousands)
    _name_rows(axes, [name_of(scenario.names[each]) for each in workers])
    _write_batches(sheet, steps, workers)
    title = f"{outcome.policy}: the last {counted(len(steps), _unit(scenario))}"
    facts = timeline_facts(scenario, steps)
    notes = [facts[0].upper() + facts[1:]]
    if len(workers) < len(everyone):
        title += f", {len(workers)} of {len(everyone):,} workers"
        notes.append("slow and fast ones of each kind")
    lost_s = sum(step.lost_s for step in steps[1:])
    if lost_s:
        notes.append(f"{duration(lost_s)} lost between steps are cut out")
    sheet.head(title, noted(*notes), 1)
    sheet.legend_below([(name, _ACTIVITIES[name]) for name in _ACTIVITIES if name in used])
    return sheet.figure


def timeline_facts(scenario: Scenario, steps: Sequence[Step]) -> str:
    """Return how long steps last, and how much of that workers wait."""
    lasts_s = sum(step.lasts_s for step in steps)
    waits_s = sum(float(step.idle_s.mean()) for step in steps)
    whom = " for others" if isinstance(scenario.mode, Sync) else ""
    part = 100 * waits_s / lasts_s
    return (
        f"a {_unit(scenario)} takes {duration(lasts_s / len(steps))}, and workers wait{whom} "
        f"{part:.0f} % of the time"
    )


def _chosen(scenario: Scenario, steps: Sequence[Step], everyone: list[int]) -> list[int]:
    """Return the workers to show: of too many, some of each kind, from slowest to fastest."""
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


def _seats(sizes: Sequence[int], seats: int) -> list[int]:
    """Return how many of each group get a seat: one at least, beyond that by their sizes."""
    given = [1] * len(sizes)
    while sum(given) < min(seats, sum(sizes)):
        claims = [size / got if got < size else 0.0 for size, got in zip(sizes, given, strict=True)]
        given[int(np.argmax(claims))] += 1
    return given


def _draw_bars(
    axes: Axes,
    scenario: Scenario,
    steps: Sequence[Step],
    workers: Sequence[int],
    begins_ms: Floats,
) -> set[str]:
    """Draw every worker's bars; return the activities that there are."""
    spans: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for step, begin_ms in zip(steps, begins_ms, strict=False):
        places = {worker: place for place, worker in enumerate(step.workers.tolist())}
        phases = _phases(scenario, step)
        for row, worker in enumerate(workers):
            if worker not in places:
                spans.setdefault(("not there", row), []).append((begin_ms, 1e3 * step.lasts_s))
                continue
            for activity, from_s, lasts_s in phases:
                place = places[worker]
                if lasts_s[place] > 0:
                    span = (begin_ms + 1e3 * from_s[place], 1e3 * lasts_s[place])
                    spans.setdefault((activity, row), []).append(span)
    for (activity, row), bars in spans.items():
        axes.broken_barh(bars, (row - 0.39, 0.78), facecolors=_ACTIVITIES[activity], linewidth=0)
    return {activity for activity, _ in spans}


def _phases(scenario: Scenario, step: Step) -> list[tuple[str, Floats, Floats]]:
    """Return what workers do in a step, from when, and for how long."""
    ended_s = step.computed_s
    everyone_s = np.full_like(ended_s, ended_s.max())
    if not isinstance(scenario.mode, Sync):
        return [
            ("computing", np.zeros_like(ended_s), ended_s),
            ("waiting", ended_s, step.lasts_s - ended_s),
        ]
    return [
        ("waiting for input", np.zeros_like(ended_s), step.input_s),
        ("computing", step.input_s, ended_s - step.input_s),
        ("waiting for others", ended_s, everyone_s - ended_s),
        ("reducing gradients", everyone_s, step.lasts_s - everyone_s),
    ]


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _write_batches(sheet: Sheet, steps: Sequence[Step], workers: Sequence[int]) -> None:
    """Write each worker's local batch at the end of its row: that of the last whole step."""
    last = {
        worker: batch
        for step in sorted(steps, key=lambda each: each.whole)
        for worker, batch in zip(step.workers.tolist(), step.split, strict=True)
    }
    rows = sheet.axes.get_yaxis_transform()
    for row, worker in enumerate(workers):
        text, at = f"{last[worker]:,}", (1.0, row)
        sheet.note(text, (34, 0), at=at, xycoords=rows, ha="right", va="center")
    sheet.note("local batch", (6, 4), at=(1.0, 1.0), xycoords="axes fraction")


def _unit(scenario: Scenario) -> str:
    """Return what a bar of a timeline stands for."""
    return "step" if isinstance(scenario.mode, Sync) else "global batch"

"""A picture of what workers did in the last steps of a simulation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from poise.cli.durations import duration
from poise.cli.plot_choice import chosen_workers, everyone_in
from poise.cli.plot_style import FAINT, new_figure
from poise.cli.plot_text import counted, head, legend_below, name_of, note, noted, thousands
from poise.core.timing import Floats
from poise.engine.modes import Sync
from poise.sim.outcome import Outcome
from poise.sim.scenario import Scenario
from poise.sim.step import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INPUT, _COMPUTING, _WAITING, _WAITING_FOR_ANY, _REDUCING, _AWAY = (
    *("waiting for input", "computing", "waiting for others", "waiting", "reducing gradients"),
    "not there",
)
_ACTIVITIES = {
    _INPUT: "#e3b04b",
    _COMPUTING: "#3b78a8",
    _WAITING: "#f0cfc4",
    _WAITING_FOR_ANY: "#f0cfc4",
    _REDUCING: "#62a06f",
    _AWAY: "#ededed",
}
_FEW_ROWS, _ROW_IN, _LOW_ROW_IN = 12, 0.27, 0.22
"""Inches of a row of few workers, and of more."""


def timeline(scenario: Scenario, outcome: Outcome) -> "Figure":
    """Draw what workers did in the last steps, a row for each.

    Steps stand end to end, from 0. Asynchronous ones are the times in which a global batch was
    pushed: how long a worker waited in each is known, not when, so that it is drawn at the end.
    """
    steps, everyone = outcome.timeline, everyone_in(outcome.timeline)
    workers = chosen_workers(scenario, steps)
    row_in = _ROW_IN if len(workers) <= _FEW_ROWS else _LOW_ROW_IN
    figure, axes = new_figure(2.0 + row_in * len(workers))
    begins_ms = 1e3 * np.cumsum([0.0, *(step.lasts_s for step in steps)])
    used = _draw_bars(axes, scenario, steps, workers, begins_ms)
    axes.vlines(begins_ms[1:-1], -0.5, len(workers) - 0.5, color=FAINT, linewidth=0.7, zorder=0.5)
    axes.set_xlim(0, begins_ms[-1])
    axes.set_xlabel(f"milliseconds from the begin of {_unit(scenario)} {steps[0].number:,}")
    thousands(axes.xaxis)
    _name_rows(axes, [name_of(scenario.names[each]) for each in workers])
    _write_batches(axes, steps, workers)
    title = f"{outcome.policy}: the last {counted(len(steps), _unit(scenario))}"
    facts = timeline_facts(scenario, steps)
    notes = [facts[0].upper() + facts[1:]]
    if len(workers) < len(everyone):
        title += f", {len(workers)} of {len(everyone):,} workers"
        notes.append("slow and fast ones of each kind")
    lost_s = sum(step.lost_s for step in steps[1:])
    if lost_s:
        notes.append(f"{duration(lost_s)} lost between steps are cut out")
    head(axes, title, noted(*notes), 1)
    legend_below(figure, [(name, _ACTIVITIES[name]) for name in _ACTIVITIES if name in used])
    return figure


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


def _draw_bars(
    axes: "Axes",
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
                spans.setdefault((_AWAY, row), []).append((begin_ms, 1e3 * step.lasts_s))
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
            (_COMPUTING, np.zeros_like(ended_s), ended_s),
            (_WAITING_FOR_ANY, ended_s, step.lasts_s - ended_s),
        ]
    return [
        (_INPUT, np.zeros_like(ended_s), step.input_s),
        (_COMPUTING, step.input_s, ended_s - step.input_s),
        (_WAITING, ended_s, everyone_s - ended_s),
        (_REDUCING, everyone_s, step.lasts_s - everyone_s),
    ]


def _name_rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _write_batches(axes: "Axes", steps: Sequence[Step], workers: Sequence[int]) -> None:
    """Write each worker's local batch at the end of its row: that of the last whole step."""
    last = {
        worker: batch
        for step in sorted(steps, key=lambda each: each.whole)
        for worker, batch in zip(step.workers.tolist(), step.split, strict=True)
    }
    rows = axes.get_yaxis_transform()
    for row, worker in enumerate(workers):
        text, at = f"{last[worker]:,}", (1.0, row)
        note(axes, text, (34, 0), at=at, xycoords=rows, ha="right", va="center")
    note(axes, "local batch", (6, 4), at=(1.0, 1.0), xycoords="axes fraction")


def _unit(scenario: Scenario) -> str:
    """Return what a bar of a timeline stands for."""
    return "step" if isinstance(scenario.mode, Sync) else "global batch"

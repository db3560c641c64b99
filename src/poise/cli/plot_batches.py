"""A picture of the local batches of a simulation over its steps."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from poise.cli.plot_events import felt_first, in_words
from poise.cli.plot_sheet import CALM, FAINT, QUIET, Entry, Label, Sheet, name_of, noted, spread
from poise.core.timing import Floats
from poise.sim.outcome import Outcome, Point
from poise.sim.scenario import Scenario

MOST_LINES = 12
"""Lines of local batches."""
_MOST_SHADES = 4
"""Workers of a kind that shades of one color can tell apart."""
_EVENT_ROWS = 4
"""Rows of labels above a picture; an event that finds no room has a line and no label."""
_AXES_IN = 6.6
"""Inches of axes beside a legend, about."""


def batches(scenario: Scenario, outcome: Outcome) -> Figure:
    """Draw local batches over steps: a line per worker, or of many the mean and range per kind."""
    course = outcome.course
    sheet = Sheet(4.4)
    axes = sheet.axes
    if scenario.workers <= MOST_LINES:
        lines, how = _draw_workers(axes, scenario, course), ""
    else:
        lines, how = _draw_kinds(axes, scenario, course)
    axes.set_xlim(course[0].step, course[-1].step + 1)
    axes.set_ylim(0, 1.06 * max(1, *(max(point.split) for point in course)))
    rows = _mark_events(sheet, scenario, course)
    strided = f"simulated step (one stands for up to {scenario.stride:,})"
    sheet.tidy("step" if scenario.stride == 1 else strided, "local batch (samples)")
    sheet.head(f"{outcome.policy}: local batches", noted(scenario.cluster.title, how), rows)
    sheet.legend_beside(lines)
    return sheet.figure


def _draw_workers(axes: Axes, scenario: Scenario, course: Sequence[Point]) -> list[Entry]:
    """Draw a line per worker; lines that are the same all along share it in dashes."""
    table = np.full((scenario.workers, len(course) + 1), np.nan)
    for column, point in enumerate([*course, course[-1]]):
        table[point.workers, column] = point.split
    steps = _edges(course)
    alike: dict[bytes, list[int]] = {}
    for worker in range(scenario.workers):
        alike.setdefault(table[worker].tobytes(), []).append(worker)
    colors = _worker_colors(scenario)
    for workers in alike.values():
        for turn, worker in enumerate(workers):
            (line,) = axes.plot(
                steps, table[worker], drawstyle="steps-post", color=colors[worker], linewidth=1.8
            )
            if len(workers) > 1:
                line.set_linestyle((4 * turn, (4, 4 * (len(workers) - 1))))
    order = np.argsort(-np.nan_to_num(table[:, -1]), kind="stable").tolist()
    return [
        (name_of(scenario.names[worker]), Line2D([], [], color=colors[worker], linewidth=2.2))
        for worker in order
    ]


def _edges(course: Sequence[Point]) -> list[int]:
    """Return where steps begin, and where the last one ends."""
    return [*(point.step for point in course), course[-1].step + 1]


def _worker_colors(scenario: Scenario) -> list[str]:
    """Return shades of one color for workers of a kind, if those can be told apart."""
    kinds = scenario.cluster.kinds
    if max(kind.count for kind in kinds) > _MOST_SHADES:
        return list(CALM[: scenario.workers])
    colors = []
    for kind, color in zip(kinds, CALM, strict=False):
        for shade in np.linspace(0.0, 0.5, max(2, kind.count))[: kind.count]:
            base = np.array(to_rgb(color))
            lighter = base + (1 - base) * shade
            colors.append(to_hex((lighter[0], lighter[1], lighter[2])))
    return colors


def _draw_kinds(axes: Axes, scenario: Scenario, course: Sequence[Point]) -> tuple[list[Entry], str]:
    """Draw the mean and range of each kind; return the lines by name, and how to read them."""
    steps = _edges(course)
    kinds = spread(range(len(scenario.cluster.kinds)), MOST_LINES)
    lines: list[tuple[float, Entry]] = []
    for kind, color in zip(kinds, CALM, strict=False):
        found = [_of_kind(scenario, point, kind) for point in (*course, course[-1])]
        low, mean, high = np.array([(each.min(), each.mean(), each.max()) for each in found]).T
        axes.fill_between(steps, low, high, step="post", color=color, alpha=0.2, linewidth=0)
        (line,) = axes.plot(steps, mean, drawstyle="steps-post", color=color, linewidth=1.8)
        declared = scenario.cluster.kinds[kind]
        name = name_of(declared.name) + (f" ({declared.count:,})" if declared.count > 1 else "")
        lines.append((float(np.nan_to_num(mean[-1])), (name, line)))
    lines.sort(key=lambda each: -each[0])
    return [entry for _, entry in lines], _how_to_read(scenario, kinds)


def _how_to_read(scenario: Scenario, shown: Sequence[int]) -> str:
    """Return what lines and bands are."""
    kinds = scenario.cluster.kinds
    alone = len(kinds) == scenario.workers
    some = f"{len(shown)} of {len(kinds):,} {'workers' if alone else 'kinds'}"
    notes = [some] if len(shown) < len(kinds) else []
    return "; ".join(notes if alone else [*notes, "mean and range of each kind"])


def _of_kind(scenario: Scenario, point: Point, kind: int) -> Floats:
    """Return the local batches of a kind's workers; one NaN if none is there."""
    found = np.array(point.split, dtype=np.float64)[scenario.kind_of[point.workers] == kind]
    return found if found.size else np.array([np.nan])


def _mark_events(sheet: Sheet, scenario: Scenario, course: Sequence[Point]) -> int:
    """Draw a thin line at each event; return the rows of labels above."""
    labels = []
    for event in scenario.events:
        place = felt_first(course, event)
        if place is None:
            continue
        step = course[place].step if event.at_step is None else event.at_step
        sheet.axes.axvline(step, color=FAINT, linewidth=0.9, zorder=0.5)
        labels.append(Label(step, in_words(scenario, event), QUIET))
    return sheet.label_above(labels, most=_EVENT_ROWS, width_in=_AXES_IN)

"""Pictures of throughput and of progress to the goal, over virtual time."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poise.cli.durations import duration
from poise.cli.plot_events import felt_at
from poise.cli.plot_sheet import QUIET, Entry, Label, Sheet, color_of, mark, noted, stroke
from poise.core.timing import Floats
from poise.engine.modes import Sync
from poise.sim.outcome import Outcome, Point
from poise.sim.scenario import Scenario

_HALF_WINDOW, _ASYNC_HALF_WINDOW = 4, 12
"""Points on each side of a running median, and of a running mean."""
_MOST_MARKED = 12
"""Events that are marked on curves."""
_AXES_IN = 7.9
"""Inches of axes that stand alone, about."""
_CLOCKS = ((1.0, "seconds", 120.0), (60.0, "minutes", 7200.0), (3600.0, "hours", np.inf))
"""Seconds of a unit of virtual time, its name, and the time up to which it is used."""


def throughput(scenario: Scenario, outcomes: Sequence[Outcome]) -> Figure:
    """Draw the samples per second of each policy over virtual time, and of the best split."""
    shown = drawable(outcomes)
    unit_s, unit = _clock(shown)
    sheet = Sheet(4.4)
    axes = sheet.axes
    entries = list(_draw_ideal(axes, scenario, shown, unit_s))
    entries += [_draw_rates(axes, scenario, each, unit_s) for each in shown]
    if _marks_events(scenario):
        marks = axes.plot([], [], "o", **mark(QUIET))
        entries.append(("event of the scenario", marks[0]))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    sheet.tidy(f"virtual time ({unit})", "samples per second")
    lost = "time lost between steps is left out" if any(each.lost_s for each in shown) else ""
    sheet.head("Throughput", noted(scenario.cluster.title, _smoothing(scenario, shown), lost), 0)
    sheet.legend_beside(entries)
    return sheet.figure


def progress(scenario: Scenario, outcomes: Sequence[Outcome]) -> Figure | None:
    """Draw how near each policy is to the goal, over virtual time; None: there is no goal."""
    goal = None if scenario.learning is None else scenario.learning.target_samples
    if goal is None:
        return None
    shown = drawable(outcomes)
    unit_s, unit = _clock(shown)
    sheet = Sheet(4.4)
    axes = sheet.axes
    longest_s = max((each.clock_s for each in shown), default=unit_s)
    axes.set_xlim(0, 1.01 * longest_s / unit_s)
    axes.set_ylim(0, 100)
    labels = [_draw_progress(axes, each, goal, unit_s) for each in shown]
    rows = sheet.label_above(labels, most=len(labels), width_in=_AXES_IN)
    sheet.tidy(f"virtual time ({unit})", "part of the goal (%)")
    what = f"goal: {goal:,.0f} samples, each counted by what it teaches"
    sheet.head("Progress to the goal", noted(scenario.cluster.title, what), rows)
    return sheet.figure


def drawable(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes of policies that made steps."""
    return [each for each in outcomes if not each.refused and each.course]


def _draw_rates(axes: Axes, scenario: Scenario, outcome: Outcome, unit_s: float) -> Entry:
    color = color_of(outcome.policy)
    times = np.array([point.end_s for point in outcome.course]) / unit_s
    places = felt_at(scenario, outcome.course)
    rates = np.array([point.samples_per_s for point in outcome.course])
    rates = _smooth(scenario, outcome.course, rates)
    (line,) = axes.plot(*_held(times, rates), color=color, **stroke(outcome.policy))
    if _marks_events(scenario):
        axes.plot(times[places], rates[places], "o", **mark(color))
    return outcome.policy, line


def _marks_events(scenario: Scenario) -> bool:
    return isinstance(scenario.mode, Sync) and 0 < len(scenario.events) <= _MOST_MARKED


def _draw_ideal(
    axes: Axes, scenario: Scenario, shown: Sequence[Outcome], unit_s: float
) -> Iterator[Entry]:
    """Draw what the best split makes, by the clock of the last outcome that knows it."""
    for each in reversed(shown):
        known = [point for point in each.course if np.isfinite(point.ideal_samples_per_s)]
        if known:
            times = np.array([point.end_s for point in known]) / unit_s
            ideals = np.array([point.ideal_samples_per_s for point in known])
            held = _held(times, _smooth(scenario, known, ideals))
            (line,) = axes.plot(*held, color=QUIET, linestyle=(0, (4, 2)), zorder=3.5)
            yield f"best split (clock of {each.policy})", line
            return


def _draw_progress(axes: Axes, outcome: Outcome, goal: float, unit_s: float) -> Label:
    """Draw a curve and its end; return the label of that."""
    color = color_of(outcome.policy)
    course = [(point.end_s, point.effective_samples) for point in outcome.course]
    end = (outcome.clock_s, outcome.timeline[-1].effective_samples)
    rows = np.array([(0.0, 0.0), *course, end]) / (unit_s, goal / 100)
    times, parts = rows[:, 0], np.minimum(rows[:, 1], 100.0)
    axes.plot(times, parts, color=color, **stroke(outcome.policy))
    axes.plot(times[-1], parts[-1], "o", clip_on=False, **mark(color))
    if outcome.target_s is not None:
        return Label(times[-1], f"{outcome.policy} {duration(outcome.target_s)}", color)
    axes.vlines(times[-1], parts[-1], 100, color=color, linewidth=0.7, linestyle=":")
    text = f"{outcome.policy} {parts[-1]:.0f} % after {duration(outcome.clock_s)}"
    return Label(times[-1], text, color)


def _smooth(scenario: Scenario, course: Sequence[Point], rates: Floats) -> Floats:
    """Return running medians between events, or the running mean of an asynchronous training.

    There, samples come in bursts; their mean rate is the harmonic mean over global batches.
    """
    half = _half_window(scenario, len(rates))
    if not isinstance(scenario.mode, Sync):
        return 1 / np.array([window.mean() for window in _windows(1 / rates, half)])
    parts = np.split(rates, sorted(set(felt_at(scenario, course))))
    return np.array([np.median(window) for part in parts for window in _windows(part, half)])


def _windows(values: Floats, half: int) -> Iterator[Floats]:
    """Yield each value's neighborhood; at the ends, what there is of it."""
    for place in range(len(values)):
        yield values[max(0, place - half) : place + half + 1]


def _held(ends: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return a line on which each value holds from the end before to its own."""
    return np.repeat(np.concatenate(([0.0], ends)), 2)[1:-1], np.repeat(values, 2)


def _half_window(scenario: Scenario, points: int) -> int:
    most = _HALF_WINDOW if isinstance(scenario.mode, Sync) else _ASYNC_HALF_WINDOW
    return min(most, points // 20)


def _smoothing(scenario: Scenario, shown: Sequence[Outcome]) -> str:
    """Return what was done to the curves."""
    half = max((_half_window(scenario, len(each.course)) for each in shown), default=0)
    what = "median" if isinstance(scenario.mode, Sync) else "mean"
    return f"running {what} of {2 * half + 1} points" if half else ""


def _clock(shown: Sequence[Outcome]) -> tuple[float, str]:
    """Return the unit of virtual time that fits: its seconds, and its name."""
    longest_s = max((each.clock_s for each in shown), default=0.0)
    return next((unit_s, name) for unit_s, name, upto in _CLOCKS if longest_s < upto)

"""The pictures of `poise simulate`: throughput, progress, timelines and local batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from poise.cli.durations import duration
from poise.cli.plot_text import (
    QUIET,
    Entry,
    Label,
    counted,
    head,
    label_above,
    legend_below,
    legend_beside,
    name_of,
    noted,
    thousands,
    tidy,
)
from poise.cli.requirements import require
from poise.core.timing import Floats
from poise.engine.modes import Sync
from poise.errors import InvalidSetting
from poise.sim.outcome import Outcome, Point
from poise.sim.scenario import Event, Scenario
from poise.sim.step import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Subject = Literal["throughput", "progress", "timeline", "batches"]
MOST_ROWS = 24
"""Workers of a timeline."""
MOST_LINES = 12
"""Lines of local batches."""
DPI = 150

_POLICIES = {
    "even": "#c8553d",
    "auto": "#1b6ca8",
    "proportional": "#3a7d44",
    "lbbsp": "#c9982b",
    "optperf": "#7d5ba6",
    "static": "#3f9c9c",
    "fixed": "#a8577e",
}
_CALM = (
    *("#1b6ca8", "#c9803a", "#3a7d44", "#8d5a97", "#b8483f", "#3f9c9c"),
    *("#8a7a3b", "#5f6caf", "#c76d8e", "#6b8e23", "#7a5c48", "#4f7f8f"),
)
_FAINT = "#9a9a9a"
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
_HALF_WINDOW, _ASYNC_HALF_WINDOW = 4, 12
"""Points on each side of a running median, and of a running mean."""
_MOST_SHADES = 4
"""Workers of a kind that shades of one color can tell apart."""
_MOST_MARKED = 12
"""Events that are marked on curves."""
_EVENT_ROWS = 4
"""Rows of labels above a picture; an event that finds no room has a line and no label."""
_BESIDE_LEGEND_IN, _ALONE_IN = 6.6, 7.9
"""Inches of axes, about."""
_CLOCKS = ((1.0, "seconds", 120.0), (60.0, "minutes", 7200.0), (3600.0, "hours", np.inf))
"""Seconds of a unit of virtual time, its name, and the time up to which it is used."""


@dataclass(frozen=True, eq=False)
class Picture:
    """One of the pictures of a comparison."""

    subject: Subject
    outcome: Outcome | None
    """Whose it is; None: it shows all."""
    figure: "Figure"

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        return self.subject if self.outcome is None else f"{self.subject}-{self.outcome.policy}"

    def png(self) -> bytes:
        """Return the file."""
        file = BytesIO()
        self.figure.savefig(file, format="png", dpi=DPI)
        return file.getvalue()


def check_directory(path: Path) -> None:
    """Raise unless pictures can be drawn into a directory, which is made."""
    require("matplotlib", extra="report")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be made: {error.strerror or error}") from None


def draw_all(scenario: Scenario, outcomes: Sequence[Outcome], directory: Path) -> list[Path]:
    """Write all pictures; raises InvalidSetting if a file cannot be written."""
    check_directory(directory)
    return [_written(picture, directory) for picture in pictures(scenario, outcomes)]


def pictures(scenario: Scenario, outcomes: Sequence[Outcome]) -> Iterator[Picture]:
    """Draw what there is to show: of all policies first, then of each that was not refused."""
    shown = _shown(outcomes)
    if not shown:
        return
    yield Picture("throughput", None, throughput(scenario, shown))
    advance = progress(scenario, shown)
    if advance is not None:
        yield Picture("progress", None, advance)
    for each in shown:
        yield Picture("timeline", each, timeline(scenario, each))
        yield Picture("batches", each, batches(scenario, each))


def timeline(scenario: Scenario, outcome: Outcome) -> "Figure":
    """Draw what workers did in the last steps, a row for each.

    Steps stand end to end, from 0. Asynchronous ones are the times in which a global batch was
    pushed: how long a worker waited in each is known, not when, so that it is drawn at the end.
    """
    from matplotlib.figure import Figure

    steps, everyone = outcome.timeline, _everyone(outcome.timeline)
    workers = _rows(scenario, steps)
    row_in = 0.27 if len(workers) <= MOST_LINES else 0.22
    figure = Figure(figsize=(8.8, 2.0 + row_in * len(workers)), layout="constrained")
    axes = figure.add_subplot()
    begins_ms = 1e3 * np.cumsum([0.0, *(step.lasts_s for step in steps)])
    used = _draw_bars(axes, scenario, steps, workers, begins_ms)
    axes.vlines(begins_ms[1:-1], -0.5, len(workers) - 0.5, color=_FAINT, linewidth=0.7, zorder=0.5)
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


def batches(scenario: Scenario, outcome: Outcome) -> "Figure":
    """Draw local batches over steps: a line per worker, or of many the mean and range per kind."""
    from matplotlib.figure import Figure

    course = outcome.course
    figure = Figure(figsize=(8.8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    if scenario.workers <= MOST_LINES:
        lines, how = _draw_workers(axes, scenario, course), ""
    else:
        lines, how = _draw_kinds(axes, scenario, course)
    axes.set_xlim(course[0].step, course[-1].step + 1)
    axes.set_ylim(0, 1.06 * max(1, *(max(point.split) for point in course)))
    rows = _mark_events(axes, scenario, course)
    strided = f"simulated step (one stands for up to {scenario.stride:,})"
    axes.set_xlabel("step" if scenario.stride == 1 else strided)
    axes.set_ylabel("local batch (samples)")
    tidy(axes)
    head(axes, f"{outcome.policy}: local batches", noted(scenario.cluster.title, how), rows)
    legend_beside(axes, lines)
    return figure


def throughput(scenario: Scenario, outcomes: Sequence[Outcome]) -> "Figure":
    """Draw the samples per second of each policy over virtual time, and of the best split."""
    from matplotlib.figure import Figure

    shown = _shown(outcomes)
    unit_s, unit = _clock(shown)
    figure = Figure(figsize=(8.8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    entries = list(_draw_ideal(axes, scenario, shown, unit_s))
    for each in shown:
        entries.append(_draw_rates(axes, scenario, each, unit_s))
    if _marks_events(scenario):
        marks = axes.plot([], [], "o", **_mark(QUIET))
        entries.append(("event of the scenario", marks[0]))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"virtual time ({unit})")
    axes.set_ylabel("samples per second")
    tidy(axes)
    lost = "time lost between steps is left out" if any(each.lost_s for each in shown) else ""
    head(axes, "Throughput", noted(scenario.cluster.title, _smoothing(scenario, shown), lost), 0)
    legend_beside(axes, entries)
    return figure


def progress(scenario: Scenario, outcomes: Sequence[Outcome]) -> "Figure | None":
    """Draw how near each policy is to the goal, over virtual time; None: there is no goal."""
    from matplotlib.figure import Figure

    goal = None if scenario.learning is None else scenario.learning.target_samples
    if goal is None:
        return None
    shown = _shown(outcomes)
    unit_s, unit = _clock(shown)
    figure = Figure(figsize=(8.8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    longest_s = max((each.clock_s for each in shown), default=unit_s)
    axes.set_xlim(0, 1.01 * longest_s / unit_s)
    axes.set_ylim(0, 100)
    labels = [_draw_progress(axes, each, goal, unit_s) for each in shown]
    rows = label_above(axes, labels, most=len(labels), width_in=_ALONE_IN)
    axes.set_xlabel(f"virtual time ({unit})")
    axes.set_ylabel("part of the goal (%)")
    tidy(axes)
    what = f"goal: {goal:,.0f} samples, each counted by what it teaches"
    head(axes, "Progress to the goal", noted(scenario.cluster.title, what), rows)
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


def _written(picture: Picture, directory: Path) -> Path:
    path = directory / f"{picture.name}.png"
    try:
        path.write_bytes(picture.png())
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def _shown(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes of policies that made steps."""
    return [each for each in outcomes if not each.refused and each.course]


def _rows(scenario: Scenario, steps: Sequence[Step]) -> list[int]:
    """Return the workers to show: of too many, some of each kind, from slowest to fastest."""
    everyone = _everyone(steps)
    if len(everyone) <= MOST_ROWS:
        return everyone
    waited_s = np.zeros(scenario.workers)
    for step in steps:
        waited_s[step.workers] += step.idle_s
    by_kind: dict[int, list[int]] = {}
    for worker in sorted(everyone, key=lambda each: waited_s[each]):
        by_kind.setdefault(int(scenario.kind_of[worker]), []).append(worker)
    kinds = _spread(sorted(by_kind), MOST_ROWS)
    seats = _seats([len(by_kind[kind]) for kind in kinds], MOST_ROWS)
    return sorted(
        worker
        for kind, count in zip(kinds, seats, strict=True)
        for worker in _spread(by_kind[kind], count)
    )


def _everyone(steps: Sequence[Step]) -> list[int]:
    return sorted({worker for step in steps for worker in step.workers.tolist()})


def _seats(sizes: Sequence[int], seats: int) -> list[int]:
    """Return how many of each group get a seat: one at least, beyond that by their sizes."""
    given = [1] * len(sizes)
    while sum(given) < min(seats, sum(sizes)):
        claims = [size / got if got < size else 0.0 for size, got in zip(sizes, given, strict=True)]
        given[int(np.argmax(claims))] += 1
    return given


def _spread(values: Sequence[int], count: int) -> list[int]:
    """Return so many of the values, the first and the last of them included."""
    if len(values) <= count:
        return list(values)
    places = np.linspace(0, len(values) - 1, count).round().astype(int)
    return [values[place] for place in places.tolist()]


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
    style: dict[str, Any] = {"fontsize": 8.5, "color": QUIET, "annotation_clip": False}
    style |= {"textcoords": "offset points"}
    rows = axes.get_yaxis_transform()
    for row, worker in enumerate(workers):
        text, at = f"{last[worker]:,}", (1.0, row)
        axes.annotate(text, at, xycoords=rows, xytext=(34, 0), ha="right", va="center", **style)
    axes.annotate("local batch", (1.0, 1.0), xycoords="axes fraction", xytext=(6, 4), **style)


def _unit(scenario: Scenario) -> str:
    """Return what a bar of a timeline stands for."""
    return "step" if isinstance(scenario.mode, Sync) else "global batch"


def _draw_workers(axes: "Axes", scenario: Scenario, course: Sequence[Point]) -> list[Entry]:
    """Draw a line per worker; lines that are the same all along share it in dashes."""
    from matplotlib.lines import Line2D

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
    from matplotlib.colors import to_hex, to_rgb

    kinds = scenario.cluster.kinds
    if max(kind.count for kind in kinds) > _MOST_SHADES:
        return list(_CALM[: scenario.workers])
    colors = []
    for kind, color in zip(kinds, _CALM, strict=False):
        for shade in np.linspace(0.0, 0.5, max(2, kind.count))[: kind.count]:
            base = np.array(to_rgb(color))
            lighter = base + (1 - base) * shade
            colors.append(to_hex((lighter[0], lighter[1], lighter[2])))
    return colors


def _draw_kinds(
    axes: "Axes", scenario: Scenario, course: Sequence[Point]
) -> tuple[list[Entry], str]:
    """Draw the mean and range of each kind; return the lines by name, and how to read them."""
    steps = _edges(course)
    kinds = _chosen_kinds(scenario, MOST_LINES)
    lines: list[tuple[float, Entry]] = []
    for kind, color in zip(kinds, _CALM, strict=False):
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


def _chosen_kinds(scenario: Scenario, most: int) -> list[int]:
    """Return the numbers of the kinds to show."""
    return _spread(range(len(scenario.cluster.kinds)), most)


def _of_kind(scenario: Scenario, point: Point, kind: int) -> Floats:
    """Return the local batches of a kind's workers; one NaN if none is there."""
    found = np.array(point.split, dtype=np.float64)[scenario.kind_of[point.workers] == kind]
    return found if found.size else np.array([np.nan])


def _mark_events(axes: "Axes", scenario: Scenario, course: Sequence[Point]) -> int:
    """Draw a thin line at each event; return the rows of labels above."""
    labels = []
    for event in scenario.events:
        place = _place(course, event)
        if place is None:
            continue
        step = course[place].step if event.at_step is None else event.at_step
        axes.axvline(step, color=_FAINT, linewidth=0.9, zorder=0.5)
        labels.append(Label(step, _event_in_words(scenario, event), QUIET))
    return label_above(axes, labels, most=_EVENT_ROWS, width_in=_BESIDE_LEGEND_IN)


def _places(scenario: Scenario, course: Sequence[Point]) -> list[int]:
    """Return the points of a course at which events are first felt.

    None of an asynchronous one, in which workers are at different steps.
    """
    if not isinstance(scenario.mode, Sync):
        return []
    places = (_place(course, event) for event in scenario.events)
    return [place for place in places if place is not None]


def _place(course: Sequence[Point], event: Event) -> int | None:
    """Return the first point of a course at which an event is due; None: it comes later."""
    due = (number for number, point in enumerate(course) if event.is_due(point.step, point.end_s))
    return next(due, None)


def _event_in_words(scenario: Scenario, event: Event) -> str:
    whom = _whom(scenario, event)
    if event.what in ("leaves", "fails", "joins"):
        many = len(event.workers) > 1
        return f"{whom} {event.what[:-1] if many else event.what}"
    part = {"slower_network": "network", "slower_link": "link of ", "slower_loader": "loader of "}
    subject = part.get(event.what, "") + ("" if event.what == "slower_network" else whom)
    factors = set(event.factors)
    if len(factors) > 1:
        return "speeds change"
    (factor,) = factors
    how = "as declared" if factor == 1 else f"{factor:.3g}× as slow"
    lasting = f" for {counted(event.for_steps, 'step')}" if event.for_steps else ""
    return f"{subject} {how}{lasting}"


def _whom(scenario: Scenario, event: Event) -> str:
    if len(event.workers) == 1:
        return name_of(scenario.names[event.workers[0]])
    if len(event.workers) == scenario.workers:
        return "all workers"
    for kind in scenario.cluster.kinds:
        if tuple(kind.workers) == event.workers:
            return f"all {name_of(kind.name)}"
    return f"{len(event.workers):,} workers"


def _draw_rates(axes: "Axes", scenario: Scenario, outcome: Outcome, unit_s: float) -> Entry:
    color = _color(outcome.policy)
    times = np.array([point.end_s for point in outcome.course]) / unit_s
    places = _places(scenario, outcome.course)
    rates = np.array([point.samples_per_s for point in outcome.course])
    rates = _smooth(scenario, outcome.course, rates)
    (line,) = axes.plot(*_held(times, rates), color=color, **_stroke(outcome.policy))
    if _marks_events(scenario):
        axes.plot(times[places], rates[places], "o", **_mark(color))
    return outcome.policy, line


def _marks_events(scenario: Scenario) -> bool:
    return isinstance(scenario.mode, Sync) and 0 < len(scenario.events) <= _MOST_MARKED


def _draw_ideal(
    axes: "Axes", scenario: Scenario, shown: Sequence[Outcome], unit_s: float
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


def _draw_progress(axes: "Axes", outcome: Outcome, goal: float, unit_s: float) -> "Label":
    """Draw a curve and its end; return the label of that."""
    color = _color(outcome.policy)
    course = [(point.end_s, point.effective_samples) for point in outcome.course]
    end = (outcome.clock_s, outcome.timeline[-1].effective_samples)
    rows = np.array([(0.0, 0.0), *course, end]) / (unit_s, goal / 100)
    times, parts = rows[:, 0], np.minimum(rows[:, 1], 100.0)
    axes.plot(times, parts, color=color, **_stroke(outcome.policy))
    axes.plot(times[-1], parts[-1], "o", clip_on=False, **_mark(color))
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
    parts = np.split(rates, sorted(set(_places(scenario, course))))
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


def _color(policy: str) -> str:
    return _POLICIES.get(policy, _CALM[-1])


def _stroke(policy: str) -> dict[str, Any]:
    """Return how a policy's curve is drawn: ours on top."""
    ours = policy == "auto"
    return {"linewidth": 2.0 if ours else 1.4, "zorder": 3.0 if ours else 2.0}


def _mark(color: str) -> dict[str, Any]:
    return {
        "color": color,
        "markersize": 5.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
        "zorder": 4.0,
    }

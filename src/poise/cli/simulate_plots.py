"""The pictures of `poise simulate`: throughput, progress, timelines and local batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from poise.cli.requirements import require
from poise.cli.simulate import duration
from poise.core.timing import Floats
from poise.engine.modes import Sync
from poise.errors import InvalidSetting
from poise.sim.bsp import Step
from poise.sim.outcome import Outcome, Point
from poise.sim.scenario import Event, Scenario

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Subject = Literal["throughput", "progress", "timeline", "batches"]
Entry = tuple[str, "Artist"]
"""A name in a legend, and what it names."""
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
_QUIET, _FAINT = "#555555", "#9a9a9a"
_INPUT, _COMPUTING, _WAITING, _REDUCING, _AWAY = (
    *("waiting for input", "computing", "waiting for others", "reducing gradients"),
    "not there",
)
_ACTIVITIES = {
    _INPUT: "#e3b04b",
    _COMPUTING: "#3b78a8",
    _WAITING: "#f0cfc4",
    _REDUCING: "#62a06f",
    _AWAY: "#ededed",
}
_HALF_WINDOW = 2
"""Points on each side of a running median."""
_MOST_SHADES = 4
"""Workers of a kind that shades of one color can tell apart."""
_MOST_MARKED = 12
"""Events that are marked on curves."""
_EVENT_ROWS = 3
"""Rows of labels above a picture; an event that finds no room has a line and no label."""
_MIDDLE = 0.5
_LINE_PT = 12.0
"""Points from a row of labels to the next."""
_CHARACTER_IN = 0.063
"""Inches of a character of a label, on average."""
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

    steps = outcome.timeline
    workers = _rows(scenario, steps)
    figure = Figure(figsize=(8.8, 2.0 + 0.27 * len(workers)), layout="constrained")
    axes = figure.add_subplot()
    begins_ms = 1e3 * np.cumsum([0.0, *(step.lasts_s for step in steps)])
    used = _draw_bars(axes, scenario, steps, workers, begins_ms)
    axes.vlines(begins_ms[1:-1], -0.5, len(workers) - 0.5, color=_FAINT, linewidth=0.7, zorder=0.5)
    axes.set_xlim(0, begins_ms[-1])
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.set_yticks(range(len(workers)), [_short(scenario.names[each]) for each in workers])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.tick_params(axis="y", length=0)
    _thousands(axes.xaxis)
    axes.set_xlabel(f"milliseconds from the begin of step {steps[0].number:,}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _write_batches(axes, steps, workers)
    _head(axes, _timeline_title(outcome, scenario, workers), _timeline_note(scenario, steps), 1)
    _legend_below(figure, [(name, _ACTIVITIES[name]) for name in _ACTIVITIES if name in used])
    return figure


def batches(scenario: Scenario, outcome: Outcome) -> "Figure":
    """Draw local batches over steps: a line per worker, or of many the mean and range per kind.

    The smaller last steps of epochs are left out.
    """
    from matplotlib.figure import Figure

    course = whole_steps(outcome.course)
    figure = Figure(figsize=(8.8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    if scenario.workers <= MOST_LINES:
        lines, note = _draw_workers(axes, scenario, course), ""
    else:
        lines, note = _draw_kinds(axes, scenario, course)
    axes.set_xlim(course[0].step, max(course[-1].step, course[0].step + 1))
    axes.set_ylim(0, 1.06 * max(1, *(max(point.split) for point in course)))
    rows = _mark_events(axes, scenario, course)
    strided = f"simulated step (one stands for up to {scenario.stride:,})"
    axes.set_xlabel("step" if scenario.stride == 1 else strided)
    axes.set_ylabel("local batch (samples)")
    _tidy(axes)
    _head(axes, f"{outcome.policy}: local batches", _note(scenario, note), rows)
    _legend_beside(axes, lines)
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
    if scenario.events and len(scenario.events) <= _MOST_MARKED:
        marks = axes.plot([], [], "o", **_mark(_QUIET))
        entries.append(("event of the scenario", marks[0]))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"virtual time ({unit})")
    axes.set_ylabel("samples per second")
    _tidy(axes)
    points = max((2 * _half_window(len(each.course)) + 1 for each in shown), default=1)
    smoothed = f"running median of {points} points" if points > 1 else ""
    _head(axes, "Throughput", _note(scenario, smoothed), 0)
    _legend_beside(axes, entries)
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
    rows = _label_above(axes, labels, most=len(labels), width_in=_ALONE_IN)
    axes.set_xlabel(f"virtual time ({unit})")
    axes.set_ylabel("part of the goal (%)")
    _tidy(axes)
    what = f"goal: {goal:,.0f} samples, each counted by what it teaches"
    _head(axes, "Progress to the goal", _note(scenario, what), rows)
    return figure


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
    everyone = sorted({worker for step in steps for worker in step.workers.tolist()})
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
            (_WAITING, ended_s, step.lasts_s - ended_s),
        ]
    return [
        (_INPUT, np.zeros_like(ended_s), step.input_s),
        (_COMPUTING, step.input_s, ended_s - step.input_s),
        (_WAITING, ended_s, everyone_s - ended_s),
        (_REDUCING, everyone_s, step.lasts_s - everyone_s),
    ]


def _write_batches(axes: "Axes", steps: Sequence[Step], workers: Sequence[int]) -> None:
    """Write the last local batch of each worker at the end of its row."""
    last = {
        worker: batch
        for step in steps
        for worker, batch in zip(step.workers.tolist(), step.split, strict=True)
    }
    style: dict[str, Any] = {"fontsize": 8.5, "color": _QUIET, "annotation_clip": False}
    style |= {"textcoords": "offset points"}
    rows = axes.get_yaxis_transform()
    for row, worker in enumerate(workers):
        text, at = f"{last[worker]:,}", (1.0, row)
        axes.annotate(text, at, xycoords=rows, xytext=(58, 0), ha="right", va="center", **style)
    axes.annotate(
        "local batch", (1.0, 1.0), xycoords="axes fraction", xytext=(58, 4), ha="right", **style
    )


def _timeline_title(outcome: Outcome, scenario: Scenario, workers: Sequence[int]) -> str:
    steps = len(outcome.timeline)
    unit = "step" if isinstance(scenario.mode, Sync) else "global batch"
    title = f"{outcome.policy}: the last {counted(steps, unit)}"
    everyone = len({worker for step in outcome.timeline for worker in step.workers.tolist()})
    if len(workers) == everyone:
        return title
    return f"{title}, {len(workers)} of {everyone:,} workers (slow and fast ones of each kind)"


def _timeline_note(scenario: Scenario, steps: Sequence[Step]) -> str:
    return _note(scenario, timeline_facts(scenario, steps))


def timeline_facts(scenario: Scenario, steps: Sequence[Step]) -> str:
    """Return how long steps last, and how much of that workers wait."""
    lasts_s = sum(step.lasts_s for step in steps)
    if isinstance(scenario.mode, Sync):
        waits_s, whom = sum(float(step.idle_s.mean()) for step in steps), " for others"
    else:
        waits_s = sum(float((step.lasts_s - step.computed_s).mean()) for step in steps)
        whom = ""
    lost_s = sum(step.lost_s for step in steps[1:])
    cut = f"; {duration(lost_s)} lost between them are cut out" if lost_s else ""
    each = duration(lasts_s / len(steps))
    return f"{each} each, {100 * waits_s / lasts_s:.0f} % of which workers wait{whom}{cut}"


def whole_steps(course: Sequence[Point]) -> list[Point]:
    """Leave out steps with fewer samples than those before and after: the ends of epochs."""
    samples = [sum(point.split) for point in course]
    after = [*samples[1:], np.inf]
    before = [0, *samples[:-1]]
    return [
        point
        for point, own, last, following in zip(course, samples, before, after, strict=True)
        if own >= min(last, following)
    ]


def _draw_workers(axes: "Axes", scenario: Scenario, course: Sequence[Point]) -> list[Entry]:
    """Draw a line per worker; lines that are the same all along share it in dashes."""
    from matplotlib.lines import Line2D

    table = np.full((scenario.workers, len(course)), np.nan)
    for column, point in enumerate(course):
        table[point.workers, column] = point.split
    steps = [point.step for point in course]
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
        (scenario.names[worker], Line2D([], [], color=colors[worker], linewidth=2.2))
        for worker in order
    ]


def _worker_colors(scenario: Scenario) -> list[str]:
    """Return shades of one color for workers of a kind, if those can be told apart."""
    from matplotlib.colors import to_hex, to_rgb

    kinds = scenario.cluster.kinds
    if max(kind.count for kind in kinds) > _MOST_SHADES:
        return list(_CALM[: scenario.workers])
    colors = []
    for kind, color in zip(kinds, _CALM, strict=False):
        for shade in np.linspace(0.0, 0.6, max(2, kind.count))[: kind.count]:
            base = np.array(to_rgb(color))
            lighter = base + (1 - base) * shade
            colors.append(to_hex((lighter[0], lighter[1], lighter[2])))
    return colors


def _draw_kinds(
    axes: "Axes", scenario: Scenario, course: Sequence[Point]
) -> tuple[list[Entry], str]:
    """Draw the mean and range of each kind; return the lines by name, and how to read them."""
    steps = [point.step for point in course]
    kinds = chosen_kinds(scenario, MOST_LINES)
    lines: list[tuple[float, Entry]] = []
    for kind, color in zip(kinds, _CALM, strict=False):
        found = [of_kind(scenario, point, kind) for point in course]
        low, mean, high = np.array([(each.min(), each.mean(), each.max()) for each in found]).T
        axes.fill_between(steps, low, high, step="post", color=color, alpha=0.2, linewidth=0)
        (line,) = axes.plot(steps, mean, drawstyle="steps-post", color=color, linewidth=1.8)
        declared = scenario.cluster.kinds[kind]
        name = _short(declared.name) + (f" ({declared.count:,})" if declared.count > 1 else "")
        lines.append((float(np.nan_to_num(mean[-1])), (name, line)))
    lines.sort(key=lambda each: -each[0])
    every = len(scenario.cluster.kinds)
    some = "" if len(kinds) == every else f"{len(kinds)} of {every:,} kinds; "
    note = f"{some}mean of each kind, and band from lowest to highest"
    return [entry for _, entry in lines], note


def chosen_kinds(scenario: Scenario, most: int) -> list[int]:
    """Return the numbers of the kinds to show."""
    return _spread(range(len(scenario.cluster.kinds)), most)


def of_kind(scenario: Scenario, point: Point, kind: int) -> Floats:
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
        labels.append(_Label(step, _event_in_words(scenario, event), _QUIET))
    return _label_above(axes, labels, most=_EVENT_ROWS, width_in=_BESIDE_LEGEND_IN)


def _places(scenario: Scenario, course: Sequence[Point]) -> list[int]:
    """Return the points of a course at which events are first felt."""
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
        return _short(scenario.names[event.workers[0]])
    if len(event.workers) == scenario.workers:
        return "all workers"
    for kind in scenario.cluster.kinds:
        if tuple(kind.workers) == event.workers:
            return f"all {_short(kind.name)}"
    return f"{len(event.workers):,} workers"


def _draw_rates(axes: "Axes", scenario: Scenario, outcome: Outcome, unit_s: float) -> Entry:
    color = _color(outcome.policy)
    times = np.array([point.end_s for point in outcome.course]) / unit_s
    places = _places(scenario, outcome.course)
    rates = _smooth(np.array([point.samples_per_s for point in outcome.course]), places)
    (line,) = axes.plot(times, rates, color=color, **_stroke(outcome.policy))
    if len(scenario.events) <= _MOST_MARKED:
        axes.plot(times[places], rates[places], "o", **_mark(color))
    return outcome.policy, line


def _draw_ideal(
    axes: "Axes", scenario: Scenario, shown: Sequence[Outcome], unit_s: float
) -> Iterator[Entry]:
    """Draw what the best split makes, by the clock of the last outcome that knows it."""
    for each in reversed(shown):
        known = [point for point in each.course if np.isfinite(point.ideal_samples_per_s)]
        if known:
            times = np.array([point.end_s for point in known]) / unit_s
            ideals = np.array([point.ideal_samples_per_s for point in known])
            rates = _smooth(ideals, _places(scenario, known))
            (line,) = axes.plot(times, rates, color=_QUIET, linestyle=(0, (4, 2)), linewidth=1.5)
            yield f"best split (clock of {each.policy})", line
            return


def _draw_progress(axes: "Axes", outcome: Outcome, goal: float, unit_s: float) -> "_Label":
    """Draw a curve and its end; return the label of that."""
    color = _color(outcome.policy)
    times = [0.0, *(point.end_s / unit_s for point in outcome.course)]
    parts = [0.0, *(100 * point.effective_samples / goal for point in outcome.course)]
    axes.plot(times, parts, color=color, **_stroke(outcome.policy))
    axes.plot(times[-1], parts[-1], "o", clip_on=False, **_mark(color))
    if outcome.target_s is not None:
        return _Label(times[-1], f"{outcome.policy} {duration(outcome.target_s)}", color)
    axes.vlines(times[-1], parts[-1], 100, color=color, linewidth=0.7, linestyle=":")
    text = f"{outcome.policy} {parts[-1]:.0f} % after {duration(outcome.clock_s)}"
    return _Label(times[-1], text, color)


def _smooth(values: Floats, breaks: Sequence[int] = ()) -> Floats:
    """Return the running median of each part; at its ends, of the points that there are."""
    half = _half_window(len(values))
    parts = np.split(values, sorted(set(breaks)))
    return np.array(
        [
            np.median(part[max(0, place - half) : place + half + 1])
            for part in parts
            for place in range(len(part))
        ]
    )


def _half_window(points: int) -> int:
    return min(_HALF_WINDOW, points // 20)


def _clock(shown: Sequence[Outcome]) -> tuple[float, str]:
    """Return the unit of virtual time that fits: its seconds, and its name."""
    longest_s = max((each.clock_s for each in shown), default=0.0)
    return next((unit_s, name) for unit_s, name, upto in _CLOCKS if longest_s < upto)


def _color(policy: str) -> str:
    return _POLICIES.get(policy, _CALM[-1])


def _stroke(policy: str) -> dict[str, Any]:
    """Return how a policy's curve is drawn: ours on top."""
    ours = policy == "auto"
    return {"linewidth": 2.2 if ours else 1.6, "zorder": 3.0 if ours else 2.0}


def _mark(color: str) -> dict[str, Any]:
    return {
        "color": color,
        "markersize": 5.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
        "zorder": 4.0,
    }


@dataclass(frozen=True)
class _Label:
    """A text above a picture, which belongs to a place on its horizontal axis."""

    x: float
    text: str
    color: str


def _label_above(axes: "Axes", labels: Sequence[_Label], *, most: int, width_in: float) -> int:
    """Write labels in rows so that none covers another; return how many rows it takes.

    Texts go to the right of their places in the left half, and to the left in the right half.
    A label that needs more than the most rows is left out. A thin line leads from each to its
    place, behind those below.
    """
    low, high = axes.get_xlim()
    inner = [(each, (each.x - low) / (high - low)) for each in labels]
    left = sorted(((e, at) for e, at in inner if at <= _MIDDLE), key=lambda pair: -pair[1])
    right = sorted(((e, at) for e, at in inner if at > _MIDDLE), key=lambda pair: pair[1])
    taken: list[list[tuple[float, float]]] = []
    written: list[tuple[int, bool, _Label]] = []
    for label, at in (*left, *right):
        width = _CHARACTER_IN * (len(label.text) + 2) / width_in
        span = (at, at + width) if at <= _MIDDLE else (at - width, at)
        row = _free_row(taken, span)
        if row < most:
            written.append((row, at <= _MIDDLE, label))
    for row, rightwards, label in sorted(written, key=lambda each: -each[0]):
        _write_label(axes, label, row, rightwards=rightwards)
    return len(taken[:most])


def _free_row(taken: list[list[tuple[float, float]]], span: tuple[float, float]) -> int:
    """Return the lowest row with room for a span, which takes it.

    >>> rows = [[(0.0, 0.5)]]
    >>> _free_row(rows, (0.6, 0.9)), _free_row(rows, (0.4, 0.7))
    (0, 1)
    """
    for row, spans in enumerate(taken):
        if all(span[1] <= begin or span[0] >= end for begin, end in spans):
            spans.append(span)
            return row
    taken.append([span])
    return len(taken) - 1


def _write_label(axes: "Axes", label: _Label, row: int, *, rightwards: bool) -> None:
    text = axes.annotate(
        label.text,
        (label.x, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-3 if rightwards else 3, 5 + _LINE_PT * row),
        textcoords="offset points",
        ha="left" if rightwards else "right",
        va="bottom",
        fontsize=8.5,
        color=label.color,
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )
    text.set_parse_math(False)
    axes.annotate(
        "",
        (label.x, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 5 + _LINE_PT * row),
        textcoords="offset points",
        annotation_clip=False,
        arrowprops={
            "arrowstyle": "-",
            "color": label.color,
            "linewidth": 0.7,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def _head(axes: "Axes", title: str, note: str, rows: int) -> None:
    """Write a title and what to know, above so many rows of labels."""
    above = 7 + _LINE_PT * rows
    text = axes.annotate(
        note,
        (0.0, 1.0),
        xycoords="axes fraction",
        xytext=(0, above),
        textcoords="offset points",
        va="bottom",
        fontsize=8.5,
        color=_QUIET,
        annotation_clip=False,
    )
    text.set_parse_math(False)
    pad = above + (_LINE_PT + 3 if note else 0)
    axes.set_title(title, fontsize=11, loc="left", pad=pad, fontweight="bold", parse_math=False)


def _note(scenario: Scenario, more: str) -> str:
    title = _short(scenario.cluster.title, 110 - len(more))
    return " · ".join(text for text in (title, more) if text)


def _tidy(axes: "Axes") -> None:
    _thousands(axes.xaxis)
    _thousands(axes.yaxis)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _thousands(axis: "Axis") -> None:
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _legend_beside(axes: "Axes", entries: Sequence[Entry]) -> None:
    """Write a legend at the right, whatever characters the names are made of."""
    legend = axes.legend(
        [handle for _, handle in entries],
        ["name"] * len(entries),
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        borderaxespad=0.0,
        fontsize=9,
        frameon=False,
    )
    for text, (name, _) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(_short(name))


def _legend_below(figure: "Figure", entries: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(facecolor=color, label=name) for name, color in entries],
        loc="outside lower center",
        ncols=len(entries),
        fontsize=9,
        frameon=False,
        handlelength=1.2,
    )


def _short(text: str, most: int = 28) -> str:
    """Return a text on one line, cut where it is too long.

    >>> _short("a  b"), _short("abcdef", 4)
    ('a b', 'abc…')
    """
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: max(0, most - 1)]}…"


def counted(count: int, what: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "step"), counted(12, "global batch")
    ('1 step', '12 global batches')
    """
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")

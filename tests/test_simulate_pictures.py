"""The pictures and the page of `poise simulate`: what is on them, and what they survive."""

import base64
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

import poise.cli.options
from poise.cli.plot_batches import batches
from poise.cli.plot_curves import progress, throughput
from poise.cli.plot_sheet import DPI, file_of, write
from poise.cli.plot_timeline import timeline
from poise.cli.simulate import check_directory
from poise.cli.simulate_findings import Findings
from poise.cli.simulate_page import draw_all, page, pictures
from poise.errors import InvalidSetting
from poise.sim.outcome import Outcome, compare
from poise.sim.scenario import Scenario
from poise.sim.scenario_file import declared_scenario, read_scenario
from poise.sim.what_if import WhatIf
from poise.toml_file import Toml

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SLOWDOWN = Path(__file__).parent.parent / "examples" / "scenarios" / "slowdown.toml"
FAST = {"forward_s": [0.0004, 0.004], "backward_s": [0.0008, 0.006]}
SLOW = {"forward_s": [0.001, 0.006], "backward_s": [0.002, 0.009]}
HOSTILE = '<script>alert("1")</script> & $\\frac{x}$ \'"'
ROWS = [["policy", "step"], ["even", "1.00 s"], ["<auto>", "273 ms"]]
PNG = b"\x89PNG"

Points = NDArray[np.float64]
"""Times or steps, and values."""

pytestmark = pytest.mark.filterwarnings("error")


def draw_into(directory: Path, scenario: Scenario, outcomes: Sequence[Outcome]) -> list[Path]:
    """Write the page and the pictures; return where the pictures are."""
    index, *drawn = draw_all(Findings(scenario, outcomes, [], WhatIf()), directory)
    assert index.name == "index.html"
    return drawn


def declared(*workers: Mapping[str, object], **keys: object) -> Scenario:
    """Return a small scenario of these tables."""
    tables = {"steps": 40, "global_batch": 256, "policies": ["even", "auto"], **keys}
    return declared_scenario(
        Toml("my.toml", {**tables, "worker": [dict(each) for each in workers]})
    )


@pytest.fixture(scope="module")
def slowdown() -> Scenario:
    """The example, cut short: the event comes at step 60, and the goal is near."""
    whole = read_scenario(SLOWDOWN)
    assert whole.learning is not None
    return replace(
        whole,
        steps=120,
        policies=("even", "proportional", "auto"),
        events=tuple(replace(event, at_step=60) for event in whole.events),
        learning=replace(whole.learning, target_samples=50_000.0),
    )


@pytest.fixture(scope="module")
def outcomes(slowdown: Scenario) -> list[Outcome]:
    return compare(slowdown)


@pytest.fixture(scope="module")
def forty() -> tuple[Scenario, list[Outcome]]:
    """Forty workers of three kinds, one of which is a straggler."""
    scenario = declared(
        {"name": "a", "count": 8, **FAST},
        {"name": "b", "count": 12, **FAST},
        {"name": "c", "count": 20, **SLOW},
        policies=["auto"],
        global_batch=4000,
        event=[{"at_step": 30, "worker": "b-7", "slower": 9.0}],
    )
    return scenario, compare(scenario)


def only(figure: "Figure") -> "Axes":
    (axes,) = figure.axes
    return axes


def legend(axes: "Axes") -> list[str]:
    found = axes.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def below(figure: "Figure") -> list[str]:
    """Return the legend of a whole figure."""
    (found,) = figure.legends
    return [text.get_text() for text in found.get_texts()]


def words(axes: "Axes") -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


def by_color(axes: "Axes", color: str) -> list[Points]:
    """Return the points of the lines of a color, those of single dots left out."""
    return [
        np.column_stack((line.get_xdata(), line.get_ydata())).astype(np.float64)
        for line in axes.lines
        if line.get_color() == color and line.get_marker() in ("None", None, "")
    ]


def mean_of(line: Points) -> float:
    """Return the mean of a curve over its time."""
    lasts = np.diff(line[:, 0])
    return float(lasts @ (line[1:, 1] + line[:-1, 1]) / 2 / lasts.sum())


@dataclass
class Seen(HTMLParser):
    """What a page holds."""

    tags: list[str] = field(default_factory=list)
    images: list[dict[str, str | None]] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if tag == "img":
            self.images.append(given)
        for key in ("src", "href"):
            link = given.get(key) or "#"
            if not link.startswith(("#", "data:image/png;base64,")):
                self.outside.append(link)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @staticmethod
    def of(text: str) -> "Seen":
        seen = Seen()
        seen.feed(text)
        seen.close()
        assert not seen.open
        return seen


def test_throughput_shows_every_policy_the_best_split_and_the_event(
    slowdown: Scenario, outcomes: list[Outcome]
) -> None:
    axes = only(throughput(slowdown, outcomes))
    names = ["even", "proportional", "auto"]
    assert legend(axes) == ["best split (clock of auto)", *names, "event of the scenario"]
    assert axes.get_ylabel() == "samples per second"
    assert "running median of" in words(axes)[0]
    (even,), (auto,), (ideal,) = (by_color(axes, c) for c in ("#c8553d", "#1b6ca8", "#555555"))
    for line, outcome in zip((even, auto), (outcomes[0], outcomes[2]), strict=True):
        assert line[0, 0] == 0
        assert line[-1, 0] == pytest.approx(outcome.clock_s)
        assert mean_of(line) == pytest.approx(outcome.samples_per_s, rel=0.05)
    assert ideal[0, 1] > even[0, 1]
    dots = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_path())]
    assert len(dots) == 3


def test_a_slump_after_an_event_is_not_smoothed_away(
    slowdown: Scenario, outcomes: list[Outcome]
) -> None:
    (auto,) = by_color(only(throughput(slowdown, outcomes)), "#1b6ca8")
    raw = [point.samples_per_s for point in outcomes[2].course]
    assert auto[:, 1].min() < 1.3 * min(raw)


@pytest.mark.parametrize(
    ("seconds", "unit"), [(100.0, "seconds"), (1000.0, "minutes"), (9000.0, "hours")]
)
def test_the_clock_is_told_in_a_unit_that_fits(
    slowdown: Scenario, outcomes: list[Outcome], seconds: float, unit: str
) -> None:
    longer = replace(outcomes[0], clock_s=seconds)
    assert only(throughput(slowdown, [longer])).get_xlabel() == f"virtual time ({unit})"
    drawn = progress(slowdown, [longer])
    assert drawn is not None
    assert only(drawn).get_xlabel() == f"virtual time ({unit})"


def test_progress_ends_at_the_goal_with_its_time(
    slowdown: Scenario, outcomes: list[Outcome]
) -> None:
    figure = progress(slowdown, outcomes)
    assert figure is not None
    axes = only(figure)
    for outcome, color in zip(outcomes, ("#c8553d", "#3a7d44", "#1b6ca8"), strict=True):
        (line,) = by_color(axes, color)
        assert outcome.target_s is not None
        assert line[0].tolist() == [0, 0]
        assert line[-1] == pytest.approx([outcome.target_s, 100])
    said = words(axes)
    assert sum(text.split()[0] in ("even", "proportional", "auto") for text in said) == 3
    assert any(text.startswith("auto ") and text.endswith(" s") for text in said)


def test_a_goal_that_is_missed_is_told_as_a_part(slowdown: Scenario) -> None:
    assert slowdown.learning is not None
    far = replace(slowdown, learning=replace(slowdown.learning, target_samples=1e6), steps=20)
    figure = progress(far, compare(far))
    assert figure is not None
    assert sum(" 1 % after " in text for text in words(only(figure))) == 3


def test_without_a_goal_there_is_no_progress() -> None:
    scenario = declared({"name": "a", **FAST}, {"name": "b", **SLOW})
    found = compare(scenario)
    assert progress(scenario, found) is None
    names = [picture.name for picture in pictures(scenario, found)]
    each = [f"{what}-{policy}" for policy in ("even", "auto") for what in ("timeline", "batches")]
    assert names == ["throughput", *each]


def test_a_timeline_has_a_row_per_worker_and_names_what_they_do(
    slowdown: Scenario, outcomes: list[Outcome]
) -> None:
    outcome = outcomes[2]
    figure = timeline(slowdown, outcome)
    axes = only(figure)
    assert [each.get_text() for each in axes.get_yticklabels()] == list(slowdown.names)
    assert below(figure) == ["computing", "waiting for others", "reducing gradients"]
    assert axes.get_title(loc="left") == "auto: the last 12 steps"
    lasts_ms = 1e3 * sum(step.lasts_s for step in outcome.timeline)
    assert axes.get_xlim() == pytest.approx((0, lasts_ms))
    assert "milliseconds" in axes.get_xlabel()
    assert {str(each) for each in outcome.timeline[-1].split} <= set(words(axes))


def test_the_bars_of_a_row_fill_its_time(slowdown: Scenario, outcomes: list[Outcome]) -> None:
    axes = only(timeline(slowdown, outcomes[0]))
    filled = [0.0] * slowdown.workers
    for bars in axes.collections:
        for path in bars.get_paths():
            low, high = path.get_extents().get_points()
            if high[0] > low[0]:  # not the lines between steps
                filled[round((low[1] + high[1]) / 2)] += high[0] - low[0]
    assert filled == pytest.approx([axes.get_xlim()[1]] * slowdown.workers)


def test_waiting_for_input_and_absence_are_shown() -> None:
    scenario = declared(
        {"name": "a", **FAST},
        {"name": "b", "input_s": 0.01, **FAST},
        {"name": "c", **FAST},
        policies=["even"],
        restart_s=5.0,
        event=[
            {"at_step": 30, "worker": "c", "leaves": True},
            {"at_step": 36, "worker": "c", "joins": True},
        ],
    )
    (outcome,) = compare(scenario)
    figure = timeline(scenario, outcome)
    assert below(figure) == ["waiting for input", "computing", "waiting for others", "not there"]
    assert "10.0 s lost between steps are cut out" in words(only(figure))[-1]
    assert {"c leaves", "c joins"} <= set(words(only(batches(scenario, outcome))))


def test_of_forty_workers_some_of_each_kind_are_shown_and_the_straggler(
    forty: tuple[Scenario, list[Outcome]],
) -> None:
    scenario, (outcome,) = forty
    axes = only(timeline(scenario, outcome))
    assert axes.get_title(loc="left") == "auto: the last 12 steps, 24 of 40 workers"
    names = [each.get_text() for each in axes.get_yticklabels()]
    assert len(names) == len(set(names)) == 24
    assert {name[0] for name in names} == {"a", "b", "c"}
    assert "b-7" in names


def test_of_forty_workers_batches_show_mean_and_range_per_kind(
    forty: tuple[Scenario, list[Outcome]],
) -> None:
    scenario, (outcome,) = forty
    axes = only(batches(scenario, outcome))
    assert sorted(legend(axes)) == ["a (8)", "b (12)", "c (20)"]
    assert len(axes.collections) == 3
    last = np.array(outcome.course[-1].split)
    ends = sorted(float(np.asarray(line.get_ydata())[-1]) for line in axes.lines[:3])
    assert ends == pytest.approx(sorted(map(np.mean, np.split(last, [8, 20]))))
    assert "b-7 9× as slow" in words(axes)


def test_of_many_kinds_some_are_shown() -> None:
    tables = [{"name": f"m{number}", **FAST} for number in range(30)]
    scenario = declared(*tables, policies=["even"], steps=5)
    (outcome,) = compare(scenario)
    axes = only(batches(scenario, outcome))
    assert len(legend(axes)) == len(axes.lines) == 12
    assert words(axes) == ["12 of 30 workers"]
    assert len(only(timeline(scenario, outcome)).get_yticklabels()) == 24


def test_batches_have_a_line_per_worker_and_one_per_event(
    slowdown: Scenario, outcomes: list[Outcome]
) -> None:
    axes = only(batches(slowdown, outcomes[2]))
    assert sorted(legend(axes)) == sorted(slowdown.names)
    assert len({str(line.get_color()) for line in axes.lines}) == 5
    *lines, event = axes.lines
    assert all(line.get_drawstyle() == "steps-post" for line in lines)
    assert [np.asarray(line.get_ydata())[-1] for line in lines] == list(outcomes[2].last_split)
    assert set(map(float, np.asarray(event.get_xdata()))) == {60.0}
    assert "rtx6000-0 4× as slow" in words(axes)
    assert axes.get_ylabel() == "local batch (samples)"


def test_lines_that_are_the_same_share_their_place(
    slowdown: Scenario, outcomes: list[Outcome]
) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    figure = batches(slowdown, outcomes[0])
    drawn = imread(BytesIO(file_of(figure)))
    axes = only(figure)
    left, right = (int(part * drawn.shape[1]) for part in axes.get_position().intervalx)
    for line in axes.lines[:4]:
        away = np.abs(drawn[:, left:right, :3] - to_rgb(str(line.get_color())))
        assert (away < 0.01).all(axis=-1).sum() > 20


def test_smaller_last_steps_of_epochs_are_no_changes_of_the_split() -> None:
    tables = ({"name": "a", **FAST}, {"name": "b", **SLOW})
    scenario = declared(*tables, policies=["even"], training={"epoch_samples": 1000})
    (outcome,) = compare(scenario)
    assert len({sum(step.split) for step in outcome.timeline}) == 2
    line = only(batches(scenario, outcome)).lines[0]
    assert set(np.asarray(line.get_ydata()).tolist()) == {128.0}
    written = words(only(timeline(scenario, outcome)))
    assert written.count("128") == 2


@pytest.mark.parametrize("mode", ["async", "stale:1"])
def test_an_asynchronous_training_shows_computing_and_waiting_only(
    mode: str, tmp_path: Path
) -> None:
    tables = ({"name": "_a", "count": 2, **FAST}, {"name": "$b$", **SLOW})
    event = {"at_step": 20, "worker": "_a", "slower": 2.0}
    server = {"update_s": 0.01}
    scenario = declared(*tables, mode=mode, noise={"cv": 0.1}, server=server, event=[event])
    found = compare(scenario)
    assert len(draw_into(tmp_path, scenario, found[:1])) == 3
    figure = timeline(scenario, found[0])
    assert below(figure) == ["computing", "waiting"]
    assert only(figure).get_title(loc="left") == "even: the last 12 global batches"
    axes = only(throughput(scenario, found))
    assert legend(axes) == ["even", "auto"]
    assert words(axes) == ["running mean of 5 points"]
    for outcome, color in zip(found, ("#c8553d", "#1b6ca8"), strict=True):
        (line,) = by_color(axes, color)
        assert mean_of(line) == pytest.approx(outcome.samples_per_s, rel=0.1)
    assert sorted(legend(only(batches(scenario, found[0])))) == ["$b$", "_a-0", "_a-1"]


def test_a_policy_that_was_refused_is_told_and_not_drawn(
    slowdown: Scenario, outcomes: list[Outcome]
) -> None:
    mixed = [outcomes[0], Outcome("static", refused="workers <come> & go")]
    names = [picture.name for picture in pictures(slowdown, mixed)]
    assert names == ["throughput", "progress", "timeline-even", "batches-even"]
    assert "static" not in legend(only(throughput(slowdown, mixed)))
    seen = Seen.of(page(slowdown, mixed, list(pictures(slowdown, mixed)), ROWS, []))
    assert len(seen.images) == 4
    assert "It cannot follow: workers <come> & go" in seen.texts


def test_when_all_are_refused_there_are_no_pictures_but_a_page(
    slowdown: Scenario, tmp_path: Path
) -> None:
    refused = [Outcome("static", refused="no")]
    assert draw_into(tmp_path, slowdown, refused) == []
    assert Seen.of(page(slowdown, refused, [], ROWS, [])).images == []


def test_one_worker_and_one_step_are_enough(tmp_path: Path) -> None:
    scenario = declared(dict(FAST), steps=1, policies=["even"])
    assert len(draw_into(tmp_path, scenario, compare(scenario))) == 3


def test_pictures_are_written_and_fit_on_their_paper(
    slowdown: Scenario, outcomes: list[Outcome], tmp_path: Path
) -> None:
    directory = tmp_path / "new" / "pictures"
    check_directory(directory)
    paths = draw_into(directory, slowdown, outcomes[2:])
    assert [path.name for path in paths] == [
        *("throughput.png", "progress.png", "timeline-auto.png", "batches-auto.png")
    ]
    assert all(path.parent == directory and path.read_bytes()[:4] == PNG for path in paths)
    for picture in pictures(slowdown, outcomes[:1]):
        picture.figure.set_dpi(DPI)
        picture.figure.draw_without_rendering()
        paper = picture.figure.get_window_extent()
        drawn = picture.figure.get_tightbbox().get_points() * DPI
        assert drawn.min() >= -1, picture.name
        assert (drawn[1] <= (paper.width + 1, paper.height + 1)).all(), picture.name


def test_drawing_needs_no_state_of_matplotlib(slowdown: Scenario, outcomes: list[Outcome]) -> None:
    before = "matplotlib.pyplot" in sys.modules
    assert next(pictures(slowdown, outcomes)).png
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_place_where_nothing_can_be_written_is_refused(
    slowdown: Scenario, outcomes: list[Outcome], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSetting, match="file/pictures cannot be made: Not a directory"):
        check_directory(tmp_path / "file" / "pictures")
    (tmp_path / "throughput.png").mkdir()
    with pytest.raises(InvalidSetting, match=r"throughput\.png cannot be written: Is a directory"):
        draw_into(tmp_path, slowdown, outcomes[:1])
    with pytest.raises(InvalidSetting, match=r"throughput\.png cannot be written: Is a directory"):
        write(tmp_path / "throughput.png", page(slowdown, [], [], ROWS, []).encode())


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poise.cli.options, "find_spec", lambda _: None)
    with pytest.raises(InvalidSetting, match=r"matplotlib cannot be imported.*poise\[report\]"):
        check_directory(tmp_path)


def test_a_page_stands_alone_and_holds_everything(
    slowdown: Scenario, outcomes: list[Outcome], tmp_path: Path
) -> None:
    path = tmp_path / "index.html"
    drawn = list(pictures(slowdown, outcomes[2:]))
    text = page(slowdown, outcomes[2:], drawn, ROWS, ["auto is 3 < 4 times as fast"])
    write(path, text.encode())
    seen = Seen.of(path.read_text(encoding="utf-8"))
    assert seen.outside == []
    assert not {"script", "link", "iframe"} & set(seen.tags)
    assert (seen.tags.count("h1"), seen.tags.count("h2")) == (1, 2 + 1)
    assert (seen.tags.count("tr"), seen.tags.count("td"), seen.tags.count("th")) == (3, 2, 4)
    assert {cell for row in ROWS for cell in row} <= set(seen.texts)
    assert {"auto is 3 < 4 times as fast", slowdown.cluster.note} <= set(seen.texts)
    assert seen.texts.count(slowdown.cluster.title) == 2
    for picture in seen.images:
        alt, source = picture["alt"], picture["src"]
        assert alt is not None
        assert alt.endswith(".")
        assert source is not None
        assert base64.b64decode(source.partition(",")[2])[:4] == PNG
    assert len({picture["alt"] for picture in seen.images}) == 2 + 2 * 1


def test_a_hostile_title_is_only_text(slowdown: Scenario, outcomes: list[Outcome]) -> None:
    cluster = replace(slowdown.cluster, title=HOSTILE * 5, note=HOSTILE)
    scenario = replace(slowdown, cluster=cluster)
    renamed = [replace(outcomes[0], policy='"><img src=x>')]
    drawn = list(pictures(scenario, renamed))
    text = page(scenario, renamed, drawn, [[HOSTILE], [HOSTILE]], [HOSTILE])
    seen = Seen.of(text)
    assert "<script" not in text
    assert seen.outside == []
    assert len(seen.images) == 4
    assert seen.texts.count(HOSTILE) == 4


def test_steps_that_no_best_split_is_known_of_are_left_out(
    slowdown: Scenario, outcomes: list[Outcome]
) -> None:
    course = tuple(
        replace(point, ideal_samples_per_s=math.nan) if point.step % 3 else point
        for point in outcomes[2].course
    )
    axes = only(throughput(slowdown, [replace(outcomes[2], course=course)]))
    (ideal,) = by_color(axes, "#555555")
    assert np.isfinite(ideal).all()

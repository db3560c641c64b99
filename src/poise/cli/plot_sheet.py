"""What pictures share: colors and strokes, and text, whatever characters it is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from poise.errors import InvalidSetting

Entry = tuple[str, Artist]
"""A name in a legend, and what it names."""
DPI = 150
QUIET = "#555555"
"""The color of what is not the subject."""
CALM = (
    *("#1b6ca8", "#c9803a", "#3a7d44", "#8d5a97", "#b8483f", "#3f9c9c"),
    *("#8a7a3b", "#5f6caf", "#c76d8e", "#6b8e23", "#7a5c48", "#4f7f8f"),
)
"""Colors of workers and kinds, in their order."""
FAINT = "#9a9a9a"
"""The color of lines in the background."""
_POLICIES = {
    "even": "#c8553d",
    "auto": "#1b6ca8",
    "proportional": "#3a7d44",
    "lbbsp": "#c9982b",
    "optperf": "#7d5ba6",
    "static": "#3f9c9c",
    "fixed": "#a8577e",
}

_MIDDLE = 0.5
_LINE_PT = 12.0
"""Points from a row of labels to the next."""
_LINE_CHARACTERS, _NAME_CHARACTERS = 100, 20
_CHARACTER_IN = 0.063
"""Inches of a character of a label, on average."""


@dataclass(frozen=True)
class Label:
    """A text above a picture, which belongs to a place on its horizontal axis."""

    x: float
    text: str
    color: str


class Sheet:
    """A picture that is being drawn."""

    def __init__(self, height_in: float, width_in: float = 8.8) -> None:
        self.figure = Figure(figsize=(width_in, height_in), layout="constrained")
        self.axes = self.figure.add_subplot()

    def tidy(self, x: str, y: str) -> None:
        """Name the axes, and draw a faint grid, and no frame at the top and the right."""
        self.axes.set(xlabel=x, ylabel=y)
        self.axes.xaxis.set_major_formatter(thousands)
        self.axes.yaxis.set_major_formatter(thousands)
        self.axes.grid(alpha=0.25)
        self.axes.spines[["top", "right"]].set_visible(False)

    def head(self, title: str, facts: str, rows: int) -> None:
        """Write a title and what to know, above so many rows of labels."""
        above = 7 + _LINE_PT * rows
        self.note(facts, (0, above), at=(0.0, 1.0), xycoords="axes fraction", va="bottom")
        pad = above + 3 + _LINE_PT * len(facts.splitlines())
        self.axes.set_title(
            title, fontsize=11, loc="left", pad=pad, fontweight="bold", parse_math=False
        )

    def label_above(self, labels: Sequence[Label], *, most: int, width_in: float) -> int:
        """Write labels in rows so that none covers another; return how many rows it takes.

        Texts go to the right of their places in the left half, and to the left in the right half.
        A label that needs more than the most rows is left out. A thin line leads from each to its
        place, behind those below.
        """
        low, high = self.axes.get_xlim()
        inner = [(each, (each.x - low) / (high - low)) for each in labels]
        inner.sort(key=lambda pair: (pair[1] > _MIDDLE, abs(pair[1] - _MIDDLE)))
        taken: list[list[tuple[float, float]]] = []
        written: list[tuple[int, bool, Label]] = []
        for label, at in inner:
            width = _CHARACTER_IN * (len(label.text) + 2) / width_in
            span = (at, at + width) if at <= _MIDDLE else (at - width, at)
            row = _free_row(taken, span)
            if row < most:
                written.append((row, at <= _MIDDLE, label))
        for row, rightwards, label in sorted(written, key=lambda each: -each[0]):
            self._write_label(label, row, rightwards=rightwards)
        return len(taken[:most])

    def legend_beside(self, entries: Sequence[Entry]) -> None:
        """Write a legend at the right, whatever characters the names are made of."""
        legend = self.axes.legend(
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
            text.set_text(name)

    def legend_below(self, entries: Sequence[tuple[str, str]]) -> None:
        """Write a legend of names and colors below."""
        self.figure.legend(
            handles=[Patch(facecolor=color, label=name) for name, color in entries],
            loc="outside lower center",
            ncols=len(entries),
            fontsize=9,
            frameon=False,
            handlelength=1.2,
        )

    def note(
        self,
        text: str,
        offset: tuple[float, float],
        *,
        at: tuple[float, float],
        color: str = QUIET,
        **style: Any,
    ) -> None:
        """Write small text so many points from a place, whatever characters it is made of."""
        style |= {"textcoords": "offset points", "annotation_clip": False, "fontsize": 8.5}
        self.axes.annotate(text, at, xytext=offset, color=color, **style).set_parse_math(False)

    def _write_label(self, label: Label, row: int, *, rightwards: bool) -> None:
        place: dict[str, Any] = {"at": (label.x, 1.0), "color": label.color}
        place |= {"xycoords": self.axes.get_xaxis_transform()}
        up, side = 5 + _LINE_PT * row, "left" if rightwards else "right"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        self.note(
            label.text, (-3 if rightwards else 3, up), ha=side, va="bottom", bbox=box, **place
        )
        line = {"arrowstyle": "-", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
        self.note("", (0, up), arrowprops={"color": label.color, **line}, **place)


def file_of(figure: Figure, kind: str = "png") -> bytes:
    """Return the file of a picture."""
    file = BytesIO()
    figure.savefig(file, format=kind, dpi=DPI)
    return file.getvalue()


def write(path: Path, contents: bytes) -> None:
    """Write a file; raises InvalidSetting if that cannot be."""
    try:
        path.write_bytes(contents)
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be written: {error.strerror or error}") from None


def color_of(policy: str) -> str:
    """Return the color of a policy, the same on all pictures."""
    return _POLICIES.get(policy, CALM[-1])


def stroke(policy: str) -> dict[str, Any]:
    """Return how a policy's curve is drawn: ours on top."""
    ours = policy == "auto"
    return {"linewidth": 2.0 if ours else 1.4, "zorder": 3.0 if ours else 2.0}


def mark(color: str) -> dict[str, Any]:
    """Return how a point on a curve is drawn."""
    return {
        "color": color,
        "markersize": 5.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
        "zorder": 4.0,
    }


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


def thousands(value: float, _: float) -> str:
    """Return a number beside an axis; large ones with commas."""
    return f"{value:,.10g}"


def noted(*parts: str) -> str:
    """Return what to know on one line, or on more where it is too long.

    >>> noted("a", "", "b")
    'a · b'
    """
    lines: list[str] = []
    for part in (short(each, _LINE_CHARACTERS) for each in parts if each):
        if lines and len(lines[-1]) + len(part) < _LINE_CHARACTERS:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def spread(values: Sequence[int], count: int) -> list[int]:
    """Return so many of the values, the first and the last of them included."""
    if len(values) <= count:
        return list(values)
    places = np.linspace(0, len(values) - 1, count).round().astype(int)
    return [values[place] for place in places.tolist()]


def short(text: str, most: int) -> str:
    """Return a text on one line, cut where it is too long.

    >>> short("a  b", 4), short("abcdef", 4)
    ('a b', 'abc…')
    """
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def name_of(text: str) -> str:
    """Return a name; of a long one, both ends.

    >>> name_of("the-machine-in-the-cellar-12")
    'the-machin…cellar-12'
    """
    line = " ".join(text.split())
    return line if len(line) <= _NAME_CHARACTERS else f"{line[:10]}…{line[-9:]}"


def counted(count: int, what: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "step"), counted(12, "global batch")
    ('1 step', '12 global batches')
    """
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")

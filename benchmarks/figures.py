"""Figures with bars: how a benchmark states what it found, to people and to programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from options import Effort
from rich.console import Console
from rich.table import Table

_RESAMPLES = 2000


@dataclass(frozen=True)
class Figure:
    """One measured number beside the bar it has to meet, if there is one."""

    name: str
    figure: float
    rule: Literal["at most", "below", "at least"] | None = None
    bar: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the bar is met; a figure that is not a number meets none. None: no bar.

        >>> Figure("ratio", 1.02, "at most", 1.02).ok, Figure("width", 0.04, "below", 0.04).ok
        (True, False)
        >>> Figure("time", 3.0).ok
        """
        if self.bar is None:
            return None
        if self.rule == "at most":
            return self.figure <= self.bar
        if self.rule == "below":
            return self.figure < self.bar
        return self.figure >= self.bar

    def as_row(self) -> dict[str, Any]:
        """Return the figure for a JSON list; a figure that is not finite becomes null."""
        return {
            "name": self.name,
            "figure": self.figure if np.isfinite(self.figure) else None,
            "rule": self.rule,
            "bar": self.bar,
            "ok": self.ok,
        }


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Distance between the two ends."""
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the median and its 95 % percentile bootstrap interval.

    The values must be exchangeable: paired ratios, one per round, and not the times themselves.

    >>> bootstrap([2.0, 2.0, 2.0])
    Interval(median=2.0, low=2.0, high=2.0)
    """
    sample = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(sample.size, size=(_RESAMPLES, sample.size))
    low, high = np.percentile(np.median(sample[draws], axis=1), [2.5, 97.5])
    return Interval(float(np.median(sample)), float(low), float(high))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return the median of the ratios of each round, with its interval.

    >>> paired_ratio([2.0, 6.0], [1.0, 3.0]).median
    2.0
    """
    return bootstrap([n / d for n, d in zip(numerators, denominators, strict=True)])


def judged(figures: Sequence[Figure], effort: Effort) -> list[Figure]:
    """Return the figures with their bars; of a smoke run, without.

    >>> judged([Figure("ratio", 1.5, "at most", 1.0)], "smoke")
    [Figure(name='ratio', figure=1.5, rule=None, bar=None)]
    """
    if effort == "smoke":
        return [Figure(each.name, each.figure) for each in figures]
    return list(figures)


def as_json(name: str, figures: Sequence[Figure], context: Mapping[str, Any]) -> str:
    """Return one JSON object: the figures, and whatever explains them."""
    rows = [figure.as_row() for figure in figures]
    return json.dumps({"benchmark": name, "figures": rows, **context})


def show(title: str, figures: Sequence[Figure], notes: Mapping[str, str]) -> None:
    """Print the figures as a table for people, with notes below."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("measured", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("ok")
    for each in figures:
        bar = "" if each.bar is None else f"{each.rule} {each.bar:g}"
        verdict = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[each.ok]
        table.add_row(each.name, f"{each.figure:.4f}", bar, verdict)
    console = Console()
    console.print(table)
    for name, note in notes.items():
        console.print(f"{name}: {note}", highlight=False, markup=False)

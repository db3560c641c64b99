"""The picture of `poise plan --sweep`: throughput and goodput over the global batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poise.cli.plan_findings import Findings, batches_around, even_of
from poise.cli.plot_sheet import QUIET, Sheet, counted, file_of, write
from poise.core.goodput import efficiency
from poise.core.limits import Limits
from poise.core.plan import best_plan
from poise.errors import InfeasibleSplit

POINTS = 90

_BEST, _EVEN, _GOODPUT = "#1b6ca8", "#c8553d", "#3a7d44"


@dataclass(frozen=True)
class Point:
    """What is predicted of one global batch."""

    global_batch: int
    best: float
    """Samples per second with the best split."""
    even: float | None
    """The same with an even split; None where that does not fit."""


def draw(findings: Findings, path: Path) -> None:
    """Write the picture; raises InvalidSetting if the file cannot be written."""
    write(path, file_of(figure(findings, sweep(findings)), path.suffix[1:]))


def sweep(findings: Findings) -> list[Point]:
    """Plan the cluster for about a hundred global batches, evenly spaced on a logarithmic scale."""
    limits = findings.limits
    points = []
    for batch in _batches(limits, findings.plan.global_batch):
        try:
            best = best_plan(findings.model, limits, batch)
        except InfeasibleSplit:  # not a sum of multiples
            continue
        even_s = even_of(best, limits).step_s
        even = None if even_s is None else batch / even_s
        points.append(Point(batch, batch / best.step_s, even))
    return points


def figure(findings: Findings, points: Sequence[Point]) -> Figure:
    """Return the picture: an object of its own, which nothing else knows of."""
    sheet = Sheet(4.6, 7.5)
    axes = sheet.axes
    _draw_lines(axes, points, findings)
    _mark_batches(axes, findings)
    sheet.tidy("global batch (samples)", "samples per second")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    title = findings.cluster.title or counted(len(findings.cluster.workers), "worker")
    axes.set_title(title, fontsize=11, loc="left", parse_math=False)
    axes.legend(fontsize=9, framealpha=0.9, edgecolor="none")
    return sheet.figure


def _batches(limits: Limits, global_batch: int) -> list[int]:
    low, high = batches_around(limits, global_batch)
    unit = math.lcm(*{int(each) for each in limits.multiple})
    spaced = np.geomspace(low, high, POINTS)
    whole = {min(high, max(low, round(size / unit) * unit)) for size in spaced}
    last_even = _last_even(limits)
    return sorted(whole | {global_batch} | ({last_even} if low <= last_even <= high else set()))


def _last_even(limits: Limits) -> int:
    """Return the largest global batch whose even split fits."""
    return limits.workers * int(limits.high.min())


def _draw_lines(axes: Axes, points: Sequence[Point], findings: Findings) -> None:
    x = [point.global_batch for point in points]
    axes.plot(x, [point.best for point in points], color=_BEST, label="throughput, best split")
    fits = [(point.global_batch, point.even) for point in points if point.even is not None]
    if fits:
        label = "throughput, even split"
        ends = fits[-1][0] == _last_even(findings.limits) < x[-1]
        axes.plot(
            *zip(*fits, strict=True),
            color=_EVEN,
            marker="x" if ends else None,
            markevery=[-1],
            label=f"{label} (beyond x it does not fit)" if ends else label,
        )
    learning = findings.learning
    if learning is not None:
        label = f"goodput, best split (noise scale {learning.noise_scale:,.0f})"
        scale, start = learning.noise_scale, learning.start_batch
        y = [point.best * efficiency(scale, point.global_batch, start) for point in points]
        axes.plot(x, y, color=_GOODPUT, linestyle="-.", label=label)


def _mark_batches(axes: Axes, findings: Findings) -> None:
    asked, learning = findings.plan.global_batch, findings.learning
    axes.axvline(asked, color=QUIET, linewidth=1, linestyle="--", label=f"asked for: {asked:,}")
    if learning is not None:
        best = learning.best_global_batch
        axes.plot(
            best,
            learning.best_goodput,
            color=_GOODPUT,
            marker="o",
            linestyle="none",
            label=f"highest goodput: {best:,}",
        )

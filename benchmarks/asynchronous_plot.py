"""Picture of the asynchronous benchmark: accuracy over time, staleness, what the server takes.

Draws anew from runs' JSON: `python benchmarks/asynchronous_plot.py FILE RUN.json [RUN.json ...]`;
of several runs each adds the parts that it has.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_STYLES: dict[str, dict[str, Any]] = {
    "uniform": {"linewidth": 1.8, "color": "tab:blue"},
    "balanced": {"linewidth": 2.4, "color": "black", "zorder": 3},
    "damped": {"linewidth": 1.2, "color": "tab:green"},
    "stale 4": {"linewidth": 1.2, "color": "tab:orange"},
    "sync": {"linewidth": 1.2, "color": "tab:red"},
}
_COMPARED = ("uniform", "balanced")
_MOST_STALE = 16
"""The last bar stands for everything beyond."""


def plot(
    trainings: Mapping[str, Any] | None, server: Sequence[Mapping[str, Any]], to: Path
) -> None:
    """Draw what there is: accuracies and staleness at the last level, and the server's updates."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    panels: list[Any] = []
    if trainings is not None:
        level = trainings["amount"]["levels"][-1]
        runs = [run for run in trainings["runs"] if run["level"] == level]
        panels = [(_draw_accuracy, runs), *((_draw_staleness, (runs, kind)) for kind in _COMPARED)]
    if server:
        panels.append((_draw_server, server))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 4), squeeze=False, constrained_layout=True
    )
    for axis, (draw, shown) in zip(axes[0], panels, strict=True):
        draw(axis, shown)
    figure.savefig(to, dpi=90)
    plt.close(figure)


def _draw_accuracy(axis: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """Each training's mean over seeds, at the same points."""
    axis.set_title(f"HL{runs[0]['level']}: accuracy over seconds", loc="left")
    axis.set_xlabel("seconds of training, mean over seeds")
    for kind, style in _STYLES.items():
        found = [run["points"] for run in runs if run["kind"] == kind]
        length = min(map(len, found), default=0)
        seconds, accuracy = (
            np.mean([[point[key] for point in points[:length]] for points in found], axis=0)
            for key in ("at_s", "accuracy")
        )
        axis.plot(seconds, accuracy, label=kind, **style)
    axis.legend(fontsize=8, frameon=False, loc="lower right")


def _draw_staleness(axis: Any, shown: tuple[Sequence[Mapping[str, Any]], str]) -> None:
    """Every worker's histogram over all updates of a training, all seeds together."""
    runs, kind = shown
    axis.set_title(f"HL{runs[0]['level']}, {kind}: staleness of updates", loc="left")
    axis.set_xlabel(f"updates missed ({_MOST_STALE}: or more)")
    axis.set_ylabel("part of a worker's updates")
    found = [run["points"][-1]["staleness"] for run in runs if run["kind"] == kind]
    workers = sorted({worker for each in found for worker in each})
    for place, worker in enumerate(workers):
        counts = np.zeros(_MOST_STALE + 1)
        for each in found:
            for stale, updates in each.get(worker, {}).items():
                counts[min(int(stale), _MOST_STALE)] += updates
        width = 0.8 / len(workers)
        where = np.arange(len(counts)) + (place - (len(workers) - 1) / 2) * width
        axis.bar(where, counts / counts.sum(), width, label=f"worker {worker}")
    axis.set_xticks(range(0, _MOST_STALE + 1, 2))
    axis.axvline(len(workers) - 1, color="gray", linewidth=0.8, linestyle="dotted")
    axis.legend(fontsize=8, frameon=False)


def _draw_server(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    axis.set_xlabel("workers")
    for megabytes in sorted({row["megabytes"] for row in rows}):
        own = [row for row in rows if row["megabytes"] == megabytes]
        (line,) = axis.plot(
            [row["workers"] for row in own],
            [row["updates_per_s"] for row in own],
            marker="o",
            label=f"{megabytes:g} MB",
        )
        limits = [row["limit"] for row in own]
        axis.axhline(np.median(limits), color=line.get_color(), linewidth=0.8, linestyle="dotted")
    axis.set_xscale("log", base=2)
    counts = sorted({row["workers"] for row in rows})
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_yscale("log")
    axis.set_title("server: updates/s, and its limit (dotted)", loc="left")
    axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.2), ncols=3)


if __name__ == "__main__":
    found = [json.loads(Path(name).read_text()) for name in sys.argv[2:]]
    plot(
        next((each["trainings"] for each in found if each["trainings"]), None),
        next((each["server"] for each in found if each["server"]), []),
        Path(sys.argv[1]),
    )

"""Pictures of the adaptive benchmark: accuracy over time; batch, noise and rate over samples.

Draws anew from a run's JSON: `python benchmarks/adaptive_plot.py RUN.json FILE`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_STYLES: dict[str, dict[str, Any]] = {
    "adaptive": {"linewidth": 2.4, "color": "black", "zorder": 3},
    "adaptdl": {"linewidth": 1.8, "color": "tab:red"},
    "ddp": {"linewidth": 1.8, "color": "tab:blue"},
}
_ADAPTING = ("adaptive", "adaptdl")
_COLUMNS = ("accuracy over seconds", "global batch", "noise scale", "learning-rate factor")


def plot(series: Mapping[str, Any], path: Path) -> None:
    """Draw the first seed's trainings, a row for each task."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    columns = len(_COLUMNS)
    figure, axes = plt.subplots(
        len(series), columns, figsize=(17, 4 * len(series)), squeeze=False, constrained_layout=True
    )
    for row, (task, found) in zip(axes, series.items(), strict=True):
        runs, target = next(iter(found["runs"].values())), found["amount"]["target"]
        for axis, title in zip(row, _COLUMNS, strict=True):
            axis.set_title(f"{task}: {title}", loc="left")
            axis.set_xlabel("samples")
        row[0].set_xlabel("seconds of training")
        row[0].axhline(target, color="gray", linewidth=0.8, linestyle="dotted")
        for name, trained in runs.items():
            style = _STYLES.get(name, {"linewidth": 1.0, "alpha": 0.8})
            _draw_accuracy(row[0], name, trained, style)
            if name in _ADAPTING:
                _draw_decisions(row[1:], trained, style)
        for axis in row[1:3]:
            axis.set_yscale("log")
        row[0].legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw_accuracy(axis: Any, name: str, trained: Mapping[str, Any], style: Any) -> None:
    seconds = np.cumsum(trained["step_s"])
    steps = [steps for steps, _ in trained["accuracies"]]
    values = [value for _, value in trained["accuracies"]]
    axis.plot([seconds[at - 1] for at in steps], values, label=name, **style)


def _draw_decisions(axes: Any, trained: Mapping[str, Any], style: Any) -> None:
    batch_axis, noise_axis, rate_axis = axes
    samples = np.cumsum(trained["batches"])
    batch_axis.plot(samples, trained["batches"], **style)
    for axis, key in ((noise_axis, "noise"), (rate_axis, "lr_factor")):
        known = [(steps, state[key]) for steps, state in trained["states"] if state.get(key)]
        axis.plot([samples[at - 1] for at, _ in known], [value for _, value in known], **style)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text())["tasks"], Path(sys.argv[2]))

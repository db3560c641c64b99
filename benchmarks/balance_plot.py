"""A picture of the balance benchmark: step times over the training, by policy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_STYLES: dict[str, dict[str, Any]] = {
    "auto": {"linewidth": 2.4, "color": "black", "zorder": 3},
    "oracle": {"linewidth": 1.8, "color": "gray", "linestyle": "dotted"},
}


def plot(found: Mapping[str, Mapping[str, Sequence[Any]]], path: Path) -> None:
    """Draw, for each cluster, the median over rounds of every step's time."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(found), 1, figsize=(9, 3 * len(found)), squeeze=False, constrained_layout=True
    )
    for axis, (name, results) in zip(axes[:, 0], found.items(), strict=True):
        drawn = {label: runs for label, runs in results.items() if "slowdown" not in label}
        for label, runs in drawn.items():
            steps = min(len(each.step_s) for each in runs)
            times = np.median([each.step_s[:steps] for each in runs], axis=0) * 1e3
            style = _STYLES.get(label.split()[0], {"linewidth": 1.2})
            axis.plot(range(2, steps), times[2:], label=label, **style)
        axis.set_title(name, loc="left")
        axis.set_xlabel("step")
        axis.set_ylabel("ms")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, ncols=4, frameon=False)
    figure.savefig(path, dpi=90)
    plt.close(figure)

"""The colors and strokes that pictures of a simulation share."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def new_figure(height_in: float) -> "tuple[Figure, Axes]":
    """Return an empty picture, as wide as all of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.8, height_in), layout="constrained")
    return figure, figure.add_subplot()


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

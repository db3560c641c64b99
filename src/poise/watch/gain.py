"""What another split of the same global batch would gain.

A script that gives each worker one local batch shows how long it takes, but not which part of
that depends on the samples. So three answers are given, and a range is what they say:

- "per sample": all of it does;
- "fitted": as the prior of `poise.core.fit` has it, and whatever several local batches taught;
- "late": a worker's time per sample is at most the median's, and what is above is fixed.

With equal local batches the first two agree on the step time whatever the fixed part is, if it is
the same part everywhere: sum_i (T - f t_i) b / ((1 - f) t_i) = n b gives T = n / sum_i (1 / t_i)
for any f. The third is what bounds the gain from below.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from poise.core.fit import Fit
from poise.core.observation import Observation
from poise.core.split import Split, optimal_split
from poise.core.timing import Floats, SpeedModel
from poise.watch.table import Table

MOST_STEPS = 200
"""The fit looks at so many of the last steps; more would keep worker 0 from its work."""
LEAST_GAIN = 0.01
"""Part of a step below which a gain is not worth a word."""
SPREAD = 0.1
"""Local batches that differ by this part, in this part of the steps, show a worker's slope."""
_STARVED = 0.05
"""Part of a step that a worker waits for its loader's processes if they are the limit."""

Verdict = Literal["gain", "nothing", "unknown"]


@dataclass(frozen=True)
class Gain:
    """What is expected of the best split."""

    verdict: Verdict
    """Whether there is a gain beyond noise; unknown: local batches are not known."""
    split: Split = ()
    """By the fitted model."""
    shortest_s: float = 0.0
    """The range of the step time with it,"""
    longest_s: float = 0.0
    """from the most to the least hopeful of the models."""
    slopes_seen: bool = False
    """Whether workers had local batches of several sizes, so that the fit is no guess."""


def find_gain(table: Table) -> Gain:
    """Compare the split of a table with the best one."""
    split, workers = table.split, len(table.workers)
    if workers == 1:
        return Gain("nothing")
    if min(split) < 1:
        return Gain("unknown")
    fit, step_s = _fitted(table), float(table.end_s[table.with_split].mean())
    fitted = fit.model()
    saved_s, best = [], split
    for model in (fitted, *_extremes(table, fitted)):
        optimum = optimal_split(model, sum(split))
        saved_s.append(max(model.step_s(split) - optimum.step_s, 0.0))
        best = optimum.split if model is fitted else best
    slopes_seen = _slopes_seen(table)
    if saved_s[0] < step_s * max(LEAST_GAIN, _chance(fit, split)):
        return Gain("nothing", split, step_s, step_s, slopes_seen)
    return Gain("gain", best, step_s - max(saved_s), step_s - min(saved_s), slopes_seen)


def _fitted(table: Table) -> Fit:
    """Fit the last steps, those with the most common split at the end."""
    order = np.argsort(table.with_split[-MOST_STEPS:], kind="stable")
    fit = Fit.start(len(table.workers))
    limits, ready_s = _input_limits(table), _ready_s(table)
    wait_s = table.sync_s + np.where(table.prefetched, table.input_s, 0.0)
    for place in (order + max(table.steps - MOST_STEPS, 0)).tolist():
        observation = Observation(
            step=int(table.numbers[place]),
            split=tuple(table.batch[place].tolist()),
            ready_s=ready_s[place][:, None],
            done_s=table.end_s[place][:, None],
            wait_s=wait_s[place],
            input_s=limits,
        )
        fit, _ = fit.update(observation)
    return fit


def _extremes(table: Table, fitted: SpeedModel) -> tuple[SpeedModel, SpeedModel]:
    """Return the models "per sample" and "late"."""
    batches = np.array(table.split, dtype=np.float64)
    ready_s = _ready_s(table)[table.with_split].mean(axis=0)
    per_sample_s = ready_s / batches
    usual_s = np.minimum(per_sample_s, np.percentile(per_sample_s, 50, method="lower"))
    late_s = ready_s - usual_s * batches
    rest = {"bucket_s": fitted.bucket_s, "input_s": fitted.input_s}
    return (
        SpeedModel.of(np.zeros(len(batches)), per_sample_s, **rest),
        SpeedModel.of(np.maximum(late_s, 0.0), usual_s, **rest),
    )


def _ready_s(table: Table) -> Floats:
    """Return each worker's time until its last gradient, with input that it loads by itself."""
    ready_s = table.local_s + np.where(table.prefetched, 0.0, table.input_s)
    return np.maximum(ready_s, 1e-6)


def _input_limits(table: Table) -> Floats:
    """Return seconds per sample of loaders whose processes do not keep up; NaN elsewhere.

    They work all the time, and so a batch takes them the step without waiting for others.
    """
    starved_s = np.where(table.prefetched, table.input_s, 0.0).mean(axis=0)
    own_s = (table.end_s - table.waiting_s).mean(axis=0)
    starved = starved_s > _STARVED * table.end_s.mean(axis=0)
    return np.where(starved, own_s / table.batch.mean(axis=0), np.nan)


def _chance(fit: Fit, split: Split) -> float:
    """Return the gain that noise alone may promise: the slowest of n seems slower than it is."""
    slowest = int(fit.model().local_s(split).argmax())
    error = float(fit.error(split)[slowest])
    return max(1.5, math.sqrt(2 * math.log(fit.workers))) * error


def _slopes_seen(table: Table) -> bool:
    """Return whether every worker had another local batch in a good part of the steps."""
    split = np.array(table.split)
    other = np.abs(table.batch - split) > SPREAD * split
    return bool((other.mean(axis=0) > SPREAD).all())

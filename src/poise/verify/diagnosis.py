"""Why two trainings are not the same: found from the first step in which they differ.

That step starts from equal weights, so its gradients tell. With g the gradient of one process and
g_i the workers' own, before weighting, these are asked in turn:

    data        are the samples of the workers, joined, those of one process?
    order       does g change when the samples of the batch come in another order?
    reduction   is g = sum_i w_i g_i with the weights w_i that were used?  Then it is right.
    scale       is g = k sum_i w_i g_i?
    sum         is g = sum_i g_i?
    mean        is g = sum_i a_i g_i with any factors a_i?  Found by least squares.

If not even that, what a sample contributes depends on its neighbors in the local batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poise.verify import causes
from poise.verify.causes import Cause
from poise.verify.comparison import Difference, distances, largest, precision_of, used_steps
from poise.verify.observation import Leaf, Runs, Values
from poise.verify.samples import padded_apart, same_sample

_FIT_LIMITS = 10.0
"""How many times the limit for equal gradients a fit may miss,"""
_FIT_LEAVES = 0.02
"""or how much of the difference it may leave."""
_NUMBERS_PER_FACTOR = 4
"""With fewer numbers in a gradient, factors could fit by chance."""
_NOTICEABLE = 1e-3
"""Factors closer than this are the same."""


def causes_of(runs: Runs, difference: Difference) -> list[Cause]:
    """Return the likely causes of a difference, the likeliest first; none if none is found.

    That samples influence each other is concluded from what is left when all else is excluded,
    and only from a difference that cannot be rounding.
    """
    match difference.kind:
        case "start":
            return [causes.START]
        case "setting":
            return [causes.other_setting(difference.name, *difference.values, difference.worker)]
        case "update" | "worker":
            return [causes.UPDATES]
        case "steps":
            return [_other_steps(runs)]
        case "gradient":
            other = _in_data(runs, difference.step)
            return _in_gradient(runs, difference) if other is None else [other]


@dataclass(frozen=True)
class Fit:
    """The gradient of one process, and how those of the workers add up to it."""

    whole: Tensor
    parts: Tensor
    """One column for each worker that counts."""
    weights: Tensor
    """Those that were used."""

    @staticmethod
    def of(whole: Values, parts: Sequence[Values], weights: Sequence[float]) -> "Fit | None":
        """Line all numbers up, leaving out what is not finite; None if nothing is left."""
        names = [name for name in whole if all(name in part for part in parts)]
        if not names or not parts:
            return None
        columns = [torch.cat([side[name] for name in names]).double() for side in (whole, *parts)]
        table = torch.stack(columns, dim=1)
        table = table[table.isfinite().all(dim=1)]
        if not table[:, 0].any():
            return None
        return Fit(table[:, 0], table[:, 1:], torch.tensor(weights, dtype=torch.float64))

    @property
    def conclusive(self) -> bool:
        """Whether factors that fit mean something."""
        return len(self.whole) >= _NUMBERS_PER_FACTOR * len(self.weights)

    def misses(self, factors: Tensor) -> float:
        """Return the largest error of parts times factors, as a part of the largest number."""
        return float((self.parts @ factors - self.whole).abs().max() / self.whole.abs().max())

    def leaves(self, factors: Tensor) -> float:
        """Return the length of that error, as a part of the whole's length."""
        return float((self.parts @ factors - self.whole).norm() / self.whole.norm())

    def explains(self, factors: Tensor, limit: float) -> bool:
        """Whether these factors, instead of those used, make the difference go away."""
        if self.misses(factors) <= _FIT_LIMITS * limit:
            return True
        return self.leaves(factors) <= _FIT_LEAVES * self.leaves(self.weights)

    def scale(self) -> float:
        """Return the number by which the weighted sum is best multiplied."""
        summed = self.parts @ self.weights
        return float(summed @ self.whole) / (float(summed @ summed) or 1.0)

    def best(self) -> Tensor:
        """Return the factors with the smallest error."""
        solved = torch.linalg.lstsq(self.parts, self.whole[:, None], driver="gelsd")
        factors: Tensor = solved.solution[:, 0]
        return factors


def _in_data(runs: Runs, step: int) -> Cause | None:
    """Find the first sample that is not the same, in the batches that led to an update."""
    earlier = [used for used in used_steps(runs) if used < step]
    for batch in range(earlier[-1] + 1 if earlier else 0, step + 1):
        whole = runs.alone.steps[batch].samples
        again = runs.reordered.steps[batch].samples
        parts = [seen.steps[batch].samples for seen in runs.shared]
        known = [part for part in parts if part is not None]
        if whole is None or again is None or len(known) < len(parts):
            continue
        if (sample := _first_other(whole, again[::-1])) is not None:
            return causes.augmentation(batch, sample)
        if (sample := _first_other(whole, [each for part in known for each in part])) is not None:
            return causes.other_data(batch, *_place(sample, [len(part) for part in known]))
    return None


def _first_other(ones: Sequence[list[Leaf]], others: Sequence[list[Leaf]]) -> int | None:
    """Return the number of the first sample that is not the same; None if all are."""
    for number, (one, other) in enumerate(zip(ones, others, strict=False)):
        if not same_sample(one, other):
            return number
    return None if len(ones) == len(others) else min(len(ones), len(others))


def _place(sample: int, shares: Sequence[int]) -> tuple[int, int]:
    """Return which sample of which worker a sample of the global batch is."""
    worker = 0
    while worker < len(shares) - 1 and sample >= shares[worker]:
        sample -= shares[worker]
        worker += 1
    return sample, worker


def _in_gradient(runs: Runs, difference: Difference) -> list[Cause]:
    """Find how the gradient of one process follows from those of the workers."""
    step = difference.step
    whole, again = runs.alone.steps[step].local, runs.reordered.steps[step].local
    precision = precision_of(runs)
    measured = largest(distances(whole, again))
    if measured > precision.rounding:
        return [*_random_numbers(runs), *_batch_norm(runs)] or [causes.ORDER]
    counting = [seen.steps[step] for seen in runs.shared if seen.steps[step].weight > 0]
    fit = Fit.of(whole, [each.local for each in counting], [each.weight for each in counting])
    if fit is None:
        return []
    limit = precision.limit_for(measured)
    if fit.misses(fit.weights) <= limit:
        return [causes.AFTER_BACKWARD]
    denominator = _denominator(runs, fit, limit)
    if denominator is not None:
        return [denominator]
    coupled = _coupled(runs, step, fit) if difference.certain and fit.conclusive else []
    return [*_batch_norm(runs), *_random_numbers(runs)] or coupled


def _denominator(runs: Runs, fit: Fit, limit: float) -> Cause | None:
    """Find out what the loss is divided by, the simplest answer first."""
    scale = fit.scale()
    if abs(scale - 1) > _NOTICEABLE and fit.explains(scale * fit.weights, limit):
        return causes.scaled(1 / scale if scale else math.inf, len(runs.shared))
    if fit.explains(torch.ones_like(fit.weights), limit):
        return causes.SUM
    best = fit.best()
    noticeable = float((best - fit.weights).abs().max()) > _NOTICEABLE
    if fit.conclusive and noticeable and fit.explains(best, limit):
        return causes.mean(best.tolist(), fit.weights.tolist(), counted=runs.alone.counted)
    return None


def _batch_norm(runs: Runs) -> list[Cause]:
    layers = runs.alone.batch_norms
    return [causes.batch_norm(layers)] if layers else []


def _random_numbers(runs: Runs) -> list[Cause]:
    """Random numbers that are drawn between a batch and the optimizer."""
    seen = runs.alone
    if seen.dropouts or seen.draws_in_model:
        return [causes.dropout(seen.dropouts)]
    return [causes.RANDOM_LOOP] if seen.draws_in_loop else []


def _coupled(runs: Runs, step: int, fit: Fit) -> list[Cause]:
    """Samples that influence each other, through padding or through the loss."""
    leaves = fit.leaves(fit.best())
    whole, part = runs.alone.steps[step].samples, runs.shared[-1].steps[step].samples
    padded = bool(whole and part and padded_apart(whole[-1], part[-1]))
    return [*([causes.padding(leaves)] if padded else []), causes.in_batch_negatives(leaves)]


def _other_steps(runs: Runs) -> Cause:
    ours, *theirs = (
        sum(bool(step.used) for step in seen.steps) for seen in (runs.alone, *runs.shared)
    )
    worker = next((number for number, steps in enumerate(theirs) if steps != ours), 0)
    return causes.other_steps(ours, theirs[worker], worker)

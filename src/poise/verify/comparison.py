"""Where two trainings differ, and by how much: values in, values out.

Two trainings that mean the same differ by rounding, and how much that is depends on model and
data. So it is measured: one process trains a second time, with the samples inside each global
batch in reversed order and every weight changed in its last bit. Several workers may differ from
one process three times as much, or by the limit of the precision, whichever is more.

Between there and what rounding never does lies a strip in which a difference alone proves
nothing: a ReLU whose input is 0 but for rounding is open in one run and closed in another.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from poise.verify.observation import Runs, Values

_TIMES_ROUNDING = 3.0
_UPDATE_LIMIT = 0.1
"""How much of an update may differ: AdamW turns a gradient's sign into a step, rounding or not."""

Kind = Literal["start", "gradient", "setting", "update", "worker", "steps"]
"""What differs: weights before the first step, a gradient, a number that the optimizer is set to,
an update of the weights, one worker's weights from another's, or the steps that are taken."""


@dataclass(frozen=True)
class Precision:
    """What rounding does to gradients, as a part of the largest one."""

    limit: float
    """Differences up to here are always rounding."""
    rounding: float
    """Differences beyond are never rounding."""

    def limit_for(self, measured: float) -> float:
        """Return the largest difference that is rounding where rounding alone gave that much.

        What is too large to be rounding is no measure of it.
        """
        return max(self.limit, _TIMES_ROUNDING * measured if measured <= self.rounding else 0.0)


DOUBLE, SINGLE, HALF = Precision(1e-12, 1e-9), Precision(1e-6, 1e-3), Precision(2**-6, 2**-5)


@dataclass(frozen=True)
class Difference:
    """Something that is not the same."""

    kind: Kind
    step: int
    name: str = ""
    """Of the parameter or the setting."""
    amount: float = 0.0
    """As a part of the largest gradient, weight or update."""
    worker: int = 0
    certain: bool = True
    """Whether it is too large to be rounding."""
    values: tuple[float, float] = (0.0, 0.0)
    """Of a setting: in one process, and on the worker."""


@dataclass(frozen=True)
class Extent:
    """How far several workers are from one process."""

    steps: int
    """Steps that were compared."""
    gradients: float
    """Largest difference of any gradient, as a part of the largest one of its step."""
    rounding: float
    """The same between two runs of one process."""


def extent_of(runs: Runs) -> Extent:
    """Return how far several workers are from one process."""
    seen = [
        (runs.alone.steps[s].used, runs.shared[0].steps[s].used, runs.reordered.steps[s].used)
        for s in used_steps(runs)
    ]
    return Extent(
        steps=len(seen),
        gradients=max((largest(distances(one, several)) for one, several, _ in seen), default=0.0),
        rounding=max((largest(distances(one, again)) for one, _, again in seen), default=0.0),
    )


def differences(runs: Runs) -> Iterator[Difference]:
    """Yield what differs, the earliest first; within a step, in the order of parameters."""
    yield from _at_start(runs)
    apart = _first_taken_apart(runs)
    for step in used_steps(runs):
        if step == apart:
            break
        yield from _in_gradient(runs, step)
        yield from _in_settings(runs, step)
        yield from _in_update(runs, step)
        yield from _between_workers(runs, step)
    if apart is not None:
        yield Difference("steps", apart)


def used_steps(runs: Runs) -> list[int]:
    """Return the steps that all runs began and in which an optimizer used a gradient."""
    everyone = (runs.alone, runs.reordered, *runs.shared)
    begun = min(len(seen.steps) for seen in everyone)
    return [step for step in range(begun) if any(seen.steps[step].used for seen in everyone)]


def precision_of(runs: Runs) -> Precision:
    """Return the precision of the coarsest numbers in a training."""
    if runs.alone.autocast:
        return HALF
    kinds = {values.dtype for step in runs.alone.steps for values in step.used.values()}
    bits = min((torch.finfo(kind).bits for kind in kinds), default=32)
    return {64: DOUBLE, 32: SINGLE}.get(bits, HALF)


def distances(one: Values, other: Values) -> dict[str, float]:
    """Return how far each parameter's values are apart, as a part of the largest value of all.

    A parameter without values has zeros. Values that are finite in neither are equal; those that
    are finite in one only are infinitely far apart.
    """
    names = list(dict.fromkeys([*one, *other]))
    size = max((_largest(values) for side in (one, other) for values in side.values()), default=0.0)
    return {name: _apart(one.get(name), other.get(name)) / (size or 1.0) for name in names}


def largest(apart: dict[str, float]) -> float:
    """Return the largest of some distances."""
    return max(apart.values(), default=0.0)


def _first_taken_apart(runs: Runs) -> int | None:
    """Return the first step that one process takes and a worker does not, or the reverse."""
    everyone = [[bool(step.used) for step in seen.steps] for seen in (runs.alone, *runs.shared)]
    for step, taken in enumerate(zip_longest(*everyone, fillvalue=False)):
        if len(set(taken)) > 1:
            return step
    return None


def _at_start(runs: Runs) -> Iterator[Difference]:
    limit = precision_of(runs).limit
    for seen in (runs.reordered, *runs.shared):
        apart = distances(runs.alone.steps[0].before, seen.steps[0].before)
        for name, amount in apart.items():
            if amount > limit:
                yield Difference("start", 0, name, amount, seen.worker)


def _in_gradient(runs: Runs, step: int) -> Iterator[Difference]:
    one, again = runs.alone.steps[step].used, runs.reordered.steps[step].used
    precision = precision_of(runs)
    limit = precision.limit_for(largest(distances(one, again)))
    for name, amount in distances(one, runs.shared[0].steps[step].used).items():
        if amount > limit:
            certain = amount > max(limit, precision.rounding)
            yield Difference("gradient", step, name, amount, certain=certain)


def _in_settings(runs: Runs, step: int) -> Iterator[Difference]:
    ours = runs.alone.steps[step].settings
    for seen in runs.shared:
        for name, theirs in seen.steps[step].settings.items():
            if name in ours and not math.isclose(ours[name], theirs, rel_tol=1e-6):
                values = ours[name], theirs
                yield Difference("setting", step, name, worker=seen.worker, values=values)


def _in_update(runs: Runs, step: int) -> Iterator[Difference]:
    """Compare updates by their length; single numbers may be anything where AdamW divides."""
    ours, theirs, again = (
        _update(seen.steps[step].before, seen.steps[step].after)
        for seen in (runs.alone, runs.shared[0], runs.reordered)
    )
    size = math.sqrt(sum(float(change.norm()) ** 2 for change in ours.values()))
    for name in ours.keys() & theirs.keys() & again.keys():
        measured = float((again[name] - ours[name]).norm())
        # A weight is stored rounded, which a small update does not outweigh.
        stored = precision_of(runs).limit * float(runs.alone.steps[step].before[name].norm())
        limit = max(_UPDATE_LIMIT * size, _TIMES_ROUNDING * measured, stored)
        missed = float((theirs[name] - ours[name]).norm())
        if missed > limit:
            yield Difference("update", step, name, missed / (size or 1.0))


def _between_workers(runs: Runs, step: int) -> Iterator[Difference]:
    first = runs.shared[0].steps[step].digests
    for seen in runs.shared:
        for name, digest in seen.steps[step].digests.items():
            if digest != first.get(name):
                yield Difference("worker", step, name, worker=seen.worker)


def _update(before: Values, after: Values) -> Values:
    return {name: after[name].double() - before[name].double() for name in after}


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        values = one if other is None else other
        return 0.0 if values is None else _largest(values)
    if one.shape != other.shape:
        return math.inf
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return math.inf
    return _largest(one[finite].double() - other[finite].double())

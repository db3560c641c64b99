"""Goodput: how fast a global batch learns, and the one that learns fastest.

    efficiency(B) = (phi + B0) / (phi + B)
    goodput(B)    = B / OptPerf(B) * efficiency(B)

phi is the gradient noise scale in samples, B0 the global batch that the learning rate was chosen
for, OptPerf(B) the step time of the best split. Pollux (OSDI 2021, section 3.1) for equal workers,
Cannikin (section 4.4) for unequal ones. The efficiency assumes SGD with AdaScale; for Adam it is
a heuristic.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from poise.core.cluster import Network, Worker, limits_of, speed_model
from poise.core.limits import UNLIMITED, Limits
from poise.core.split import capacity_within, optimal_split, water_level
from poise.core.timing import Floats, SpeedModel
from poise.errors import InfeasibleSplit, InvalidSetting
from poise.numbers import check_number, check_whole

_AROUND = 2
"""How many whole batches on each side of a candidate are looked at."""
_AROUND_MULTIPLES = 8
"""The same, in multiples, where local batches come in those: steps are coarser then."""
_FINALISTS = 12
"""How many candidates are compared by their integer splits."""
_NEARBY = 1.02
"""By this factor a batch next to a candidate may be better than the candidate."""
_MOST_LEVELS = 400
MOST_NOISE = 1e15
"""Samples; a larger noise scale is a mistake."""
_ENDS = 2
_SPARE = 1e-9


def efficiency(noise_scale: float, batch: float, start: float) -> float:
    """Return how much a sample of a batch teaches, compared with one of a batch of start samples.

    >>> efficiency(noise_scale=300, batch=600, start=100)
    0.4444444444444444
    """
    return (noise_scale + start) / (noise_scale + batch)


def goodput(
    model: SpeedModel, limits: Limits, noise_scale: float, start: int, global_batch: int
) -> float:
    """Return samples per second, each counted by what it teaches."""
    step_s = optimal_split(model, global_batch, limits).step_s
    return global_batch / step_s * efficiency(noise_scale, global_batch, start)


def best_global_batch(
    workers: Sequence[Worker],
    network: Network | None,
    noise_scale: float,
    start: int,
    allowed: tuple[int, int],
) -> int:
    """Return the global batch with the highest goodput, within (lowest, highest).

    >>> worker = Worker(forward_s=(0.001, 0.01), backward_s=(0.002, 0.02))
    >>> best_global_batch([worker] * 2, Network(), 400.0, 64, (64, 4096))  # sqrt(400 x 0.03/0.0015)
    90
    """
    model = speed_model(workers, network or Network())
    check_number("best_global_batch", "noise_scale", noise_scale, 0, MOST_NOISE)
    check_whole("best_global_batch", "start", start, 1, UNLIMITED)
    if not isinstance(allowed, list | tuple) or len(allowed) != _ENDS:
        raise InvalidSetting(f"allowed={allowed!r} is no range; give (lowest, highest)")
    for end in allowed:
        check_whole("best_global_batch", "allowed", end, 1, UNLIMITED)
    return best_batch(model, limits_of(workers), noise_scale, start, allowed)


def best_batch(
    model: SpeedModel, limits: Limits, noise_scale: float, start: int, allowed: tuple[int, int]
) -> int:
    """Return the global batch with the highest goodput.

    Where OptPerf(B) = C B + D, the goodput rises up to B* = sqrt(phi D / C) and falls from there,
    since its derivative has the sign of phi D - C B^2. Segments end where a worker reaches a bound
    or another bucket decides its time, and with micro-batches where a worker needs one pass more.
    The whole batches around each candidate are compared by their integer splits.
    """
    low, high = _feasible(limits, allowed)
    rough = _candidates(model, limits, noise_scale, low, high)
    found: dict[int, float] = {}
    for candidate in sorted(rough, key=lambda batch: -rough[batch])[:_FINALISTS]:
        if found and rough[candidate] * (noise_scale + start) * _NEARBY < max(found.values()):
            continue  # whole samples only make a step longer
        for center in (candidate, *_full(model, limits, candidate)):
            for batch in _around(center, limits):
                if low <= batch <= high and batch not in found:
                    found[batch] = _exact(model, limits, noise_scale, start, batch)
    if not found:
        limits.check(low)
        raise InfeasibleSplit(
            f"no global batch from {low} to {high} is a sum of multiples of "
            f"{sorted(set(limits.multiple.tolist()))}; widen the range"
        )
    best = max(found, key=lambda batch: (found[batch], -batch))
    optimal_split(model, best, limits)  # raises if no global batch of the range can be split
    return best


def most_goodput(
    model: SpeedModel, limits: Limits, noise_scale: float, start: int, allowed: tuple[int, int]
) -> float:
    """Return a goodput that no global batch exceeds, at less than half the cost of the best one.

    It is the best of divisible samples: whole ones only make a step longer.
    """
    low, high = _feasible(limits, allowed)
    rough = _candidates(model, limits, noise_scale, low, high)
    return max(rough.values()) * (noise_scale + start) * _NEARBY


def _candidates(
    model: SpeedModel, limits: Limits, noise_scale: float, low: int, high: int
) -> dict[int, float]:
    """Return the best global batch of each segment, and both ends, with their rough goodputs."""
    if not (math.isfinite(noise_scale) and noise_scale >= 0):
        raise InvalidSetting(f"noise_scale={noise_scale} is not a number of samples from 0 up")
    candidates = {low, high}
    for bottom, top in _promising(model, limits, noise_scale, _segments(model, limits, low, high)):
        candidates.add(_peak(model, limits, noise_scale, bottom, top))
    return {batch: _rough(model, limits, noise_scale, batch) for batch in candidates}


def _feasible(limits: Limits, allowed: tuple[int, int]) -> tuple[int, int]:
    low, high = allowed
    if not 1 <= low <= high:
        raise InvalidSetting(
            f"the global batch may lie from {low} to {high}; give a range from 1 that rises"
        )
    least, most = limits.least, limits.most
    if high < least or low > most:
        limits.check(high if high < least else low)
    return max(low, least), min(high, most)


def _segments(model: SpeedModel, limits: Limits, low: int, high: int) -> list[tuple[float, float]]:
    """Return ranges of the global batch in which no worker begins another pass."""
    below, above = (water_level(model, batch, limits) for batch in (low, high))
    sizes = sorted(capacity_within(model, each, limits) for each in _jumps(model, below, above))
    return list(pairwise([float(low), *sizes, float(high)]))


def _promising(
    model: SpeedModel, limits: Limits, noise_scale: float, segments: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the segments that may hold the best batch: of many, those whose ends are best."""
    if len(segments) <= _FINALISTS:
        return segments

    def promise(segment: tuple[float, float]) -> float:
        return max(_rough(model, limits, noise_scale, max(end, 1.0)) for end in segment)

    widest = sorted(segments, key=lambda segment: segment[0] - segment[1])[: _FINALISTS // 2]
    return [*widest, *sorted(segments, key=promise, reverse=True)[:_FINALISTS]]


def _around(batch: float, limits: Limits) -> list[int]:
    """Return the nearest global batches that multiples may add up to."""
    unit = int(np.gcd.reduce(limits.multiple))
    base = limits.least
    center = round((batch - base) / unit)
    around = _AROUND if limits.unit == 1 else _AROUND_MULTIPLES
    return [base + unit * (center + offset) for offset in range(-around, around + 1)]


def _jumps(model: SpeedModel, below_s: float, above_s: float) -> Floats:
    """Return the step times at which a worker has filled its passes; evenly thinned if many."""
    times: list[Floats] = []
    for worker in np.flatnonzero(np.isfinite(model.micro_batch)):
        most = model.micro_batch[worker]
        room = model.capacity(above_s)[0][worker]
        filled = np.arange(1, min(int(room // most), 10**5) + 1) * most
        times.append(model.local_s(filled, np.full(len(filled), worker)))
    found = np.unique(np.concatenate(times)) if times else np.zeros(0)
    found = found[(found > below_s) & (found < above_s)]
    if len(found) > _MOST_LEVELS:
        found = found[np.linspace(0, len(found) - 1, _MOST_LEVELS).astype(int)]
    return found


def _peak(model: SpeedModel, limits: Limits, noise_scale: float, bottom: float, top: float) -> int:
    """Return the best global batch of a range in which OptPerf is convex, by halving.

    Left of the peak B* of the segment that holds B lies beyond B, right of it before.
    """
    while top - bottom > 1:
        middle = (bottom + top) / 2
        target = _closed_form(model, limits, noise_scale, middle)
        if bottom <= target <= top and abs(target - middle) <= 1:
            return round(target)
        bottom, top = (middle, top) if target > middle else (bottom, middle)
    return round((bottom + top) / 2)


def _closed_form(model: SpeedModel, limits: Limits, noise_scale: float, batch: float) -> float:
    """Return B* = sqrt(phi D / C) of the segment that holds a global batch."""
    level = water_level(model, batch, limits)
    room, slope = model.capacity(level)
    if np.clip(room, limits.low, limits.high).sum() > batch * (1 + _SPARE):
        return math.inf  # a worker at its lower bound sets the pace: more samples cost nothing
    rising = slope[(room > limits.low) & (room < limits.high)].sum()
    if rising <= 0:
        return batch
    per_sample_s = 1 / float(rising)
    fixed_s = level - per_sample_s * batch
    return math.sqrt(max(0.0, noise_scale * fixed_s / per_sample_s))


def _full(model: SpeedModel, limits: Limits, batch: float) -> tuple[int, int]:
    """Return the global batches nearby at which no worker has a sample less than it could.

    With many equal workers these lie far from their neighbors: all of them get one sample more.
    """
    room, _ = model.capacity(water_level(model, batch, limits))
    number, unit = room / limits.multiple, limits.multiple
    ends = (np.floor(number + _SPARE) * unit, np.ceil(number - _SPARE) * unit)
    down, up = (int(np.clip(end, limits.low, limits.high).sum()) for end in ends)
    return down, up


def _rough(model: SpeedModel, limits: Limits, noise_scale: float, batch: float) -> float:
    """Return the goodput of divisible samples, up to a factor."""
    return batch / water_level(model, batch, limits) / (noise_scale + batch)


def _exact(model: SpeedModel, limits: Limits, noise_scale: float, start: int, batch: int) -> float:
    try:
        return goodput(model, limits, noise_scale, start, batch)
    except InfeasibleSplit:  # not a sum of multiples
        return -math.inf

"""Splits: how many samples of a global batch each worker gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from poise.core.limits import Limits
from poise.core.timing import Floats, Ints, StepTimes
from poise.errors import InfeasibleSplit, InvalidSetting
from poise.numbers import is_whole

Split = tuple[int, ...]
"""Local batches, one per worker."""

_TOLERANCE = 1e-12
_NEAR = 1e-9
_MOST_ROUNDS = 200
_MOST_EVENTS = 10**6
_FALLING = "times do not rise with the local batch; give times that do"
_MOST_COINS = 10**8
"""The largest sum of different multiples that is looked for; a set of 12 MB."""


def apportion(shares: Sequence[int], total: int) -> Split:
    """Divide total in proportion to shares, in whole samples.

    The law: the parts add up to total, each lies within one of its exact proportion, and where
    total is at most the sum of the shares no part exceeds its share. A share of 0 gets nothing.

    >>> apportion((5, 2, 9), 8)
    (2, 1, 5)
    """
    whole = sum(shares)
    if whole <= 0:
        raise InfeasibleSplit(f"shares {tuple(shares)} add up to {whole}; at least one must count")
    ends = [bound * total // whole for bound in accumulate(shares, initial=0)]
    return tuple(stop - start for start, stop in pairwise(ends))


def even_split(workers: int, global_batch: int) -> Split:
    """Divide the global batch evenly, each worker getting at least one sample.

    >>> even_split(3, 16)
    (5, 5, 6)
    """
    if global_batch < workers:
        raise InfeasibleSplit(
            f"global_batch={global_batch} cannot be split over {workers} workers with at least "
            f"one sample each; raise global_batch to at least {workers} or remove workers"
        )
    return apportion((1,) * workers, global_batch)


def check_split(split: Sequence[int], workers: int, global_batch: int) -> Split:
    """Return the split as a tuple if it divides the global batch over the workers."""
    found = tuple(split)
    if len(found) != workers:
        raise InvalidSetting(
            f"split {list(found)} has {len(found)} entries, but there are {workers} workers; "
            "give one local batch per worker"
        )
    right = set(map(type, found)) == {int} and min(found) >= 0  # quick for 10,000 workers
    for worker, local in () if right else enumerate(found):
        if not is_whole(local):
            raise InvalidSetting(
                f"split {list(found)} gives worker {worker} {local!r}; "
                "a local batch is a whole number of samples"
            )
        if local < 0:
            raise InvalidSetting(
                f"split {list(found)} gives worker {worker} {local} samples; "
                "use 0 to leave a worker idle"
            )
    if sum(found) != global_batch:
        raise InvalidSetting(
            f"split {list(found)} adds up to {sum(found)}, but global_batch={global_batch}; "
            "change one of the two"
        )
    return found


@dataclass(frozen=True, eq=False)
class Optimum:
    """The split that makes a step shortest."""

    split: Split
    step_s: float
    """The step time with it."""
    level_s: float
    """The step time if samples could be divided; below step_s by less than one sample's time."""
    poured_s: float
    """The same if workers at their lower bound took no time: how high the others are filled."""


def optimal_split(
    times: StepTimes, global_batch: int, limits: Limits | None = None, *, near_s: float = 0.0
) -> Optimum:
    """Return the split with the shortest step, exactly, in whole samples.

    Minimizes max_i tau_i(b_i) subject to sum b_i = B, low_i <= b_i <= high_i and b_i a multiple
    of g_i. At the optimum every worker that is not at a bound ends at the same time: water is
    poured over the workers up to the level T at which their capacities add up to B. Cannikin's
    three cases (section 4.2) are this one. Whole samples: of all (worker, next sample) the B
    that end earliest, which is the same as giving each sample that is left after rounding down
    to the worker with the smallest tau_i(b_i + 1).

    Args:
        times: what each worker needs.
        global_batch: samples to divide.
        limits: bounds and multiples; at least one sample each by default.
        near_s: a step time close to the answer, if one is known: it saves time, nothing else.

    >>> from poise.core.timing import SpeedModel
    >>> model = SpeedModel.of([0.01, 0.02], [0.001, 0.003])
    >>> optimal_split(model, 100).split
    (78, 22)
    """
    if limits is None:
        limits = _one_each(times.workers)
    if limits.workers != times.workers:
        raise InvalidSetting(
            f"there are limits for {limits.workers} workers and times for {times.workers}; "
            "give both for the same workers"
        )
    if not isinstance(global_batch, int | np.integer):
        raise InvalidSetting(f"global_batch={global_batch!r} is not a whole number of samples")
    limits.check(global_batch)
    floor_s = times.local_s(limits.real[0])
    start_s = near_s or _guess(times, global_batch, floor_s)
    poured_s, room = _pour(times, global_batch, limits, start_s)
    taken = _whole(room, limits)
    top_up = _top_up if limits.unit is not None else _top_up_mixed
    taken = top_up(times, taken, global_batch, limits)
    step_s = float(times.local_s(taken).max())
    level_s = min(max(poured_s, float(floor_s.max())), step_s)
    return Optimum(tuple(taken.tolist()), step_s, level_s, min(poured_s, level_s))


def capacity_within(times: StepTimes, step_s: float, limits: Limits) -> float:
    """Return how many samples fit into a step time, if they could be divided.

    More than the global batch means that some split is faster; lower bounds may forbid any.
    """
    if float(times.local_s(limits.low).max()) > step_s:
        return -np.inf
    room, _ = times.capacity(step_s)
    return float(np.clip(room, limits.low, limits.high).sum())


def water_level(times: StepTimes, global_batch: float, limits: Limits) -> float:
    """Return the shortest step if samples could be divided."""
    floor_s = times.local_s(limits.real[0])
    poured_s, _ = _pour(times, global_batch, limits, _guess(times, global_batch, floor_s))
    return max(poured_s, float(floor_s.max()))


@lru_cache(maxsize=4)
def _one_each(workers: int) -> Limits:
    return Limits.of(workers)


def _guess(times: StepTimes, global_batch: float, floor_s: Floats) -> float:
    """Return a step time above 0 to begin with."""
    return max(times.near_s(global_batch), float(floor_s.min())) or 1e-9


def _pour(
    times: StepTimes, global_batch: float, limits: Limits, level: float
) -> tuple[float, Floats]:
    """Return the least step time within which the global batch fits, and the capacities there.

    Newton's method on a rising, piecewise linear function, kept inside a bracket. The capacities
    are those just below where the function jumps, so that they never add up to more.
    """
    (low, high), (lower, upper) = limits.real, limits.inner
    little = _TOLERANCE * global_batch
    below, above, least, found = 0.0, np.inf, low, False
    for _ in range(_MOST_ROUNDS):
        room, slope = times.capacity(level)
        inside = room > lower
        inside &= room < upper
        np.minimum(np.maximum(room, low, out=room), high, out=room)
        missing = global_batch - float(room.sum())
        steepness = float(slope @ inside)
        if missing > little:
            below, least = level, room
            if found:
                break
        else:
            above = level
            if missing >= -little and steepness > 0:
                if not times.jumps:  # someone is inside, so it rises on both sides
                    return level, room
                # It may be the right end of a flat stretch: look a little to the left.
                level, found = level * (1 - _NEAR), True
                continue
        found = False
        if above < np.inf and above - below <= _TOLERANCE * above:
            break
        level = level + missing / steepness if steepness > 0 and abs(missing) > little else below
        if not below < level < above:
            level = (below + above) / 2 if above < np.inf else 2 * below
    return above, least


def _whole(room: Floats, limits: Limits) -> Ints:
    """Return the largest whole local batches within capacities that keep the bounds."""
    if limits.unit == 1:
        whole = (room + _TOLERANCE).astype(np.int64)
    else:
        multiple = limits.multiple
        whole = np.floor(room / multiple + _TOLERANCE).astype(np.int64) * multiple
    return np.minimum(np.maximum(whole, limits.low), limits.high)


def _taken(times: StepTimes, step_s: float, limits: Limits) -> Ints:
    """Return the largest whole local batches that end within step_s."""
    room, _ = times.capacity(step_s)
    low, high = limits.real
    return _whole(np.minimum(np.maximum(room, low), high), limits)


def _top_up(times: StepTimes, taken: Ints, global_batch: int, limits: Limits) -> Ints:
    """Give out what is left, all workers taking the same multiple."""
    unit = limits.unit
    assert unit is not None
    if (global_batch - limits.least) % unit:
        raise InfeasibleSplit(
            f"global_batch={global_batch} is not a multiple of {unit}, and every local batch is; "
            f"choose {global_batch // unit * unit} or {-(-global_batch // unit) * unit}"
        )
    for _ in range(_MOST_ROUNDS):
        missing = (global_batch - int(taken.sum())) // unit
        if missing == 0:
            return taken
        if missing < 0:  # the level was a rounding error too high
            worker = int(np.where(taken > limits.low, times.local_s(taken), -np.inf).argmax())
            taken[worker] -= unit
            continue
        ahead = _next_s(times, taken, limits)
        rank = min(missing, len(ahead)) - 1
        reach_s = float(np.partition(ahead, rank)[rank])
        if reach_s == np.inf:  # some have no room for more
            reach_s = float(ahead[ahead < np.inf].max())
        upper = np.maximum(
            _taken(times, reach_s, limits), np.where(ahead <= reach_s, taken + unit, taken)
        )
        taken, upper = _narrowed(times, taken, upper, global_batch, limits)
        who, ends = _events(times, taken, upper, limits)
        first = min((global_batch - int(taken.sum())) // unit, len(who))
        chosen = np.argpartition(ends, first - 1)[:first] if first else np.zeros(0, dtype=np.int64)
        taken = taken + unit * np.bincount(who[chosen], minlength=len(taken))
    raise InvalidSetting(_FALLING)


def _top_up_mixed(times: StepTimes, taken: Ints, global_batch: int, limits: Limits) -> Ints:
    """Give out what is left, workers taking different multiples.

    The parts must add up exactly, which takes a little more time than the even case: the least
    level is sought from which samples can be taken back, in multiples, so that they do.
    """
    free = (limits.high - limits.low) // limits.multiple
    rest = global_batch - limits.least
    if _coins(rest, limits.multiple, np.minimum(free, rest // limits.multiple)) is None:
        raise InfeasibleSplit(
            f"global_batch={global_batch} cannot be made of local batches that are multiples of "
            f"{sorted(set(limits.multiple.tolist()))}; change global_batch or one multiple_of"
        )
    upper = taken
    back = _excess(upper, global_batch, limits)
    while back is None:
        taken, ahead = upper, _next_s(times, upper, limits)
        upper = np.where(ahead <= ahead.min(), taken + limits.multiple, taken)
        back = _excess(upper, global_batch, limits)
    for unit, number in back.items():
        for _ in range(number):
            mine = (limits.multiple == unit) & (upper > limits.low)
            worker = int(np.where(mine, times.local_s(upper), -np.inf).argmax())
            upper[worker] -= unit
    return upper


def _next_s(times: StepTimes, taken: Ints, limits: Limits) -> Floats:
    """Return each worker's tau with one multiple more; infinity where there is no room."""
    more = taken + limits.multiple
    ahead = times.local_s(more)
    ahead[more > limits.high] = np.inf
    return ahead


def _narrowed(
    times: StepTimes, taken: Ints, upper: Ints, global_batch: int, limits: Limits
) -> tuple[Ints, Ints]:
    """Halve the time between two sets of local batches until few samples lie between them."""
    few = 4 * len(taken) + 64
    if (upper - taken).sum() // limits.multiple[0] <= few:
        return taken, upper
    below, above = float(times.local_s(taken).min()), float(times.local_s(upper).max())
    for _ in range(_MOST_ROUNDS):
        if (upper - taken).sum() // limits.multiple[0] <= few:
            break
        middle = (below + above) / 2
        found = np.clip(_taken(times, middle, limits), taken, upper)
        if found.sum() <= global_batch:
            taken, below = found, middle
        else:
            upper, above = found, middle
    return taken, upper


def _events(times: StepTimes, taken: Ints, upper: Ints, limits: Limits) -> tuple[Ints, Floats]:
    """Return (worker, end) of every next sample, or multiple, between the local batches."""
    numbers = (upper - taken) // limits.multiple
    if numbers.sum() > _MOST_EVENTS + 8 * len(taken):
        raise InvalidSetting(_FALLING)
    who = np.repeat(np.arange(len(taken)), numbers)
    nth = np.arange(len(who)) - np.repeat(np.cumsum(numbers) - numbers, numbers) + 1
    return who, times.local_s(taken[who] + nth * limits.multiple[who], who)


def _excess(upper: Ints, global_batch: int, limits: Limits) -> dict[int, int] | None:
    """Return how many multiples of each kind to take back, or None if it cannot come out even."""
    amount = int(upper.sum()) - global_batch
    if amount < 0:
        return None
    free = np.minimum((upper - limits.low) // limits.multiple, amount // limits.multiple)
    return _coins(amount, limits.multiple, free)


def _coins(amount: int, multiples: Ints, free: Ints) -> dict[int, int] | None:
    """Return how many of each multiple add up to amount, or None; bit k of a set means sum k."""
    if amount > _MOST_COINS:
        raise InvalidSetting(
            f"{amount} samples over workers with different multiple_of are too many to add up "
            "exactly; use one multiple_of, or a smaller global_batch"
        )
    within = (1 << (amount + 1)) - 1
    reached, steps = 1, []
    for unit in sorted(set(multiples.tolist()), reverse=True):
        left, size = int(free[multiples == unit].sum()), 1
        while left > 0 and unit * size <= amount:
            size = min(size, left)
            before = reached
            reached |= (reached << (unit * size)) & within
            steps.append((unit, size, before))
            left, size = left - size, size * 2
    if not reached >> amount & 1:
        return None
    used: dict[int, int] = {}
    for unit, size, before in reversed(steps):
        if not before >> amount & 1:
            used[unit] = used.get(unit, 0) + size
            amount -= unit * size
    return used

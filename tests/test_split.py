"""Laws of the best split: against linear programs, brute force, and any other split."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

import poise
from poise import Network, Worker
from poise.core.cluster import speed_model
from poise.core.limits import Limits
from poise.core.plan import Forecast, best_plan
from poise.core.planning import worth_of
from poise.core.split import Split, even_split, optimal_split, water_level
from poise.core.timing import Curves, SpeedModel, StepTimes
from poise.errors import InfeasibleSplit, InvalidSetting

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Case = tuple[SpeedModel, Limits, int]
"""Times, limits and a global batch that they admit."""

KINDS = ("compute", "communication", "mixed", "idle", "input", "bounds")
NEAR = 1e-9


def random_case(random: np.random.Generator, kind: str) -> Case:
    """Return a cluster with speeds up to 10 times apart, of the kind that is asked for."""
    workers, buckets = int(random.integers(1, 9)), int(random.integers(1, 7))
    global_batch = int(random.integers(workers, 60 * workers))
    slowness = 1e-3 * 10 ** random.uniform(0, 1, (workers, 1))
    done = np.sort(random.uniform(size=(workers, buckets)), axis=1)
    per_sample = slowness * (0.3 + 0.7 * done)
    fixed = slowness * random.uniform(0, 40, (workers, 1)) * (0.3 + 0.7 * done)
    backward_s = 0.7 * float(slowness.mean()) * global_batch / workers
    exchange_s = {"compute": 0.0, "communication": 1e3 * backward_s}.get(kind, backward_s)
    bucket_s = random.dirichlet(np.ones(buckets)) * exchange_s
    if kind == "idle":
        fixed[0] *= 10 ** random.uniform(0, 2)
        per_sample[0] *= 10 ** random.uniform(0, 5)
    input_s = random.uniform(0, 2, workers) * slowness[:, 0] * (kind == "input")
    low, high = np.full(workers, int(kind != "idle")), np.full(workers, 2**40)
    if kind == "bounds":
        low = random.integers(0, max(global_batch // workers, 1) + 1, workers)
        high = low + random.integers(0, 2 * global_batch // workers + 1, workers)
        global_batch = int(random.integers(max(low.sum(), 1), max(high.sum(), 1) + 1))
        high[0] += max(0, global_batch - int(high.sum()))
    model = SpeedModel.of(fixed, per_sample, bucket_s, input_s=input_s)
    return model, Limits.of(workers, min_batch=low, max_batch=high), global_batch


def random_cases(kind: str, number: int) -> list[Case]:
    random = np.random.default_rng([KINDS.index(kind), number])
    return [random_case(random, kind) for _ in range(number)]


def linear_optima(cases: Sequence[Case]) -> Floats:
    """Return the step times of divisible samples, all cases as one linear program.

    Minimize the sum of T subject to start + slope b <= T for every line of every worker, sum b = B
    and low <= b <= high. A case's times are in units of its slowest sample, for HiGHS' tolerances.
    """
    rows, columns, values, ends = [], [], [], []
    samples, sums = [], []
    lowest, highest = [], []
    unit = np.array([max(m.per_sample_s.max(), m.input_s.max()) for m, _, _ in cases])
    column, row = len(cases), 0
    for number, (model, limits, _) in enumerate(cases):
        tails = np.cumsum(model.bucket_s[::-1])[::-1]
        starts = np.hstack([model.fixed_s + tails, np.zeros((model.workers, 1))]) / unit[number]
        slopes = np.hstack([model.per_sample_s, model.input_s[:, None]]) / unit[number]
        mine = np.repeat(np.arange(column, column + model.workers), starts.shape[1])
        index = np.arange(row, row + starts.size)
        rows += [index, index]
        columns += [mine, np.full(starts.size, number)]
        values += [slopes.ravel(), np.full(starts.size, -1.0)]
        ends.append(-starts.ravel())
        samples.append(np.arange(column, column + model.workers))
        sums.append(np.full(model.workers, number))
        lowest.append(limits.low)
        highest.append(limits.high)
        column, row = column + model.workers, row + starts.size
    of_samples = np.concatenate(samples)
    found = linprog(
        np.arange(column) < len(cases),
        csr_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))),
        np.concatenate(ends),
        csr_array(
            (np.ones(len(of_samples)), (np.concatenate(sums), of_samples)),
            shape=(len(cases), column),
        ),
        [batch for _, _, batch in cases],
        np.stack(
            [
                np.concatenate([np.zeros(len(cases)), *lowest]),
                np.concatenate([np.full(len(cases), np.inf), *highest]),
            ],
            axis=1,
        ),
        method="highs",
    )
    assert found.success, found.message
    return np.asarray(found.x[: len(cases)] * unit)


def assert_agrees_with_linear_programs(cases: Sequence[Case]) -> None:
    for (model, limits, batch), level_s in zip(cases, linear_optima(cases), strict=True):
        best = optimal_split(model, batch, limits)
        one_sample_s = max(model.per_sample_s.max(), model.input_s.max())
        assert water_level(model, batch, limits) == pytest.approx(level_s, rel=1e-6)
        assert best.level_s == pytest.approx(level_s, rel=1e-6)
        assert level_s * (1 - 1e-6) <= best.step_s <= level_s * (1 + 1e-6) + one_sample_s
        assert_is_optimal(model, limits, batch, best.split)


def assert_is_allowed(limits: Limits, global_batch: int, split: Split) -> None:
    local = np.array(split)
    assert sum(split) == global_batch
    assert np.all((limits.low <= local) & (local <= limits.high))
    assert not np.any(local % limits.multiple)


def assert_is_optimal(times: StepTimes, limits: Limits, global_batch: int, split: Split) -> None:
    """Prove a split best, for equal multiples: nothing shorter holds the global batch.

    A shorter step would need every worker's smallest local batch to end sooner than this step
    does, and the most samples that end sooner to add up to the global batch.
    """
    assert_is_allowed(limits, global_batch, split)
    step_s = times.local_s(split).max()
    if times.local_s(limits.low).max() >= step_s:
        return
    unit = limits.multiple
    below, above = limits.low // unit, np.minimum(limits.high, global_batch) // unit + 1
    while np.any(above - below > 1):
        middle = (below + above) // 2
        sooner = times.local_s(middle * unit) < step_s
        below, above = np.where(sooner, middle, below), np.where(sooner, above, middle)
    assert int((below * unit).sum()) < global_batch


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_split_is_the_optimum_of_the_linear_program(kind: str) -> None:
    assert_agrees_with_linear_programs(random_cases(kind, 500))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_split_is_the_optimum_of_many_linear_programs(kind: str) -> None:
    cases = random_cases(kind, 5000)
    for start in range(0, len(cases), 500):
        assert_agrees_with_linear_programs(cases[start : start + 500])


def test_cannikins_three_cases_are_among_the_random_clusters() -> None:
    """And one in which a worker is too slow to be used."""
    decided = {
        kind: [
            set(model.bounds(optimal_split(model, batch, limits).split))
            for model, limits, batch in random_cases(kind, 100)
            if len(model.bucket_s) > 1
        ]
        for kind in ("compute", "communication", "mixed", "input")
    }
    assert all(bounds == {"compute"} for bounds in decided["compute"])
    assert all(bounds == {"communication"} for bounds in decided["communication"])
    assert sum(bounds == {"compute", "communication"} for bounds in decided["mixed"]) > 20
    assert sum("input" in bounds for bounds in decided["input"]) > 20
    splits = [
        optimal_split(model, batch, limits).split
        for model, limits, batch in random_cases("idle", 100)
    ]
    assert sum(split[0] == 0 for split in splits) > 20


@cache
def all_splits(workers: int, global_batch: int) -> Ints:
    """Return every way to divide a global batch."""
    if workers == 1:
        return np.array([[global_batch]])
    return np.vstack(
        [
            np.insert(all_splits(workers - 1, global_batch - first), 0, first, axis=1)
            for first in range(global_batch + 1)
        ]
    )


def shortest_step_s(times: StepTimes, limits: Limits, global_batch: int) -> float:
    """Return the step time of the best of all splits; infinity if there is none."""
    splits = all_splits(limits.workers, global_batch)
    allowed = np.all(
        (limits.low <= splits) & (splits <= limits.high) & (splits % limits.multiple == 0), axis=1
    )
    table = np.stack(
        [times.local_s(np.full(limits.workers, b)) for b in range(global_batch + 1)], axis=1
    )
    step_s = table[np.arange(limits.workers), splits].max(axis=1)
    return float(step_s[allowed].min(initial=np.inf))


def random_limits(random: np.random.Generator, workers: int) -> Limits:
    """Return bounds and multiples, which may leave no split at all."""
    low = random.integers(0, 4, workers) * random.integers(0, 2)
    high = low + random.integers(7, 30, workers)
    units = random.integers(1, 6, workers)
    multiple = (np.ones(workers, dtype=int), np.full(workers, units[0]), units)
    return Limits.of(
        workers,
        min_batch=low,
        max_batch=high if random.integers(2) else None,
        multiple_of=multiple[random.integers(3)],
    )


def linear(random: np.random.Generator, workers: int) -> StepTimes:
    return random_case_of(random, workers)[0]


def in_passes(random: np.random.Generator, workers: int) -> StepTimes:
    return random_case_of(random, workers, micro_batch=random.integers(1, 10, workers))[0]


def random_case_of(
    random: np.random.Generator, workers: int, micro_batch: object = np.inf
) -> tuple[SpeedModel, int]:
    """Return a model of so many workers, every feature in use, and its buckets."""
    buckets = int(random.integers(1, 5))
    slowness = 1e-3 * 10 ** random.uniform(0, 1, (workers, 1))
    fixed = np.cumsum(slowness * random.uniform(0, 5, (workers, buckets)), axis=1)
    rise = np.cumsum(slowness * random.uniform(0.05, 1, (workers, buckets)), axis=1)
    model = SpeedModel.of(
        fixed,
        rise,
        random.uniform(0, 5e-3, buckets),
        input_s=random.uniform(0, 1e-2, workers) * random.integers(0, 2, workers),
        micro_batch=np.asarray(micro_batch, dtype=float),
    )
    return model, buckets


@dataclass(frozen=True, eq=False)
class Given(Curves):
    """Tau as a function of (worker numbers, local batches)."""

    count: int
    function: Callable[[Ints, Floats], Floats]
    most: int = 2**32

    @property
    def workers(self) -> int:
        return self.count

    def local_s(self, batches: ArrayLike, workers: Ints | None = None) -> Floats:
        every = np.arange(self.workers) if workers is None else workers
        return self.function(every, np.asarray(batches, dtype=np.float64))


def table(random: np.random.Generator, workers: int) -> StepTimes:
    """Tau as a table that rises by random steps, some of them 0."""
    steps = random.exponential(size=(workers, 64)) * random.integers(0, 2, (workers, 64))
    known = np.cumsum(steps, axis=1) + 0.1
    beyond = np.arange(1, 3)
    known = np.hstack([known, known[:, -1:] + 1e6 * beyond])
    return Given(workers, lambda who, b: known[who, np.minimum(b, 65).astype(int)], most=65)


def power(random: np.random.Generator, workers: int) -> StepTimes:
    rate = random.uniform(1, 10, workers)
    return Given(workers, lambda who, b: 0.3 + rate[who] * b**0.8, most=2**8)


def tiles(random: np.random.Generator, workers: int) -> StepTimes:
    rate = random.uniform(1, 10, workers)
    return Given(workers, lambda who, b: 1 + rate[who] * np.ceil(b / 8), most=2**8)


def knee(random: np.random.Generator, workers: int) -> StepTimes:
    rate, place = random.uniform(1, 10, workers), random.integers(1, 9, workers)
    return Given(
        workers,
        lambda who, b: 1 + rate[who] * (0.1 * b + np.maximum(b - place[who], 0)),
        most=2**8,
    )


@pytest.mark.parametrize("kind", [linear, in_passes, table, power, tiles, knee])
def test_the_best_split_is_the_best_of_all_splits(
    kind: Callable[[np.random.Generator, int], StepTimes],
) -> None:
    """With bounds, equal and mixed multiples; no split is found only where there is none."""
    random = np.random.default_rng(3)
    infeasible = 0
    for _ in range(120):
        workers = int(random.integers(1, 5))
        global_batch = int(random.integers(1, 28))
        times, limits = kind(random, workers), random_limits(random, workers)
        expected = shortest_step_s(times, limits, global_batch)
        if expected == np.inf:
            infeasible += 1
            with pytest.raises(InfeasibleSplit):
                optimal_split(times, global_batch, limits)
            continue
        best = optimal_split(times, global_batch, limits)
        assert_is_allowed(limits, global_batch, best.split)
        assert best.step_s == times.local_s(best.split).max()
        assert best.step_s == pytest.approx(expected, rel=NEAR)
        assert best.level_s <= best.step_s
    assert 10 < infeasible < 150


seeds = st.integers(0, 2**32 - 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return random_case(np.random.default_rng(draw(seeds)), draw(st.sampled_from(KINDS)))


@given(case=cases(), seed=seeds)
def test_the_order_of_workers_does_not_matter(case: Case, seed: int) -> None:
    model, limits, batch = case
    order = np.random.default_rng(seed).permutation(model.workers)
    best = optimal_split(model, batch, limits)
    other = optimal_split(model.take(order), batch, limits.take(order.tolist()))
    assert other.step_s == pytest.approx(best.step_s, rel=NEAR)
    assert other.level_s == pytest.approx(best.level_s, rel=NEAR)
    assert_is_allowed(limits.take(order.tolist()), batch, other.split)


@given(case=cases(), more=st.integers(1, 100))
def test_a_larger_global_batch_takes_no_less_time(case: Case, more: int) -> None:
    model, limits, batch = case
    larger = min(batch + more, int(limits.high.sum()))
    one, other = (optimal_split(model, size, limits) for size in (batch, larger))
    assert other.step_s >= one.step_s * (1 - NEAR)
    assert other.level_s >= one.level_s * (1 - NEAR)


@given(case=cases(), seed=seeds)
def test_no_other_split_is_shorter(case: Case, seed: int) -> None:
    """Neither the even one nor any that is drawn."""
    model, limits, batch = case
    best_s = optimal_split(model, batch, limits).step_s
    even = np.array(even_split(model.workers, batch)) if batch >= model.workers else limits.low
    if np.all((limits.low <= even) & (even <= limits.high)) and even.sum() == batch:
        assert best_s <= model.step_s(even) * (1 + NEAR)
    random = np.random.default_rng(seed)
    for _ in range(10):
        assert best_s <= model.step_s(any_split(random, limits, batch)) * (1 + NEAR)


def any_split(random: np.random.Generator, limits: Limits, global_batch: int) -> Ints:
    """Return a random split within the limits."""
    split = limits.low.copy()
    while missing := global_batch - int(split.sum()):
        room = np.minimum(limits.high - split, missing)
        worker = int(random.choice(np.flatnonzero(room)))
        split[worker] += random.integers(1, room[worker] + 1)
    return split


@given(case=cases(), factor=st.floats(1e-6, 1e6))
def test_times_in_another_unit_give_the_same_step_in_that_unit(case: Case, factor: float) -> None:
    model, limits, batch = case
    scaled = SpeedModel.of(
        model.fixed_s * factor,
        model.per_sample_s * factor,
        model.bucket_s * factor,
        input_s=model.input_s * factor,
    )
    best, other = (optimal_split(times, batch, limits) for times in (model, scaled))
    assert other.step_s == pytest.approx(best.step_s * factor, rel=NEAR)
    assert other.level_s == pytest.approx(best.level_s * factor, rel=NEAR)


@given(case=cases(), seed=seeds)
def test_a_slower_exchange_never_shortens_the_step(case: Case, seed: int) -> None:
    model, limits, batch = case
    extra = np.random.default_rng(seed).exponential(0.05, len(model.bucket_s))
    slower = SpeedModel.of(
        model.fixed_s, model.per_sample_s, model.bucket_s + extra, input_s=model.input_s
    )
    before, after = (optimal_split(times, batch, limits) for times in (model, slower))
    assert before.step_s * (1 - NEAR) <= after.step_s
    assert after.step_s <= (before.step_s + extra.sum()) * (1 + NEAR)


@given(case=cases(), factor=st.floats(0.01, 100))
def test_a_step_time_known_to_be_near_changes_nothing(case: Case, factor: float) -> None:
    model, limits, batch = case
    best = optimal_split(model, batch, limits)
    other = optimal_split(model, batch, limits, near_s=best.step_s * factor)
    assert other.step_s == pytest.approx(best.step_s, rel=NEAR)
    assert other.level_s == pytest.approx(best.level_s, rel=NEAR)


@given(seed=seeds, unit=st.integers(1, 16), number=st.integers(1, 6))
def test_with_micro_batches_and_multiples_the_split_is_proved_best(
    seed: int, unit: int, number: int
) -> None:
    random = np.random.default_rng(seed)
    micro_batch = np.where(random.integers(0, 2, number), random.integers(1, 40, number), np.inf)
    model, _ = random_case_of(random, number, micro_batch)
    limits = Limits.of(number, min_batch=random.integers(0, 3, number), multiple_of=unit)
    batch = int(limits.low.sum()) + unit * int(random.integers(1, 2000))
    assert_is_optimal(model, limits, batch, optimal_split(model, batch, limits).split)


@given(seed=seeds, number=st.integers(1, 6))
def test_capacity_is_the_inverse_of_the_local_time(seed: int, number: int) -> None:
    """With buckets, loaders and micro-batches, before, at and after the ends of passes."""
    random = np.random.default_rng(seed)
    micro_batch = np.where(random.integers(0, 2, number), random.integers(1, 40, number), np.inf)
    model, _ = random_case_of(random, number, micro_batch)
    floor_s = model.local_s(np.zeros(number))
    filled = np.where(np.isfinite(micro_batch), micro_batch * random.integers(1, 9), 8.0)
    ends_s = model.local_s(filled)
    for step_s in (*ends_s, *(ends_s * 1.01), *(float(ends_s.max()) * random.uniform(0, 3, 20))):
        room, slope = model.capacity(step_s)
        in_time = floor_s <= step_s
        assert np.all(model.local_s(np.maximum(room, 0))[in_time] <= step_s * (1 + NEAR))
        assert np.all(model.local_s(np.maximum(room, 0) * (1 + 1e-6) + 1e-6) > step_s * (1 - 1e-12))
        assert np.all(room[~in_time] < 1)
        assert np.all(slope >= 0)


@given(seed=seeds)
def test_the_slope_of_the_capacity_is_how_it_rises(seed: int) -> None:
    random = np.random.default_rng(seed)
    model, _ = random_case_of(random, 5, [np.inf, 8, 3, np.inf, 20])
    step_s = float(model.local_s(random.uniform(0, 50, 5)).max())
    room, slope = model.capacity(step_s)
    ahead, ahead_slope = model.capacity(step_s * (1 + 1e-7))
    inside = slope == ahead_slope
    assert np.allclose(
        (ahead - room)[inside], (slope * step_s * 1e-7)[inside], rtol=1e-3, atol=NEAR
    )


def test_a_local_batch_above_the_micro_batch_pays_its_fixed_cost_for_every_pass() -> None:
    model = SpeedModel.of([[0.01, 0.02]], [[0.001, 0.002]], [0.05, 0.003], micro_batch=8)
    tails = 0.05 + 0.003
    assert model.local_s([8])[0] == pytest.approx(0.01 + 0.008 + tails)
    assert model.local_s([9])[0] == pytest.approx(2 * 0.02 + 9 * 0.002 + tails)
    assert model.local_s([17])[0] == pytest.approx(3 * 0.02 + 17 * 0.002 + tails)
    assert model.bounds([8]) == ("communication",)
    assert model.bounds([9]) == ("compute",)


def test_the_level_is_found_where_an_empty_batch_takes_no_time() -> None:
    """No worker needs any time for its smallest local batch, so there is nothing to start from."""
    model, limits = SpeedModel.proportional([1, 2]), Limits.of(2, min_batch=0)
    assert water_level(model, 10, limits) == pytest.approx(10 / 3)
    assert optimal_split(model, 10, limits).level_s == pytest.approx(10 / 3)
    curves = Given(2, lambda who, b: (1 + who) * b**0.8)
    assert water_level(curves, 10, limits) <= optimal_split(curves, 10, limits).step_s * (1 + 1e-9)


def test_the_level_is_the_least_one_where_more_time_brings_no_more_samples() -> None:
    """At a worker's maximum, and at a full pass while the next one's fixed cost is not paid."""
    lines = ([[0.1, 0.1]], [[0.001, 0.01]], [0.2, 0.0])
    model, limits = SpeedModel.of(*lines), Limits.of(1, max_batch=39)
    assert water_level(model, 39, limits) == pytest.approx(0.49)
    assert optimal_split(model, 39, limits).level_s == pytest.approx(0.49)
    assert optimal_split(model, 39, limits, near_s=0.6).level_s == pytest.approx(0.49)
    passes = SpeedModel.of(*lines, micro_batch=15)
    for number in (15, 30, 60):
        expected = passes.step_s([number])
        assert water_level(passes, number, Limits.of(1)) == pytest.approx(expected)


def test_a_huge_upper_bound_is_none() -> None:
    limits = Limits.of(4, max_batch=2**62)
    assert optimal_split(SpeedModel.proportional([1, 1, 1, 1]), 8, limits).split == (2, 2, 2, 2)


# What bounds a worker


FAST, SLOW = (0.001, 0.01), (0.01, 0.01)


def test_each_worker_is_told_what_bounds_it() -> None:
    model = SpeedModel.of(
        [[0.01, 0.01]] * 5,
        [[0.001, 0.002], [0.0021, 0.0022], [0.0001, 0.0001], [0.001, 0.002], [0.05, 0.1]],
        [0.02, 0.001],
        input_s=[0, 0, 0.003, 0, 0],
    )
    limits = Limits.of(5, min_batch=1, max_batch=[99, 99, 99, 5, 99])
    best = best_plan(model, limits, 80)
    assert best.bound == ("compute", "communication", "input", "max", "min")


def test_a_worker_whose_least_batch_sets_the_pace_is_bound_by_its_minimum() -> None:
    model = SpeedModel.of([0, 0], [1.0, 0.001])
    best = best_plan(model, Limits.of(2, min_batch=[5, 0]), 10)
    assert best.split == (5, 5)
    assert best.bound == ("min", "compute")


def test_an_idle_worker_that_sets_the_pace_is_bound_by_its_minimum() -> None:
    model = SpeedModel.of([9.0, 0], [1.0, 0.001])
    best = best_plan(model, Limits.of(2, min_batch=0), 10)
    assert best.split == (0, 10)
    assert best.bound[0] == "min"


def test_a_worker_at_its_maximum_by_its_own_choice_is_not_bound_by_it() -> None:
    model = SpeedModel.of([0.1, 0.1], [0.01, 0.01])
    assert best_plan(model, Limits.of(2, max_batch=[5, 99]), 10).bound == ("compute", "compute")
    assert best_plan(model, Limits.of(2, max_batch=[4, 99]), 10).bound == ("max", "compute")
    assert best_plan(model, Limits.of(2, min_batch=[6, 1]), 10).bound == ("min", "compute")


line = st.tuples(st.floats(1e-5, 1e-2), st.floats(0, 0.1))


@given(
    forward=line,
    backward=line,
    gamma=st.floats(0.05, 0.95),
    overlapping_s=st.floats(0, 0.2),
    local=st.integers(1, 200),
)
def test_two_lines_keep_cannikins_criterion(
    forward: tuple[float, float],
    backward: tuple[float, float],
    gamma: float,
    overlapping_s: float,
    local: int,
) -> None:
    """Compute-bound when (1 - gamma) P >= T_o, and the step is what section 3 says it is."""
    worker = Worker(forward_s=forward, backward_s=backward)
    network = Network(ready=(gamma, 1.0), bucket_s=(overlapping_s, 0.004))
    model = speed_model([worker], network)
    a, p = (per_sample * local + fixed for per_sample, fixed in (forward, backward))
    hidden = (1 - gamma) * p - overlapping_s
    expected = a + p + 0.004 if hidden >= 0 else a + gamma * p + overlapping_s + 0.004
    assert model.step_s([local]) == pytest.approx(expected)
    if abs(hidden) > 1e-12:
        assert model.bounds([local]) == ("compute" if hidden > 0 else "communication",)


# What a worker is worth


def worker(slowness: float, min_batch: int = 1, max_batch: int | None = None) -> Worker:
    return Worker(
        forward_s=(0.001 * slowness, 0.002),
        backward_s=(0.002 * slowness, 0.003),
        min_batch=min_batch,
        max_batch=max_batch,
    )


SLOW_NETWORK = Network(ready=(0.3, 1.0), bucket_s=(0.5, 0.1))


def test_a_slow_worker_on_a_slow_network_is_not_worth_having() -> None:
    """Alone, the fast worker exchanges nothing; a share of 0 would not save that."""
    pair = [worker(1), worker(50)]
    (worth,) = worth_of(pair, SLOW_NETWORK, global_batch=64, which=[1])
    assert not worth.worth_having
    assert worth.without_s == pytest.approx(0.005 + 64 * 0.003)
    idle = [pair[0], worker(50, min_batch=0)]
    assert poise.plan(idle, SLOW_NETWORK, global_batch=64).step_s > 0.005 + 64 * 0.003


def test_a_useful_worker_is_worth_having() -> None:
    (worth,) = worth_of([worker(1), worker(2)], Network(), global_batch=64, which=[1])
    assert worth.worth_having
    assert worth.without_s is not None
    assert worth.with_s < 0.75 * worth.without_s


def test_a_worker_that_the_others_cannot_replace_is_worth_having() -> None:
    limited = [worker(1, max_batch=32), worker(50)]
    (needed,) = worth_of(limited, SLOW_NETWORK, global_batch=64, which=[1])
    (alone,) = worth_of([worker(1)], Network(), global_batch=8, which=[0])
    assert needed.without_s is None
    assert needed.worth_having
    assert alone.worth_having


@pytest.mark.parametrize("number", [2, -1])
def test_the_worth_of_a_worker_that_is_not_there_is_refused(number: int) -> None:
    with pytest.raises(InvalidSetting, match=f"worker.*{number}|{number}.*worker"):
        worth_of([worker(1), worker(2)], Network(), global_batch=8, which=[number])


# Errors say what is wrong

TWO = SpeedModel.proportional([1, 2])
NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpeedModel.of([0.1, NAN], [1, 1]), r"fixed_s has nan at \(1, 0\)"),
        (lambda: SpeedModel.of([0.1, 0.1], [1, -2]), r"per_sample_s has -2.0 at \(1, 0\)"),
        (lambda: SpeedModel.of([0.1], [np.inf]), "per_sample_s has inf"),
        (lambda: SpeedModel.of([0.1], [1], [-1]), "bucket_s has -1.0"),
        (lambda: SpeedModel.of([0.1], [1], input_s=NAN), "input_s has nan"),
        (lambda: SpeedModel.of([], []), "fixed_s is empty; give at least one worker"),
        (lambda: SpeedModel.of([[]], [[]], []), "fixed_s is empty; .* one bucket"),
        (lambda: SpeedModel.of([0.1, 0.1], [1]), "workers x buckets"),
        (lambda: SpeedModel.of([0.1], [1], [1, 2]), "one reduction time per bucket"),
        (lambda: SpeedModel.of(0.1, 1), "workers x buckets"),
        (lambda: SpeedModel.of([0.1, 0.1], [1, 1], input_s=[1, 2, 3]), "input_s"),
        (lambda: SpeedModel.of([0.1, 0.1], [1, 1], micro_batch=[1, 2, 3]), "micro_batch"),
        (lambda: SpeedModel.of([0.1, 0.1], [1, 0]), "worker 1 takes no time per sample"),
        (lambda: SpeedModel.of([0.1], [1], micro_batch=0), "micro_batch is 0.0"),
        (lambda: SpeedModel.of([0.1], [1], micro_batch=NAN), "micro_batch is nan"),
        (lambda: SpeedModel.proportional([1, 0]), "above 0"),
        (lambda: SpeedModel.proportional([]), "above 0"),
        (lambda: Limits.of(0), "0 workers; a cluster needs at least 1"),
        (lambda: Limits.of(2, min_batch=[1, 2, 3]), "min_batch has 3 entries for 2 workers"),
        (lambda: Limits.of(2, max_batch=[1]), "max_batch has 1 entries for 2 workers"),
        (lambda: Limits.of(2, min_batch=-1), "min_batch=-1 is not made of whole numbers from 0"),
        (lambda: Limits.of(2, max_batch=2.5), "max_batch=2.5 is not made of whole numbers"),
        (lambda: Limits.of(2, multiple_of=0), "multiple_of=0 is not made of whole numbers from 1"),
        (lambda: optimal_split(TWO, 8, Limits.of(3)), "limits for 3 workers and times for 2"),
    ],
)
def test_wrong_times_and_limits_are_refused_with_the_reason(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        make()


@pytest.mark.parametrize(
    ("limits", "global_batch", "message"),
    [
        ({}, 1, r"global_batch=1 is less than all min_batch together, 2 .* at least 2"),
        ({"min_batch": [3, 9]}, 10, r"less than all min_batch together, 12 .*worker 1 with 9"),
        ({"max_batch": [3, 9]}, 13, r"more than all workers may take, 12 .*worker 0 with 3"),
        ({"multiple_of": 8}, 20, "not a multiple of 8, .* choose 16 or 24"),
        ({"multiple_of": [4, 6]}, 21, r"cannot be made of .* multiples of \[4, 6\]"),
        ({"multiple_of": [4, 6], "max_batch": [4, 18]}, 14, r"multiples of \[4, 6\]"),
        ({"names": ["fast", "slow"], "max_batch": 3}, 9, "the smallest: fast with 3"),
    ],
)
def test_a_global_batch_that_does_not_fit_names_the_bound(
    limits: dict[str, Any], global_batch: int, message: str
) -> None:
    with pytest.raises(InfeasibleSplit, match=message):
        optimal_split(TWO, global_batch, Limits.of(2, **limits))


@pytest.mark.parametrize(
    "limits",
    [
        {"min_batch": [1, 5], "max_batch": [9, 4]},
        {"min_batch": [1, 5], "max_batch": [9, 7], "multiple_of": [1, 8]},
    ],
)
def test_bounds_that_contradict_each_other_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InfeasibleSplit, match=r"worker 1 has min_batch=5 and max_batch=\d with"):
        Limits.of(2, **limits)


LINES: dict[str, Any] = {"forward_s": FAST, "backward_s": SLOW}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "worker gpu needs forward_s and backward_s, or ready_s alone"),
        ({"forward_s": FAST}, "needs forward_s and backward_s"),
        ({**LINES, "ready_s": (FAST,)}, "or ready_s alone"),
        ({"forward_s": FAST, "ready_s": (FAST,)}, "or ready_s alone"),
        ({**LINES, "forward_s": (0.1,)}, r"worker gpu has forward_s=\(0.1,\); give two numbers"),
        ({**LINES, "backward_s": (NAN, 0)}, r"backward_s=\(nan, 0\); give two numbers"),
        ({**LINES, "backward_s": (0.1, -1)}, r"backward_s=\(0.1, -1\); give two numbers"),
        ({"ready_s": (FAST, 3)}, "ready_s=3; give two numbers"),
        ({**LINES, "input_s": -1}, "input_s=-1; give a number from 0 up"),
        ({**LINES, "memory_bytes": NAN}, "memory_bytes=nan"),
        ({**LINES, "fixed_bytes": "1 GB"}, "fixed_bytes='1 GB'"),
        ({**LINES, "bytes_per_sample": True}, "bytes_per_sample=True"),
        ({**LINES, "min_batch": -1}, "min_batch=-1; give a whole number from 0 up"),
        ({**LINES, "min_batch": None}, "min_batch=None; give a whole number from 0 up"),
        ({**LINES, "max_batch": 2.0}, "max_batch=2.0; give a whole number from 0 up"),
        ({**LINES, "multiple_of": 0}, "multiple_of=0; give a whole number from 1 up"),
        ({**LINES, "multiple_of": None}, "multiple_of=None; give a whole number from 1 up"),
        ({**LINES, "micro_batch": 0}, "micro_batch=0; give a whole number from 1 up"),
    ],
)
def test_a_worker_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Worker(name="gpu", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ready": ()}, r"ready=\(\); give a list of numbers"),
        ({"bucket_s": 0.1}, "bucket_s=0.1; give a list of numbers"),
        ({"bucket_s": (NAN,)}, r"bucket_s=\(nan,\)"),
        ({"bucket_s": (-1.0,)}, r"bucket_s=\(-1.0,\)"),
        ({"ready": (0.5, 1.0)}, "2 numbers in ready and 1 in bucket_s"),
        ({"ready": (0.5,)}, r"ready=\[0.5\]; give parts of backward that rise to 1.0"),
        ({"ready": (0.5, 0.4, 1.0), "bucket_s": (1, 1, 1)}, "rise to 1.0"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Network(**settings)


@pytest.mark.parametrize("global_batch", [0, -8, 8.0, True, NAN])
def test_a_global_batch_is_a_number_of_samples(global_batch: int) -> None:
    with pytest.raises(InvalidSetting, match=r"global_batch=.* whole number"):
        poise.plan([worker(1)], global_batch=global_batch)


def test_a_cluster_that_cannot_be_planned_for_says_why() -> None:
    with pytest.raises(InvalidSetting, match="no workers; a cluster needs at least 1"):
        poise.plan([], global_batch=8)
    with pytest.raises(InvalidSetting, match="1 lines in ready_s, but the network has 2 buckets"):
        poise.plan([Worker(ready_s=(FAST,))], SLOW_NETWORK, global_batch=8)
    with pytest.raises(InvalidSetting, match="takes no time per sample"):
        poise.plan([Worker(forward_s=(0, 1), backward_s=(0, 1))], global_batch=8)
    with pytest.raises(InfeasibleSplit, match=r"less than all min_batch together, 3 .*worker 0"):
        poise.plan([worker(1)] * 3, global_batch=2)


@pytest.mark.parametrize("micro_batch", [None, 8])
def test_a_worker_without_memory_for_one_sample_is_named(micro_batch: int | None) -> None:
    full = Worker(
        name="full",
        forward_s=FAST,
        backward_s=SLOW,
        micro_batch=micro_batch,
        memory_bytes=100,
        fixed_bytes=100,
        bytes_per_sample=1,
    )
    with pytest.raises(InfeasibleSplit, match=r"full has (memory for 0 samples|no memory)"):
        poise.plan([full], global_batch=8)


# Ten thousand workers


def large_clusters() -> Iterator[Case]:
    random = np.random.default_rng(10_000)
    number = 10_000
    for buckets, in_several_passes, unit in product((2, 16), (False, True), (1, 8)):
        slowness = 1e-3 * 10 ** random.uniform(0, 1, (number, 1))
        done = np.linspace(0.1, 1, buckets)
        model = SpeedModel.of(
            slowness * random.uniform(0, 20, (number, 1)) * (0.3 + done),
            slowness * (0.3 + done),
            np.full(buckets, 0.1 / buckets),
            input_s=random.uniform(0, 2e-3, number),
            micro_batch=random.integers(4, 64, number) if in_several_passes else np.inf,
        )
        low = random.integers(0, 9, number)
        high = low + random.integers(unit, 200, number)
        limits = Limits.of(number, min_batch=low, max_batch=high, multiple_of=unit)
        yield model, limits, 8 * int(random.integers(limits.low.sum(), limits.high.sum()) // 8)


def test_ten_thousand_workers_get_a_split_that_is_proved_best() -> None:
    for model, limits, batch in large_clusters():
        best = optimal_split(model, batch, limits)
        assert_is_optimal(model, limits, batch, best.split)
        assert best.level_s <= best.step_s == model.step_s(best.split)


@settings(max_examples=20)
@given(seed=seeds, number=st.integers(1, 300), most=st.sampled_from([10**3, 10**6, 10**10]))
def test_global_batches_of_any_size_get_a_split_that_is_proved_best(
    seed: int, number: int, most: int
) -> None:
    random = np.random.default_rng(seed)
    model, _ = random_case_of(random, number)
    limits = Limits.of(number)
    batch = number + int(random.integers(most))
    assert_is_optimal(model, limits, batch, optimal_split(model, batch, limits).split)


@pytest.mark.parametrize("split", [(60, 60, 60, 60), (80, 60, 50, 50), (10, 10, 200, 20)])
def test_a_step_is_expected_to_last_as_long_as_its_latest_worker(split: tuple[int, ...]) -> None:
    """The mean of the largest of scattered times, against many draws of them."""
    model = SpeedModel.of(np.full((4, 1), 0.02), np.full((4, 1), 0.002), [0.03])
    scatter = np.array([0.2, 0.2, 0.1, 0.15])
    forecast = Forecast(model, Limits.of(4), 0.0, scatter)
    work_s = 0.02 + 0.002 * np.array(split)
    draws = np.random.default_rng(0).standard_normal((200_000, 4))
    mean_s = (work_s * (1 + scatter * draws)).max(axis=1).mean() + 0.03
    assert forecast.step_s(split) == pytest.approx(mean_s, rel=2e-3)
    assert forecast.step_s(split) >= model.step_s(split)
    exact = Forecast(model, Limits.of(4), 0.0)
    assert exact.step_s(split) == model.step_s(split)


def test_local_batches_can_be_kept_from_shrinking() -> None:
    limits = Limits.of(3, min_batch=2, max_batch=12, multiple_of=[1, 4, 1])
    found = limits.at_least(np.array([1, 10, 40]))
    assert found.low.tolist() == [2, 8, 12]
    assert found.high.tolist() == limits.high.tolist()

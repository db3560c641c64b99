"""What the best split costs to find, and what it is worth.

Run: `python benchmarks/solver.py [--quick | --smoke] [--json]`. `--quick` takes less than a minute
and measures less; the bars are the same.

**Clusters.** Random, of 10 to 10,000 workers whose speeds lie up to a factor of 10 apart, with
fixed times worth 0 to 20 samples and a reduction in 2 or 16 buckets that takes as long as backward
does on an average worker, so that some workers are bound by compute and some by communication.
The global batch is 32 samples per worker. Every measurement is of another cluster.

**One solve.** `optimal_split` with whole samples, from a speed model to the split as a tuple, in
wall time. The speed model is made before, as HiGHS's matrices are, and anew for each solve, so
that nothing it keeps for later calls is there already. A measurement is the median of 15 solves in
a row, since in training the solver runs at every step. Sizes and numbers of buckets take turns
within a round; the first measurement of each is not counted. Shown are the median and the 10th and
90th percentile over rounds. The figure is the worse one of 2 and 16 buckets.

**Against a linear program.** SciPy's HiGHS (`linprog(method="highs")`, sparse matrices) on the
same clusters of 1,000 workers, one after the other in the same round. It solves the relaxation:
samples may be divided, which is easier. Its matrices and bounds are made before; timed is the call
of linprog alone. Both find the same step time, or the run fails. The figure is the median of the
ratios of each round, HiGHS / ours, for the worse one of 2 and 16 buckets.

**Growth.** Median time at 10,000 workers / median time at 1,000, divided by what n log n allows,
(10,000 log 10,000) / (1,000 log 1,000); likewise from 100 to 1,000. At most 1 means: no faster than
n log n. The figure is the worse one of 2 and 16 buckets. From 100 to 1,000 the cost of a call that
does not depend on n makes the figure small.

**An engine update.** One observation of 10,000 workers into the engine with policy auto: checks,
fit of all lines, drift watch, solve where it may pay, decision. Virtual workers with 5 % noise,
from the first step on, so that steps with a decision are among them. A row of updates is made for
2 and for 16 buckets; shown are median, 10th and 90th percentile, and the figure is the larger
median.

**What it is worth.** No bar: how much longer a step takes, on clusters of 2 to 16 workers, with
the even split, with shares by inverse time per sample, measured once at the even split, and with
equal compute times (LB-BSP), each in whole samples, against the best split.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

import numpy as np
from figures import Figure, as_json, bootstrap, judged, show
from numpy.typing import NDArray
from options import Effort, options
from rich.console import Console
from rich.table import Table
from scipy.optimize import linprog
from scipy.sparse import csr_array

from poise.core.limits import Limits
from poise.core.split import Optimum, Split, apportion, even_split, optimal_split
from poise.core.timing import SpeedModel
from poise.engine.bsp import Engine
from poise.policy import Auto
from poise.sim.simulate import observe

WORKERS = (10, 100, 1000, 10_000)
BUCKETS = (2, 16)
SOLVE_BAR_MS = 20.0
HIGHS_BAR = 200.0
GROWTH_BAR = 1.0

_LARGEST = WORKERS[-1]
_COMPARED = 1000
"""How many workers HiGHS gets."""
_SAMPLES_PER_WORKER = 32
_IN_A_ROW = 15
_SPREAD = 10.0
_AGREEMENT = 1e-6
_SHARE_UNITS = 10**12
"""Real shares become whole numbers of these, to be apportioned exactly."""

Floats = NDArray[np.float64]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Amount:
    """How much is measured; nothing else may depend on it."""

    rounds: int
    """Solves of each size."""
    comparisons: int
    """Solves by HiGHS for each number of buckets."""
    updates: int
    """Steps that the engine is shown."""
    worths: int
    """Clusters on which splits are compared."""


AMOUNTS = {
    "full": Amount(rounds=200, comparisons=25, updates=400, worths=5000),
    "quick": Amount(rounds=30, comparisons=9, updates=60, worths=500),
    "smoke": Amount(rounds=2, comparisons=1, updates=3, worths=5),
}


@dataclass(frozen=True)
class Cluster:
    """The times of a random cluster, as a speed model takes them."""

    fixed_s: Floats
    per_sample_s: Floats
    bucket_s: Floats
    compute: Floats
    """Seconds per sample and fixed seconds of all workers, the reduction left out."""
    global_batch: int

    def model(self) -> SpeedModel:
        """Return a speed model that has computed nothing yet."""
        return SpeedModel.of(self.fixed_s, self.per_sample_s, self.bucket_s)


@dataclass(frozen=True)
class Spread:
    """Times of one kind: the median, and where most of them lie."""

    median_s: float
    p10_s: float
    p90_s: float

    def __str__(self) -> str:
        return f"{self.median_s * 1e3:.3f} ({self.p10_s * 1e3:.3f}-{self.p90_s * 1e3:.3f})"


Times = dict[tuple[int, int], list[float]]
"""Seconds of each measurement, by (workers, buckets)."""


def main() -> None:
    """Measure, and print the figures."""
    parser = options("What the best split costs to find.", quick="less than a minute")
    arguments = parser.parse_args()
    amount = AMOUNTS[arguments.effort]
    if not arguments.json:
        print("measuring, for some minutes at most", file=sys.stderr)
    solves = measure_solves(amount.rounds)
    ours, highs = compare_with_highs(amount.comparisons)
    updates = {
        (_LARGEST, buckets): engine_update_s(_LARGEST, buckets, amount.updates)
        for buckets in BUCKETS
    }
    worth = measure_worth(amount.worths)
    report(solves, ours, highs, updates, worth, effort=arguments.effort, json=arguments.json)


def report(
    solves: Times,
    ours: Times,
    highs: Times,
    updates: Times,
    worth: dict[str, Floats],
    *,
    effort: Effort,
    json: bool,
) -> None:
    speed_ups = {
        buckets: ratios(highs[_COMPARED, buckets], ours[_COMPARED, buckets]) for buckets in BUCKETS
    }
    figures = [*solve_figures(solves), highs_figure(speed_ups), update_figure(updates)]
    figures = judged(figures, effort)
    if json:
        known = context(solves, ours, highs, speed_ups, worth)
        print(as_json("solver", figures, {**known, "engine_update_ms": rows_ms(updates)}))
        return
    notes = {
        f"times faster than HiGHS, {buckets} buckets": str(bootstrap(found))
        for buckets, found in speed_ups.items()
    }
    for (_, buckets), found in updates.items():
        notes[f"engine update, {buckets} buckets, ms"] = str(spread(found))
    rounds = len(solves[_LARGEST, BUCKETS[0]])
    notes["run"] = (
        f"{rounds} solves of each size, {len(speed_ups[BUCKETS[0]])} by HiGHS, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    show("The best split: what it costs to find", figures, notes)
    show_times(solves, highs)
    show_worth(worth)


def solve_figures(times: Times) -> list[Figure]:
    slowest_s = max(statistics.median(times[_LARGEST, buckets]) for buckets in BUCKETS)
    growths = {
        f"growth / n log n, {few:,} to {many:,} workers": max(
            growth(times, few, many, buckets) for buckets in BUCKETS
        )
        for few, many in ((1000, 10_000), (100, 1000))
    }
    return [
        Figure(f"one solve, {_LARGEST:,} workers, ms", slowest_s * 1e3, "below", SOLVE_BAR_MS),
        *(Figure(name, found, "at most", GROWTH_BAR) for name, found in growths.items()),
    ]


def highs_figure(speed_ups: dict[int, list[float]]) -> Figure:
    least = min(statistics.median(found) for found in speed_ups.values())
    return Figure(f"times faster than HiGHS, {_COMPARED:,} workers", least, "at least", HIGHS_BAR)


def update_figure(updates: Times) -> Figure:
    slowest_s = max(statistics.median(found) for found in updates.values())
    name = f"an engine update, {_LARGEST:,} workers, ms"
    return Figure(name, slowest_s * 1e3, "below", SOLVE_BAR_MS)


def context(
    solves: Times,
    ours: Times,
    highs: Times,
    speed_ups: dict[int, list[float]],
    worth: dict[str, Floats],
) -> dict[str, Any]:
    return {
        "solve_ms": rows_ms(solves),
        "compared_ms": rows_ms(ours),
        "highs_ms": rows_ms(highs),
        "times_faster_than_highs": {
            str(buckets): statistics.median(found) for buckets, found in speed_ups.items()
        },
        "longer_than_the_best": {
            name: {"mean": float(excess.mean()), "max": float(excess.max())}
            for name, excess in worth.items()
        },
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def rows_ms(times: Times) -> list[dict[str, float]]:
    found = {place: spread(seconds) for place, seconds in times.items()}
    return [
        {
            "workers": workers,
            "buckets": buckets,
            "median": each.median_s * 1e3,
            "p10": each.p10_s * 1e3,
            "p90": each.p90_s * 1e3,
        }
        for (workers, buckets), each in found.items()
    ]


def show_times(solves: Times, highs: Times) -> None:
    table = Table(title="One solve, ms: median (p10-p90)", title_justify="left")
    table.add_column("workers", justify="right")
    for buckets in BUCKETS:
        table.add_column(f"{buckets} buckets", justify="right")
    for workers in WORKERS:
        table.add_row(f"{workers:,}", *(str(spread(solves[workers, k])) for k in BUCKETS))
    table.add_row(f"{_COMPARED:,}, by HiGHS", *(str(spread(highs[_COMPARED, k])) for k in BUCKETS))
    Console().print(table)


def show_worth(worth: dict[str, Floats]) -> None:
    table = Table(title="How much longer a step takes than with the best split, %")
    table.title_justify = "left"
    for name in ("split", "mean", "median", "max"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, excess in worth.items():
        numbers = (excess.mean(), np.median(excess), excess.max())
        table.add_row(name, *(f"{100 * number:.1f}" for number in numbers))
    Console().print(table)


def spread(seconds: list[float]) -> Spread:
    p10, median, p90 = np.percentile(seconds, [10, 50, 90]).tolist()
    return Spread(median, p10, p90)


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    return [n / d for n, d in zip(numerators, denominators, strict=True)]


def growth(times: Times, few: int, many: int, buckets: int) -> float:
    """Return how much faster than n log n the median time grows; below 1: not as fast."""
    measured = statistics.median(times[many, buckets]) / statistics.median(times[few, buckets])
    return measured / (many * math.log(many) / (few * math.log(few)))


def measure_solves(rounds: int) -> Times:
    """Return the time of one solve, for all sizes in turn."""
    random = np.random.default_rng(0)
    places = list(product(WORKERS, BUCKETS))
    times: Times = {place: [] for place in places}
    for workers, buckets in places:
        solve_s(random_cluster(random, workers, buckets))
    for _ in range(rounds):
        for workers, buckets in places:
            seconds, _ = solve_s(random_cluster(random, workers, buckets))
            times[workers, buckets].append(seconds)
    return times


def solve_s(cluster: Cluster) -> tuple[float, Optimum]:
    """Return how long one solve takes, and what it finds."""
    limits = Limits.of(len(cluster.fixed_s))
    models = [cluster.model() for _ in range(_IN_A_ROW)]
    solves = [timed(partial(optimal_split, each, cluster.global_batch, limits)) for each in models]
    return statistics.median(seconds for seconds, _ in solves), solves[0][1]


def compare_with_highs(rounds: int) -> tuple[Times, Times]:
    """Return our times and those of HiGHS, on the same clusters in turn."""
    random = np.random.default_rng(1)
    ours: Times = {(_COMPARED, buckets): [] for buckets in BUCKETS}
    highs: Times = {(_COMPARED, buckets): [] for buckets in BUCKETS}
    solve_s(random_cluster(random, _COMPARED, BUCKETS[0]))
    for _ in range(rounds):
        for place in ours:
            cluster = random_cluster(random, *place)
            problem = linear_program(cluster)
            seconds, best = solve_s(cluster)
            highs_s, found = timed(partial(linprog, **problem, method="highs"))
            if not math.isclose(found.fun, best.level_s, rel_tol=_AGREEMENT):
                raise RuntimeError(
                    f"HiGHS finds {found.fun} s ({found.message}) and Poise {best.level_s} s; "
                    "the two solve the same problem, so one is wrong"
                )
            ours[place].append(seconds)
            highs[place].append(highs_s)
    return ours, highs


def engine_update_s(workers: int, buckets: int, steps: int) -> list[float]:
    """Return the time of each engine update in a virtual training."""
    random = np.random.default_rng(2)
    cluster = random_cluster(random, workers, buckets)
    truth = cluster.model()
    timetable, engine = Engine(Auto(), workers, cluster.global_batch).start()
    times = []
    for step in range(steps):
        noise = np.exp(0.05 * random.standard_normal(workers))
        seen = observe(truth, step, 0, timetable.at(step).split, noise)
        seconds, (plan, engine) = timed(partial(engine.update, [seen], step + 2))
        times.append(seconds)
        timetable = timetable if plan is None else timetable.announce(plan)
    return times


def linear_program(cluster: Cluster) -> dict[str, Any]:
    """Return linprog's arguments: minimize T with start + slope b <= T, sum b = B, b >= 1."""
    workers, buckets = cluster.fixed_s.shape
    tails = np.cumsum(cluster.bucket_s[::-1])[::-1]
    lines = np.arange(workers * buckets)
    columns = np.concatenate([1 + lines // buckets, np.zeros_like(lines)])
    values = np.concatenate([cluster.per_sample_s.ravel(), np.full(lines.size, -1.0)])
    return {
        "c": np.eye(1, 1 + workers)[0],
        "A_ub": csr_array((values, (np.tile(lines, 2), columns))),
        "b_ub": -(cluster.fixed_s + tails).ravel(),
        "A_eq": csr_array(np.append(0.0, np.ones(workers))[None]),
        "b_eq": [cluster.global_batch],
        "bounds": [(0, None), *[(1, None)] * workers],
    }


def measure_worth(clusters: int) -> dict[str, Floats]:
    """Return how much longer a step takes with other splits, as parts of the best step."""
    random = np.random.default_rng(2)
    found: dict[str, list[float]] = {name: [] for name in SPLITS}
    for _ in range(clusters):
        cluster = random_cluster(random, int(random.integers(2, 17)), int(random.choice(BUCKETS)))
        model = cluster.model()
        best = optimal_split(model, cluster.global_batch)
        for name, split in SPLITS.items():
            found[name].append(model.step_s(split(cluster)) / best.step_s - 1)
    return {name: np.array(excess) for name, excess in found.items()}


def even(cluster: Cluster) -> Split:
    return even_split(len(cluster.fixed_s), cluster.global_batch)


def inverse_time(cluster: Cluster) -> Split:
    """Shares by samples per second, measured once with the even split."""
    per_sample, fixed = cluster.compute
    local = np.array(even(cluster))
    speed = local / (per_sample * local + fixed)
    units = (speed / speed.sum() * _SHARE_UNITS).astype(np.int64)
    return apportion(units.tolist(), cluster.global_batch)


def equal_compute(cluster: Cluster) -> Split:
    """Compute times as equal as whole samples allow, the reduction left out (LB-BSP)."""
    per_sample, fixed = cluster.compute
    return optimal_split(SpeedModel.of(fixed, per_sample), cluster.global_batch).split


SPLITS: dict[str, Callable[[Cluster], Split]] = {
    "even": even,
    "inverse time per sample": inverse_time,
    "equal compute time": equal_compute,
}


def random_cluster(random: np.random.Generator, workers: int, buckets: int) -> Cluster:
    """Return workers of random speeds in the papers' form: forward, then backward in buckets."""
    slowness = 1e-3 * _SPREAD ** random.uniform(0, 1, workers)
    backward = slowness * random.uniform(0.5, 0.8, workers)
    fixed_samples = random.uniform(0, 20, workers)
    done = np.append(np.sort(random.uniform(0.05, 0.95, buckets - 1)), 1.0)
    per_sample = (slowness - backward)[:, None] + backward[:, None] * done
    reduction_s = float(backward.mean()) * _SAMPLES_PER_WORKER
    return Cluster(
        per_sample * fixed_samples[:, None],
        per_sample,
        random.dirichlet(np.ones(buckets)) * reduction_s,
        np.stack([slowness, slowness * fixed_samples]),
        _SAMPLES_PER_WORKER * workers,
    )


def timed(call: Callable[[], Found]) -> tuple[float, Found]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


if __name__ == "__main__":
    main()

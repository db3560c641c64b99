"""How long training takes when the global batch follows the gradient noise, and against what.

Run: `python benchmarks/adaptive.py [--quick | --smoke] [--json] [--plot FILE] [--only NAME ...]`.
`--quick` takes less than three minutes once data and AdaptDL are set up: one task, one seed, fewer
samples and fixed batches; the bars are the same. All takes about 45 minutes.

**Tasks.** images: Fashion-MNIST, a small convolutional network, SGD with momentum. text: the King
James text, a character transformer, AdamW; accuracy is that of the next character. The learning
rate is chosen for the starting batch by accuracy after a fixed number of samples, in one process
and before any comparison; it has no schedule. A training ends after a fixed number of samples. The
target is an accuracy that the starting batch reaches well before that.

**Cluster.** Four workers under CPU quotas in the core ratios of OmniLearn's heterogeneity level 8
(6/6/4/32), scaled to 1.35 cores in all, one torch thread each, in `poise.lab`.

**Trainings.** ddp: DistributedDataParallel with the starting batch. fixed N: Poise, balanced, with
the global batch N and the learning rate times the square root of N over the starting batch.
adaptive: Poise with a range of global batches, from the starting batch on. adaptdl: AdaptDL 0.2.11
in its own environment on a second lab with the same quotas, same start, learning rate and highest
batch; what it needs to run here and to decide as often as in a long training is in
`adaptive_adaptdl.py`. All trainings of a seed are under way at the same time and take turns of
about two seconds in random order, since the machine's own speed changes from one minute to the
next. A training's time is that of its own steps, worker 0's, from the first on. Weights are kept
at equal distances in samples and tested after all training is over, so tests take none of it.

**Figures.** Time to the target: the first time at which the accuracy, as its mean with the tests
before and after it, reaches the target, on a line between tests. Best fixed batch: the one with
the least time, known in hindsight; geometric mean over seeds. Faster beyond seed noise: the upper
end of the one-sided 95 % t-interval of the mean log ratio over seeds is below 1; with one seed,
the ratio itself. A training that never reaches the target counts with all its time, which favors
it. Final accuracy: mean of the last three tests; not below beyond seed noise means that the upper
end of the one-sided 95 % t-interval of the mean difference is at least 0; with one seed, the
difference itself. Noise measurement: CPU time of a step, over all workers, of Poise with a range
of one batch, which measures and never moves, over that with a fixed batch, minus 1: median over
blocks of eight steps that take turns, on two equal workers with a core each.
"""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from adaptive_runs import PEER, SPEEDS, Amount, Runs, Trained, run
from adaptive_setup import Say, SetUpFailed
from adaptive_tasks import TASKS, Task
from adaptive_turns import Settings
from adaptive_worker import measuring_cost
from figures import Figure, Interval, as_json, judged, paired_ratio, show
from options import Effort, options
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student
from workers import end_on_sigterm, run_workers

SEEDS = (1, 2, 3)
BEST_BAR = 1.10
MEASURING_BAR = 0.01
PAPERS = {"ddp": 0.85, PEER: 0.52}
"""What Cannikin reports to save, at most, against each."""

_CONFIDENCE = 0.95
_COST_WORKERS = 2
_COST_LIMIT_S = 300.0


@dataclass(frozen=True)
class Found:
    """All that was measured of one task."""

    task: Task
    amount: Amount
    runs: dict[int, Runs]
    """By seed."""
    cost: dict[str, list[float]]
    """CPU seconds of steps, by what is done in them."""

    @property
    def names(self) -> list[str]:
        """The trainings."""
        return list(next(iter(self.runs.values())))

    @property
    def peers(self) -> list[str]:
        """Those that adaptive is compared with."""
        return [name for name in PAPERS if name in self.names]

    def each(self, name: str) -> list[Trained]:
        """Return a training with every seed."""
        return [runs[name] for runs in self.runs.values()]

    def times(self, name: str) -> list[float]:
        """Return the times to the target; all its time where a training never reaches it."""
        target = self.amount.target
        return [each.seconds_to(target) or each.seconds() for each in self.each(name)]

    def reached(self, name: str) -> bool:
        """Whether a training reaches the target with every seed."""
        return all(each.seconds_to(self.amount.target) is not None for each in self.each(name))

    def ratios(self, name: str, other: str) -> list[float]:
        """Return the time of one training over that of another, for each seed."""
        pairs = zip(self.times(name), self.times(other), strict=True)
        return [mine / its for mine, its in pairs]

    @property
    def best_fixed(self) -> str | None:
        """The fixed batch with the least time to the target; None: none reaches it."""
        fixed = [n for n in self.names if n.startswith("fixed") and self.reached(n)]
        return min(fixed, key=lambda name: geometric_mean(self.times(name)), default=None)

    @property
    def start(self) -> str:
        """The training that differs from ddp by its balance alone."""
        return f"fixed {self.task.global_batch}"


def geometric_mean(values: Sequence[float]) -> float:
    """Return the mean that is fair to ratios."""
    return math.exp(statistics.mean(math.log(value) for value in values))


def upper_end(values: Sequence[float]) -> float:
    """Return the upper end of the one-sided t-interval of the mean; of one value, itself."""
    mean, count = statistics.mean(values), len(values)
    if count == 1:
        return mean
    error = statistics.stdev(values) / math.sqrt(count)
    return mean + float(student.ppf(_CONFIDENCE, count - 1)) * error


def figures(found: Found) -> list[Figure]:
    """Return what one task's trainings have to meet."""
    name = found.task.name
    return [
        _best_figure(found),
        *(_faster_figure(found, other) for other in found.peers),
        _accuracy_figure(found),
        Figure(
            f"{name}: noise measurement, part of a step",
            measuring(found.cost).median - 1,
            "at most",
            MEASURING_BAR,
        ),
    ]


def _best_figure(found: Found) -> Figure:
    best, ratio = found.best_fixed, math.nan
    if best is not None and found.reached("adaptive"):
        ratio = geometric_mean(found.ratios("adaptive", best))
    return Figure(f"{found.task.name}: adaptive / best fixed batch", ratio, "at most", BEST_BAR)


def _faster_figure(found: Found, other: str) -> Figure:
    logs = [math.log(ratio) for ratio in found.ratios("adaptive", other)]
    high = math.exp(upper_end(logs)) if found.reached("adaptive") else math.nan
    return Figure(f"{found.task.name}: adaptive / {other}, upper end", high, "below", 1.0)


def _accuracy_figure(found: Found) -> Figure:
    pairs = zip(found.each("adaptive"), found.each("ddp"), strict=True)
    high = upper_end([mine.final - its.final for mine, its in pairs])
    label = f"{found.task.name}: final accuracy, adaptive - ddp, upper end"
    return Figure(label, high, "at least", 0.0)


def measuring(cost: dict[str, list[float]]) -> Interval:
    """Return the CPU time of a step that measures the noise over that of one that does not."""
    return paired_ratio(cost["measured"], cost["plain"])


def notes(found: Found) -> dict[str, str]:
    """Return what helps to read the figures."""
    name, best = found.task.name, found.best_fixed
    measured, again = measuring(found.cost), paired_ratio(found.cost["again"], found.cost["plain"])
    return {
        f"{name}: best fixed batch": "none reaches the target" if best is None else best,
        **{f"{name}: {reduction(found, other)}": explained(found, other) for other in found.peers},
        f"{name}: step with / without measuring the noise": f"{measured}, A/A {again}",
    }


def reduction(found: Found, other: str) -> str:
    """Return how much time is saved against another training, beside what Cannikin reports."""
    saved = 1 - geometric_mean(found.ratios("adaptive", other))
    return f"{saved:.0%} less time than {other} (Cannikin: up to {PAPERS[other]:.0%})"


def explained(found: Found, other: str) -> str:
    """Return the parts of a reduction, as factors of time whose product is the whole."""
    target = found.amount.target
    samples = geometric_mean(
        [
            _samples_to(mine, target) / _samples_to(its, target)
            for mine, its in zip(found.each("adaptive"), found.each(other), strict=True)
        ]
    )
    whole = geometric_mean(found.ratios("adaptive", other))
    speed = whole / samples
    parts = f"samples needed x {samples:.2f}, time per sample x {speed:.2f}"
    if other == "ddp" and found.start in found.names:
        balance = _per_sample(found, found.start) / _per_sample(found, other)
        ceiling = min(SPEEDS) / statistics.mean(SPEEDS)
        parts += (
            f" (balancing at the same batch x {balance:.2f}, by the cores not below "
            f"{ceiling:.2f}; a larger batch x {speed / balance:.2f})"
        )
    if other == PEER:
        own = _per_sample(found, PEER) / _per_sample(found, "ddp")
        refit_s = statistics.mean(each.states[-1][1]["refit_s"] for each in found.each(PEER))
        parts += f" (its own is x {own:.2f} of ddp's, without {refit_s:.1f} s of refits)"
    return parts


def _samples_to(trained: Trained, target: float) -> float:
    return trained.samples_to(target) or sum(trained.batches)


def _per_sample(found: Found, name: str) -> float:
    """Return seconds per sample over whole trainings."""
    return geometric_mean([each.seconds() / sum(each.batches) for each in found.each(name)])


def table_of(found: Found) -> Table:
    """Return all trainings of a task."""
    seeds = ", ".join(map(str, found.runs))
    title = f"{found.task.title}: until {found.amount.target:.1%}, seeds {seeds}"
    table = Table(title=title, title_justify="left")
    table.add_column("training")
    for heading in ("time s", "each seed", "samples", "batch", "step ms", "all s", "accuracy"):
        table.add_column(heading, justify="right")
    for name in found.names:
        trained, reached = found.each(name), found.reached(name)
        samples = statistics.mean(_samples_to(each, found.amount.target) for each in trained)
        batches = [batch for each in trained for batch in each.batches]
        table.add_row(
            name,
            f"{'' if reached else 'more than '}{geometric_mean(found.times(name)):.1f}",
            " ".join(f"{time_s:.1f}" for time_s in found.times(name)),
            f"{samples:,.0f}",
            _range(batches),
            f"{statistics.median(s for each in trained for s in each.step_s) * 1e3:.0f}",
            f"{statistics.mean(each.seconds() for each in trained):.1f}",
            f"{statistics.mean(each.final for each in trained):.2%}",
        )
    return table


def _range(batches: Sequence[int]) -> str:
    low, middle, high = (round(float(each)) for each in np.percentile(batches, [5, 50, 95]))
    return f"{middle}" if low == high else f"{low}-{middle}-{high}"


def cost_of_measuring(task: Task, data: Path, effort: Effort) -> dict[str, list[float]]:
    """Return CPU seconds of steps with and without measuring the noise."""
    settings = Settings(
        task=task.name,
        seed=1,
        data=str(data),
        trainings=[],
        samples=sys.maxsize,
        snapshots=0,
        folder="",
        port=0,
    )
    rounds = {"full": 80, "quick": 12, "smoke": 2}[effort]
    results = run_workers(
        measuring_cost, settings, rounds, workers=_COST_WORKERS, limit_s=_COST_LIMIT_S
    )
    found: dict[str, list[float]] = results[0]
    return found


def measured(task: Task, seeds: Sequence[int], say: Say, effort: Effort) -> Found:
    """Run all of one task."""
    amount = Amount.of(task, effort)
    cost = cost_of_measuring(task, amount.data(task, say), effort)
    runs = {}
    for seed in seeds:
        say(f"{task.name}, seed {seed}")
        runs[seed] = run(task, amount, seed, say)
    return Found(task, amount, runs, cost)


def as_series(found: Found) -> dict[str, Any]:
    """Return what was measured as plain data, so that pictures can be drawn again."""
    runs = {
        str(seed): {name: asdict(trained) for name, trained in runs.items()}
        for seed, runs in found.runs.items()
    }
    return {"amount": asdict(found.amount), "runs": runs, "cost": found.cost}


def main() -> int:
    """Run the benchmark; return 0 whatever it finds: bars are for readers."""
    parser = options(__doc__.splitlines()[0] if __doc__ else "", quick="less than three minutes")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), help="tasks to run")
    parser.add_argument("--seeds", nargs="+", type=int, help=f"instead of {SEEDS}")
    parser.add_argument("--plot", metavar="FILE", help="draw the trainings into a .png or .svg")
    arguments = parser.parse_args()
    end_on_sigterm()
    errors, begun_s = Console(stderr=True, highlight=False), time.monotonic()

    def say(text: str) -> None:
        errors.print(f"{time.monotonic() - begun_s:4.0f} s  {text}", markup=False)

    whole = arguments.effort == "full"
    names = arguments.only or (list(TASKS) if whole else ["images"])
    seeds = arguments.seeds or (SEEDS if whole else SEEDS[:1])
    try:
        all_found = [measured(TASKS[name], seeds, say, arguments.effort) for name in names]
    except SetUpFailed as error:
        sys.exit(str(error))
    all_figures = [figure for found in all_found for figure in figures(found)]
    all_figures = judged(all_figures, arguments.effort)
    all_notes = {label: text for found in all_found for label, text in notes(found).items()}
    series = {found.task.name: as_series(found) for found in all_found}
    if arguments.plot:
        from adaptive_plot import plot

        plot(series, Path(arguments.plot))
    if arguments.json:
        print(as_json("adaptive", all_figures, {"notes": all_notes, "tasks": series}))
        return 0
    console = Console()
    for found in all_found:
        console.print(table_of(found))
    show("Adapting the global batch", all_figures, all_notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast workers of unequal speed train under each policy, and how near to the best that is.

Run: `python benchmarks/balance.py [--quick | --smoke] [--json] [--plot FILE] [--only NAME ...]`.
`--quick` takes less than three minutes and measures fewer clusters and policies, fewer times; the
bars are the same.

**Clusters.** HL1, HL2, HL4 and HL8: four workers under CPU quotas in OmniLearn's core ratios
(12/12/12/12, 12/12/8/16, 9/9/6/24, 6/6/4/32), scaled to 1.35 cores in all, training a small
convolutional network. paced-16: sixteen workers that sleep, in the mix of Cannikin's cluster (4
A100, 4 V100, 8 RTX 6000), with real gradients and real traffic. link: two workers of unequal speed
on slow links, with a model whose reduction takes longer than its computation. All run in
`poise.lab`, in processes that stay the same for all policies, one torch thread each.

**Policies.** even is plain DistributedDataParallel; the others are Poise's by name, each from its
first step on. The oracle is the better of two fixed splits, by measured step time: the best one
for ready lines that are measured apart, before, around the best split so far (a least-squares line
per worker and bucket, and the least reduction times), and the one in proportion to the cores. All
trainings of a round are under way at the same time and take turns, in blocks of 6 steps and in
random order, since the machine's own speed changes from one minute to the next; ratios are taken
within a round.

**Figures.** Steady: median of a training's last 12 steps. 15 steps after start: the median of
steps 13 to 17 of all rounds over that of the last 12, relative to the same for fixed splits (the
oracle's and static), whose steps change with the machine alone. Slowdown: one worker's
speed is divided by 4 at step 30; the median of steps 13 to 17 after it, over that of the oracle
for the new speeds at the same time. Walk: the speeds go HL 1-2-4-8-8-4-2-1; the whole time over
that of the oracle of each part. Prediction: difference between the mean step time that worker 0
predicts before the last 12 steps and what they take, where the split stays; beside it, by how much
the means of fixed splits change from 12 steps to the next 12. Reduction: what auto
saves against even, in parts of what the oracle saves.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

from balance_worker import BLOCK, SLOW_AT, Settings
from figures import Figure, as_json, bootstrap, judged, show
from options import Effort, options
from rich.console import Console
from rich.table import Table
from workers import end_on_sigterm

from poise.cli.worker_messages import receive
from poise.lab import Lab
from poise.sim.scenes import CORES, WALK

TOTAL_CORES = 1.35
STEADY_BAR = {"throttled": 1.05, "paced": 1.02}
PREDICTION_BAR = {"throttled": 0.07, "paced": 0.03}
START_BAR = 1.05
SLOWDOWN_BAR = 1.10
WALK_BAR = 1.05
REDUCTION_BAR = 0.95
LEAST_REDUCTION = 0.1
"""Where the oracle saves less than this part, a ratio of savings says nothing."""

_WORKER = Path(__file__).parent / "balance_worker.py"
_OTHERS = ("static", "proportional", "lbbsp", "optperf")
_MIX = [1.0] * 4 + [0.5] * 4 + [0.35] * 8
_STEADY = 2 * BLOCK
_FIFTEEN = slice(13, 18)
_TRIMMED = 2
"""Of the longest and of the shortest steps, so many are left out of a mean."""


@dataclass(frozen=True)
class Cluster:
    """What to run where."""

    name: str
    kind: str
    settings: Settings
    lab: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """One training as worker 0 saw it."""

    step_s: list[float]
    splits: list[list[int]]
    """Before each block of steps."""
    predicted: list[float | None]
    """The step time that was expected then."""

    @property
    def steady_s(self) -> float:
        """The median of the last steps."""
        return statistics.median(self.step_s[-min(_STEADY, len(self.step_s) - 3) :])

    @property
    def prediction_error(self) -> float:
        """How far the prediction before the last blocks is off; NaN if the split changed there."""
        blocks = _STEADY // BLOCK
        predicted, last = self.predicted[-blocks], self.splits[-blocks:]
        if predicted is None or any(split != last[0] for split in last):
            return math.nan
        return abs(predicted / _mean(self.step_s[-_STEADY:]) - 1)

    @property
    def change(self) -> float:
        """By how much the mean of the last steps differs from that of the steps before."""
        before = self.step_s[-2 * _STEADY : -_STEADY]
        return abs(_mean(before) / _mean(self.step_s[-_STEADY:]) - 1)


Results = dict[str, list[Trained]]
"""By policy, one for each round."""


def hl(level: int) -> list[float]:
    """Return the speeds of a heterogeneity level."""
    cores = CORES[level]
    return [TOTAL_CORES * each / sum(cores) for each in cores]


def clusters(effort: Effort) -> list[Cluster]:
    """Return what to run."""
    if effort == "smoke":
        return _smoke()
    quick = effort == "quick"
    throttled = Settings(
        speeds=[],
        global_batch=240,
        model="images",
        rounds=2 if quick else 5,
        policies=["even", "auto"] if quick else ["even", *_OTHERS, "auto"],
        oracles=["lines"] if quick else ["lines", "cores"],
        steps=24 if quick else 36,
        even_steps=6 if quick else 12,
        calibrations=1 if quick else 3,
    )
    found = []
    for level in (1, 8) if quick else (1, 2, 4, 8):
        slower = {} if quick or level > 1 else _slower(hl(level), worker=1)
        rounds = throttled.rounds if level in (1, 8) else 3
        settings = replace(throttled, speeds=hl(level), rounds=rounds, **slower)
        found.append(Cluster(f"HL{level}", "throttled", settings))
    # Sixteen processes take most of a minute to start.
    paced = replace(throttled, speeds=_MIX, global_batch=512, model="points", oracles=["lines"])
    if quick:
        paced = replace(paced, rounds=1, steps=30)
    else:
        paced = replace(paced, **_slower(_MIX, worker=5))
    found.append(Cluster("paced-16", "paced", paced, {"pace": "3ms+30ms"}))
    return found if quick else [*found, _walk(throttled), _link(throttled)]


def _smoke() -> list[Cluster]:
    """Return two workers of each kind, for as few steps as figures can be taken of."""
    settings = Settings(
        speeds=[0.6, 0.3],
        global_batch=16,
        model="points",
        rounds=1,
        policies=["even", "auto"],
        oracles=["lines"],
        steps=4 * BLOCK,
        even_steps=BLOCK,
        calibrations=1,
    )
    return [
        Cluster("throttled-2", "throttled", settings),
        Cluster("paced-2", "paced", settings, {"pace": "1ms+5ms"}),
    ]


def _slower(speeds: Sequence[float], worker: int) -> dict[str, Any]:
    slow = [speed / 4 if number == worker else speed for number, speed in enumerate(speeds)]
    return {"slow_speeds": slow}


def _walk(throttled: Settings) -> Cluster:
    settings = replace(
        throttled,
        speeds=hl(1),
        rounds=1,
        policies=["proportional", "lbbsp", "auto"],
        steps=8 * BLOCK,
        walk=[hl(level) for level in WALK],
    )
    return Cluster("walk", "throttled", settings)


def _link(throttled: Settings) -> Cluster:
    policies = ["even", "proportional", "lbbsp", "auto"]
    settings = replace(
        throttled,
        speeds=[0.9, 0.3],
        global_batch=192,
        model="heavy",
        policies=policies,
        rounds=3,
    )
    return Cluster("link", "throttled", settings, {"link": "200mbit"})


def run(cluster: Cluster, say: Callable[[str], None]) -> Results:
    """Run a cluster's trainings in a lab; return them by policy."""
    results: Results = defaultdict(list)
    settings = json.dumps(asdict(cluster.settings))
    with Lab(cluster.settings.speeds, **cluster.lab) as lab:
        workers = lab.start([str(_WORKER), settings], stdout=PIPE)
        for _, message in receive(workers):
            if "speeds" in message:
                lab.set_speeds(message["speeds"])
            else:
                label = message.pop("label")
                found = Trained(**message)
                results[label].append(found)
                say(f"{cluster.name} {label}: {found.steady_s * 1e3:.0f} ms {found.splits[-1:]}")
    return results


def oracle(results: Results, prefix: str = "oracle") -> list[Trained]:
    """Return the trainings of the better candidate for the best split."""
    candidates = [runs for label, runs in results.items() if label.startswith(prefix)]
    return min(candidates, key=lambda runs: statistics.median(_steady(runs)))


def figures(cluster: Cluster, results: Results) -> list[Figure]:
    """Return what one cluster's trainings have to meet."""
    if cluster.name == "walk":
        return [_walk_figure(cluster, results)]
    if cluster.name == "link":
        return [_not_above(cluster.name, other, results) for other in ("proportional", "lbbsp")]
    found = [*_steady_figures(cluster, results), *_reduction_figures(cluster.name, results)]
    others = [_not_above(cluster.name, other, results) for other in _OTHERS if other in results]
    if others:
        found.append(max(others, key=lambda each: each.figure))
    if "slowdown" in results:
        found.append(_slowdown_figure(cluster.name, results))
    return found


def _steady_figures(cluster: Cluster, results: Results) -> list[Figure]:
    name, kind, auto, best = cluster.name, cluster.kind, results["auto"], oracle(results)
    ratio = _median_ratio(_steady(auto), _steady(best))
    machine = statistics.median(_early(runs) for runs in _fixed(results))
    errors = [each.prediction_error for each in auto if not math.isnan(each.prediction_error)]
    error = statistics.mean(errors) if errors else math.nan
    start = f"{name}: 15 steps after start / steady"
    return [
        Figure(f"{name}: auto / oracle, steady", ratio, "at most", STEADY_BAR[kind]),
        Figure(start, _early(auto) / machine, "at most", START_BAR),
        Figure(f"{name}: prediction error, mean", error, "at most", PREDICTION_BAR[kind]),
    ]


def _reduction_figures(name: str, results: Results) -> list[Figure]:
    """Return what auto saves against even shares, where there is something to save."""
    even = _steady(results["even"])
    saved = 1 - _median_ratio(_steady(oracle(results)), even)
    if saved < LEAST_REDUCTION:
        return []
    part = (1 - _median_ratio(_steady(results["auto"]), even)) / saved
    return [Figure(f"{name}: reduction of auto / of the oracle", part, "at least", REDUCTION_BAR)]


def _not_above(name: str, other: str, results: Results) -> Figure:
    """Return how auto compares with another policy; what noise allows counts as a tie."""
    pairs = zip(_steady(results["auto"]), _steady(results[other]), strict=True)
    low = bootstrap([auto_s / other_s for auto_s, other_s in pairs]).low
    return Figure(f"{name}: auto / {other}, lower end", low, "at most", 1.0)


def _slowdown_figure(name: str, results: Results) -> Figure:
    best = oracle(results, "slowdown oracle")
    ratios = [
        statistics.median(mine.step_s[SLOW_AT:][_FIFTEEN]) / its.steady_s
        for mine, its in zip(results["slowdown"], best, strict=True)
    ]
    label = f"{name}: 15 steps after a 4x slowdown / the new oracle"
    return Figure(label, statistics.median(ratios), "at most", SLOWDOWN_BAR)


def _walk_figure(cluster: Cluster, results: Results) -> Figure:
    return Figure("walk: auto / oracle", _walked(cluster, results, "auto"), "at most", WALK_BAR)


def _walked(cluster: Cluster, results: Results, policy: str) -> float:
    """Return the whole time of a policy over that of the better oracle of each part."""
    part = cluster.settings.steps
    candidates = [runs for label, runs in results.items() if label.startswith("oracle")]
    ratios = []
    for number, mine in enumerate(results[policy]):
        best_s = sum(
            min(sum(runs[number].step_s[at : at + part]) for runs in candidates)
            for at in range(0, len(mine.step_s), part)
        )
        ratios.append(sum(mine.step_s) / best_s)
    return statistics.median(ratios)


def _fixed(results: Results) -> list[list[Trained]]:
    """Return the trainings whose split never changes: what changes is the machine."""
    return [runs for label, runs in results.items() if label.startswith(("oracle", "static"))]


def _early(runs: Sequence[Trained]) -> float:
    """Return how much longer steps take 15 steps after the start than at the end."""
    early = [step_s for each in runs for step_s in each.step_s[_FIFTEEN]]
    late = [step_s for each in runs for step_s in each.step_s[-_STEADY:]]
    return statistics.median(early) / statistics.median(late)


def _mean(times: Sequence[float]) -> float:
    return statistics.mean(sorted(times)[_TRIMMED:-_TRIMMED])


def _steady(runs: Sequence[Trained]) -> list[float]:
    return [each.steady_s for each in runs]


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(numerator / denominator for numerator, denominator in pairs)


def notes(cluster: Cluster, results: Results) -> dict[str, str]:
    """Return what helps to read the figures."""
    if cluster.name == "walk":
        others = [name for name in _OTHERS if name in results]
        ratios = (f"{name} {_walked(cluster, results, name):.3f}" for name in others)
        return {"walk: others / oracle": ", ".join(ratios)}
    if cluster.name == "link":
        return {}
    changes = [each.change for runs in _fixed(results) for each in runs]
    text = f"{statistics.mean(changes):.1%} from 12 steps to the next 12, mean"
    return {f"{cluster.name}: fixed splits' own change": text}


def table_of(cluster: Cluster, results: Results) -> Table:
    """Return the step times of one cluster's trainings."""
    speeds, even = cluster.settings.speeds, _steady(results.get("even", []))
    ceiling = 1 - min(speeds) / statistics.mean(speeds)
    title = f"{cluster.name}: ceiling of the reduction {ceiling:.0%}" if even else cluster.name
    table = Table(title=title, title_justify="left")
    for heading in ("policy", "steady ms", "spread", "against even", "all steps s", "split"):
        table.add_column(heading, justify="left" if heading in ("policy", "split") else "right")
    for label, runs in results.items():
        times = sorted(_steady(runs))
        same = len(times) == len(even)
        table.add_row(
            label,
            f"{statistics.median(times) * 1e3:.0f}",
            f"{times[0] * 1e3:.0f}-{times[-1] * 1e3:.0f}",
            f"{_median_ratio(_steady(runs), even) - 1:+.0%}" if same else "",
            f"{statistics.median(sum(each.step_s) for each in runs):.1f}",
            str(runs[-1].splits[-1] if runs[-1].splits else "even"),
        )
    return table


def main() -> int:
    """Run the benchmark; return 0 whatever it finds: bars are for readers."""
    parser = options(__doc__.splitlines()[0] if __doc__ else "", quick="less than three minutes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="clusters to run")
    parser.add_argument("--plot", metavar="FILE", help="draw step times into a .png or .svg")
    arguments = parser.parse_args()
    end_on_sigterm()
    errors = Console(stderr=True, highlight=False)
    found: dict[str, tuple[Cluster, Results]] = {}
    all_figures: list[Figure] = []
    all_notes: dict[str, str] = {}
    for cluster in clusters(arguments.effort):
        if arguments.only and cluster.name not in arguments.only:
            continue
        results = run(cluster, lambda text: errors.print(text, markup=False))
        found[cluster.name] = (cluster, results)
        all_figures += figures(cluster, results)
        all_notes |= notes(cluster, results)
    all_figures = judged(all_figures, arguments.effort)
    if arguments.plot:
        from balance_plot import plot

        plot({name: results for name, (_, results) in found.items()}, Path(arguments.plot))
    if arguments.json:
        runs = {
            name: {label: [asdict(each) for each in runs] for label, runs in results.items()}
            for name, (_, results) in found.items()
        }
        print(as_json("balance", all_figures, {"notes": all_notes, "runs": runs}))
        return 0
    console = Console()
    for cluster, results in found.values():
        console.print(table_of(cluster, results))
    show("Balancing workers of unequal speed", all_figures, all_notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How much longer training takes with each policy than with an oracle's splits, on virtual workers.

Run: `python benchmarks/policies.py [--quick | --smoke] [--json]`. `--quick` takes less than three
minutes: 3 seeds instead of 20. The bars are the same. Nothing here depends on the machine: virtual
workers, a virtual clock, seeded noise; the same run prints the same numbers.

**The walk.** OmniLearn's: 4 workers whose cores change through the heterogeneity levels
1-2-4-8-8-4-2-1, 200 steps each, at a constant sum of cores; a fifth of an even step is fixed cost;
measured times scatter by 5 % (cv). A plan starts two steps after it is announced. Regret is the sum
of the step times, without noise, over that of an oracle who knows the walk, minus 1; shown are the
median and the largest over seeds, and how often the split changed. An epoch is 200 steps, which
is what optperf waits for; static shares are those of the first level and never change.

**Bent times.** The same walk where times are no lines: b^0.8, tiles of 8, a knee at 80 samples; and
with noise that lasts (correlation 0.8 between neighboring steps).

**High fixed cost.** Constant clusters in which 90 % of an even step is fixed cost, noise 10 %:
after how many windows of 20 steps the split is within 2 % of the best, the slowest of all seeds and
four clusters. Where every worker has its own fixed cost, as a slow machine has, there is a bar.
Where the fixed cost is the same for all, less than the noise of a window is to be gained, and the
numbers are shown without one.

**Equal workers.** Noise of 10 %, in one case with a correlation of 0.6: how often the split changes
in 200 steps, and what that costs.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from figures import Figure, as_json, judged, show
from options import options
from rich.console import Console
from rich.table import Table

from poise.core.timing import SpeedModel
from poise.policy import Auto, Even, LbBsp, OptPerf, Policy, Proportional, Static
from poise.sim.scenario import Noise
from poise.sim.scenes import BENDS, CORES, by_cores, walk
from poise.sim.simulate import simulate
from poise.sim.truth import Truth

GLOBAL_BATCH = 240
POLICIES: dict[str, Policy] = {
    "auto": Auto(),
    "proportional": Proportional(),
    "lbbsp": LbBsp(),
    "optperf": OptPerf(),
    "static": Static(CORES[1]),
    "even": Even(),
}
SPEEDS = [(1, 1, 1, 1), (1, 1.2, 0.8, 1.1), (2, 1, 1, 0.5), (32, 6, 6, 4)]
WINDOW = 20
REGRET_BAR, WINDOWS_BAR = 0.02, 7


@dataclass(frozen=True)
class Amount:
    """How much is simulated."""

    seeds: int
    steps: int
    """Of a walk; all of it are 1600."""
    short_seeds: int
    """Of the short trainings on constant clusters."""


AMOUNTS = {
    "full": Amount(seeds=20, steps=1600, short_seeds=100),
    "quick": Amount(seeds=3, steps=1600, short_seeds=15),
    "smoke": Amount(seeds=1, steps=260, short_seeds=1),
}
Rows = dict[str, dict[str, list[float]]]
"""Regrets by scene and policy."""


def main() -> None:
    """Simulate, and print the figures."""
    parser = options("Policies against an oracle, on virtual workers.", quick="3 seeds, not 20")
    arguments = parser.parse_args()
    amount = AMOUNTS[arguments.effort]
    seeds = amount.seeds
    if not arguments.json:
        print("simulating, for some minutes at most", file=sys.stderr)
    regrets, changes = walks(seeds, amount.steps)
    own, common = (windows(amount.short_seeds, own=each) for each in (True, False))
    figures = [
        Figure(
            "regret of auto on the walk", median(regrets["walk"]["auto"]), "at most", REGRET_BAR
        ),
        *(
            Figure(
                f"auto / proportional, {scene}",
                median(found["auto"]) / median(found["proportional"]),
                "at most",
                1.0,
            )
            for scene, found in regrets.items()
        ),
        Figure("windows to 2 %, fixed cost 0.9", max(own), "at most", WINDOWS_BAR),
    ]
    slow = {
        "windows, own fixed cost": spread(own),
        "windows, common fixed cost": spread(common),
        "changes on equal workers": changes_on_equal_workers(amount.short_seeds),
    }
    figures = judged(figures, arguments.effort)
    if arguments.json:
        print(as_json("policies", figures, {"seeds": seeds, "regret": medians(regrets), **slow}))
        return
    show("Policies against an oracle", figures, {"seeds": str(seeds), **slow})
    show_regrets(regrets, changes)


def walks(seeds: int, steps: int) -> tuple[Rows, Rows]:
    """Return the regrets and the numbers of changes on each scene."""
    scenes: dict[str, tuple[Callable[[int], Truth], Noise]] = {
        "walk": (walk(), Noise(cv=0.05)),
        **{f"walk, {name}": (walk(bend=bend), Noise(cv=0.05)) for name, bend in BENDS.items()},
        "walk, lasting noise": (walk(), Noise(cv=0.05, correlation=0.8)),
    }
    regrets: Rows = {scene: {} for scene in scenes}
    changes: Rows = {scene: {} for scene in scenes}
    for scene, (truth_at, noise) in scenes.items():
        for name, policy in POLICIES.items():
            courses = [
                simulate(
                    policy,
                    truth_at,
                    global_batch=GLOBAL_BATCH,
                    steps=steps,
                    noise=noise,
                    seed=seed,
                    epoch_steps=200,
                )
                for seed in range(seeds if policy.online else 1)
            ]
            regrets[scene][name] = [course.regret for course in courses]
            changes[scene][name] = [len(course.plans) for course in courses]
    return regrets, changes


def windows(seeds: int, *, own: bool) -> list[float]:
    """Return how many windows auto takes to a split within 2 % of the best; infinity: not in 30."""
    found = []
    for speeds in SPEEDS:
        model = by_cores(speeds, fixed_share=0.9)
        if not own:
            model = SpeedModel.of(np.full(4, model.fixed_s.mean()), model.per_sample_s[:, 0])
        found += [windows_of(model, seed, 7 if own else 30) for seed in range(seeds)]
    return found


def changes_on_equal_workers(seeds: int) -> str:
    """Return how often auto leaves a split in 200 steps, where none is better than the first."""
    equal, found = by_cores(CORES[1]), []
    for label, correlation in (("noise", 0.0), ("lasting noise", 0.6)):
        courses = [
            simulate(
                Auto(),
                lambda _: equal,
                global_batch=GLOBAL_BATCH,
                steps=200,
                noise=Noise(cv=0.1, correlation=correlation),
                seed=seed,
            )
            for seed in range(seeds)
        ]
        regret = np.mean([course.regret for course in courses])
        changes = np.mean([len(course.plans) for course in courses])
        found.append(f"{label} of 10 %: {changes:.1f} on average, regret {regret:.1%}")
    return "; ".join(found)


def windows_of(truth: SpeedModel, seed: int, most: int) -> float:
    course = simulate(
        Auto(),
        lambda _: truth,
        global_batch=GLOBAL_BATCH,
        steps=most * WINDOW,
        noise=Noise(cv=0.1),
        seed=seed,
    )
    excess = course.step_s / course.best_s - 1
    reached = np.flatnonzero(excess[WINDOW - 1 :: WINDOW] <= REGRET_BAR + 1e-9)
    return float(reached[0] + 1) if reached.size else np.inf


def median(values: list[float]) -> float:
    return float(np.median(values))


def medians(rows: Rows) -> dict[str, Any]:
    return {
        scene: {name: median(found) for name, found in row.items()} for scene, row in rows.items()
    }


def spread(values: list[float]) -> str:
    never = sum(not np.isfinite(each) for each in values)
    p90, slowest = np.sort(values)[[int(0.9 * len(values)), -1]]
    return (
        f"median {median(values):.0f}, 90th percentile {p90:.0f}, slowest {slowest:.0f}, "
        f"not reached {never} of {len(values)}"
    )


def show_regrets(regrets: Rows, changes: Rows) -> None:
    table = Table(title="Regret, %: median (largest), changes of the split", title_justify="left")
    table.add_column("scene")
    for name in POLICIES:
        table.add_column(name, justify="right")
    for scene, row in regrets.items():
        table.add_row(
            scene,
            *(
                f"{100 * median(found):.1f} ({100 * max(found):.1f}), "
                f"{median(changes[scene][name]):.0f}"
                for name, found in row.items()
            ),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

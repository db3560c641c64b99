"""OmniLearn's experiments, on virtual workers: heterogeneity levels, static and dynamic.

Run: `make bench NAME=papers/omnilearn [ARGS="--quick --json"]`. `--quick` takes less than three
minutes: one seed instead of three, and asynchronous trainings of two fifths of the steps. The bars
are the same. Nothing here depends on the machine: virtual workers, a virtual clock, seeded noise.

**What is compared.** 4 workers at the heterogeneity levels HL1, HL2, HL4 and HL8 (most cores over
fewest), the walk HL 1-2-4-8-8-4-2-1, and 32 workers with the cores of the paper's artifact, whose
ratio is 16. Synchronous (BSP) and asynchronous (ASP). Uniform: the same local batch for all.
Static: by cores, on the walk by those of its first level. Dynamic: OmniLearn's controller (policy
proportional). Poise: policy auto.

**What is known of the paper.** Its abstract, and the core tables and batches of its artifact. What
a core computes is assumed, with all else, in `constants.toml`. Accuracy is not simulated.

**What balancing can do.** Synchronous: the steps of the best splits over those of even ones; the
textbook bound, fewest cores over mean cores, stands beside it. Asynchronous: nobody waits, so local
batches change the throughput by fixed costs alone; the ceiling is that of the best local batches.
What they change is staleness.

**Not circular.** The main rows again, on truths that no speed model here can represent.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from figures import Figure, as_json, judged, show
from omnilearn_runs import (
    ASP_TWISTS,
    DYNAMIC,
    LEVELS,
    MANY,
    SYSTEMS,
    TWISTS,
    Case,
    Result,
    run_all,
)
from options import options
from sheets import Sheet, less, percent

AMOUNTS: dict[str, tuple[int, dict[str, float]]] = {
    "full": (3, {"BSP": 1.0, "ASP": 1.0}),
    "quick": (1, {"BSP": 1.0, "ASP": 0.4}),
    "smoke": (1, {"BSP": 0.04, "ASP": 0.15}),
}
"""Seeds, and the part of the steps in each mode."""
PLACES = (*(f"HL{level}" for level in LEVELS), MANY, DYNAMIC)
TWISTED = ("HL8", DYNAMIC)
"""Where truths are tried that no model represents; with a server, the first only."""
OTHERS = ("static", "dynamic", "Poise")
DYNAMIC_BAR, CEILING_BAR, WALK_BAR, STALENESS_BAR = 1.05, 0.02, 1.05, 1.25
UNEQUAL = ("HL2", "HL4", "HL8", MANY, DYNAMIC)

Where = tuple[str, str, str]
"""Mode, place, twist."""


def main() -> None:
    """Simulate, and print the figures and tables."""
    parser = options("OmniLearn's experiments, on virtual workers.", quick="1 seed, shorter")
    arguments = parser.parse_args()
    seeds, parts = AMOUNTS[arguments.effort]
    if not arguments.json:
        print("simulating, for some minutes", file=sys.stderr)
    found = Found(seeds, parts)
    sheets = [synchronous(found), asynchronous(found), *not_circular(found)]
    sheets.append(beside_the_paper(found))
    figures = judged(figures_of(found), arguments.effort)
    if arguments.json:
        tables = [sheet.as_json() for sheet in sheets]
        print(as_json("papers/omnilearn", figures, {"seeds": seeds, "tables": tables}))
        return
    show("OmniLearn on virtual workers", figures, {"seeds": str(seeds)})
    for sheet in sheets:
        sheet.show()


BSP: list[Where] = [("BSP", place, "") for place in PLACES]
ASP: list[Where] = [("ASP", place, "") for place in PLACES]
BSP_TWISTED: list[Where] = [("BSP", place, twist) for place in TWISTED for twist in TWISTS if twist]
ASP_TWISTED: list[Where] = [("ASP", TWISTED[0], twist) for twist in ASP_TWISTS]


class Found:
    """The results, by place and system."""

    def __init__(self, seeds: int, parts: Mapping[str, float]) -> None:
        self._seeds = seeds
        self._parts = parts
        places = [*ASP, *ASP_TWISTED, *BSP, *BSP_TWISTED]
        cases = [case for where in places for system in SYSTEMS for case in self._of(where, system)]
        self._results = run_all(cases)

    def _of(self, where: Where, system: str) -> list[Case]:
        mode, place, twist = where
        part = self._parts[mode]
        return [Case(mode, place, system, twist, seed, part) for seed in range(self._seeds)]

    def all(self, where: Where, system: str) -> list[Result]:
        """Return the results of all seeds."""
        return [self._results[case] for case in self._of(where, system)]

    def median(self, where: Where, system: str, value: Callable[[Result], float]) -> float:
        """Return the median of a value over the seeds."""
        return float(np.median([value(result) for result in self.all(where, system)]))

    def ratio(self, where: Where, system: str, other: str) -> float:
        """Return how long a training takes compared with another one, by the same chance."""
        pairs = zip(self.all(where, system), self.all(where, other), strict=True)
        return float(np.median([one.clock_s / two.clock_s for one, two in pairs]))

    def saved(self, where: Where, system: str) -> float:
        """Return how much less time a training takes than with uniform local batches."""
        return 1 - self.ratio(where, system, "uniform")

    def throughput(self, where: Where, system: str) -> float:
        """Return the samples per second compared with uniform local batches."""
        pairs = zip(self.all(where, system), self.all(where, "uniform"), strict=True)
        return float(np.median([one.samples_per_s / two.samples_per_s for one, two in pairs]))

    def ceiling(self, where: Where) -> float:
        """Return the most that can be saved at the same global batch."""
        return self.median(where, "uniform", lambda result: result.ceiling)

    def stale(self, where: Where, system: str) -> tuple[float, float]:
        """Return the largest mean staleness of a worker, and the tail."""
        found = [result.staleness for result in self.all(where, system)]
        largest, tail = np.median(np.array([each for each in found if each]), axis=0)
        return float(largest), float(tail)


def named(where: Where) -> str:
    """Return what a row is called."""
    mode, place, twist = where
    return f"{mode} {place}" + (f", {twist}" if twist else "")


def bound(where: Where) -> str:
    """Return the textbook bound, 1 - min / mean of the cores; of the walk there is none."""
    cores = Case(where[0], where[1], "uniform").cores
    return "-" if where[1] == DYNAMIC else percent(1 - min(cores) / float(np.mean(cores)))


def saved_rows(found: Found, places: Sequence[Where]) -> list[list[Any]]:
    """Return the rows of synchronous trainings."""
    return [
        [
            named(where),
            found.median(where, "uniform", lambda result: result.clock_s) / 3600,
            *(less(found.saved(where, system)) for system in OTHERS),
            percent(found.ceiling(where)),
            bound(where),
            *(
                percent(found.median(where, system, lambda result: result.waiting))
                for system in SYSTEMS
            ),
        ]
        for where in places
    ]


SAVED = (
    "",
    "uniform, hours",
    *(f"{name}: less" for name in OTHERS),
    "ceiling",
    "1 - min / mean",
    *(f"{name}: waits" for name in SYSTEMS),
)


def synchronous(found: Found) -> Sheet:
    """Return times and waiting of synchronous trainings."""
    return Sheet(
        "Synchronous: less time than uniform local batches, and the part of it that workers wait",
        SAVED,
        saved_rows(found, BSP),
        "Difference: training time is that of a fixed number of global batches, and not to an "
        "accuracy; the ceiling is below the bound by fixed costs and the network.",
    )


def stale_rows(found: Found, places: Sequence[Where]) -> list[list[Any]]:
    """Return the rows of asynchronous trainings."""
    rows = []
    for where in places:
        row: list[Any] = [
            named(where),
            found.median(where, "uniform", lambda result: result.samples_per_s),
            *(found.throughput(where, system) for system in OTHERS),
            1 / (1 - found.ceiling(where)),
        ]
        for system in SYSTEMS:
            largest, tail = found.stale(where, system)
            row.append(f"{largest:.1f}, {tail:.0f}")
        rows.append(row)
    return rows


STALE = (
    "",
    "uniform, samples/s",
    *(f"{name} / uniform" for name in OTHERS),
    "ceiling",
    *(f"{name}: stale" for name in SYSTEMS),
)


def asynchronous(found: Found) -> Sheet:
    """Return throughput and staleness of asynchronous trainings."""
    return Sheet(
        "Asynchronous: throughput, and staleness in updates (largest mean of a worker, 99th "
        "percentile of all updates)",
        STALE,
        stale_rows(found, ASP),
        "The mean staleness is always workers - 1; balancing removes the tail. Difference: the "
        "accuracy that this brings (the paper: up to 6.9 %) is not simulated. The ceiling leaves "
        "out queueing, and so may be passed by some 0.5 %. Cores of 32 workers are those of the "
        "synchronous table.",
    )


def not_circular(found: Found) -> list[Sheet]:
    """Return the main rows on truths that no model can represent."""
    note = "Where no model is right, the best split is the best that a search finds."
    title = "The same on truths that no speed model here can represent"
    return [
        Sheet(f"{title}: synchronous", SAVED, saved_rows(found, BSP_TWISTED), note),
        Sheet(
            f"{title}: asynchronous",
            STALE,
            stale_rows(found, ASP_TWISTED),
            "Equal iteration times are for staleness; where nobody waits they cost throughput if "
            "the fastest worker has a knee, for all who balance.",
        ),
    ]


def beside_the_paper(found: Found) -> Sheet:
    """Return what is published beside what is found here."""
    unequal = [where for where in BSP if where[1] in UNEQUAL]

    def span(value: Callable[[Where], float]) -> str:
        values = [value(where) for where in unequal]
        return f"{percent(min(values))} to {percent(max(values))}"

    def mean(value: Callable[[Where], float]) -> str:
        return percent(float(np.mean([value(where) for where in unequal])))

    def of(system: str) -> Callable[[Where], float]:
        return lambda where: found.saved(where, system)

    def tail(system: str) -> str:
        return f"{found.stale(('ASP', 'HL8', ''), system)[0]:.1f}"

    rows = [
        [
            "less time, synchronous, unequal rows",
            "14 to 85 %",
            span(of("dynamic")),
            span(of("Poise")),
            span(found.ceiling),
        ],
        [
            "their mean",
            "about 26 % (summary by others)",
            mean(of("dynamic")),
            mean(of("Poise")),
            mean(found.ceiling),
        ],
        ["accuracy, asynchronous", "up to +6.9 %", "not simulated", "not simulated", "-"],
        [
            "largest mean staleness, HL8 (uniform " + tail("uniform") + ")",
            "not in the text at hand",
            tail("dynamic"),
            tail("Poise"),
            "3.0",
        ],
        ["per level and workload", "not in the text at hand", *["tables above"] * 2, "-"],
    ]
    return Sheet(
        "Paper / here",
        ["", "paper (abstract)", "dynamic here", "Poise here", "ceiling"],
        rows,
        "Differences: the paper's 85 % lie above what balancing the same global batch can save "
        "with its own core tables, if workers are as fast as their cores are many; so they differ "
        "by more than that, or it holds something else too. Its mean is over levels, modes and "
        "models that are not known, and lower than that of these rows.",
    )


def figures_of(found: Found) -> list[Figure]:
    """Return the figures with bars."""
    beyond = [
        found.saved(where, system) - found.ceiling(where)
        for where in BSP + BSP_TWISTED
        for system in OTHERS
    ]

    def against_dynamic(places: Sequence[Where]) -> float:
        return max(found.ratio(where, "Poise", "dynamic") for where in places)

    walk: Where = ("BSP", DYNAMIC, "")
    regret = found.median(walk, "Poise", lambda result: 1 / (1 - result.ceiling))
    stalest = max(
        found.stale(where, "Poise")[0] / (len(Case(where[0], where[1], "Poise").cores) - 1)
        for where in ASP
    )
    return [
        Figure(
            "Poise / dynamic, time, worst synchronous row",
            against_dynamic(BSP),
            "at most",
            DYNAMIC_BAR,
        ),
        Figure(
            "the same on truths no model represents, worst",
            against_dynamic(BSP_TWISTED),
            "at most",
            DYNAMIC_BAR,
        ),
        Figure("reduction beyond its ceiling, largest", max(beyond), "at most", CEILING_BAR),
        Figure("Poise step / best step on the walk", regret, "at most", WALK_BAR),
        Figure(
            "largest mean staleness with Poise / (workers - 1)", stalest, "at most", STALENESS_BAR
        ),
    ]


if __name__ == "__main__":
    main()

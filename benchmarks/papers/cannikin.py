"""Cannikin's experiments, on virtual workers: convergence, batch times, learning, prediction.

Run: `make bench NAME=papers/cannikin [ARGS="--quick --json"]`. `--quick` takes less than three
minutes: one seed instead of three, and steps that stand for more. The bars are the same. Nothing
here depends on the machine: virtual workers, a virtual clock, seeded noise.

**What is compared.** Five workloads on 3 GPUs (A5000, A4000, P4000) and on 16 (4 A100, 4 V100,
8 RTX 6000). DDP: even shares of the starting batch. LB-BSP: samples move from the slowest to the
fastest, the batch stays. OptPerf: Cannikin's split, the batch stays. Poise, fixed: ours, the batch
stays. AdaptDL: even shares of a batch that follows the goodput of equal workers (`adaptdl.py`).
Cannikin and Poise: their own splits of a batch that follows the goodput. The three choose the
batch by the same rule, and differ in their speed models and splits.

**What is known of the paper.** Its abstract. Times, batches and networks are public measurements
of others or assumptions, each with its source in `constants.toml`; nothing is tuned towards the
paper's numbers.

**What balancing can do.** The step of the best split over that of even shares, at the same global
batch, is a ceiling. A reduction is divided into balancing at the same batch, up to the ceiling, and
what the size of the batch brings.

**Not circular.** The simulator's workers follow lines, as the policies' models do. So the main
rows are repeated on truths that no such model can represent: a ring with one slow link, loaders
that limit, overlap that slows computing, noise that lasts, and a knee.

Trainings with a fixed batch are simulated for some epochs, and the rest is taken to be like the
second half of these. In long trainings a step stands for several once nothing has been decided
for 60 steps, so that policies see fewer measurements than in real life.
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np
from cannikin_runs import Result, run_all
from cannikin_setup import ADAPTIVE, FIXED, SYSTEMS, TWISTS, Case, start_batch
from constants import CLUSTERS, WORKLOADS
from figures import Figure, as_json, judged, show
from options import options
from sheets import Sheet, less, percent

AMOUNTS = {"full": (3, 250), "quick": (1, 70), "smoke": (1, 2)}
"""Seeds, and about how many steps of an epoch are simulated."""
TWISTED = {"3 GPUs": "ResNet-18 / CIFAR-10", "16 GPUs": "ResNet-50 / ImageNet"}
"""The workload of each cluster that is run on truths no model can represent."""
TWISTED_SYSTEMS = ("DDP", "Poise, fixed", "AdaptDL", "Cannikin", "Poise")
CONVERGENCE_BAR, CEILING_BAR, STEP_BAR = 1.05, 0.02, 1.05
UNKNOWN = "not in the text at hand"

Where = tuple[str, str, str]
"""Cluster, workload, twist."""


def main() -> None:
    """Simulate, and print the figures and tables."""
    parser = options("Cannikin's experiments, on virtual workers.", quick="1 seed, larger strides")
    arguments = parser.parse_args()
    seeds, fine = AMOUNTS[arguments.effort]
    if not arguments.json:
        print("simulating, for some minutes", file=sys.stderr)
    found = Found(run_all(cases(seeds, fine)), seeds, fine)
    sheets = [
        convergence(found),
        sources(found),
        sources_against_adaptdl(found),
        batch_times(found),
        learning(found),
        not_circular(found),
        beside_the_paper(found),
    ]
    figures = judged(figures_of(found), arguments.effort)
    if arguments.json:
        tables = [sheet.as_json() for sheet in sheets]
        print(as_json("papers/cannikin", figures, {"seeds": seeds, "tables": tables}))
        return
    show("Cannikin on virtual workers", figures, {"seeds": str(seeds)})
    for sheet in sheets:
        sheet.show()


def cases(seeds: int, fine: int) -> list[Case]:
    """Return all trainings, those that take longest first."""
    found = [
        Case(cluster, workload, system, twist, seed, fine)
        for cluster, workload, twist in PLAIN + TWISTED_PLACES
        for system in (TWISTED_SYSTEMS if twist else SYSTEMS)
        for seed in range(seeds)
    ]
    return sorted(found, key=lambda case: case.system in FIXED)


PLAIN: list[Where] = [(cluster, workload, "") for cluster in CLUSTERS for workload in WORKLOADS]
TWISTED_PLACES: list[Where] = [
    (cluster, workload, twist) for cluster, workload in TWISTED.items() for twist in TWISTS if twist
]


class Found:
    """The results, by place and system."""

    def __init__(self, results: dict[Case, Result], seeds: int, fine: int) -> None:
        self._results = results
        self._seeds = seeds
        self._fine = fine

    def all(self, where: Where, system: str) -> list[Result]:
        """Return the results of all seeds."""
        cluster, workload, twist = where
        return [
            self._results[Case(cluster, workload, system, twist, seed, self._fine)]
            for seed in range(self._seeds)
        ]

    def median(self, where: Where, system: str, value: Callable[[Result], float]) -> float:
        """Return the median of a value over the seeds."""
        return float(np.median([value(result) for result in self.all(where, system)]))

    def clock_s(self, where: Where, system: str) -> float:
        """Return how long a training takes."""
        return self.median(where, system, lambda result: result.clock_s)

    def ratio(self, where: Where, system: str, other: str) -> float:
        """Return how long it takes compared with another system, by the same chance."""
        pairs = zip(self.all(where, system), self.all(where, other), strict=True)
        return float(np.median([one.clock_s / two.clock_s for one, two in pairs]))

    def ceiling(self, where: Where) -> float:
        """Return the most that balancing saves of an even step with the starting batch."""
        any_one = self.all(where, "DDP")[0]
        return 1 - any_one.best_s / any_one.even_s

    def step_ratio(self, where: Where, system: str) -> float:
        """Return the settled step with the starting batch compared with the best one."""
        return self.median(where, system, lambda result: result.batch_s / result.best_s)


def named(where: Where) -> str:
    """Return what a row is called."""
    cluster, workload, twist = where
    return f"{cluster}, {twist or workload}"


def convergence(found: Found) -> Sheet:
    """Return how long trainings take."""
    others = [name for name in SYSTEMS if name != "DDP"]
    rows = [
        [
            named(where),
            found.clock_s(where, "DDP") / 3600,
            *(found.ratio(where, system, "DDP") for system in others),
            found.ratio(where, "Cannikin", "AdaptDL"),
            found.ratio(where, "Poise", "AdaptDL"),
        ]
        for where in PLAIN
    ]
    columns = ["", "DDP, hours", *(f"{name} / DDP" for name in others)]
    columns += ["Cannikin / AdaptDL", "Poise / AdaptDL"]
    return Sheet(
        "Time to the goal",
        columns,
        rows,
        "Difference: Cannikin's model needs two epochs before its batch can move, and with the "
        "epochs of the Pollux traces BERT (two) is over by then, and NeuMF (five) has lost 40 % of "
        "DDP's time.",
    )


def sources(found: Found) -> Sheet:
    """Return where the reduction against DDP comes from."""
    rows = []
    for where in PLAIN:
        fixed, total = (found.ratio(where, name, "DDP") for name in ("Poise, fixed", "Poise"))
        batch = found.median(where, "Poise", lambda result: result.batch)
        rows.append(
            [
                named(where),
                start_batch(*where[:2]),
                round(batch),
                percent(1 - total),
                percent(1 - fixed),
                percent(found.ceiling(where)),
                percent(fixed - total),
            ]
        )
    columns = ["", "batch, start", "batch, mean", "Poise, less than DDP"]
    columns += ["of it balancing at the same batch", "its ceiling", "of it batch size"]
    return Sheet(
        "Where the reduction against DDP comes from",
        columns,
        rows,
        "Difference: with these starting batches on 16 GPUs, one to thirteen samples each, fixed "
        "costs and the network decide, and there is next to nothing to balance; the paper's "
        "batches are not known.",
    )


def sources_against_adaptdl(found: Found) -> Sheet:
    """Return where the reduction against AdaptDL comes from."""
    rows = []
    for where in PLAIN:
        ceiling = found.median(where, "AdaptDL", lambda result: result.ceiling)
        row = [
            named(where),
            round(found.median(where, "AdaptDL", lambda result: result.batch)),
            percent(ceiling),
        ]
        for system in ("Cannikin", "Poise"):
            total = 1 - found.ratio(where, system, "AdaptDL")
            row += [
                round(found.median(where, system, lambda result: result.batch)),
                less(total),
                percent(max(0.0, total - ceiling)),
            ]
        rows.append(row)
    columns = ["", "AdaptDL: batch", "ceiling of balancing at its batches"]
    for system in ("Cannikin", "Poise"):
        columns += [f"{system}: batch", "less time", "of it surely batch size"]
    return Sheet(
        "Where the reduction against AdaptDL comes from",
        columns,
        rows,
        "Difference: AdaptDL has no accumulation here, so that on 3 GPUs its even shares are bound "
        "by the memory of the smallest card.",
    )


def batch_times(found: Found) -> Sheet:
    """Return step times with the starting batch."""
    systems = ("LB-BSP", "OptPerf", "Poise, fixed")
    rows = [
        [
            named(where),
            found.all(where, "DDP")[0].even_s * 1e3,
            *(
                found.median(where, system, lambda result: result.batch_s / result.even_s)
                for system in systems
            ),
            1 - found.ceiling(where),
            found.step_ratio(where, "Poise, fixed"),
        ]
        for where in PLAIN
    ]
    columns = ["", "even, ms", *(f"{name} / even" for name in systems), "best / even"]
    columns += ["Poise, fixed / best"]
    return Sheet(
        "Batch time with the starting batch, once settled (second half, without noise)",
        columns,
        rows,
        "No split is faster than the best one: best / even is what balancing can do. Difference: "
        "the paper's batch times belong to batches and a network that are not known.",
    )


def learning(found: Found) -> Sheet:
    """Return how soon splits are good, and how well step times are predicted."""
    rows = []
    for where in PLAIN:
        row: list[str] = [named(where)]
        for fixed, moving in (("OptPerf", "Cannikin"), ("Poise, fixed", "Poise")):
            row += [settled(found.all(where, fixed)), errors(found.all(where, moving))]
        rows.append(row)
    columns = ["", "OptPerf: within 2 %", "Cannikin: error", "Poise: within 2 %", "Poise: error"]
    return Sheet(
        "Until the split stays within 2 % of the best (batch fixed), and error of predicted step "
        "times (batch moving)",
        columns,
        rows,
        "Errors: of the noise-free step of each plan that predicts one, median (largest). 'From "
        "the start': even shares are within 2 % of the best. Difference: Cannikin decides once an "
        "epoch, as in the paper, and Poise after a few steps.",
    )


def settled(results: Sequence[Result]) -> str:
    """Return the median of the steps, seconds and epochs until a split is good."""
    known = [result.settled for result in results if result.settled is not None]
    if len(known) * 2 <= len(results):
        return "never"
    steps, seconds, epochs = np.median(np.array(known), axis=0)
    if not steps:
        return "from the start"
    return f"{steps:.0f} steps, {seconds:.0f} s, {epochs:.2f} epochs"


def errors(results: Sequence[Result]) -> str:
    """Return the median and the largest error of predictions."""
    found = [error for result in results for error in result.errors]
    if not found:
        return "no prediction"
    return f"{percent(float(np.median(found)))} ({percent(max(found))})"


def not_circular(found: Found) -> Sheet:
    """Return the main rows on truths that no model can represent."""
    rows = [
        [
            named(where),
            *(found.ratio(where, system, "DDP") for system in ADAPTIVE),
            found.ratio(where, "Cannikin", "AdaptDL"),
            found.ratio(where, "Poise", "AdaptDL"),
            found.ratio(where, "Poise", "Cannikin"),
            found.ratio(where, "Poise, fixed", "DDP"),
            1 - found.ceiling(where),
            found.step_ratio(where, "Poise, fixed"),
        ]
        for where in TWISTED_PLACES
    ]
    columns = ["", *(f"{name} / DDP" for name in ADAPTIVE), "Cannikin / AdaptDL"]
    columns += ["Poise / AdaptDL", "Poise / Cannikin", "Poise, fixed / DDP", "best / even"]
    columns += ["Poise, fixed: step / best"]
    workloads = "; ".join(f"{cluster}: {workload}" for cluster, workload in TWISTED.items())
    return Sheet(
        "The same on truths that no speed model here can represent",
        columns,
        rows,
        f"{workloads}. Where step times are not the largest of the workers' own, the best split "
        "is the best that a search finds.",
    )


def beside_the_paper(found: Found) -> Sheet:
    """Return what is published beside what is found here."""

    def most(system: str, other: str, cluster: str) -> str:
        rows = [(1 - found.ratio(where, system, other), where[1]) for where in of(cluster)]
        best, workload = max(rows)
        least, other_workload = min(rows)
        return f"{less(best)} ({workload}); least: {less(least)} ({other_workload})"

    def of(cluster: str) -> list[Where]:
        return [where for where in PLAIN if where[0] == cluster]

    rows = [
        [
            f"less time than {other}, {cluster}",
            published if cluster == "16 GPUs" else UNKNOWN,
            most("Cannikin", other, cluster),
            most("Poise", other, cluster),
        ]
        for other, published in (("AdaptDL", "up to 52 %"), ("DDP", "up to 85 %"))
        for cluster in CLUSTERS
    ]
    for what in ("time per workload", "batch time", "epochs until OptPerf", "prediction error"):
        rows.append([what, UNKNOWN, "tables above", "tables above"])
    return Sheet(
        "Paper / here",
        ["", "paper (abstract)", "Cannikin here", "Poise here"],
        rows,
        "The abstract does not say which workload, batch and network its numbers belong to; here "
        "DDP stays at the small starting batch, so that most of the distance to it is batch size.",
    )


def figures_of(found: Found) -> list[Figure]:
    """Return the figures with bars."""
    balancing = [
        1 - found.ratio(where, system, "DDP") - found.ceiling(where)
        for where in PLAIN
        for system in FIXED
        if system != "DDP"
    ]
    balancing += [
        1 - found.ratio(where, "Poise, fixed", "DDP") - found.ceiling(where)
        for where in TWISTED_PLACES
    ]

    def against_cannikin(places: Sequence[Where]) -> float:
        return max(found.ratio(where, "Poise", "Cannikin") for where in places)

    return [
        Figure(
            "Poise / Cannikin, time to the goal, worst workload",
            against_cannikin(PLAIN),
            "at most",
            CONVERGENCE_BAR,
        ),
        Figure(
            "the same on truths no model represents, worst",
            against_cannikin(TWISTED_PLACES),
            "at most",
            CONVERGENCE_BAR,
        ),
        Figure(
            "Poise / AdaptDL, time to the goal, worst workload",
            max(found.ratio(where, "Poise", "AdaptDL") for where in PLAIN),
            "at most",
            CONVERGENCE_BAR,
        ),
        Figure(
            "balancing beyond its ceiling, largest",
            max(balancing),
            "at most",
            CEILING_BAR,
        ),
        Figure(
            "Poise step / best step, starting batch, worst",
            max(found.step_ratio(where, "Poise, fixed") for where in PLAIN),
            "at most",
            STEP_BAR,
        ),
    ]


if __name__ == "__main__":
    main()

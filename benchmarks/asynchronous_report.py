"""The asynchronous benchmark's command line: what to run, and how it is told."""

import argparse
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from adaptive_setup import Say, SetUpFailed
from asynchronous_figures import Found, figures, load_notes, load_table, notes, table_of
from asynchronous_load import Loaded, measured
from asynchronous_runs import Amount, run, sweep
from asynchronous_tasks import (
    BALANCED,
    CHOICES,
    GLOBAL_BATCH,
    LEARNING_RATE,
    MOMENTUM,
    UNIFORM,
    speeds,
)
from figures import Figure, as_json, judged, show
from options import Effort, options
from rich.console import Console
from workers import end_on_sigterm

FULL = Amount(
    levels=(1, 2, 4, 8),
    seeds=(1, 2, 3),
    samples=60_000,
    target=0.78,
    snapshots=15,
    test_samples=1000,
    last_test_samples=10_000,
)
QUICK = Amount(
    levels=(1, 8),
    seeds=(1,),
    samples=20_000,
    target=0.6,
    snapshots=8,
    test_samples=1000,
    last_test_samples=2500,
)
SMOKE = Amount(
    levels=(8,),
    seeds=(1,),
    samples=1024,
    target=0.05,
    snapshots=4,
    test_samples=100,
    last_test_samples=100,
    random=True,
)
AMOUNTS = {"full": FULL, "quick": QUICK, "smoke": SMOKE}
CHOOSING = replace(FULL, levels=(1,), seeds=(100, 101, 102))
PARTS = ("trainings", "server")
_WIDTH = 110
"""Columns that a table needs."""
_LEARNS = 0.5
"""Accuracy below which a training has failed."""


def main(description: str) -> int:
    """Run the benchmark; return 0 whatever it finds: bars are for readers."""
    arguments = _arguments(description)
    end_on_sigterm()
    errors, begun_s = Console(stderr=True, highlight=False), time.monotonic()

    def say(text: str) -> None:
        errors.print(f"{time.monotonic() - begun_s:4.0f} s  {text}", markup=False)

    amount = _amount(arguments)
    found, loads = None, []
    try:
        if arguments.choose:
            _choose(amount, say)
            return 0
        if "trainings" in arguments.only:
            found = Found(amount, run(amount, say))
    except SetUpFailed as error:
        raise SystemExit(str(error)) from None
    if "server" in arguments.only:
        loads = _loads(say, arguments.effort)
    if arguments.plot:
        from asynchronous_plot import plot

        plot(_series(found), _rows(loads), Path(arguments.plot))
    _tell(found, loads, arguments.effort, as_object=arguments.json)
    return 0


def _arguments(description: str) -> argparse.Namespace:
    parser = options(description, quick="at most three minutes")
    parser.add_argument("--choose", action="store_true", help="find learning rate and momentum")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--levels", nargs="+", type=int, help=f"instead of {FULL.levels}")
    parser.add_argument("--seeds", nargs="+", type=int, help=f"instead of {FULL.seeds}")
    parser.add_argument(
        "--pair", action="store_true", help=f"compare {UNIFORM} and {BALANCED} alone"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw what was found into a .png or .svg")
    parser.add_argument("--samples", type=int, help=f"instead of {FULL.samples}")
    return parser.parse_args()


def _amount(arguments: argparse.Namespace) -> Amount:
    amount = AMOUNTS[arguments.effort]
    if arguments.choose and amount is FULL:
        amount = CHOOSING
    return replace(
        amount,
        levels=tuple(arguments.levels or amount.levels),
        seeds=tuple(arguments.seeds or amount.seeds),
        samples=arguments.samples or amount.samples,
        kinds=(UNIFORM, BALANCED) if arguments.pair else amount.kinds,
    )


def _choose(amount: Amount, say: Say) -> None:
    """Find the best rate that is a factor of two away from one that fails with some seed."""
    results = sweep(amount, CHOICES, UNIFORM, say)
    learn = {(rate, momentum) for rate, momentum, finals in results if min(finals) > _LEARNS}
    safe = [each for each in results if {each[:2], (2 * each[0], each[1])} <= learn]
    for rate, momentum, finals in results:
        print(
            f"learning rate {rate:g}, momentum {momentum:g}: {statistics.mean(finals):.2%} "
            f"({min(finals):.2%} to {max(finals):.2%})"
        )
    rate, momentum, _ = max(safe, key=lambda each: statistics.mean(each[2]))
    print(f"chosen: learning rate {rate:g}, momentum {momentum:g}")


def _loads(say: Say, effort: Effort) -> list[Loaded]:
    match effort:
        case "smoke":
            return measured((1, 2), (0.1,), 1, say)
        case "quick":
            return measured((1, 4), (1.0,), 2, say)
        case "full":
            return measured((1, 2, 4, 8, 16), (0.1, 1.0, 10.0), 5, say)


def _tell(found: Found | None, loads: list[Loaded], effort: Effort, *, as_object: bool) -> None:
    all_figures: list[Figure] = [] if found is None else judged(figures(found), effort)
    all_notes = ({} if found is None else notes(found)) | load_notes(loads)
    if as_object:
        context = {"notes": all_notes, "trainings": _series(found), "server": _rows(loads)}
        print(as_json("async", all_figures, context))
        return
    console = Console()
    console.width = max(console.width, _WIDTH)
    if found is not None:
        for level in found.amount.levels:
            console.print(table_of(found, level))
    if loads:
        console.print(load_table(loads))
    if not all_figures:
        for name, text in all_notes.items():
            console.print(f"{name}: {text}", highlight=False)
        return
    show("Asynchronous training on unequal workers", all_figures, all_notes)


def _series(found: Found | None) -> dict[str, Any] | None:
    """Return what was measured as plain data."""
    if found is None:
        return None
    return {
        "amount": asdict(found.amount),
        "global_batch": GLOBAL_BATCH,
        "learning_rate": LEARNING_RATE,
        "momentum": MOMENTUM,
        "speeds": {level: speeds(level) for level in found.amount.levels},
        "runs": [
            {
                "level": level,
                "seed": seed,
                "kind": kind,
                "final": trained.final,
                "seconds_to_target": trained.seconds_to(found.amount.target),
                "mean_staleness": trained.mean_staleness,
                "points": [asdict(point) for point in trained.points],
            }
            for (level, seed), kinds in found.runs.items()
            for kind, trained in kinds.items()
        ],
    }


def _rows(loads: list[Loaded]) -> list[dict[str, Any]]:
    return [asdict(each) | {"limit": each.limit} for each in loads]

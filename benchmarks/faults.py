"""Random faults in real trainings: everybody ends, names the same culprit, and leaves nothing.

Run: `python benchmarks/faults.py [--quick | --smoke] [--json] [--seed N]`. `--quick` takes about
three minutes: 12 faults instead of 200. The bars are the same.

Three or four workers train on this machine, started by themselves or by torchrun, with and without
loader processes. At a random step something happens to a random worker: it is killed, stopped,
raises, exits, crashes, or runs out of memory; its link is cut (each worker is in a network
namespace of its own then); or the process that hosts the store, worker 0 or torchrun, is stopped.
A worker that is stopped for half of `silent_s` and goes on must disturb nobody.

- **ended**: all other processes ended by themselves within 30 s, or went on where that is promised.
- **named**: every survivor names that worker, and repeats its own reason if it had one. Nobody
  says anything else.
- **message**: from the fault until the last survivor has said so. A fault is silent if no
  connection ends with it: then `silent_s`, 5 s here, has to pass first.
- **clean**: no process, loader processes included, and no namespace is left.
"""

import json
import os
from statistics import median

from fault_runs import SILENT, Outcome, faults, run
from fault_script import SILENT_S
from figures import Figure, as_json, judged, show
from options import options
from rich.console import Console
from workers import end_on_sigterm

NUMBER = {"full": 200, "quick": 12, "smoke": 1}
MEDIAN_BAR_S, WORST_BAR_S, WORST_SILENT_BAR_S = 1.0, 3.0, SILENT_S + 2.0


def main() -> None:
    """Let things go wrong."""
    parser = options("Random faults in real trainings.", quick="12 faults instead of 200")
    parser.add_argument("--seed", type=int, default=1, help="draws other faults (default 1)")
    chosen = parser.parse_args()
    end_on_sigterm()
    console = Console(stderr=True)
    outcomes = []
    for number, fault in enumerate(faults(NUMBER[chosen.effort], chosen.seed)):
        outcome = run(fault, number)
        outcomes.append(outcome)
        said = "; ".join(outcome.problems) or _said(outcome)
        line = f"{number + 1:3}. {fault}: {said}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    figures = judged(_figures(outcomes), chosen.effort)
    load = f"{median(each.load for each in outcomes):.1f} (median over the runs)"
    if chosen.json:
        runs = [
            {"fault": str(each.fault), "message_s": each.message_s, "problems": each.problems}
            for each in outcomes
        ]
        context = {"load": load, "cores": os.cpu_count(), "runs": json.loads(_plain(runs))}
        print(as_json("faults", figures, context))
    else:
        show(f"{len(outcomes)} faults", figures, {"load of the machine": load})


def _said(outcome: Outcome) -> str:
    if outcome.fault.kind == "brief stop":
        return "went on"
    return f"said after {outcome.message_s:.2f} s"


def _figures(outcomes: list[Outcome]) -> list[Figure]:
    total = len(outcomes)
    messages = [each for each in outcomes if each.message_s == each.message_s]
    prompt = [each.message_s for each in messages if each.fault.kind not in SILENT]
    silent = [each.message_s for each in messages if each.fault.kind in SILENT]
    nothing = float("nan")
    return [
        Figure("ended or went on, share", _share(outcomes, "ended", total), "at least", 1.0),
        Figure(
            "first cause named by all, share", _share(outcomes, "named", total), "at least", 1.0
        ),
        Figure("nothing left, share", _share(outcomes, "clean", total), "at least", 1.0),
        Figure(
            "message after, median s",
            median(prompt) if prompt else nothing,
            "at most",
            MEDIAN_BAR_S,
        ),
        Figure(
            "message after, worst s", max(prompt) if prompt else nothing, "at most", WORST_BAR_S
        ),
        Figure(
            "message after silent faults, worst s",
            max(silent) if silent else nothing,
            "at most",
            WORST_SILENT_BAR_S,
        ),
    ]


def _share(outcomes: list[Outcome], which: str, total: int) -> float:
    return sum(bool(getattr(each, which)) for each in outcomes) / total


def _plain(value: object) -> str:
    """Return JSON in which what is not a number is null."""
    return json.dumps(value).replace("NaN", "null")


if __name__ == "__main__":
    main()

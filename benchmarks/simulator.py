"""How fast the simulator is: worker-steps per second, memory, and how the cost grows.

Run: `python benchmarks/simulator.py [--quick | --smoke] [--json]`. Everything runs on one core:
BLAS is told to use one thread, and nothing else is started beside a measurement. Each measurement
is a process of its own, so that its peak memory is its own.

**Rate.** BSP with auto on 1,000 workers of three kinds, two buckets, noise of 5 %: simulated
worker-steps per second of processor time and of wall time, the median of several runs. The bar is
on wall time.

**Scale.** 10,000 workers x 1,000 steps with noise, drift, random failures and what the best split
would have been in some of the steps: seconds and peak memory. `--quick` runs the same.

**Growth.** The same cluster with more and more workers, from 1,000 to 16,000, and with more and
more steps; the exponent of seconds in worker-steps, by least squares on logarithms. Small clusters
cost a fixed part per step, so that the exponent of workers is below 1.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from figures import Figure, as_json, judged, show
from options import options

RATE_BAR, SECONDS_BAR, BYTES_BAR, EXPONENT_BAR = 200_000.0, 60.0, 2.0**30, 1.1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Amount:
    """How much is simulated."""

    repeats: int
    rate: tuple[int, int]
    """Workers and steps."""
    scale: tuple[int, int]
    sizes: tuple[int, ...]
    """Numbers of workers, for the growth."""
    lengths: tuple[int, ...]
    """Numbers of steps, for the growth."""
    growing: int = 4000
    """Workers of the runs that get longer."""


AMOUNTS = {
    "full": Amount(
        7, (1000, 400), (10_000, 1000), (1000, 2000, 4000, 8000, 16_000), (100, 200, 400, 800)
    ),
    "quick": Amount(3, (1000, 400), (10_000, 1000), (1000, 4000, 16_000), (100, 400)),
    "smoke": Amount(1, (20, 40), (50, 30), (20, 40), (20, 40), growing=20),
}


def main() -> None:
    """Measure, and print the figures."""
    parser = options("The simulator's speed, memory and growth.", quick="3 runs, fewer sizes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(**json.loads(arguments.one))))
        return
    amount = AMOUNTS[arguments.effort]
    repeats, sizes, lengths = amount.repeats, amount.sizes, amount.lengths
    rates = [run(*amount.rate) for _ in range(repeats)]
    rate = float(np.median([each["worker_steps"] / each["wall_s"] for each in rates]))
    spread = [each["worker_steps"] / each["wall_s"] for each in rates]
    scale = run(*amount.scale, disturbed=True)
    by_workers = [fastest(repeats, size, 150) for size in sizes]
    by_steps = [fastest(repeats, amount.growing, length) for length in lengths]
    figures = [
        Figure("worker-steps per second, 1,000 workers", rate, "at least", RATE_BAR),
        Figure("10,000 workers x 1,000 steps, seconds", scale["wall_s"], "below", SECONDS_BAR),
        Figure("the same, peak memory, bytes", scale["peak_bytes"], "below", BYTES_BAR),
        Figure("exponent in workers", exponent(sizes, by_workers), "at most", EXPONENT_BAR),
        Figure("exponent in steps", exponent(lengths, by_steps), "at most", EXPONENT_BAR),
    ]
    notes = {
        "runs": str(repeats),
        "rate, least and most": f"{min(spread):,.0f} to {max(spread):,.0f} worker-steps/s",
        "10,000 x 1,000": f"{scale['worker_steps'] / scale['wall_s']:,.0f} worker-steps/s, "
        f"regret {100 * scale['regret']:.1f} %, {scale['changes']:.0f} plans, "
        f"{scale['fewest']:.0f} to {scale['most']:.0f} workers",
        "seconds by workers": shown(sizes, by_workers),
        "seconds by steps, 4,000 workers": shown(lengths, by_steps),
    }
    figures = judged(figures, arguments.effort)
    if arguments.json:
        print(as_json("simulator", figures, notes))
    else:
        show("The simulator", figures, notes)


def run(workers: int, steps: int, *, disturbed: bool = False) -> dict[str, float]:
    """Measure one simulation in a process of its own."""
    asked = {"workers": workers, "steps": steps, "disturbed": disturbed}
    command = [sys.executable, __file__, "--one", json.dumps(asked)]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def fastest(repeats: int, workers: int, steps: int) -> float:
    """Return the least wall time of some runs: what disturbs them only makes them longer."""
    return min(run(workers, steps)["wall_s"] for _ in range(min(repeats, 3)))


def measured(workers: int, steps: int, *, disturbed: bool) -> dict[str, float]:
    """Simulate in this process; disturbed: with drift and failures."""
    from poise.policy import Auto
    from poise.sim.outcome import outcome_of
    from poise.sim.scenario_file import declared_scenario
    from poise.toml_file import Toml

    kinds = [(0.5, 1.0), (0.3, 2.5), (0.2, 6.0)]
    tables: list[dict[str, object]] = [
        {
            "count": int(part * workers),
            "forward_s": [0.0004 * slowness, 0.004],
            "backward_s": [0.0008 * slowness, 0.006],
        }
        for part, slowness in kinds
    ]
    scenario = declared_scenario(
        Toml(
            "benchmark",
            {
                "global_batch": 64 * workers,
                "steps": steps,
                "network": {"ready": [0.3, 1.0], "bucket_s": [0.02, 0.004]},
                "noise": {"cv": 0.05},
                "drift": {"per_step": 0.005 if disturbed else 0.0},
                "failures": {"mean_steps": 20 * workers, "down_steps": 50} if disturbed else {},
                "worker": tables,
            },
        )
    )
    begin_s = time.perf_counter()
    found = outcome_of(scenario, "auto", Auto())
    wall_s = time.perf_counter() - begin_s
    counts = [len(point.workers) for point in found.course]
    return {
        "worker_steps": float(workers * steps),
        "wall_s": wall_s,
        "peak_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "regret": found.regret,
        "changes": float(found.changes),
        "fewest": float(min(counts)),
        "most": float(max(counts)),
    }


def exponent(sizes: Sequence[int], seconds: list[float]) -> float:
    """Return p of seconds ~ size^p."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def shown(sizes: Sequence[int], seconds: list[float]) -> str:
    return ", ".join(f"{size:,}: {each:.2f}" for size, each in zip(sizes, seconds, strict=True))


if __name__ == "__main__":
    main()

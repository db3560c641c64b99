"""How fast the simulator is: worker-steps per second, memory, and how the cost grows.

Run: `python benchmarks/simulator.py [--quick] [--json]`. Everything runs on one core: BLAS is told
to use one thread, and nothing else is started beside a measurement. Each measurement is a process
of its own, so that its peak memory is its own.

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

import numpy as np
from figures import Figure, as_json, show

RATE_BAR, SECONDS_BAR, BYTES_BAR, EXPONENT_BAR = 200_000.0, 60.0, 2.0**30, 1.1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SCALE = {"drift": True, "failures": True}


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description="The simulator's speed, memory and growth.")
    parser.add_argument("--quick", action="store_true", help="3 runs instead of 7, fewer sizes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(**json.loads(arguments.one))))
        return
    repeats = 3 if arguments.quick else 7
    rates = [run(workers=1000, steps=400) for _ in range(repeats)]
    rate = float(np.median([each["worker_steps"] / each["wall_s"] for each in rates]))
    spread = [each["worker_steps"] / each["wall_s"] for each in rates]
    scale = run(workers=10_000, steps=1000, **SCALE)
    sizes = [1000, 4000, 16_000] if arguments.quick else [1000, 2000, 4000, 8000, 16_000]
    lengths = [100, 400] if arguments.quick else [100, 200, 400, 800]
    by_workers = [fastest(repeats, workers=size, steps=150) for size in sizes]
    by_steps = [fastest(repeats, workers=4000, steps=length) for length in lengths]
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
    if arguments.json:
        print(as_json("simulator", figures, notes))
    else:
        show("The simulator", figures, notes)


def run(**asked: object) -> dict[str, float]:
    """Measure one simulation in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(asked)]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def fastest(repeats: int, **asked: object) -> float:
    """Return the least wall time of some runs: what disturbs them only makes them longer."""
    return min(run(**asked)["wall_s"] for _ in range(min(repeats, 3)))


def measured(
    workers: int, steps: int, *, drift: bool = False, failures: bool = False
) -> dict[str, float]:
    """Simulate in this process."""
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
                "drift": {"per_step": 0.005 if drift else 0.0},
                "failures": {"mean_steps": 20 * workers, "down_steps": 50} if failures else {},
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


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return p of seconds ~ size^p."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def shown(sizes: list[int], seconds: list[float]) -> str:
    return ", ".join(f"{size:,}: {each:.2f}" for size, each in zip(sizes, seconds, strict=True))


if __name__ == "__main__":
    main()

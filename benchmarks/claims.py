"""What is claimed of policies, on truths that the core cannot represent and on real records.

Run: `python benchmarks/claims.py [--quick | --smoke] [--json]`. `--quick` takes less than three
minutes: 2 seeds instead of 8, and labs of 90 steps instead of 240. The bars are the same.

A simulator whose truth has the form that a policy assumes proves that the policy solves what it
assumes. So the same cluster, three kinds of workers with a global batch of 480, is simulated

- with **lines**, as the core takes them;
- with a **ring** in which one link is a tenth as fast, round by round;
- with **loaders** that are the limit of some workers, behind queues;
- with **drag**: computing takes 1.3 times as long while gradients are reduced;
- with **lasting noise**, correlation 0.8 between neighboring steps;
- with **bends**: tiles, knees and powers;
- with **all** of these together.

Shown is how much longer steps take with each policy than with the best split, from the start and
once settled (the last half), the median over seeds. The bar: once settled, auto's steps are at most
5 % longer than those of the best other policy.

**Labs.** Three real workers train a small convolutional network, once with even shares and once
with auto, both recorded (`poise lab`): under CPU quotas, where times and reductions scatter a lot,
and paced, which is quieter. From auto's record alone a scenario is
calibrated and simulated with both policies. Shown are simulated and measured step times, and the
gain of auto over even in both. The bars: each simulated time is off by at most twice the error that
the calibration itself states, and by at most a fifth.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, as_json, judged, show
from options import options
from rich.console import Console
from rich.table import Table

from poise.records import read_record
from poise.sim.calibration import calibrated
from poise.sim.calibration_text import scenario_text
from poise.sim.outcome import steps_of
from poise.sim.scenario import Scenario
from poise.sim.scenario_file import declared_scenario, read_scenario
from poise.sim.step import Step
from poise.toml_file import Toml

POLICIES = ("even", "proportional", "lbbsp", "optperf", "auto")
WORSE_BAR, OFF_BAR = 1.05, 0.2
FAST = {"forward_s": [0.0005, 0.005], "backward_s": [0.0010, 0.008]}
MIDDLE = {"forward_s": [0.0012, 0.006], "backward_s": [0.0024, 0.010]}
SLOW = {"forward_s": [0.0030, 0.008], "backward_s": [0.0060, 0.012]}
LINES = {"ready": [0.3, 1.0], "bucket_s": [0.030, 0.012]}
RING = {
    "ready": [0.3, 1.0],
    "bucket_bytes": [12e6, 5e6],
    "link_bytes_per_s": 1e9,
    "latency_s": 1e-4,
}
SLOW_LINK = {"link_bytes_per_s": 1e8}
LOADED = {"input_s": 0.0022}
BENT: tuple[dict[str, Any], ...] = ({"tile": 8}, {"knee": [100, 2.0]}, {"power": [0.9, 40]})
LABS = {
    "quotas": ("--speeds", "0.8,0.4,0.2"),
    "paced": ("--speeds", "1,0.5,0.25", "--pace", "2ms+20ms"),
}


@dataclass(frozen=True)
class Amount:
    """How much is simulated and trained."""

    seeds: int
    steps: int
    """Of a simulation."""
    lab_steps: int
    labs: tuple[str, ...] = tuple(LABS)
    trained: tuple[str, ...] = ("even", "auto")
    """Policies in the labs; auto's record is the one that is calibrated."""


AMOUNTS = {
    "full": Amount(seeds=8, steps=600, lab_steps=240),
    "quick": Amount(seeds=2, steps=300, lab_steps=90),
    "smoke": Amount(seeds=1, steps=20, lab_steps=26, labs=("paced",), trained=("auto",)),
}
TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from poise.torch import Balancer

policy, path, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(96 * steps, 1, 28, 28), torch.randint(0, 10, (96 * steps,)))
model = nn.Sequential(
    nn.Conv2d(1, 24, 5, stride=2), nn.ReLU(), nn.Conv2d(24, 48, 3), nn.ReLU(), nn.Flatten(),
    nn.Linear(48 * 10 * 10, 64), nn.ReLU(), nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Balancer(96, policy=policy, record=path) as balancer:
    model, optimizer, loader = balancer.prepare(model, optimizer, DataLoader(data, batch_size=96))
    for _ in balancer.epochs(1):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def main() -> None:
    """Simulate, run the labs, and print the figures."""
    parser = options("Claims on hard truths and on real records.", quick="2 seeds, shorter labs")
    arguments = parser.parse_args()
    amount = AMOUNTS[arguments.effort]
    seeds = amount.seeds
    if not arguments.json:
        print("simulating and training, for some minutes at most", file=sys.stderr)
    truths = {name: regrets(tables, seeds, amount.steps) for name, tables in hard_truths().items()}
    lab = {
        f"{name}, {policy}": each
        for name in amount.labs
        for policy, each in in_the_lab(LABS[name], amount).items()
    }
    figures = [
        Figure(
            f"auto / best other policy, settled, {name}",
            (1 + found["auto"][1])
            / (1 + min(late for policy, (_, late) in found.items() if policy != "auto")),
            "at most",
            WORSE_BAR,
        )
        for name, found in truths.items()
    ]
    figures += [
        Figure(f"lab, {policy}: off / allowed", each["off"] / each["allowed"], "at most", 1.0)
        for policy, each in lab.items()
    ]
    figures += [
        Figure(f"lab, {policy}: off", each["off"], "at most", OFF_BAR)
        for policy, each in lab.items()
    ]
    figures = judged(figures, arguments.effort)
    if arguments.json:
        print(as_json("claims", figures, {"seeds": seeds, "truths": truths, "lab": lab}))
        return
    show("Claims", figures, {"seeds": str(seeds)})
    show_truths(truths)
    show_lab(lab)


def hard_truths() -> dict[str, dict[str, Any]]:
    """Return the clusters, each as the tables of a scenario."""
    plain: list[dict[str, Any]] = [
        {"count": 2, **FAST},
        {"count": 3, **MIDDLE},
        {"count": 1, **SLOW},
    ]
    slow_link = [*plain[:2], {**plain[2], **SLOW_LINK}]
    loaded = [{**plain[0], **LOADED}, *plain[1:]]
    bent = [{**one, **bend} for one, bend in zip(plain, BENT, strict=True)]
    everything = [
        {**plain[0], **LOADED, **BENT[0]},
        {**plain[1], **BENT[1]},
        {**plain[2], **SLOW_LINK, **BENT[2]},
    ]
    calm, lasting = {"cv": 0.05}, {"cv": 0.05, "correlation": 0.8}
    return {
        "lines": {"worker": plain, "network": LINES, "noise": calm},
        "ring": {"worker": slow_link, "network": RING, "noise": calm},
        "loaders": {"worker": loaded, "network": LINES, "noise": calm},
        "drag": {"worker": plain, "network": {**LINES, "drag": 0.3}, "noise": calm},
        "lasting noise": {"worker": plain, "network": LINES, "noise": lasting},
        "bends": {"worker": bent, "network": LINES, "noise": calm},
        "all": {"worker": everything, "network": {**RING, "drag": 0.3}, "noise": lasting},
    }


def regrets(tables: dict[str, Any], seeds: int, steps: int) -> dict[str, tuple[float, float]]:
    """Return for each policy its median regret over all steps, and over the last half."""
    base = declared_scenario(
        Toml("claims", {"global_batch": 480, "steps": steps, "policies": [*POLICIES], **tables})
    )
    found = {}
    for policy in POLICIES:
        of_seeds = [regret_of(base, policy, seed) for seed in range(seeds)]
        whole, late = np.median(of_seeds, axis=0).tolist()
        found[policy] = (whole, late)
    return found


def regret_of(base: Scenario, policy: str, seed: int) -> tuple[float, float]:
    scenario = replace(base, seed=seed)
    steps = list(steps_of(scenario, scenario.policy(policy)))
    return regret(steps), regret(steps[len(steps) // 2 :])


def regret(steps: list[Step]) -> float:
    return sum(step.clean_s for step in steps) / sum(step.best_s for step in steps) - 1


def in_the_lab(lab: Sequence[str], amount: Amount) -> dict[str, dict[str, float]]:
    """Return simulated and measured step times of real workers."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        records = {
            policy: trained(directory, lab, policy, amount.lab_steps) for policy in amount.trained
        }
        found = calibrated(read_record(records["auto"]))
        file = directory / "mine.toml"
        file.write_text(scenario_text(found, "auto.jsonl"))
        scenario = read_scenario(file)
        measured = {policy: settled_s(path) for policy, path in records.items()}
    results = {}
    for policy in amount.trained:
        steps_made = list(steps_of(scenario, scenario.policy(policy)))
        late = steps_made[len(steps_made) // 2 :]
        simulated_s = float(np.mean([step.lasts_s for step in late]))
        results[policy] = {
            "measured_s": measured[policy],
            "simulated_s": simulated_s,
            "off": abs(simulated_s / measured[policy] - 1),
            "allowed": 2 * found.error,
        }
    return results


def trained(directory: Path, lab: Sequence[str], policy: str, steps: int) -> Path:
    """Train on three unequal workers, and return the record."""
    script, path = directory / "train.py", directory / f"{policy}.jsonl"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "poise", "lab", *lab, "--", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, policy, str(path), str(steps)],
        check=True,
        env=environment,
        stdout=sys.stderr,
        timeout=900,
    )
    return path


def settled_s(path: Path) -> float:
    """Return the mean step of the last half of a record."""
    rows = read_record(path).rows
    seen = [row.observation for row in rows if row.observation is not None]
    lengths = [each.length_s for each in seen[len(seen) // 2 :] if each.length_s is not None]
    return float(np.mean(lengths))


def show_truths(truths: dict[str, dict[str, tuple[float, float]]]) -> None:
    table = Table(title="Regret, %: all steps / the last half", title_justify="left")
    table.add_column("truth")
    for policy in POLICIES:
        table.add_column(policy, justify="right")
    for name, found in truths.items():
        table.add_row(
            name, *(f"{100 * whole:.1f} / {100 * late:.1f}" for whole, late in found.values())
        )
    Console(width=100).print(table)


def show_lab(lab: dict[str, dict[str, float]]) -> None:
    table = Table(title="Three real workers, calibrated by auto's record", title_justify="left")
    for heading in ("lab", "measured", "simulated", "off", "allowed"):
        table.add_column(heading, justify="right")
    for policy, each in lab.items():
        table.add_row(
            policy,
            f"{each['measured_s'] * 1e3:.1f} ms",
            f"{each['simulated_s'] * 1e3:.1f} ms",
            f"{100 * each['off']:.1f} %",
            f"{100 * each['allowed']:.1f} %",
        )
    Console(width=100).print(table)
    for name in LABS:
        if f"{name}, even" not in lab:
            continue
        even, auto = lab[f"{name}, even"], lab[f"{name}, auto"]
        gains = [even[key] / auto[key] for key in ("measured_s", "simulated_s")]
        print(f"{name}: auto {gains[0]:.2f} times as fast as even, simulated {gains[1]:.2f}")


if __name__ == "__main__":
    main()

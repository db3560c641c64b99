"""What the reproduction of OmniLearn runs, and what is measured of it."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from constants import CONSTANTS, bucket_bytes, network_of

from poise.cluster_file import DeclaredCluster, Kind
from poise.core.cluster import Worker
from poise.core.split import even_split
from poise.core.timing import Floats
from poise.engine.modes import Async, Sync
from poise.policy import Auto, Even, Policy, Proportional, Static
from poise.records import read_record
from poise.sim.cluster import Cluster
from poise.sim.outcome import outcome_of
from poise.sim.reduction import Ring
from poise.sim.scenario import Event, Noise, Scenario, Server
from poise.sim.scenes import ASP_CORES, CORES, WALK
from poise.sim.truth import Bend

HERE = CONSTANTS["omnilearn"]
LEVELS = tuple(CORES)
MANY, DYNAMIC = "32 workers", "walk"
TAIL = 0.99
"""The part of all updates that are no staler than what is called the tail."""

SYSTEMS: Mapping[str, Callable[[Sequence[float]], Policy]] = {
    "uniform": lambda _: Even(),
    "static": Static,
    "dynamic": lambda _: Proportional(),
    "Poise": lambda _: Auto(),
}
"""Static: shares by cores. Dynamic: OmniLearn's controller."""


@dataclass(frozen=True)
class Case:
    """One training."""

    mode: str
    """BSP or ASP."""
    place: str
    """HL1 to HL8, 32 workers, or the walk."""
    system: str
    twist: str = ""
    seed: int = 0
    part: float = 1.0
    """Of the steps that constants.toml says."""

    @property
    def cores(self) -> tuple[int, ...]:
        """Of each worker at the start."""
        tables = CORES if self.mode == "BSP" else ASP_CORES
        if self.place == MANY:
            return tuple(HERE["cores_32"])
        return tables[1 if self.place == DYNAMIC else int(self.place[2:])]

    def scenario(self) -> Scenario:
        """Return it for the simulator."""
        workers = len(self.cores)
        asynchronous = self.mode == "ASP"
        per_level = round(self.part * HERE["steps_per_level"])
        steps = round(self.part * HERE["steps"] * (4 / workers if asynchronous else 1))
        plain = Scenario(
            cluster=machines(self.cores),
            global_batch=HERE["local_batch"] * workers,
            steps=per_level * len(WALK) if self.place == DYNAMIC else steps,
            seed=self.seed,
            mode=Async(damped=False) if asynchronous else Sync(),
            noise=Noise(cv=HERE["cv"]),
            events=self._walk(per_level) if self.place == DYNAMIC else (),
            server=Server(exchange_s=HERE["exchange_s"], update_s=HERE["update_s"]),
        )
        return TWISTS[self.twist](plain)

    def _walk(self, per_level: int) -> tuple[Event, ...]:
        tables = CORES if self.mode == "BSP" else ASP_CORES
        return tuple(
            Event(
                what="slower",
                workers=tuple(range(len(self.cores))),
                factors=tuple(
                    ours / then for ours, then in zip(self.cores, tables[level], strict=True)
                ),
                at_step=number * per_level,
            )
            for number, level in enumerate(WALK)
        )


def machines(cores: Sequence[int]) -> DeclaredCluster:
    """Return workers whose times go inversely with their cores."""
    fixed, forward = HERE["fixed_share"], CONSTANTS["compute"]["forward_share"]
    workers = []
    for number, each in enumerate(cores):
        sample_s = HERE["core_s_per_sample"] / each
        line = (1 - fixed) * sample_s, fixed * sample_s * HERE["local_batch"]
        workers.append(
            Worker(
                name=f"worker {number}",
                forward_s=(forward * line[0], forward * line[1]),
                backward_s=((1 - forward) * line[0], (1 - forward) * line[1]),
            )
        )
    kinds = tuple(Kind(worker.name, range(at, at + 1)) for at, worker in enumerate(workers))
    network = network_of(HERE["parameters"], len(cores))
    return DeclaredCluster(workers=tuple(workers), network=network, kinds=kinds)


def _slow_link(scenario: Scenario) -> Scenario:
    links = np.full(scenario.workers, CONSTANTS["network"]["bytes_per_s"])
    links[-1] *= CONSTANTS["twist"]["slow_link"]
    sizes = np.array(bucket_bytes(HERE["parameters"], scenario.cluster.network))
    return replace(scenario, ring=Ring(sizes, links, latency_s=0.0))


def _loader(scenario: Scenario) -> Scenario:
    slopes = scenario.model.per_sample_s[:, -1]
    fastest = int(slopes.argmin())
    workers = list(scenario.cluster.workers)
    input_s = float(slopes[fastest] / HERE["loader"])
    workers[fastest] = replace(workers[fastest], input_s=input_s)
    return replace(scenario, cluster=replace(scenario.cluster, workers=tuple(workers)))


def _knee(scenario: Scenario) -> Scenario:
    at, counts = HERE["knee"]
    return replace(scenario, bend=Bend.of(knee=(at * HERE["local_batch"], counts)))


def _lasting(scenario: Scenario) -> Scenario:
    noise = replace(scenario.noise, correlation=CONSTANTS["twist"]["correlation"])
    return replace(scenario, noise=noise)


TWISTS: Mapping[str, Callable[[Scenario], Scenario]] = {
    "": lambda scenario: scenario,
    "a ring with one slow link": _slow_link,
    "a loader that limits": _loader,
    "overlap slows computing": lambda scenario: replace(scenario, drag=CONSTANTS["twist"]["drag"]),
    "noise that lasts": _lasting,
    "a knee": _knee,
}
"""Truths that the speed model cannot represent; the first one is the one it can."""
ASP_TWISTS = ("a loader that limits", "noise that lasts", "a knee")
"""Those that a training with a server can have."""


@dataclass(frozen=True)
class Result:
    """What came of a training."""

    clock_s: float
    samples_per_s: float
    waiting: float
    ceiling: float
    """The most that balancing saves of this training's time at the same global batch."""
    changes: int
    staleness: tuple[float, float] | None = None
    """With a server: the largest of the workers' means, and the tail of all updates."""


def run_all(cases: Sequence[Case]) -> dict[Case, Result]:
    """Run trainings, as many at once as there are cores."""
    with ProcessPoolExecutor() as pool:
        return dict(zip(cases, pool.map(run, cases), strict=True))


def run(case: Case) -> Result:
    """Run one."""
    scenario = case.scenario()
    policy = SYSTEMS[case.system](case.cores)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) if case.mode == "ASP" else None
        outcome = outcome_of(scenario, case.system, policy, records=records)
        staleness = None if records is None else staleness_of(records / f"{case.system}.jsonl")
    return Result(
        clock_s=outcome.clock_s,
        samples_per_s=outcome.samples_per_s,
        waiting=outcome.waiting,
        ceiling=1 - 1 / (1 + outcome.regret) if case.mode == "BSP" else asp_ceiling(case),
        changes=outcome.changes,
        staleness=staleness,
    )


def staleness_of(record: Path) -> tuple[float, float]:
    """Return the largest mean staleness of a worker, and the tail of all updates."""
    served = next(row.served for row in reversed(read_record(record).rows) if row.served)
    means, counts = [], dict[int, int]()
    for each in served.staleness:
        means.append(sum(age * count for age, count in each.items()) / max(1, sum(each.values())))
        for age, count in each.items():
            counts[age] = counts.get(age, 0) + count
    ages = np.array(sorted(counts))
    reached = np.cumsum([counts[age] for age in ages.tolist()]) / sum(counts.values())
    return max(means), float(ages[np.searchsorted(reached, TAIL)])


def asp_ceiling(case: Case) -> float:
    """Return the most of the time that other local batches save where nobody waits.

    Rates b / (t(b) + exchange) are concave, so that giving each sample to the worker whose rate
    rises most is best; queueing at the server is left out. Of the walk, the mean over its levels.
    """
    if case.place == DYNAMIC:
        levels = [replace(case, place=f"HL{level}") for level in WALK]
        even, best = np.array([_asp_seconds(level) for level in levels]).sum(axis=0)
    else:
        even, best = _asp_seconds(case)
    return float(1 - best / even)


def _asp_seconds(case: Case) -> tuple[float, float]:
    """Return the seconds of a global batch with even local batches, and with the best ones."""
    scenario = case.scenario()
    workers, batch = scenario.workers, scenario.global_batch
    cluster = scenario.cluster_of(np.arange(workers), np.ones(workers))
    table = _rates(cluster, scenario, batch)
    even = np.array(even_split(workers, batch))
    local = np.ones(workers, dtype=int)
    everyone = np.arange(workers)
    for _ in range(batch - workers):
        more = np.minimum(local + 1, batch)
        local[np.argmax(table[everyone, more] - table[everyone, local])] += 1
    return batch / table[everyone, even].sum(), batch / table[everyone, local].sum()


def _rates(cluster: Cluster, scenario: Scenario, batch: int) -> Floats:
    """Return workers x local batches: samples per second, without queueing."""
    server = scenario.server.exchange_s + scenario.server.update_s
    rows = []
    for samples in range(batch + 1):
        each = np.full(cluster.workers, float(samples))
        computes = np.maximum(cluster.truth.ready_s(each)[:, -1], cluster.truth.input_s * each)
        rows.append(each / (computes + server))
    return np.stack(rows, axis=1)

"""What the reproduction of Cannikin runs: which systems, on which clusters, training what."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from adaptdl import AdaptDl
from constants import CONSTANTS, bucket_bytes, gpus

from poise.engine.adaptation import Adaptation
from poise.policy import Auto, Even, LbBsp, OptPerf, Policy
from poise.sim.reduction import Ring
from poise.sim.scenario import Learning, Noise, Scenario
from poise.sim.truth import Bend

_MOST_STEPS = 100_000
"""Simulated ones, of a training whose global batch moves; the goal is reached in far fewer."""
_FIXED_EPOCHS = 8
"""Where it stays, so many epochs are simulated, and the others are taken to be like these."""
_ADAPTIVE_EPOCHS = 16
"""As fine as if the training had so many epochs: large batches leave few steps of each."""


@dataclass(frozen=True)
class System:
    """A way to train: a policy, and whether the global batch follows the noise."""

    policy: Callable[[Scenario], Policy]
    adapts: bool


SYSTEMS: Mapping[str, System] = {
    "DDP": System(lambda _: Even(), adapts=False),
    "LB-BSP": System(lambda scenario: LbBsp(bounds=scenario.bounds), adapts=False),
    "OptPerf": System(lambda scenario: OptPerf(bounds=scenario.bounds), adapts=False),
    "Poise, fixed": System(lambda scenario: Auto(bounds=scenario.bounds), adapts=False),
    "AdaptDL": System(lambda scenario: AdaptDl(max_batch=_most_of_all(scenario)), adapts=True),
    "Cannikin": System(lambda scenario: OptPerf(bounds=scenario.bounds), adapts=True),
    "Poise": System(lambda scenario: Auto(bounds=scenario.bounds), adapts=True),
}
"""OptPerf is Cannikin's split without its moving batch."""
FIXED = tuple(name for name, system in SYSTEMS.items() if not system.adapts)
ADAPTIVE = tuple(name for name, system in SYSTEMS.items() if system.adapts)


@dataclass(frozen=True)
class Case:
    """One training."""

    cluster: str
    workload: str
    system: str
    twist: str = ""
    seed: int = 0
    fine: int = 300
    """About so many steps of an epoch are simulated, where the global batch stays; each stands
    for several. Where it moves, that many for each epoch of _ADAPTIVE_EPOCHS."""

    def scenario(self) -> Scenario:
        """Return it for the simulator."""
        work = CONSTANTS["workload"][self.workload]
        start = start_batch(self.cluster, self.workload)
        epoch = -(-work["epoch_samples"] // start) * start
        target = work["target_epochs"] * epoch
        adapts = SYSTEMS[self.system].adapts
        course = [(at / work["target_epochs"], phi) for at, phi in work["noise_scale"]]
        learning = Learning(
            noise_scale=((0.0, course[0][1]), *course),
            start_batch=start,
            target_samples=float(target),
            adapt=Adaptation(lowest=start, highest=work["max_batch"]) if adapts else None,
        )
        stands_for = target / start / _ADAPTIVE_EPOCHS if adapts else epoch / start
        plain = Scenario(
            cluster=gpus(self.cluster, self.workload),
            global_batch=start,
            steps=_MOST_STEPS if adapts else _FIXED_EPOCHS * self.fine,
            seed=self.seed,
            noise=Noise(cv=CONSTANTS["compute"]["cv"]),
            learning=learning,
            epoch_samples=epoch,
            stride=max(1, round(stands_for / self.fine)),
        )
        return TWISTS[self.twist](plain, work)


def start_batch(cluster: str, workload: str) -> int:
    """Return the global batch of the start, at least a sample for each worker."""
    workers = len(gpus(cluster, workload).workers)
    return max(int(CONSTANTS["workload"][workload]["start_batch"]), workers)


def _most_of_all(scenario: Scenario) -> int:
    """Return the largest local batch that every worker can take."""
    return int(scenario.limits.high.min())


def _slow_link(scenario: Scenario, work: dict[str, Any]) -> Scenario:
    """Gradients go round a ring, and one link of it is slow."""
    links = np.full(scenario.workers, CONSTANTS["network"]["bytes_per_s"])
    links[-1] *= CONSTANTS["twist"]["slow_link"]
    sizes = np.array(bucket_bytes(work["parameters"], scenario.cluster.network))
    return replace(scenario, ring=Ring(sizes, links, latency_s=0.0))


def _loader(scenario: Scenario, _work: dict[str, Any]) -> Scenario:
    """The loaders of the first kind of cards are too slow for them."""
    first = set(scenario.cluster.kinds[0].workers)
    slope = scenario.model.per_sample_s[:, -1] / CONSTANTS["twist"]["loader"]
    workers = tuple(
        replace(worker, input_s=float(slope[number])) if number in first else worker
        for number, worker in enumerate(scenario.cluster.workers)
    )
    return replace(scenario, cluster=replace(scenario.cluster, workers=workers))


def _knee(scenario: Scenario, _work: dict[str, Any]) -> Scenario:
    """Beyond some local batch, samples cost more."""
    at, counts = CONSTANTS["twist"]["knee"]
    local = scenario.global_batch / scenario.workers
    return replace(scenario, bend=Bend.of(knee=(at * local, counts)))


def _lasting(scenario: Scenario, _work: dict[str, Any]) -> Scenario:
    noise = replace(scenario.noise, correlation=CONSTANTS["twist"]["correlation"])
    return replace(scenario, noise=noise)


TWISTS: Mapping[str, Callable[[Scenario, dict[str, Any]], Scenario]] = {
    "": lambda scenario, _: scenario,
    "a ring with one slow link": _slow_link,
    "loaders that limit": _loader,
    "overlap slows computing": lambda scenario, _: replace(
        scenario, drag=CONSTANTS["twist"]["drag"]
    ),
    "noise that lasts": _lasting,
    "a knee": _knee,
}
"""Truths that the speed model cannot represent; the first one is the one it can."""

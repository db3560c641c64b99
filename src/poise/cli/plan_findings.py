"""What `poise plan` finds out about a declared cluster, before anything is printed."""

from dataclasses import asdict, dataclass
from typing import Any

from poise.cluster_file import DeclaredCluster, Kind
from poise.core.cluster import Worker, limits_of, speed_model
from poise.core.goodput import best_batch, goodput
from poise.core.limits import Limits
from poise.core.plan import Plan, best_plan
from poise.core.planning import Worth, worth_of
from poise.core.split import Split, even_split
from poise.core.timing import Bound, SpeedModel
from poise.errors import InfeasibleSplit

REACH = 16
"""Global batches are looked at up to this many times the one that was asked for."""
MOST_WORTHS = 50
"""How many kinds are planned without; of more, those with the smallest local batches."""


@dataclass(frozen=True)
class Planned:
    """What is planned for one worker."""

    name: str
    local_batch: int
    share: float
    predicted_s: float
    bound: Bound
    memory_bytes: float | None
    """What its local batch takes; None where the worker does not say."""
    memory_limit_bytes: float | None


@dataclass(frozen=True)
class Even:
    """The even split of the same global batch."""

    split: Split | None = None
    step_s: float | None = None
    """None where the workers cannot take that split."""
    why_not: str = ""


@dataclass(frozen=True)
class Learning:
    """Which global batch learns fastest, by goodput."""

    noise_scale: float
    start_batch: int
    allowed: tuple[int, int]
    """The global batches that were looked at: the smallest, the largest."""
    goodput: float
    """Samples per second of the global batch asked for, each counted by what it teaches."""
    best_global_batch: int
    best_goodput: float

    @property
    def gain(self) -> float:
        """How many times as fast the best global batch learns."""
        return self.best_goodput / self.goodput


@dataclass(frozen=True)
class Findings:
    """The plan of a cluster, and what it is compared with."""

    cluster: DeclaredCluster
    model: SpeedModel
    limits: Limits
    plan: Plan
    even: Even
    worths: tuple[tuple[Kind, Worth], ...]
    """One per kind of worker: what the first of them is worth."""
    learning: Learning | None

    @property
    def samples_per_s(self) -> float:
        """Samples per second, over all workers."""
        return self.plan.global_batch / self.plan.step_s

    @property
    def gain(self) -> float | None:
        """The step time of the even split over that of the plan."""
        return None if self.even.step_s is None else self.even.step_s / self.plan.step_s

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "title": self.cluster.title,
            "global_batch": self.plan.global_batch,
            "workers": [asdict(each) for each in self.planned()],
            "step_s": self.plan.step_s,
            "samples_per_s": self.samples_per_s,
            "even_split": None if self.even.split is None else list(self.even.split),
            "even_step_s": self.even.step_s,
            "gain": self.gain,
            "worth": [
                {"kind": kind.name, "count": kind.count, **asdict(worth)}
                for kind, worth in self.worths
            ],
            "goodput": self.learning and {**asdict(self.learning), "gain": self.learning.gain},
        }

    def planned(self) -> list[Planned]:
        """Return the part of each worker."""
        plan, workers = self.plan, self.cluster.workers
        columns = (
            (worker.name for worker in workers),
            plan.split,
            plan.shares,
            plan.local_s.tolist(),
            plan.bound,
            map(_planned_bytes, workers, plan.split),
            (worker.memory_bytes for worker in workers),
        )
        return [Planned(*parts) for parts in zip(*columns, strict=True)]


def find(
    cluster: DeclaredCluster, global_batch: int, noise_scale: float | None, start_batch: int | None
) -> Findings:
    """Plan a cluster, and compare: with an even split, without a worker, with other batches.

    Args:
        cluster: the workers and their network.
        global_batch: samples of a step.
        noise_scale: the gradient noise scale in samples; None: no other batches are looked at.
        start_batch: the global batch that the learning rate is chosen for; None: this one.
    """
    model, limits = speed_model(cluster.workers, cluster.network), limits_of(cluster.workers)
    best = best_plan(model, limits, global_batch)
    learning = None
    if noise_scale is not None:
        start = start_batch or global_batch
        learning = _learning(model, limits, global_batch, noise_scale, start)
    even = even_of(best, limits)
    return Findings(cluster, model, limits, best, even, _worths(cluster, best), learning)


def even_of(best: Plan, limits: Limits) -> Even:
    """Return the even split of a plan's global batch, or why the workers cannot take it."""
    try:
        split = even_split(len(best.split), best.global_batch)
    except InfeasibleSplit:
        return Even(why_not="there are more workers than samples")
    for worker, local in enumerate(split):
        if needs := _needs(limits, worker, local):
            return Even(why_not=f"{limits.name(worker)} takes {needs} and would get {local}")
    return Even(split, best.predict(split))


def batches_around(limits: Limits, global_batch: int) -> tuple[int, int]:
    """Return the range of global batches to look at: all that are feasible, up to a few times."""
    return max(1, limits.least), min(limits.most, REACH * global_batch)


def _planned_bytes(worker: Worker, local_batch: int) -> float | None:
    """Return the memory that a local batch takes; None where the worker does not say."""
    if worker.bytes_per_sample is None:
        return None
    at_once = min(local_batch, worker.most_at_once) if worker.micro_batch else local_batch
    return worker.fixed_bytes + worker.bytes_per_sample * at_once


def _needs(limits: Limits, worker: int, local_batch: int) -> str:
    """Return which limit a local batch breaks, or nothing."""
    low, high, unit = (int(each[worker]) for each in (limits.low, limits.high, limits.multiple))
    if local_batch > high:
        return f"at most {high} samples"
    if local_batch < low:
        return f"at least {low} samples"
    return f"multiples of {unit} samples" if local_batch % unit else ""


def _worths(cluster: DeclaredCluster, best: Plan) -> tuple[tuple[Kind, Worth], ...]:
    """Return what each kind is worth; nothing where there is one worker alone."""
    if len(cluster.workers) == 1:
        return ()
    kinds = sorted(cluster.kinds, key=lambda kind: best.split[kind.workers[0]])[:MOST_WORTHS]
    kinds = sorted(kinds, key=lambda kind: kind.workers[0])
    worths = worth_of(
        cluster.workers,
        cluster.network,
        global_batch=best.global_batch,
        which=[kind.workers[0] for kind in kinds],
    )
    return tuple(zip(kinds, worths, strict=True))


def _learning(
    model: SpeedModel, limits: Limits, global_batch: int, noise_scale: float, start_batch: int
) -> Learning:
    allowed = batches_around(limits, global_batch)
    best = best_batch(model, limits, noise_scale, start_batch, allowed)
    here, there = (
        goodput(model, limits, noise_scale, start_batch, batch) for batch in (global_batch, best)
    )
    if there < here:  # the search compares whole batches around its candidates, not all of them
        best, there = global_batch, here
    return Learning(noise_scale, start_batch, allowed, here, best, there)

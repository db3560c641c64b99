"""Planning for a declared cluster: the best split, and what each worker is worth."""

from collections.abc import Sequence
from dataclasses import dataclass

from poise.core.cluster import Network, Worker, limits_of, speed_model
from poise.core.limits import UNLIMITED
from poise.core.plan import Plan, best_plan
from poise.core.split import Optimum, optimal_split
from poise.errors import InfeasibleSplit, InvalidSetting
from poise.numbers import check_whole


def plan(workers: Sequence[Worker], network: Network | None = None, *, global_batch: int) -> Plan:
    """Return the split that makes a step shortest, with what is predicted of it.

    >>> fast = Worker(name="fast", forward_s=(0.001, 0.01), backward_s=(0.002, 0.01))
    >>> slow = Worker(name="slow", forward_s=(0.003, 0.01), backward_s=(0.006, 0.01))
    >>> network = Network(ready=(0.3, 1.0), bucket_s=(0.02, 0.004))
    >>> best = plan([fast, slow], network, global_batch=64)
    >>> best.split, round(best.step_s, 3), best.bound
    ((48, 16), 0.168, ('compute', 'compute'))
    >>> round(best.predict((32, 32)) / best.step_s, 2)  # how much longer the even split takes
    1.86
    """
    check_whole("a plan", "global_batch", global_batch, 1, UNLIMITED)
    return best_plan(speed_model(workers, network or Network()), limits_of(workers), global_batch)


@dataclass(frozen=True)
class Worth:
    """A worker's value: the shortest step with it and without it, in seconds."""

    with_s: float
    without_s: float | None
    """None where the others cannot take the whole global batch."""
    worth_having: bool
    """Whether a step is shorter with it, if samples could be divided: rounding does not judge."""


def worth_of(
    workers: Sequence[Worker], network: Network, *, global_batch: int, which: Sequence[int]
) -> tuple[Worth, ...]:
    """Compare the best step with and without each of some workers, one at a time.

    Without a worker the reduction is that of the smaller group (`Network.among`); a share of 0
    would not save that.
    """
    if not all(0 <= worker < len(workers) for worker in which):
        raise InvalidSetting(
            f"workers {list(which)} are not all among the {len(workers)} of the cluster; "
            "count them from 0"
        )
    everybody = _best(workers, network, global_batch)
    smaller = network.among(len(workers), len(workers) - 1)
    found = []
    for worker in which:
        try:
            rest = _best([*workers[:worker], *workers[worker + 1 :]], smaller, global_batch)
        except InfeasibleSplit:
            found.append(Worth(everybody.step_s, None, True))
        else:
            useful = everybody.level_s < rest.level_s
            found.append(Worth(everybody.step_s, rest.step_s, useful))
    return tuple(found)


def _best(workers: Sequence[Worker], network: Network, global_batch: int) -> Optimum:
    if not workers:
        raise InfeasibleSplit("nobody is left to take the global batch")
    return optimal_split(speed_model(workers, network), global_batch, limits_of(workers))

"""What the workers that are there can do: the splits they may take, and the shortest step."""

import numpy as np

from poise.core.split import Split
from poise.core.timing import Ints
from poise.errors import InfeasibleSplit
from poise.sim.cluster import Cluster
from poise.sim.scenario import Scenario

_ORACLE_WORK = 1_000_000
"""Worker-steps for which the best split is looked for in every step; of more, in some."""


class Possible:
    """The bounds of the workers that are there, and the best split within them."""

    def __init__(self, scenario: Scenario) -> None:
        self._all = scenario.limits
        self._every = max(1, scenario.workers * scenario.steps // _ORACLE_WORK)
        self.follow(scenario.first)

    def follow(self, present: Ints) -> None:
        """Other workers are there."""
        self._limits = self._all.take(present.tolist())
        self._checked: Split = ()
        """A split that is within their bounds."""
        self._best: tuple[Cluster | None, int, float] = (None, 0, 0.0)

    def check(self, split: Split) -> None:
        """Raise if a policy without bounds exceeds what a worker states."""
        if split == self._checked:
            return
        limits, local = self._limits, np.array(split)
        wrong = (local < limits.low) | (local > limits.high) | (local % limits.multiple > 0)
        if wrong.any():
            worker = int(np.flatnonzero(wrong)[0])
            raise InfeasibleSplit(
                f"{limits.name(worker)} would get {split[worker]} samples, and takes "
                f"{limits.low[worker]} to {limits.high[worker]} in multiples of "
                f"{limits.multiple[worker]}"
            )
        self._checked = split

    def best_s(self, step: int, cluster: Cluster, samples: int) -> float:
        """Return the step time of the best split of so many samples; NaN: not looked for."""
        if (cluster, samples) == self._best[:2]:
            return self._best[2]
        if step % self._every:
            return float("nan")
        try:
            _, found = cluster.best(samples, self._limits)
        except InfeasibleSplit:  # the smaller last step of an epoch may be no sum of multiples
            found = float("nan")
        self._best = (cluster, samples, found)
        return found

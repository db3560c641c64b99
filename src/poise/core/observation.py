"""What the workers report and a policy decides on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from poise.core.entries import LONGEST_S, MOST_BYTES, check_local_batches, check_within
from poise.core.limits import UNLIMITED
from poise.core.plain import MOST_COUNTED
from poise.core.split import Split
from poise.core.timing import Floats
from poise.errors import InvalidSetting


@dataclass(frozen=True, eq=False)
class Observation:
    """One step as all workers saw it, in arrays with one row per worker.

    None means that nobody measures it; NaN, that this worker did not: a worker that is silent in
    a step has a row of NaN. Times are each worker's own: no clocks are compared.
    """

    step: int
    split: Split
    """The split that this step was trained with."""
    epoch: int = 0
    compiling: tuple[int, ...] = ()
    """Workers on which torch.compile was at work since their last report."""
    ready_s: Floats | None = None
    """Workers x buckets: seconds from the end of the worker's previous reduction until it hands
    over each bucket, without waiting for input."""
    done_s: Floats | None = None
    """Workers x buckets: the same until the reduction of each bucket is done."""
    wait_s: Floats | None = None
    """Seconds the worker waited for input."""
    load_s: Floats | None = None
    """Seconds of the ready times in which the worker itself loaded its input."""
    input_s: Floats | None = None
    """Seconds per sample that the worker's loader takes, if its queue was empty."""
    update_s: Floats | None = None
    """Seconds of the ready times until the gradient before was applied."""
    memory_bytes: Floats | None = None
    """The worker's peak memory in this step."""
    memory_limit_bytes: Floats | None = None
    """The memory it has."""
    group_sums: Floats | None = None
    """Workers x `poise.core.noise.GroupSums`: norms of the workers' own gradients; a row of NaN on
    a worker that did not look at them."""
    global_sqnorm: float | None = None
    """Squared norm of the gradient of the global batch, before clipping."""
    clipped: bool | None = None
    """Whether the optimizer got a smaller gradient than that; None: nobody looked."""

    @cached_property
    def batches(self) -> Floats:
        """The split as real numbers."""
        return np.array(self.split, dtype=np.float64)

    @cached_property
    def length_s(self) -> float | None:
        """How long the step took, as far as was measured; None: not at all."""
        if self.ready_s is None:
            return None
        waited = 0.0 if self.wait_s is None else np.where(np.isnan(self.wait_s), 0.0, self.wait_s)
        ends = self.ready_s[:, -1] + waited
        if self.done_s is not None:
            ends = np.fmax(ends, self.done_s[:, -1])
        return float(np.fmax.reduce(ends)) if not np.isnan(ends).all() else None

    def times(self, who: str) -> Floats:
        """Return the ready times, or raise if they are missing or no times."""
        if self.ready_s is None:
            raise InvalidSetting(
                f"{who} decides on measured times, and step {self.step} has none; "
                "measure ready_s, or use a policy that needs no times"
            )
        return self.ready_s

    def check_loaded(self) -> None:
        """Raise unless it can be an observation of a step."""
        check_local_batches("split", self.split)
        for name in ("step", "epoch"):
            check_within(name, getattr(self, name), 0, MOST_COUNTED)
        if not all(0 <= worker < len(self.split) for worker in self.compiling):
            raise InvalidSetting(f"compiling={list(self.compiling)} are not all among the workers")
        self.check()

    def check(self) -> None:
        """Raise unless every number can be what it says it is."""
        found: dict[str, Floats] = {}
        for name in (*_TABLES, *_ROWS):
            values = getattr(self, name)
            dimensions = 2 if name in _TABLES else 1
            if values is None:
                continue
            found[name] = values
            if not isinstance(values, np.ndarray) or values.ndim != dimensions or not values.size:
                raise InvalidSetting(
                    f"step {self.step} has {name} of shape {np.shape(values)}; give an array of "
                    "workers" + (" x buckets" if dimensions > 1 else "")
                )
            if len(values) != len(self.split):
                raise InvalidSetting(
                    f"step {self.step} has {name} of {len(values)} workers and a split over "
                    f"{len(self.split)}; report one row per worker, NaN where nothing is known"
                )
        _check_times(self.step, found)
        ready, done = self.ready_s, self.done_s
        if ready is not None and done is not None and ready.shape != done.shape:
            raise InvalidSetting(
                f"step {self.step} has ready_s of {ready.shape[1]} buckets and done_s of "
                f"{done.shape[1]}; measure both for the same buckets"
            )


def _check_times(step: int, found: dict[str, Floats]) -> None:
    """Raise if a number is negative or infinite: one look at all of them, since that is quick."""
    every = np.concatenate([np.zeros(1), *(values.ravel() for values in found.values())])
    if np.fmin.reduce(every) >= 0 and np.fmax.reduce(every) <= LONGEST_S:
        return
    for name, values in found.items():
        most = _MOST.get(name, LONGEST_S)
        for place in np.argwhere((values < 0) | (values > most)):
            raise InvalidSetting(
                f"step {step} has {name}={values[tuple(place)]} on worker {place[0]}; "
                f"give a number from 0 to {most:.0e}, or NaN for not measured"
            )


_MOST = {"memory_bytes": MOST_BYTES, "memory_limit_bytes": MOST_BYTES, "group_sums": 1e300}
"""What is no time; of norms whose square is infinite nothing is learned."""
_TABLES = ("ready_s", "done_s", "group_sums")
"""The measurements with several numbers per worker,"""
_ROWS = ("wait_s", "load_s", "input_s", "update_s", "memory_bytes", "memory_limit_bytes")
"""and those with one."""


@dataclass(frozen=True)
class Change:
    """Workers joined or left, or the global batch is another one, from here on.

    >>> Change.of(3, global_batch=64, left=[1], joined=1)
    Change(origin=(0, 2, None), global_batch=64)
    """

    origin: tuple[int | None, ...]
    """For each worker the one before whose speed it has, itself or one of its kind; None for a
    worker of which nothing is known."""
    global_batch: int

    @staticmethod
    def of(
        workers: int, *, global_batch: int, left: Sequence[int] = (), joined: int = 0
    ) -> "Change":
        """Make the change of a cluster that some workers leave and some join at the end."""
        stay = [worker for worker in range(workers) if worker not in left]
        origin = (*stay, *[None] * joined)
        if len(stay) != workers - len(set(left)) or not origin:
            raise InvalidSetting(
                f"workers {list(left)} left a cluster of {workers}, and {joined} joined; "
                "name workers that were there, and keep at least one"
            )
        return Change(origin, global_batch)

    def check_loaded(self) -> None:
        """Raise unless it can be a change of a cluster."""
        if not self.origin or not 1 <= self.global_batch <= UNLIMITED:
            raise InvalidSetting(
                f"origin={list(self.origin)} and global_batch={self.global_batch} are no cluster"
            )

    def check(self, workers: int) -> None:
        """Raise unless each worker that is known was one of so many."""
        known = [number for number in self.origin if number is not None]
        if not all(0 <= number < workers for number in known):
            raise InvalidSetting(
                f"workers {known} are to stay of a cluster of {workers}; "
                "name each by the number it had"
            )


Event = Observation | Change

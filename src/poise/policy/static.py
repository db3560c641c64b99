"""Policy "static": shares in proportion to a declared resource."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poise.core.observation import Change
from poise.errors import InvalidSetting
from poise.numbers import is_number
from poise.policy.base import Decision, Schedule, Stated
from poise.policy.bounds import NO_BOUNDS, Bounds


@dataclass(frozen=True, init=False)
class Static(Stated):
    """Shares in proportion to a resource of each worker: b_k = B X_k / sum X.

    The resource X is what makes a worker fast: cores, or half-precision FLOP/s for mixed devices
    (OmniLearn, arXiv 2503.17469, section 4.1).

    >>> Static([12, 12, 8, 16]).init(workers=4, global_batch=240)[0]
    {0: (60, 60, 40, 80)}
    """

    resources: tuple[float, ...]
    bounds: Bounds

    def __init__(self, resources: Sequence[float], *, bounds: Bounds = NO_BOUNDS) -> None:
        found = tuple(resources)
        if not found or not all(is_number(each) and 0 < each < math.inf for each in found):
            raise InvalidSetting(
                f"Static has resources {list(found)}; give one number above 0 per worker, "
                "such as its cores"
            )
        object.__setattr__(self, "resources", tuple(float(amount) for amount in found))
        object.__setattr__(self, "bounds", bounds)

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, None]:
        """One split for the whole training."""
        if workers != len(self.resources):
            raise InvalidSetting(
                f"Static has resources of {len(self.resources)} workers, and there are {workers}; "
                "give one number per worker"
            )
        return {0: self.bounds.proportional(self.resources, global_batch)}, None

    def changed(self, change: Change) -> Decision:
        """Another global batch is shared alike; of other workers the resources are not known."""
        if change.origin != tuple(range(len(self.resources))):
            raise InvalidSetting(
                f"Static has resources of {len(self.resources)} workers, and others came or "
                "went; use a policy that can follow"
            )
        split = self.bounds.proportional(self.resources, change.global_batch)
        return Decision(split, "shares by declared resource")

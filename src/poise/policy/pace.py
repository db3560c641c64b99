"""How steps went with the split in effect, and what changing it has brought so far."""

import math
from dataclasses import dataclass

from poise.core.revised import revised
from poise.core.split import Split

_EARLY = 2
"""Steps after a change that are counted apart: caches and allocators have to follow."""
_SETTLED = 3
"""Steps after those from which a mean says something,"""
_SOON = 15
"""and up to which a difference is put down to the change, and not to speeds that drift."""
_WEIGHT = 0.1
"""Of the newest step in the mean, at least: it is to tell how steps are now."""
_FAR = 0.1
_SURE = 0.02
"""A split is worse than another only if it is by more than this part."""


@dataclass(frozen=True)
class Pace:
    """Step times since the last change, and those with the split before it."""

    early: int = 0
    early_s: float = 0.0
    """Number and sum of the first steps after the change."""
    settled: int = 0
    settled_s: float = 0.0
    """Number and mean of those after them."""
    cost_s: float = 0.0
    """What a change costs: by how much its first steps are longer."""
    changes: int = 0
    """How often the split changed since a worker's speed last did."""
    failures: int = 0
    """How often that made steps longer."""
    before: Split = ()
    before_s: float = 0.0
    """The split before the last change, and its mean step time; empty: not to go back to."""

    @property
    def mean_s(self) -> float:
        """The mean step with the split in effect; of its first steps while there are no others."""
        if self.settled >= _SETTLED:
            return self.settled_s
        return self.early_s / max(self.early, 1)

    def stepped(self, step_s: float) -> "Pace":
        """A step with the split in effect took so long."""
        if self.early < _EARLY:
            return revised(self, early=self.early + 1, early_s=self.early_s + step_s)
        settled = self.settled + 1
        mean = self.settled_s + max(1 / settled, _WEIGHT) * (step_s - self.settled_s)
        return revised(self, settled=settled, settled_s=mean)

    def changed(self, split: Split) -> "Pace":
        """The split in effect, this one, gives way to another."""
        cost_s, before, before_s = self.cost_s, self.before, self.before_s
        if self.settled >= _SETTLED:
            excess = max(0.0, self.early_s - self.early * self.settled_s)
            cost_s += 0.3 * (excess - cost_s)
            before, before_s = split, self.settled_s
        return Pace(
            cost_s=cost_s,
            changes=self.changes + 1,
            failures=self.failures,
            before=before,
            before_s=before_s,
        )

    def went_back(self) -> "Pace":
        """The split in effect gives way to the one before, since it made steps longer."""
        return Pace(cost_s=self.cost_s, changes=self.changes + 1, failures=self.failures + 1)

    def renewed(self) -> "Pace":
        """A worker's speed changed: what was seen before says nothing any more."""
        return Pace(cost_s=self.cost_s)

    def failed(self, noise: float) -> bool:
        """Whether steps were shorter before the last change; the first ones must be far longer."""
        if not self.before or self.early < _EARLY or self.settled > _SOON:
            return False
        if self.settled < _SETTLED:
            return self.early_s / self.early > self.before_s * (1 + _FAR + 2 * noise)
        margin = max(_SURE, 2 * noise / math.sqrt(self.settled))
        return self.settled_s > self.before_s * (1 + margin)

"""How steps went with the split in effect, and what changing it has brought so far."""

import math
from dataclasses import dataclass, replace

from poise.core.entries import check_local_batches, check_within
from poise.core.revised import revised
from poise.core.split import Split
from poise.errors import InvalidSetting

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
"""A split is worse than another only if it is by more than this part,"""
_ERRORS = 2.0
"""and by more than so many standard errors."""
_FIRST = 5.0
"""Step times are taken to scatter like workers' times, as if so many had shown it."""
_MEMORY = 100.0
"""How they scatter is learned from about so many."""
_MOST_CORRELATION = 0.9
_CLIP = 3.0
"""A step counts as at most so many standard deviations off: a stall is not how steps scatter."""

_MOST = 1e12
"""Nothing that is counted here gets as far."""


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
    """How often that made steps longer, less how often it did not."""
    before: Split = ()
    before_settled: int = 0
    before_s: float = 0.0
    """The split before the last change, and number and mean of its steps. Without a split it is
    not to go back to: nothing is known of it, or it is the one in effect again."""
    squares: float = 0.0
    products: float = 0.0
    scattered: float = 0.0
    """Distances of steps from their means, relative to them: the sum of their squares, of the
    products of neighbors, and how many."""
    last_off: float = 0.0

    def check_loaded(self) -> None:
        """Raise unless these can be counts and means of steps."""
        for name in ("early", "settled", "changes", "failures", "before_settled"):
            check_within(name, getattr(self, name), 0, _MOST)
        for name in ("early_s", "settled_s", "cost_s", "before_s", "squares", "scattered"):
            check_within(name, getattr(self, name), 0, _MOST)
        for name in ("products", "last_off"):
            check_within(name, getattr(self, name), -_MOST, _MOST)
        check_local_batches("before", self.before)
        if self.before and not (self.before_settled and self.before_s):
            raise InvalidSetting("before is a split, and before_settled or before_s is 0")

    @property
    def steps(self) -> int:
        """Steps since the last change."""
        return self.early + self.settled

    @property
    def mean_s(self) -> float:
        """The mean step with the split in effect; of its first steps while there are no others."""
        if self.settled >= _SETTLED:
            return self.settled_s
        return self.early_s / max(self.early, 1)

    def stepped(self, step_s: float, noise: float) -> "Pace":
        """A step with the split in effect took so long; noise is that of workers' times."""
        if self.early < _EARLY:
            return revised(self, early=self.early + 1, early_s=self.early_s + step_s)
        settled = self.settled + 1
        mean = self.settled_s + max(1 / settled, _WEIGHT) * (step_s - self.settled_s)
        pace = revised(self, settled=settled, settled_s=mean)
        if not self.settled_s:
            return pace
        most = _CLIP * self.spread(noise)
        off = min(max(step_s / self.settled_s - 1, -most), most)
        fair = self.settled / settled  # the mean is one of few steps itself
        kept = 1 - 1 / _MEMORY
        return revised(
            pace,
            squares=kept * self.squares + fair * off**2,
            products=kept * self.products + fair * off * self.last_off,
            scattered=kept * self.scattered + 1,
            last_off=off,
        )

    def spread(self, noise: float) -> float:
        """Return the standard deviation of a step, relative to its mean.

        Besides the workers' times, those of the reductions scatter.
        """
        return math.sqrt((_FIRST * noise**2 + self.squares) / (_FIRST + self.scattered))

    def error(self, noise: float) -> float:
        """Return the standard error of how much longer steps are now than before.

        Where neighbors correlate, a few of them say less.
        """
        doubt = _FIRST * self.spread(noise) ** 2
        correlation = min(max(self.products / (self.squares + doubt), 0.0), _MOST_CORRELATION)
        lasting = (1 + correlation) / (1 - correlation)
        of_means = 1 / self.settled + 1 / self.before_settled
        return self.spread(noise) * math.sqrt(lasting * of_means)

    def changed(self, split: Split) -> "Pace":
        """The split in effect, this one, gives way to another."""
        paid = bool(self.before) and self.settled > _SOON
        failures = max(0, self.failures - paid)
        pace = replace(self._begun(), changes=self.changes + 1, failures=failures)
        if self.settled >= _SETTLED:
            excess = max(0.0, self.early_s - self.early * self.settled_s)
            return replace(
                pace,
                cost_s=self.cost_s + 0.3 * (excess - self.cost_s),
                before=split,
                before_settled=self.settled,
                before_s=self.settled_s,
            )
        if not self.before:
            return pace
        return replace(
            pace,
            before=self.before,
            before_settled=self.before_settled,
            before_s=self.before_s,
        )

    def went_back(self) -> "Pace":
        """The split in effect gives way to the one before, since it made steps longer."""
        return replace(
            self._begun(),
            changes=self.changes + 1,
            failures=self.failures + 1,
            before_settled=self.before_settled,
            before_s=self.before_s,
        )

    def renewed(self) -> "Pace":
        """A worker's speed changed: what was seen before says nothing any more."""
        return self._begun()

    def failed(self, noise: float) -> bool:
        """Whether steps were shorter before the last change."""
        return bool(self.before) and self._longer(noise)

    def mistaken(self, noise: float) -> bool:
        """Whether steps stay long with the split that it went back to: that one was not why."""
        return not self.before and self.before_settled > 0 and self._longer(noise)

    def _longer(self, noise: float) -> bool:
        """Whether steps are longer than before; the first ones must be so by far."""
        if self.early < _EARLY or self.settled > _SOON:
            return False
        if self.settled < _SETTLED:
            far = 1 + _FAR + _ERRORS * self.spread(noise)
            return self.early_s > self.early * self.before_s * far
        return self.settled_s > self.before_s * (1 + max(_SURE, _ERRORS * self.error(noise)))

    def _begun(self) -> "Pace":
        """Return what is known before the first step with another split."""
        return Pace(
            cost_s=self.cost_s,
            squares=self.squares,
            products=self.products,
            scattered=self.scattered,
        )

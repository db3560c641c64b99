"""Policies whose splits follow from what the user states: "even", "fixed" and "static"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poise.core.observation import Change, Event
from poise.core.split import Split, check_split, even_split
from poise.errors import InvalidSetting
from poise.numbers import is_number, is_whole
from poise.policy.base import Decision, Schedule
from poise.policy.bounds import NO_BOUNDS, Bounds, check_bounds

_LEAST, _MOST = 1e-30, 1e30
"""Of a resource; others are a mistake."""


class Stated:
    """What they share: whatever is measured, the split stays."""

    online = False
    state_type = type(None)

    def update(self, state: None, events: Sequence[Event]) -> tuple[Decision | None, None]:
        """Only another cluster or global batch changes the split."""
        decision = None
        for event in events:
            if isinstance(event, Change):
                decision = self.changed(event)
        return decision, None

    def changed(self, change: Change) -> Decision | None:
        """Return the split after a change, None if it stays; raise if what is stated is not it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Even(Stated):
    """Every worker gets the same share of the global batch, as in plain data parallelism."""

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, None]:
        """One split for the whole training."""
        return {0: even_split(workers, global_batch)}, None

    def changed(self, change: Change) -> Decision:
        """The same rule for other workers, or another global batch."""
        return Decision(even_split(len(change.origin), change.global_batch), "even shares")


@dataclass(frozen=True, init=False)
class Fixed(Stated):
    """Splits stated by the user: one for all steps, or several by the step they start at.

    >>> Fixed([5, 2, 9]).init(workers=3, global_batch=16)[0]
    {0: (5, 2, 9)}
    >>> Fixed({0: [5, 2, 9], 7: [1, 12, 3]}).init(workers=3, global_batch=16)[0]
    {0: (5, 2, 9), 7: (1, 12, 3)}
    """

    splits: tuple[tuple[int, Split], ...]
    """(start step, split), in the order of steps."""

    def __init__(self, splits: Sequence[int] | Mapping[int, Sequence[int]]) -> None:
        by_step = splits if isinstance(splits, Mapping) else {0: splits}
        for step, split in by_step.items():
            _check_entry(step, split)
        ordered = tuple((step, tuple(by_step[step])) for step in sorted(by_step))
        object.__setattr__(self, "splits", ordered)
        self.__post_init__()

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.splits]
        if steps[:1] != [0] or steps != sorted(set(steps)):
            raise InvalidSetting(
                f"Fixed has splits for steps {steps}; add one for step 0, where training starts"
            )

    def init(self, workers: int, global_batch: int) -> tuple[Schedule, None]:
        """All splits are known from the start; each must divide the global batch."""
        return {
            step: check_split(split, workers, global_batch) for step, split in self.splits
        }, None

    def changed(self, change: Change) -> None:
        """Another cluster or global batch needs other splits."""
        workers, global_batch = len(self.splits[0][1]), sum(self.splits[0][1])
        if (len(change.origin), change.global_batch) != (workers, global_batch):
            raise InvalidSetting(
                f"Fixed has splits over {workers} workers of "
                f"{global_batch} samples, and now there are {len(change.origin)} "
                f"workers and {change.global_batch} samples; use a policy that can follow"
            )


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
        found = tuple(resources) if isinstance(resources, list | tuple) else (resources,)
        object.__setattr__(self, "resources", found)
        object.__setattr__(self, "bounds", bounds)
        self.__post_init__()

    def __post_init__(self) -> None:
        found = self.resources
        check_bounds("Static", self.bounds)
        if not found or not all(is_number(each) and _LEAST < each < _MOST for each in found):
            raise InvalidSetting(
                f"Static has resources {list(found)}; give one number above 0 per worker, "
                "such as its cores"
            )
        object.__setattr__(self, "resources", tuple(float(amount) for amount in found))

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


def _check_entry(step: object, split: object) -> None:
    if not is_whole(step) or step < 0:
        raise InvalidSetting(
            f"Fixed has a split for step {step!r}; steps are whole numbers counted from 0"
        )
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise InvalidSetting(
            f"Fixed has splits with {split!r} for step {step}; give a list of local batches, one "
            "per worker"
        )

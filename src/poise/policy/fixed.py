"""Policy "fixed": splits that the user states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poise.core.observation import Change
from poise.core.split import Split, check_split
from poise.errors import InvalidSetting
from poise.numbers import is_whole
from poise.policy.base import Schedule, Stated


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
        if 0 not in by_step:
            raise InvalidSetting(
                f"Fixed has splits for steps {sorted(by_step)}; "
                "add one for step 0, where training starts"
            )
        ordered = tuple((step, tuple(by_step[step])) for step in sorted(by_step))
        object.__setattr__(self, "splits", ordered)

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


def _check_entry(step: object, split: object) -> None:
    if not is_whole(step) or step < 0:
        raise InvalidSetting(
            f"Fixed has a split for step {step!r}; steps are whole numbers counted from 0"
        )
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise InvalidSetting(
            f"Fixed has {split!r} for step {step}; give a list of local batches, one per worker"
        )

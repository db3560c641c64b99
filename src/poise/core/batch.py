"""Global batches: the epoch's order, cut into steps, and each step into the workers' slices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from poise.core.plan import Plan
from poise.core.split import Split, apportion


@dataclass(frozen=True)
class Batch:
    """One global batch: where it lies in its epoch's order and how it is split.

    Workers hold contiguous slices in the order of their numbers.

    >>> batch = Batch(step=7, epoch=0, start=100, split=(5, 0, 3))
    >>> batch.slice(2), batch.count, batch.stop
    ((105, 108), 8, 108)
    """

    step: int
    """Counted over the whole training, from 0."""
    epoch: int
    start: int
    """Position of the first sample in the epoch's order."""
    split: Split

    @property
    def count(self) -> int:
        """Samples of the global batch."""
        return sum(self.split)

    @property
    def stop(self) -> int:
        """Position after the last sample."""
        return self.start + self.count

    def slice(self, worker: int) -> tuple[int, int]:
        """Return the positions of a worker's samples as (start, stop)."""
        start = self.start + sum(self.split[:worker])
        return start, start + self.split[worker]


def batches(
    plan_at: Callable[[int], Plan],
    *,
    length: int,
    drop_last: bool = False,
    epoch: int = 0,
    position: int = 0,
    step: int = 0,
) -> Iterator[Batch]:
    """Cut the rest of an epoch into global batches, asking for each step's plan in turn.

    The last global batch is smaller and its split in proportion; nothing is padded or repeated.
    With drop_last it is left out.
    """
    while position < length:
        plan = plan_at(step)
        count = min(plan.global_batch, length - position)
        if count < plan.global_batch and drop_last:
            return
        split = plan.split if count == plan.global_batch else apportion(plan.split, count)
        batch = Batch(step=step, epoch=epoch, start=position, split=split)
        yield batch
        position, step = batch.stop, step + 1


def steps_per_epoch(length: int, global_batch: int, *, drop_last: bool) -> int:
    """Number of global batches in a whole epoch."""
    return length // global_batch if drop_last else -(-length // global_batch)

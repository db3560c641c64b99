"""How far training is: which samples are consumed, and which batch is under way."""

from dataclasses import dataclass

from poise.core.batch import Batch
from poise.core.revised import revised
from poise.errors import OutOfOrder


@dataclass(frozen=True)
class Progress:
    """A place in the training. A sample is consumed when its gradient's reduction is complete."""

    epoch: int = 0
    position: int = 0
    """Samples of this epoch consumed so far."""
    step: int = 0
    """Steps consumed so far, over the whole training."""
    samples: int = 0
    """Samples consumed so far, over the whole training."""
    effective_samples: float = 0.0
    """The same, each counted by what it teaches: in gain times the global batch of the start."""
    skipped: int = 0
    """Steps whose gradient the optimizer never used."""
    batch: Batch | None = None
    """The batch that the loader handed out last."""
    unreduced: int = 0
    """Batches handed out since the last reduction."""
    unapplied: bool = False
    """Whether a reduced gradient still waits for the optimizer."""

    def begin_pass(self) -> "Progress":
        """A new pass over the loader starts where consumption stands."""
        return revised(self, batch=None, unreduced=0)

    def hand_out(self, batch: Batch) -> "Progress":
        """The loader yields a batch."""
        return revised(self, batch=batch, unreduced=self.unreduced + 1)

    def batch_to_reduce(self) -> Batch:
        """Return the batch that a backward running now belongs to."""
        if self.batch is None:
            raise OutOfOrder(
                "backward ran without a batch from the prepared loader, so its weight is unknown; "
                "take batches from the loader that prepare returned"
            )
        if self.unreduced > 1:
            raise OutOfOrder(
                f"the loader handed out {self.unreduced} batches (the last for step "
                f"{self.batch.step}) before one backward, so it is unclear which of them this "
                "gradient belongs to; run one backward per batch, without fetching ahead"
            )
        return self.batch

    def reduced(self, efficiency: float = 1.0) -> "Progress":
        """The reduction of the batch under way is complete: its samples are consumed.

        A second backward on the same batch consumes nothing more. The efficiency says what a
        sample teaches, compared with one of a global batch of the start's size.
        """
        batch = self.batch_to_reduce()
        if batch.step < self.step:
            return revised(self, unapplied=True)
        return revised(
            self,
            position=batch.stop,
            step=batch.step + 1,
            samples=self.samples + batch.count,
            effective_samples=self.effective_samples + batch.count * efficiency,
            unreduced=0,
            unapplied=True,
        )

    def applied(self) -> "Progress":
        """The optimizer used the gradient."""
        if self.batch is not None and self.unreduced:
            raise OutOfOrder(
                f"optimizer.step() ran without a gradient summed over the workers for step "
                f"{self.batch.step}; compute the loss from a call of the prepared model, "
                "model(x), and call loss.backward() once for it"
            )
        return revised(self, unapplied=False)

    def skip(self) -> "Progress":
        """The gradient is thrown away: a GradScaler found it too large, or the user cleared it."""
        return revised(self, skipped=self.skipped + 1, unapplied=False)

    def end_pass(self, end: int) -> "Progress":
        """The loader is exhausted; the epoch is over if its samples up to end are consumed."""
        return self.next_epoch() if self.position >= end else self

    def next_epoch(self) -> "Progress":
        """The next epoch starts at its first sample."""
        return revised(self, epoch=self.epoch + 1, position=0, batch=None, unreduced=0)

"""Where a virtual training is in its data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """An epoch, and what is left of it.

    >>> Position(length=10, left=4).after(7)
    Position(length=10, left=7, epoch=1)
    """

    length: int
    """Samples of an epoch."""
    left: int
    epoch: int = 0

    def after(self, samples: float) -> "Position":
        """Return the position after so many samples, perhaps of several epochs."""
        left = self.left - int(samples)
        if left > 0:
            return Position(self.length, left, self.epoch)
        passed, used = divmod(-left, self.length)
        return Position(self.length, self.length - used, self.epoch + 1 + passed)

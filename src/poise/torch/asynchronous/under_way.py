"""The local batches that a worker's loop has, until their gradient is pushed."""

from collections.abc import Sequence

from torch import nn

from poise.torch.asynchronous.messages import Handed
from poise.torch.backwards import Tally, count_backwards, is_usable


class UnderWay:
    """What was handed to the loop since the last push, and what became of it."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self.steps = 0
        """Local batches so far."""
        self.handed: list[Handed] = []
        """Those whose gradients are added up."""
        self.count = 0.0
        """What the loss of the last one is divided by."""
        self._skipped: list[int] = []
        """The numbers of those whose gradients were thrown away, or never computed."""
        self._trained = trained
        self._backwards = Tally()
        self._counting = count_backwards(trained, self._backwards)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of those whose gradients are added up."""
        return tuple(handed.number for handed in self.handed)

    def add(self, handed: Handed, count: float) -> None:
        """The loop gets a local batch."""
        self.handed.append(handed)
        self.count = count
        self.steps += 1
        self._backwards.backwards = 0

    def settle(self, *, leaving: bool) -> None:
        """Find out what became of batches that no optimizer step followed.

        Gradients that are still there are pushed with the next one; others were thrown away. A
        batch without a backward has none: the loop skipped it, or it left the pass.
        """
        if self.handed and not self._backwards.backwards:
            last = self.handed.pop()
            self._skipped += [] if leaving else [last.number]
        if self.handed and not is_usable([p.grad for p in self._trained]):
            self._skipped += self.numbers
            self.handed = []

    def take_skipped(self) -> tuple[int, ...]:
        """Return the numbers of those that were skipped, once."""
        skipped, self._skipped = tuple(self._skipped), []
        return skipped

    def forget(self) -> None:
        """What is added up is the server's to account for."""
        self.handed = []

    def close(self) -> None:
        """Look at backwards no more."""
        self._counting.remove()

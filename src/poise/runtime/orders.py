"""The order of samples in each epoch: a keyed permutation, or what a sampler draws."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from poise.core.order import DrawnOrder, Order
from poise.errors import StateMismatch

Drawing = Callable[[Callable[[], NDArray[np.int64]]], NDArray[np.int64]]
"""Has one process draw, and returns to everybody what it drew; `Control.drawn` is one."""


class Orders(Protocol):
    """Where the order of an epoch comes from."""

    def __len__(self) -> int:
        """Samples in an epoch, as far as known before it."""

    def at(self, epoch: int) -> Order | DrawnOrder:
        """Return the order of an epoch; all workers ask for it together."""

    def identity(self) -> dict[str, int | str]:
        """What must be the same on all workers, and after a resume."""

    def drawn(self, epoch: int) -> str:
        """Fingerprint of an epoch's order that a resume must find again; "" if none is needed."""

    def expect(self, epoch: int, position: int, drawn: str) -> None:
        """Check a saved place: now, or when the epoch's order is next asked for."""


@dataclass
class KeyedOrders:
    """A permutation that every worker computes by itself, or the data set's own order."""

    first: Order
    """The order of epoch 0."""

    def __len__(self) -> int:
        return self.first.length

    def at(self, epoch: int) -> Order:
        """Return the order of an epoch."""
        return replace(self.first, epoch=epoch)

    def identity(self) -> dict[str, int | str]:
        """Length, and a fingerprint of seed and shuffling."""
        return {"length": self.first.length, "order": self.first.digest()}

    def drawn(self, epoch: int) -> str:
        """Nothing is drawn."""
        return ""

    def expect(self, epoch: int, position: int, drawn: str) -> None:
        """Check that the place lies in the data set."""
        if position > self.first.length:
            raise StateMismatch(
                f"the state has position={position} in a data set of {self.first.length} "
                "samples; it is damaged, load another one"
            )


class Sampler(Protocol):
    """Something that draws samples for an epoch, of the framework's or the user's own."""

    @property
    def kind(self) -> str:
        """What it is called."""

    def __len__(self) -> int:
        """How many it draws, as far as it says so."""

    def draw(self, epoch: int) -> NDArray[np.int64]:
        """Draw the samples of an epoch."""


class DrawnOrders:
    """What a sampler draws on worker 0."""

    def __init__(self, sampler: Sampler, length: int, drawing: Drawing) -> None:
        self._sampler = sampler
        self._length = length
        self._drawing = drawing
        self._epoch = -1
        self._order = DrawnOrder(np.zeros(0, dtype=np.int64))
        self._expected = (-1, "")

    def __len__(self) -> int:
        return len(self._sampler)

    def at(self, epoch: int) -> DrawnOrder:
        """Draw on worker 0 and tell the others; once in each epoch."""
        if self._epoch != epoch:
            self._order = DrawnOrder(self._drawing(partial(self._sampler.draw, epoch)))
            self._epoch = epoch
        if self._expected[0] == epoch and self._expected[1] != self._order.digest():
            raise StateMismatch(
                f"the sampler drew other samples for epoch {epoch} than before the state was "
                "saved, so the rest of the epoch is not known; resume with the sampler and "
                "weights it was saved with, or save at the end of an epoch"
            )
        return self._order

    def identity(self) -> dict[str, int | str]:
        """Length and kind."""
        return {"length": self._length, "order": f"drawn by {self._sampler.kind}"}

    def drawn(self, epoch: int) -> str:
        """Fingerprint of what was drawn."""
        return self._order.digest() if self._epoch == epoch else ""

    def expect(self, epoch: int, position: int, drawn: str) -> None:
        """Check what is drawn next against a saved fingerprint."""
        self._expected = (epoch, drawn) if drawn else (-1, "")
        self._epoch = -1

"""The order of samples in each epoch: a keyed permutation, or what the user's sampler draws."""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from poise.core.order import DrawnOrder, Order, epoch_seed
from poise.errors import InvalidSetting, StateMismatch
from poise.torch.seeding import seeded


class Drawing(Protocol):
    """How one process's draw becomes everybody's; `Control` is one."""

    @property
    def worker(self) -> int:
        """This worker's number; worker 0 draws."""

    def numbers(self, mine: NDArray[np.int64], doing: str) -> NDArray[np.int64]:
        """Return worker 0's numbers."""


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


class DrawnOrders:
    """What the user's sampler yields on worker 0, under generators seeded by (seed, epoch)."""

    def __init__(self, sampler: Any, length: int, seed: int, control: Drawing) -> None:
        self._sampler = sampler
        self._length = length
        self._seed = seed
        self._control = control
        self._epoch = -1
        self._order = DrawnOrder(np.zeros(0, dtype=np.int64))
        self._expected = (-1, "")

    def __len__(self) -> int:
        if not isinstance(self._sampler, Sized):
            raise TypeError(f"the sampler ({type(self._sampler).__name__}) has no length")
        return len(self._sampler)

    def at(self, epoch: int) -> DrawnOrder:
        """Draw on worker 0 and tell the others; once in each epoch."""
        if self._epoch != epoch:
            mine = self._draw(epoch) if self._control.worker == 0 else np.zeros(0, dtype=np.int64)
            self._order = DrawnOrder(self._control.numbers(mine, "the draw of the sampler"))
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
        return {"length": self._length, "order": f"drawn by {type(self._sampler).__name__}"}

    def drawn(self, epoch: int) -> str:
        """Fingerprint of what was drawn."""
        return self._order.digest() if self._epoch == epoch else ""

    def expect(self, epoch: int, position: int, drawn: str) -> None:
        """Check what is drawn next against a saved fingerprint."""
        self._expected = (epoch, drawn) if drawn else (-1, "")
        self._epoch = -1

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        seed = epoch_seed(self._seed, epoch)
        with seeded(seed), _own_generator_seeded(self._sampler, seed):
            return _whole_numbers(self._sampler, self._length)


def orders_of(loader: DataLoader[Any], length: int, seed: int, control: Drawing) -> Orders:
    """Return the order that a loader asks for."""
    sampler = loader.sampler
    plain = type(sampler) is RandomSampler and not sampler.replacement
    if plain and sampler._num_samples is None:  # type: ignore[attr-defined]
        return KeyedOrders(Order(length=length, seed=seed))
    if type(sampler) is SequentialSampler:
        return KeyedOrders(Order(length=length, seed=seed, shuffled=False))
    return DrawnOrders(sampler, length, seed, control)


@contextmanager
def _own_generator_seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Seed a sampler's own generator; the seed that the user gave it still tells runs apart."""
    own = getattr(sampler, "generator", None)
    if not isinstance(own, torch.Generator):
        yield
        return
    state = own.get_state()
    own.manual_seed((seed + own.initial_seed()) % 2**64)
    try:
        yield
    finally:
        own.set_state(state)


def _whole_numbers(drawn: Iterable[Any], length: int) -> NDArray[np.int64]:
    """Return what a sampler yields as integers, or raise if it is something else."""
    samples = []
    for each in drawn:
        number = each.item() if isinstance(each, torch.Tensor | np.generic) else each
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidSetting(
                f"the sampler yields {each!r}, which is not a whole number; Poise cuts and sends "
                "samples by their number: give the data set whole numbers as indices"
            )
        if not 0 <= number < length:
            raise InvalidSetting(
                f"the sampler yields {number}, but the data set has samples 0 to {length - 1}"
            )
        samples.append(number)
    if not samples:
        raise InvalidSetting("the sampler yields no sample; training needs at least one")
    return np.array(samples, dtype=np.int64)

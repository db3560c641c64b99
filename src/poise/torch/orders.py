"""The order that a loader's sampler asks for."""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from poise.core.order import Order, epoch_seed
from poise.errors import InvalidSetting
from poise.runtime.orders import Drawing, DrawnOrders, KeyedOrders, Orders
from poise.torch.seeding import seeded


@dataclass(frozen=True)
class LoaderSampler:
    """A sampler of a DataLoader, drawn under generators seeded by (seed, epoch)."""

    sampler: Any
    length: int
    """Of the data set."""
    seed: int

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.sampler).__name__

    def __len__(self) -> int:
        if not isinstance(self.sampler, Sized):
            raise TypeError(f"the sampler ({self.kind}) has no length")
        return len(self.sampler)

    def draw(self, epoch: int) -> NDArray[np.int64]:
        """Draw the samples of an epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        seed = epoch_seed(self.seed, epoch)
        with seeded(seed), _own_generator_seeded(self.sampler, seed):
            return _whole_numbers(self.sampler, self.length)


def orders_of(loader: DataLoader[Any], seed: int, drawing: Drawing) -> Orders:
    """Return the order that a loader of a map-style data set asks for."""
    length, sampler = _length_of(loader), loader.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        return KeyedOrders(Order(length=length, seed=seed))
    if type(sampler) is SequentialSampler:
        return KeyedOrders(Order(length=length, seed=seed, shuffled=False))
    return DrawnOrders(LoaderSampler(sampler, length, seed), length, drawing)


def _length_of(loader: DataLoader[Any]) -> int:
    """Return the length of a map-style data set, or raise."""
    dataset = loader.dataset
    if not isinstance(dataset, Sized):
        raise InvalidSetting(
            f"{type(dataset).__name__} has no length, so an epoch has no end that workers could "
            "agree on; give the data set a __len__"
        )
    if len(dataset) == 0:
        raise InvalidSetting("the data set is empty; training needs at least one sample")
    return len(dataset)


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

"""Random augmentation that depends on (seed, epoch, sample), and not on who fetches the sample.

Samples of a map-style data set are fetched with the global generators of torch, Python and NumPy
seeded for each of them; afterwards the generators go on where they were. Seeding all three takes
9 microseconds a sample, so a generator is seeded only once the data set has been seen to use it:
the batch in which that shows is fetched again.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from poise.core.order import sample_seeds

_MARK = 20_021


class Generator(Protocol):
    """A global source of random numbers."""

    def set_aside(self) -> Any:
        """Return its state, and leave it at a mark from which any use shows.

        The mark is the same in every process, so that what is read from it is, too.
        """

    def seed(self, seed: int) -> None:
        """Start anew from a 64-bit seed."""

    def moved(self) -> bool:
        """Whether it was used since the mark."""

    def put_back(self, state: Any) -> None:
        """Go on from a state."""


@dataclass(frozen=True)
class Wanted:
    """What a loader asks the data set for."""

    epoch: int
    samples: list[int]


class SeededDataset(Dataset[Any]):
    """A data set whose samples are fetched under seeds of their own.

    Attributes are those of the user's data set, which loader processes may read and set.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.__dict__.update(_dataset=dataset, _seed=seed, _used=[])

    def __getitems__(self, wanted: Wanted) -> Sequence[Any]:
        """Fetch a batch of samples."""
        if _fetches_batches(self._dataset):
            fetched: Sequence[Any] = self._dataset.__getitems__(wanted.samples)
            return fetched
        while True:
            untouched = [each for each in GENERATORS if each not in self._used]
            with _all_set_aside():
                samples = self._fetch_seeded(wanted) if self._used else self._fetch(wanted)
                newly_used = [each for each in untouched if each.moved()]
            if not newly_used:
                return samples
            self._used.extend(newly_used)

    def _fetch(self, wanted: Wanted) -> list[Any]:
        return [self._dataset[sample] for sample in wanted.samples]

    def _fetch_seeded(self, wanted: Wanted) -> list[Any]:
        seeds = sample_seeds(self._seed, wanted.epoch, np.array(wanted.samples))
        fetched = []
        for sample, seed in zip(wanted.samples, seeds, strict=True):
            for generator in self._used:
                generator.seed(seed)
            fetched.append(self._dataset[sample])
        return fetched

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)  # while it is unpickled in a loader process
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the global generators as a seed says; afterwards they go on where they were."""
    with _all_set_aside():
        for generator in GENERATORS:
            generator.seed(seed)
        yield


@dataclass(frozen=True)
class _Torch:
    _marked: ClassVar[Any] = torch.Generator().manual_seed(_MARK).get_state()

    def set_aside(self) -> Any:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(_MARK)
        return state

    def seed(self, seed: int) -> None:
        # torch.manual_seed would look for accelerators, at a hundred times the cost.
        torch.default_generator.manual_seed(seed)

    def moved(self) -> bool:
        return not torch.equal(self._marked, torch.default_generator.get_state())

    def put_back(self, state: Any) -> None:
        torch.default_generator.set_state(state)


@dataclass(frozen=True)
class _Python:
    _expected: ClassVar[int] = random.Random(_MARK).getrandbits(64)

    def set_aside(self) -> Any:
        state = random.getstate()
        random.seed(_MARK)
        return state

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def moved(self) -> bool:
        return random.getrandbits(64) != self._expected

    def put_back(self, state: Any) -> None:
        random.setstate(state)


def _marked_numpy() -> Any:
    """Return a bit generator at the mark, as numpy.random.seed sets one."""
    generator = np.random.MT19937()
    np.random.RandomState(generator).seed(_MARK)
    return generator


@dataclass(frozen=True)
class _NumPy:
    """Swaps the bit generator under numpy.random: copying its state takes 50 microseconds."""

    _ours: ClassVar[Any] = _marked_numpy()
    _expected: ClassVar[int] = _marked_numpy().random_raw()

    def set_aside(self) -> Any:
        users = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._ours)  # type: ignore[attr-defined]
        np.random.seed(_MARK)
        return users

    def seed(self, seed: int) -> None:
        np.random.seed(seed % 2**32)

    def moved(self) -> bool:
        return bool(self._ours.random_raw() != self._expected)

    def put_back(self, state: Any) -> None:
        np.random.set_bit_generator(state)  # type: ignore[attr-defined]


GENERATORS: tuple[Generator, ...] = (_Torch(), _Python(), _NumPy())


@contextmanager
def _all_set_aside() -> Iterator[None]:
    states = [generator.set_aside() for generator in GENERATORS]
    try:
        yield
    finally:
        for generator, state in zip(GENERATORS, states, strict=True):
            generator.put_back(state)


def _fetches_batches(dataset: Any) -> bool:
    """Whether a data set fetches whole batches by a way of its own."""
    if type(dataset) is Subset:  # its way is one by one
        return _fetches_batches(dataset.dataset)
    return hasattr(dataset, "__getitems__")

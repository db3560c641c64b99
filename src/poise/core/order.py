"""The order in which an epoch visits the data set: a keyed permutation, and its seeds.

Any part of it is computed directly, in constant memory, so that resuming is a matter of knowing
(seed, epoch, position), and every worker can cut its own slice without talking to the others.

The permutation is a Feistel network on the smallest power of two that holds the data set, walked
until the value falls inside (cycle-walking; Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002). It is part of the format of saved states: golden values in the tests keep
it the same on every platform and version.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from poise.errors import InvalidSetting
from poise.numbers import is_whole

_HALF_ROUNDS = 10
_FEWEST_BITS = 6  # a smaller network has too few states to reach all orders evenly
_BLOCK = 8192
_WORD = 2**64


@dataclass(frozen=True, kw_only=True)
class Order:
    """The samples of one epoch in the order in which training visits them.

    >>> Order(length=10, seed=0, epoch=0).at(0, 10).tolist()
    [5, 1, 2, 0, 3, 6, 8, 4, 9, 7]
    >>> Order(length=10, seed=0, epoch=0).at(4, 6).tolist()
    [3, 6]
    >>> Order(length=10, shuffled=False).at(4, 6).tolist()
    [4, 5]
    """

    length: int
    """Number of samples in the data set."""
    seed: int = 0
    """Chooses the permutation, together with the epoch."""
    epoch: int = 0
    shuffled: bool = True
    """False: the data set's own order, in every epoch."""

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions start .. stop - 1."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"positions {start}:{stop} of an order of {self.length} samples")
        if not self.shuffled:
            return np.arange(start, stop, dtype=np.int64)
        first, last = start // _BLOCK, max(start, stop - 1) // _BLOCK
        parts = [
            _block(self.length, self.seed, self.epoch, number) for number in range(first, last + 1)
        ]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole[start - first * _BLOCK : stop - first * _BLOCK].copy()

    def digest(self) -> str:
        """Fingerprint of epoch 0: equal on two workers exactly when they visit samples alike."""
        first = Order(length=self.length, seed=self.seed, shuffled=self.shuffled)
        head = first.at(0, min(self.length, 1024)).astype("<i8").tobytes()
        return hashlib.sha256(f"{self.length}:".encode() + head).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class DrawnOrder:
    """The samples of one epoch as a sampler of the user's drew them, repeats and all."""

    samples: NDArray[np.int64]

    @property
    def length(self) -> int:
        """Number of samples drawn."""
        return len(self.samples)

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions start .. stop - 1."""
        return self.samples[start:stop]

    def digest(self) -> str:
        """Fingerprint of everything drawn."""
        return hashlib.sha256(self.samples.astype("<i8").tobytes()).hexdigest()[:16]


def sample_seeds(seed: int, epoch: int, samples: NDArray[np.int64]) -> list[int]:
    """Return a 64-bit seed for each sample in an epoch, the same whatever its neighbors.

    >>> sample_seeds(0, 0, np.array([3, 4]))[1] == sample_seeds(0, 0, np.array([4]))[0]
    True
    """
    key = _round_keys(seed, epoch)[0]
    seeds: list[int] = _hash(_hash(samples.astype(np.uint64) + key) + key).tolist()
    return seeds


def epoch_seed(seed: int, epoch: int) -> int:
    """Return a 64-bit seed for what is drawn once in an epoch."""
    return int(_round_keys(seed, epoch)[1])


def check_seed(seed: int) -> None:
    """Raise unless the seed is one that an order can take."""
    if not is_whole(seed) or not 0 <= seed < _WORD:
        raise InvalidSetting(
            f"seed={seed!r} is not a whole number from 0 to 2**64 - 1; choose one of those"
        )


@lru_cache(maxsize=4)
def _block(length: int, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    """Permute one block of positions. Neighboring calls fall into one block: it is remembered."""
    start = number * _BLOCK
    values = np.arange(start, min(start + _BLOCK, length), dtype=np.uint64)
    bits = max(_FEWEST_BITS, (length - 1).bit_length())
    keys = _round_keys(seed, epoch)
    values = _feistel(values, bits, keys)
    outside = np.flatnonzero(values >= length)
    while outside.size:
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= length]
    permuted = values.astype(np.int64)
    permuted.flags.writeable = False
    return permuted


def _feistel(values: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """Permute the numbers below 2**bits: each half in turn is masked by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64(2 ** (bits // 2) - 1)
    high_mask = np.uint64(2 ** (bits - bits // 2) - 1)
    high, low = values >> low_bits, values & low_mask
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        high = high ^ (_hash(low + even) & high_mask)
        low = low ^ (_hash(high + odd) & low_mask)
    return (high << low_bits) | low


def _hash(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit words: the finalizer of splitmix64 (Steele, Lea, Flood; OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    """Spread (seed, epoch) over the rounds; neighboring seeds and epochs share nothing."""
    text = f"poise order {seed} {epoch}".encode()
    stream = hashlib.shake_256(text).digest(8 * _HALF_ROUNDS)
    return [np.uint64(key) for key in np.frombuffer(stream, dtype="<u8")]

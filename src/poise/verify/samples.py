"""Fingerprints of the samples of a batch, to tell whether two runs trained on the same data."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poise.errors import InvalidSetting
from poise.runtime.slicing import Slicer, parts, samples_left, sliced
from poise.verify.observation import Leaf

_TIME = 2
"""Dimensions, with the sample's own, of a sample that can be padded at one end."""


def samples_of(contents: Any, asked: int, slicer: Slicer | None) -> list[list[Leaf]] | None:
    """Return the fingerprints of every sample of a batch that was asked to have that many.

    None if it cannot be taken apart.
    """
    try:
        if slicer is None:
            count = samples_left(contents, asked)
            samples = [sliced(contents, count, number, number + 1) for number in range(count)]
        else:
            samples = [slicer(contents, number, number + 1) for number in range(asked)]
    except InvalidSetting:
        return None
    return [[_leaf(each) for each in _leaves(sample)] for sample in samples]


def same_sample(one: Sequence[Leaf], other: Sequence[Leaf]) -> bool:
    """Whether two samples have the same contents, apart from padding at one end."""
    return len(one) == len(other) and all(map(_same_leaf, one, other))


def padded_apart(one: Sequence[Leaf], other: Sequence[Leaf]) -> bool:
    """Whether two samples differ in their shapes, as padding to the longest of a batch does."""
    return [leaf[0] for leaf in one] != [leaf[0] for leaf in other]


def _same_leaf(one: Leaf, other: Leaf) -> bool:
    shape, whole, *_ = one
    if shape == other[0]:
        return whole == other[1]
    tails = {whole, one[2]} & {other[1], other[2]}
    heads = {whole, one[3]} & {other[1], other[3]}
    # Padding inside, as of pictures of several sizes, cannot be told from other contents.
    return bool(tails or heads) or len(shape) > _TIME


def _leaves(sample: Any) -> Iterator[Tensor]:
    """Yield everything in a sample as tensors."""
    if isinstance(sample, Tensor):
        yield sample
    elif isinstance(sample, np.ndarray) and sample.dtype.kind in "biufc":
        yield torch.from_numpy(np.ascontiguousarray(sample))
    elif isinstance(sample, str | bytes | int | float):
        yield torch.tensor(list(repr(sample).encode()), dtype=torch.uint8)
    else:
        for part in parts(sample):
            yield from _leaves(part)


def _leaf(tensor: Tensor) -> Leaf:
    flat = tensor.detach().to_dense().cpu().contiguous().flatten()
    different_from_last = (flat != flat[-1:]).nonzero()
    different_from_first = (flat != flat[:1]).nonzero()
    stop = int(different_from_last[-1]) + 1 if len(different_from_last) else 0
    start = int(different_from_first[0]) if len(different_from_first) else len(flat)
    return tuple(tensor.shape), digest(flat), digest(flat[:stop]), digest(flat[start:])


def digest(flat: Tensor) -> str:
    """Fingerprint of a flat tensor on the CPU."""
    numbers = flat.contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.data, digest_size=8).hexdigest()

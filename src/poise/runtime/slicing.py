"""Parts of a collated batch: some of its samples, or none of them.

A batch may be an array of any framework, or tuples, lists, dicts and dataclasses of them; samples
lie along the first dimension. A list or tuple with one element per sample is cut as a whole; plain
values and tensors without dimensions belong to every part.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from poise.errors import InvalidSetting

PAIR = 2
"""Input and target: a batch of two tensors is these, and not two samples."""

Slicer = Callable[[Any, int, int], Any]
"""slicer(batch, start, stop) returns the samples start .. stop - 1 of a batch."""


def sliced(batch: Any, samples: int, start: int, stop: int) -> Any:
    """Return the samples start .. stop - 1 of a batch of that many samples.

    >>> import numpy as np
    >>> sliced((np.arange(6).reshape(3, 2), ["a", "b", "c"]), 3, 1, 3)
    (array([[2, 3],
           [4, 5]]), ['b', 'c'])
    """
    if _is_plain_sequence(batch) and not _lists_samples(batch, samples):
        return _sequence_like(batch, [_part(each, samples, start, stop) for each in batch])
    return _part(batch, samples, start, stop)


def emptied(batch: Any) -> Any:
    """Return a batch of the same form with no sample in it, made from a batch of one sample."""
    return sliced(batch, 1, 0, 0)


def sizes(batch: Any) -> Iterator[int]:
    """Yield every number in a batch that can be its number of samples.

    These are the lengths of lists and tuples, and the first two dimensions of tensors, since
    some models want time first.
    """
    for each in _everything(batch):
        if _is_array(each):
            yield from each.shape[:2]
        elif isinstance(each, list | tuple):
            yield len(each)


def samples_left(batch: Any, asked: int) -> int:
    """Return how many samples a batch has of those it was asked to have.

    A collate_fn may leave some out. Then all tensors and arrays in it must have the same length.
    """
    arrays = [each for each in _everything(batch) if _is_array(each) and each.ndim]
    lists = [each for each in _everything(batch) if _is_plain_sequence(each)]
    found = {len(each) for each in (*arrays, *lists)}
    if asked in found:
        return asked
    lengths = {len(each) for each in arrays}
    if len(lengths) != 1 or (isinstance(batch, list) and _look_alike(batch)):
        raise InvalidSetting(
            f"a batch of {asked} samples has lost some, and how many are left is unclear from "
            f"the lengths {sorted(found)} in it; use Balancer(..., "
            "slicer=function), called as function(batch, start, stop)"
        )
    return lengths.pop()


def parts(batch: Any) -> list[Any]:
    """Return what a list, tuple, dict or dataclass holds; nothing for anything else."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return []


def _part(batch: Any, samples: int, start: int, stop: int) -> Any:
    def cut(part: Any) -> Any:
        return _part(part, samples, start, stop)

    if _is_array(batch):
        if batch.ndim and start < stop and len(batch) != samples:
            raise InvalidSetting(
                f"the batch has {samples} samples, but holds a tensor of shape "
                f"{tuple(batch.shape)}, so it is unclear how to cut it; use "
                "Balancer(..., slicer=function), called as function(batch, start, stop)"
            )
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: cut(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(value) for value in batch))
    if isinstance(batch, list | tuple):
        whole = len(batch) == samples
        return batch[start:stop] if whole else _sequence_like(batch, [cut(b) for b in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: cut(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    if batch is None or isinstance(batch, bool | int | float | str | bytes):
        return batch
    raise InvalidSetting(
        f"a {type(batch).__name__} in the batch cannot be cut into samples; use "
        "Balancer(..., slicer=function), called as function(batch, start, stop), or, if only "
        'workers without a sample need it, Balancer(..., idle="repeat")'
    )


def _lists_samples(batch: Any, samples: int) -> bool:
    """Whether a batch that is a list or tuple holds one element per sample, and not one per part.

    In doubt it holds parts, as default_collate makes them; but a single element that is neither
    tensor nor array is a sample.
    """
    if len(batch) != samples:
        return False
    if samples == 1:
        return not _is_array(batch[0])
    if any(_is_array(each) for each in batch):
        if samples > PAIR and all(_is_part(each, samples) for each in batch) and _look_alike(batch):
            raise InvalidSetting(
                f"the batch is {samples} tensors of the same shape, which begin with {samples}: "
                f"it is unclear whether these are {samples} samples or {samples} parts; use "
                "Balancer(..., slicer=function), called as function(batch, start, stop)"
            )
        return not any(_is_part(each, samples) for each in batch)
    return not all(_is_part(each, samples) for each in batch)


def _is_part(value: Any, samples: int) -> bool:
    """Whether every tensor, array and list in a value can hold that many samples."""
    if _is_array(value):
        return value.ndim > 0 and len(value) == samples
    if _is_plain_sequence(value):
        return len(value) == samples
    held = parts(value)
    return bool(held) and all(_is_part(part, samples) for part in held)


def _look_alike(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether values are tensors or arrays of one shape and type, as samples are."""
    kinds = {(each.shape, each.dtype) if _is_array(each) else None for each in values}
    return len(kinds) == 1 and None not in kinds


def _everything(batch: Any) -> Iterator[Any]:
    """Yield a batch and all that it holds."""
    yield batch
    for part in parts(batch):
        yield from _everything(part)


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor or array, of whichever framework."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "ndim")


def _is_plain_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _sequence_like(original: list[Any] | tuple[Any, ...], parts: list[Any]) -> Any:
    return parts if isinstance(original, list) else tuple(parts)

"""Splits: how many samples of a global batch each worker gets."""

from collections.abc import Sequence
from itertools import pairwise

from poise.errors import InfeasibleSplit, InvalidSetting

Split = tuple[int, ...]
"""Local batches, one per worker."""


def apportion(shares: Sequence[int], total: int) -> Split:
    """Divide total in proportion to shares, in whole samples.

    The law: the parts add up to total, each lies within one of its exact proportion, and where
    total is at most the sum of the shares no part exceeds its share. A share of 0 gets nothing.

    >>> apportion((5, 2, 9), 8)
    (2, 1, 5)
    """
    whole = sum(shares)
    if whole <= 0:
        raise InfeasibleSplit(f"shares {tuple(shares)} add up to {whole}; at least one must count")
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    ends = [bound * total // whole for bound in bounds]
    return tuple(stop - start for start, stop in pairwise(ends))


def even_split(workers: int, global_batch: int) -> Split:
    """Divide the global batch evenly, each worker getting at least one sample.

    >>> even_split(3, 16)
    (5, 5, 6)
    """
    if global_batch < workers:
        raise InfeasibleSplit(
            f"global_batch={global_batch} cannot be split over {workers} workers with at least "
            f"one sample each; raise global_batch to at least {workers} or remove workers"
        )
    return apportion((1,) * workers, global_batch)


def check_split(split: Sequence[int], workers: int, global_batch: int) -> Split:
    """Return the split as a tuple if it divides the global batch over the workers."""
    found = tuple(split)
    if len(found) != workers:
        raise InvalidSetting(
            f"split {list(found)} has {len(found)} entries, but there are {workers} workers; "
            "give one local batch per worker"
        )
    for worker, local in enumerate(found):
        if isinstance(local, bool) or not isinstance(local, int):
            raise InvalidSetting(
                f"split {list(found)} gives worker {worker} {local!r}; "
                "a local batch is a whole number of samples"
            )
        if local < 0:
            raise InvalidSetting(
                f"split {list(found)} gives worker {worker} {local} samples; "
                "use 0 to leave a worker idle"
            )
    if sum(found) != global_batch:
        raise InvalidSetting(
            f"split {list(found)} adds up to {sum(found)}, but global_batch={global_batch}; "
            "change one of the two"
        )
    return found

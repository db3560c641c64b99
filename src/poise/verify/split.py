"""The unequal shares with which `poise verify` trains."""

from poise.core.split import Split, apportion
from poise.errors import InfeasibleSplit

_FOR_STATISTICS = 2
"""Samples that BatchNorm needs, so that verify can find it at work."""


def unequal_split(workers: int, global_batch: int) -> Split:
    """Divide a global batch into shares that fall from worker to worker.

    Every worker gets at least one sample, two where there are enough; the rest is divided like
    the squares of odd numbers. The law: the shares are never all equal. For the smallest square
    is below the mean of the squares, and its part of the rest is rounded down.

    >>> unequal_split(3, 16)
    (10, 4, 2)
    >>> unequal_split(3, 4)
    (2, 1, 1)
    """
    if global_batch <= workers:
        raise InfeasibleSplit(
            f"global_batch={global_batch} cannot be split unequally over {workers} workers with "
            f"at least one sample each; raise global_batch to at least {workers + 1}, or verify "
            "with fewer --workers"
        )
    each = _FOR_STATISTICS if global_batch > _FOR_STATISTICS * workers else 1
    weights = [(2 * number + 1) ** 2 for number in range(workers)]
    rest = apportion(weights, global_batch - each * workers)
    return tuple(each + part for part in sorted(rest, reverse=True))

"""Weights: each worker's factor in the gradient of the global batch.

    g = sum_i (c_i / C) g_i

with g_i worker i's mean gradient, c_i its count (the denominator of its loss: samples, tokens)
and C the sum of counts. Nothing else is divided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def weights(counts: Sequence[float]) -> tuple[float, ...]:
    """Return every worker's weight, c_i / C.

    >>> weights((5, 0, 3))
    (0.625, 0.0, 0.375)
    """
    total = sum(counts)
    if not total > 0:
        raise ZeroDivisionError("no worker counts anything")
    return tuple(count / total for count in counts)


@dataclass(frozen=True)
class Scaling:
    """How to turn a plain average over workers into the weighted sum, for one worker.

    A communication hook such as fp16 compression averages what it is given. Multiplying by
    before_i = n w_i / after, and the average by after, gives the weighted sum.
    """

    before: float
    """At most 1, so that no number grows beyond what a 16-bit format holds."""
    after: float
    """The same on all workers: the smallest power of two from the largest n w_i up.

    A power of two, so that it costs no precision and seldom changes with the split: hooks that
    remember what they did not send remember it in the unit of this factor.
    """


def averaged(shares: Sequence[float], worker: int) -> Scaling:
    """Return the factors around a hook that averages over the workers.

    >>> averaged((0.5, 0.5), 0)
    Scaling(before=1.0, after=1.0)
    >>> averaged((0.75, 0.25), 1)
    Scaling(before=0.25, after=2.0)
    """
    largest = len(shares) * max(shares)
    after = 2.0 ** math.ceil(math.log2(largest))
    return Scaling(len(shares) * shares[worker] / after, after)

"""How gradients are summed over virtual workers, bucket by bucket."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from poise.core.timing import Floats

MOST_IN_RING = 256
"""A ring of n workers takes 2 (n - 1) rounds, each of which all of them wait for a neighbor."""


@dataclass(frozen=True, eq=False)
class Together:
    """A collective that starts when the last worker is there and takes the same for all.

    >>> Together(np.array([0.5])).done_s(0, np.array([1.0, 3.0]), np.zeros(2))
    array([3.5, 3.5])
    """

    bucket_s: Floats
    """Seconds that each bucket adds."""

    def done_s(self, bucket: int, arrivals: Floats, free: Floats) -> Floats:
        """Return when each worker has the sum of a bucket: the same end for all.

        Args:
            bucket: its number.
            arrivals: when each worker hands it over.
            free: when each worker was done with the bucket before.
        """
        end = max(float(arrivals.max()), float(free.max())) + float(self.bucket_s[bucket])
        return np.broadcast_to(np.array([end]), arrivals.shape)


@dataclass(frozen=True, eq=False)
class Ring:
    """Chunks that go round: worker i sends to i + 1, in 2 (n - 1) rounds.

    A round ends for a worker when its neighbor's chunk is there; nobody waits for the whole
    ring. So a slow link delays those behind it more than those before, and a late worker holds up
    its neighbors first: no single time per bucket says that.

    >>> ring = Ring(np.array([2.0]), np.array([1.0, 1.0]), latency_s=0.0)
    >>> ring.bucket_s  # two workers: two rounds of half the bytes
    array([2.])
    """

    bucket_bytes: Floats
    link_bytes_per_s: Floats
    """What each worker sends to the next one."""
    latency_s: float

    @cached_property
    def bucket_s(self) -> Floats:
        """Seconds that each bucket adds if all workers arrive together and then go on."""
        together = np.zeros(len(self.link_bytes_per_s))
        buckets = range(len(self.bucket_bytes))
        return np.array([self.done_s(bucket, together, together).max() for bucket in buckets])

    def done_s(self, bucket: int, arrivals: Floats, free: Floats) -> Floats:
        """Return when each worker has the sum of a bucket, of arrivals and ends as above."""
        workers = len(arrivals)
        ends = np.maximum(arrivals, free)
        chunk = self.bucket_bytes[bucket] / workers
        before = np.arange(workers) - 1
        sending = chunk / self.link_bytes_per_s[before] + self.latency_s
        for _ in range(2 * (workers - 1)):
            ends = np.maximum(ends, ends[before]) + sending
        return ends


Reduction = Together | Ring
"""What becomes of arrivals."""

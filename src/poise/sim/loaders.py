"""Virtual loaders: when each worker's next local batch is there."""

from collections import deque

import numpy as np

from poise.core.timing import Floats, Ints


class Loaders:
    """Queues of local batches that are loaded while workers compute.

    Batch k is loaded after batch k - 1 and when there is room in the queue, that is when the
    worker has taken batch k - q. At the start queues are full. So a loader of l seconds a sample
    makes steps last l b at least, and a short stall of one is not felt.
    """

    def __init__(self, workers: int, queue: int) -> None:
        self._loaded_s = np.zeros(workers)
        self._taken_s: deque[Floats] = deque(maxlen=queue)
        self._queue = queue

    def wait_s(self, workers: Ints, now_s: float, work_s: Floats) -> Floats:
        """Return how long workers wait for their next batches, which take so long to load."""
        if len(self._taken_s) == self._queue:
            begin = np.maximum(self._loaded_s[workers], self._taken_s[0][workers])
            self._loaded_s[workers] = begin + work_s
        wait = np.maximum(self._loaded_s[workers] - now_s, 0.0)
        taken = np.full(len(self._loaded_s), now_s)
        taken[workers] = now_s + wait
        self._taken_s.append(taken)
        return np.asarray(wait)

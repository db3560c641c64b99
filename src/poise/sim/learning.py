"""What virtual gradients look like: vectors whose noise scale is known.

The gradient of one sample is G plus Gaussian noise of the same size in every direction, so that
tr(Sigma) / |G|^2 = phi. What an engine is told of it are squared norms, as in a real training,
and it has to find phi from them.
"""

import numpy as np

from poise.core.goodput import efficiency
from poise.core.timing import Floats
from poise.sim.scenario import Learning

DIMENSIONS = 64
"""Real gradients have more, of which few matter: the fewer, the more single norms scatter."""
_MOST_NUMBERS = 400_000


class Lessons:
    """How far a training is, and the norms of its next gradient."""

    def __init__(self, learning: Learning | None, seed: int) -> None:
        self._learning = learning
        """None: nothing is said of it, and nothing counts."""
        self._draw = np.random.default_rng([seed, 4])
        self._goal = None if learning is None else learning.target_samples
        self.effective_samples = 0.0

    @property
    def reached(self) -> bool:
        """Whether the goal is."""
        return self._goal is not None and self.effective_samples >= self._goal

    def taught(self, samples: float, global_batch: int, factor: float = 1.0) -> float:
        """Count samples of a global batch by what they teach; return the part up to the goal.

        A smaller step of the optimizer, by the factor, makes less of them.
        """
        if self._learning is None:
            return 1.0
        phi, before = self._learning.phi(self.effective_samples), self.effective_samples
        worth = samples * efficiency(phi, global_batch, self._learning.start_batch) * factor
        self.effective_samples += worth
        if self._goal is None or self.effective_samples <= self._goal:
            return 1.0
        return max(0.0, (self._goal - before) / worth)

    def norms(self, batches: Floats) -> tuple[Floats, float]:
        """Return each worker's sums (see `poise.core.noise.GroupSums`) and the global norm."""
        assert self._learning is not None
        workers = len(batches)
        dimensions = max(8, min(DIMENSIONS, _MOST_NUMBERS // workers))
        busy = np.maximum(batches, 1.0)
        spread = np.sqrt(self._learning.phi(self.effective_samples) / dimensions / busy)
        gradients = self._draw.standard_normal((workers, dimensions)) * spread[:, None]
        gradients[:, 0] += 1.0
        whole = (batches[:, None] * gradients).sum(axis=0) / batches.sum()
        norms = (gradients**2).sum(axis=1)
        ones = np.ones(workers)
        sums = np.stack([batches, batches, ones, batches * norms], axis=1)
        sums[batches == 0] = np.nan
        return sums, float(whole @ whole)

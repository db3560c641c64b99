"""Clusters and courses of events that papers and tests use."""

from collections.abc import Callable, Sequence

import numpy as np

from poise.core.timing import Floats, SpeedModel
from poise.sim.truth import Bend, Bent, Truth

CORES = {1: (12, 12, 12, 12), 2: (12, 12, 8, 16), 4: (9, 9, 6, 24), 8: (6, 6, 4, 32)}
"""OmniLearn's core tables for synchronous training, by heterogeneity level: max / min cores."""
ASP_CORES = {1: (10, 10, 10, 10), 2: (8, 8, 8, 16), 4: (10, 10, 4, 16), 8: (4, 4, 4, 28)}
"""The same for asynchronous training; at level 8 it is 7 times the cores."""
WALK = (1, 2, 4, 8, 8, 4, 2, 1)
"""OmniLearn's walk through these levels."""
_STEPS_PER_LEVEL = 200


def by_cores(
    cores: Sequence[float], *, global_batch: int = 240, fixed_share: float = 0.2
) -> SpeedModel:
    """Return workers that need 12 ms and a core for a sample, times inversely with their cores.

    fixed_share is the part of an even split's step that does not depend on the local batch.
    """
    per_sample_s: Floats = 0.012 / np.array(cores, dtype=np.float64)
    even_s = per_sample_s * global_batch / len(cores)
    return SpeedModel.of(fixed_share * even_s, (1 - fixed_share) * per_sample_s)


def walk(*, bend: Bend | None = None) -> Callable[[int], Truth]:
    """Return OmniLearn's walk through heterogeneity levels, each for 200 steps."""
    levels: dict[int, Truth] = {}
    for level, cores in CORES.items():
        model = by_cores(cores)
        levels[level] = model if bend is None else Bent(model, bend)
    return lambda step: levels[WALK[min(step // _STEPS_PER_LEVEL, len(WALK) - 1)]]


BENDS = {
    "b^0.8": Bend.of(power=(0.8, 60)),
    "tiles of 8": Bend.of(tile=8),
    "a knee at 80": Bend.of(knee=(80, 2.5)),
}
"""Times that no line represents."""

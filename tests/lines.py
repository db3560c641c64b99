"""Speed models as the papers state them, worked out apart from the library's own."""

from collections.abc import Sequence

import numpy as np

from poise.core.timing import SpeedModel

Lines = Sequence[tuple[float, float]]


def two_lines(
    forward_s: Lines, backward_s: Lines, ready: Sequence[float], bucket_s: Sequence[float]
) -> SpeedModel:
    """Return forward a = q b + s and backward P = k b + m, with rho_j of P before bucket j."""
    forward, backward = np.array(forward_s), np.array(backward_s)
    lines = forward[:, :, None] + backward[:, :, None] * np.array(ready)
    return SpeedModel.of(lines[:, 1], lines[:, 0], bucket_s)

"""The judgment of `poise verify`: the same training, or what differs first, and why."""

from dataclasses import dataclass

from poise.verify.causes import UNKNOWN, Cause
from poise.verify.comparison import Difference, Extent, differences, extent_of
from poise.verify.diagnosis import causes_of
from poise.verify.observation import Runs


@dataclass(frozen=True)
class Verdict:
    """What came of comparing several workers with one process."""

    extent: Extent
    difference: Difference | None = None
    """The first one; None: the same training."""
    causes: tuple[Cause, ...] = ()
    """Of the difference, the likeliest first."""


def judge(runs: Runs) -> Verdict:
    """Compare the training of several workers with that of one process.

    A difference that may be rounding counts only if a cause is found for it.
    """
    extent = extent_of(runs)
    for difference in differences(runs):
        causes = causes_of(runs, difference)
        if causes or difference.certain:
            return Verdict(extent, difference, tuple(causes) or (UNKNOWN,))
    return Verdict(extent)

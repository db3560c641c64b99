"""Notices that the reduction of gradients takes many times what it took before.

The worker that is ready last waits for nobody, so the least of done - ready over the workers is
what the reduction itself adds to the step. A step is *slow* if that is several times what is usual,
counted against the rest of the step, and makes the step half as long again. One slow step is a
stall; several in a row are an episode, which is said once, and so is its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from statistics import median

from poise.core.observation import Observation
from poise.core.revised import revised

IN_A_ROW = 5
"""Steps in a row that begin or end an episode."""
_FACTOR, _FACTOR_OVER = 4.0, 2.0
"""A reduction is slow if it takes so many times what is usual; in an episode, so many."""
_GROWTH, _GROWTH_OVER = 0.5, 0.2
"""And if it makes the step longer by this part; in an episode, by this."""
_KNOWN = 8
"""Steps from which on it is known what is usual,"""
_REMEMBERED = 64
"""and how many are remembered."""


@dataclass(frozen=True)
class Timed:
    """One step, as far as it concerns the reduction."""

    step: int
    reduction_s: float
    """What the reduction added to it."""
    rest_s: float
    """All else."""

    @staticmethod
    def of(observation: Observation) -> "Timed | None":
        """Return what a step says; None: nothing."""
        ready_s, done_s, wait_s = observation.ready_s, observation.done_s, observation.wait_s
        if ready_s is None or done_s is None or observation.compiling:
            return None
        ready, done = ready_s[:, -1].tolist(), done_s[:, -1].tolist()
        waits = [0.0] * len(ready) if wait_s is None else wait_s.tolist()
        measured = [
            (end, max(0.0, end - begin - (0.0 if isnan(wait) else wait)))
            for begin, end, wait in zip(ready, done, waits, strict=True)
            if not isnan(end - begin)
        ]
        if len(measured) <= 1:  # one alone reduces nothing, or does not know who was last
            return None
        reduction_s = min(took for _, took in measured)
        length_s = max(end for end, _ in measured)
        return Timed(observation.step, reduction_s, max(0.0, length_s - reduction_s))


@dataclass(frozen=True)
class Usual:
    """What steps take when nothing is wrong."""

    reduction_s: float
    rest_s: float

    def is_exceeded(self, timed: Timed, *, factor: float, growth: float) -> bool:
        """Whether a reduction took more than a factor, and a part of the step, beyond this.

        Where the rest of the step takes longer, too, a processor may be slower, and not a link.
        """
        rest = max(1.0, timed.rest_s / self.rest_s) if self.rest_s > 0 else 1.0
        grown_s = timed.reduction_s - self.reduction_s
        return (
            timed.reduction_s >= factor * rest * self.reduction_s
            and grown_s >= growth * rest * (self.reduction_s + self.rest_s)
        )


@dataclass(frozen=True)
class Episode:
    """Reductions that take long, or their end."""

    since: int
    """The first step of it."""
    takes_s: float
    usual: Usual
    over: bool = False

    def __str__(self) -> str:
        """Say what was found.

        >>> print(Episode(40, 1.8, Usual(0.064, 0.01)))
        the reduction of gradients takes 1.80 s since step 40, 28 times what it took before (64 ms)
        >>> print(Episode(90, 0.07, Usual(0.064, 0.01), over=True))
        the reduction of gradients takes 70 ms again since step 90
        """
        what = f"the reduction of gradients takes {_shown(self.takes_s)}"
        if self.over:
            return f"{what} again since step {self.since}"
        before_s = self.usual.reduction_s
        times = f", {self.takes_s / before_s:.0f} times what" if before_s > 0 else "; before,"
        return f"{what} since step {self.since}{times} it took before ({_shown(before_s)})"


@dataclass(frozen=True)
class ReductionWatch:
    """What reductions took so far. Frozen: each update returns the next watch."""

    remembered: tuple[Timed, ...] = ()
    """Steps that are over for long, in which nothing was wrong."""
    recent: tuple[Timed, ...] = ()
    """The last few."""
    usual: Usual | None = None
    """In an episode: what was usual before it."""

    def update(self, observations: Sequence[Observation]) -> tuple[list[Episode], "ReductionWatch"]:
        """Take in steps; return what is to be said of them."""
        watch, said = self, []
        for timed in filter(None, map(Timed.of, observations)):
            episode, watch = watch._next(timed)
            said += [] if episode is None else [episode]
        return said, watch

    def _next(self, timed: Timed) -> tuple[Episode | None, "ReductionWatch"]:
        recent = (*self.recent, timed)
        if len(recent) <= IN_A_ROW:
            return None, revised(self, recent=recent)
        oldest, *last = recent
        remembered = self.remembered
        if self.usual is None:  # what happens in an episode is not usual
            remembered = (*remembered, oldest)[-_REMEMBERED:]
        watch = revised(self, remembered=remembered, recent=tuple(last))
        return watch._judged(last)

    def _judged(self, last: Sequence[Timed]) -> tuple[Episode | None, "ReductionWatch"]:
        """Begin or end an episode, if the last steps say so."""
        takes_s = median(each.reduction_s for each in last)
        if self.usual is not None:
            limits = {"factor": _FACTOR_OVER, "growth": _GROWTH_OVER}
            if any(self.usual.is_exceeded(each, **limits) for each in last):
                return None, self
            over = Episode(last[0].step, takes_s, self.usual, over=True)
            return over, revised(self, usual=None)
        if len(self.remembered) < _KNOWN:
            return None, self
        usual = Usual(
            median(each.reduction_s for each in self.remembered),
            median(each.rest_s for each in self.remembered),
        )
        if not all(usual.is_exceeded(each, factor=_FACTOR, growth=_GROWTH) for each in last):
            return None, self
        return Episode(last[0].step, takes_s, usual), revised(self, usual=usual)


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"

"""The global batch that learns fastest, and what a step of it is worth."""

import math
from dataclasses import dataclass

import numpy as np

from poise.core.entries import BATCHES, check_within
from poise.core.goodput import best_batch, efficiency, goodput, most_goodput
from poise.core.learning_rate import gain, gain_within, steady_gain
from poise.core.limits import UNLIMITED
from poise.core.noise import GroupSums, NoiseTrack, summed_noise_scale
from poise.core.observation import Observation
from poise.core.plan import Forecast
from poise.core.revised import revised
from poise.core.timing import Floats
from poise.errors import InvalidSetting
from poise.numbers import check_number, check_whole

_CLIPPING_MEMORY = 10
"""Steps looked at of which the share of clipped ones is taken."""
_SELDOM = 4
"""So many times as rare thoughts become while nothing comes of them."""
_REACH = 2.0
"""How many times as large or small as those tried a global batch may be,"""
_TRIAL, _APART = 1.5, 1.2
"""how much larger one is that is tried, and how far apart two local batches are that show a
slope, on this part of the workers:"""
_HALF = 0.5
_NEWS = 0.05
"""A gain that differs by more than this part is told to all workers."""


@dataclass(frozen=True, eq=False)
class AdaptationState:
    """The noise of the gradients so far, and the gain in effect."""

    noise: NoiseTrack
    gain: float = 1.0
    observed: int = 0
    """Steps since the global batch was last thought over."""
    quiet: int = 0
    """Thoughts since it last moved."""
    clipped_share: float = 0.0
    """Of the steps of late, those whose gradient was clipped."""
    looked: int = 0
    """Steps of which it is known whether it was."""
    tried: tuple[int, int] = (0, 0)
    """The lowest and highest global batch so far."""
    least_local: Floats | None = None
    """Each worker's smallest local batch,"""
    most_local: Floats | None = None
    """and its largest."""

    @property
    def knows_slopes(self) -> bool:
        """Whether at least half of the workers had local batches of different size."""
        if self.least_local is None or self.most_local is None:
            return False
        return bool(np.mean(self.most_local > _APART * self.least_local) >= _HALF)

    def check_loaded(self) -> None:
        """Raise unless these can be what was seen of steps; how many workers is checked later."""
        for name in ("observed", "looked"):
            check_within(name, getattr(self, name), 0, 1e18)
        check_within("quiet", self.quiet, 0, _SELDOM)
        check_within("gain", self.gain, 1e-12, 1e12)
        if not self.tried[0] <= self.tried[1] <= UNLIMITED:
            raise InvalidSetting(f"tried={list(self.tried)} are no global batches that rise")
        least, most = self.least_local, self.most_local
        if (least is None) != (most is None):
            raise InvalidSetting("one of least_local and most_local is missing")
        if least is not None and most is not None:
            BATCHES.check("least_local", least, len(least))
            BATCHES.check("most_local", most, len(least))
            if (least > most).any():
                raise InvalidSetting("least_local is above most_local for a worker")

    def __post_init__(self) -> None:
        counts = (self.observed, self.quiet, self.looked, *self.tried)
        if min(counts) < 0 or not 0 < self.gain < math.inf or not 0 <= self.clipped_share <= 1:
            raise InvalidSetting(
                f"gain={self.gain}, clipped_share={self.clipped_share} and counts of {counts} "
                "cannot all be; start anew"
            )


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Lets the global batch follow the gradient noise, within a range.

    It moves only if both ends of the noise scale's confidence interval support a gain.
    """

    lowest: int
    highest: int
    least_gain: float = 0.05
    """Part of the goodput that a move must gain."""
    every: int = 10
    """Steps from one thought to the next, and up to four times as many while nothing comes of
    it."""
    memory: int = 100
    """Global batches at the start that the noise is averaged over."""

    def __post_init__(self) -> None:
        for name in ("lowest", "highest"):
            check_whole("adapt", name, getattr(self, name), 1, UNLIMITED)
        if not self.lowest <= self.highest:
            raise InvalidSetting(
                f"adapt=({self.lowest}, {self.highest}) are no global batches to move between; "
                "give a range from 1 that rises"
            )
        check_number("adapt", "least_gain", self.least_gain, 0, 1)
        check_whole("adapt", "every", self.every, 1, 10**9)
        check_whole("adapt", "memory", self.memory, 1, 10**9)

    def start(self, start_batch: int) -> AdaptationState:
        """Return the first state; start_batch is what the learning rate was chosen for."""
        if not self.lowest <= start_batch <= self.highest:
            raise InvalidSetting(
                f"global_batch={start_batch}, for which the learning rate is chosen, is not within "
                f"the range from {self.lowest} to {self.highest} in which it may move; "
                "start inside of it"
            )
        noise = NoiseTrack(memory_samples=float(self.memory * start_batch))
        return AdaptationState(noise, tried=(start_batch, start_batch))

    def learn(self, state: AdaptationState, observation: Observation) -> AdaptationState:
        """Take a step in: its norms, if they can be used, and its local batches."""
        state = _with_local_batches(state, observation.batches)
        state = revised(state, observed=state.observed + 1)
        if observation.clipped is not None:
            looked = state.looked + 1
            change = (observation.clipped - state.clipped_share) / min(looked, _CLIPPING_MEMORY)
            share = state.clipped_share + change
            state = revised(state, clipped_share=share, looked=looked)
        sums, whole = observation.group_sums, observation.global_sqnorm
        if sums is None or whole is None:
            return state
        busy = observation.batches > 0
        found = summed_noise_scale(GroupSums(*sums[busy].sum(axis=0).tolist()), whole)
        return state if found is None else revised(state, noise=state.noise.update(found))

    def due(self, state: AdaptationState) -> bool:
        """Whether it is time to think the global batch over."""
        return state.observed >= self.every * min(1 << state.quiet, _SELDOM)

    def choose(
        self, state: AdaptationState, forecast: Forecast | None, batch: int, start: int
    ) -> int | None:
        """Return a better global batch, or None to keep the one in effect.

        It is the best one for an end of the noise scale's interval or for the scale itself:
        that whose goodput gains most at the end where it gains least. Where the upper end is not
        known, a larger global batch is judged at the lower one: it gains more at any other.

        How much of a step's time is fixed is a guess until other local batches were seen. So
        none goes beyond twice or half of the global batches tried, and if local batches were
        always the same, as on equal workers, another one is tried for what it teaches.
        """
        low, high = state.noise.interval()
        scale, ends = (low, [low]) if high is None else (state.noise.scale, [low, high])
        if forecast is None or not scale:
            return None
        model, limits = forecast.model, forecast.limits

        enough = 1 + self.least_gain
        least, most = state.tried
        reach = min(least, batch) / _REACH, max(most, batch) * _REACH
        allowed = max(self.lowest, math.ceil(reach[0])), min(self.highest, int(reach[1]))

        def least_gain(candidate: int) -> float:
            return min(
                goodput(model, limits, phi, start, candidate)
                / goodput(model, limits, phi, start, batch)
                for phi in ends
            )

        # What gains at both ends gains in between, too: without that nothing has to be tried.
        now = goodput(model, limits, scale, start, batch)
        if most_goodput(model, limits, scale, start, allowed) >= enough * now:
            best = {best_batch(model, limits, phi, start, allowed) for phi in {scale, *ends}}
            candidates = sorted(each for each in best if high is not None or each > batch)
            gains = {each: least_gain(each) for each in candidates}
            if gains and max(gains.values()) >= enough:
                return max(gains, key=lambda each: gains[each])
        return self._trial(state, forecast, batch, low)

    def _trial(
        self, state: AdaptationState, forecast: Forecast, batch: int, low: float
    ) -> int | None:
        """Return a larger global batch to learn from, if times may be misjudged and it may pay.

        They may where few workers had different local batches, and it may pay if it would where
        all of a step's time is fixed.
        """
        larger = min(round(batch * _TRIAL), self.highest, forecast.limits.most)
        hoped = larger / batch * efficiency(low, larger, start=batch)
        if state.knows_slopes or larger < batch * _APART or hoped < 1 + self.least_gain:
            return None
        return larger if larger >= forecast.limits.least else None

    def thought_over(
        self, state: AdaptationState, batch: int, start: int, *, moved: bool
    ) -> AdaptationState:
        """Return the state with the gain that a global batch has now, if that is news.

        The gain lies between 1 and batch / start, also one that is kept from another global
        batch since gradients are clipped too often for a new one to be known. Where the noise
        scale has no upper end yet, the lower end bounds it: from below for a global batch above
        the start, from above for one below.
        """
        kappa = batch / start
        before = gain_within(state.gain, kappa)
        low, high = state.noise.interval()
        if high is None:
            bound = gain(low, 1.0, batch, start)
            assert bound is not None
            known: float | None = max(before, bound) if batch > start else min(before, bound)
        else:
            known = gain(state.noise.trace, state.noise.grad_sq, batch, start)
        new = gain_within(steady_gain(before, known, state.clipped_share), kappa)
        if abs(new - before) <= _NEWS * before:
            new = before
        least, most = state.tried
        return revised(
            state,
            gain=new,
            observed=0,
            quiet=0 if moved else min(state.quiet + 1, _SELDOM),
            tried=(min(least or batch, batch), max(most, batch)),
        )


def _with_local_batches(state: AdaptationState, local: Floats) -> AdaptationState:
    least, most = state.least_local, state.most_local
    if least is None or most is None or len(least) != len(local):
        return revised(state, least_local=local, most_local=local)
    least, most = np.minimum(least, local), np.maximum(most, local)
    return revised(state, least_local=least, most_local=most)

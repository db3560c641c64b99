"""The global batch that learns fastest, and what a step of it is worth."""

from dataclasses import dataclass, replace

from poise.core.goodput import best_batch, goodput
from poise.core.learning_rate import gain, steady_gain
from poise.core.noise import GroupSums, NoiseTrack, summed_noise_scale
from poise.core.observation import Observation
from poise.core.plan import Forecast
from poise.errors import InvalidSetting

_CLIPPING_MEMORY = 20
"""Steps looked at of which the share of clipped ones is taken."""
_SELDOM = 4
_NEWS = 0.05
"""A gain that differs by more than this part is told to all workers."""


@dataclass(frozen=True)
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
        if not 1 <= self.lowest <= self.highest:
            raise InvalidSetting(
                f"the global batch may lie from {self.lowest} to {self.highest}; "
                "give a range from 1 that rises"
            )

    def start(self, start_batch: int) -> AdaptationState:
        """Return the first state; start_batch is what the learning rate was chosen for."""
        if not self.lowest <= start_batch <= self.highest:
            raise InvalidSetting(
                f"global_batch={start_batch}, for which the learning rate is chosen, is not within "
                f"the range from {self.lowest} to {self.highest} in which it may move; "
                "start inside of it"
            )
        return AdaptationState(NoiseTrack(memory_samples=float(self.memory * start_batch)))

    def learn(self, state: AdaptationState, observation: Observation) -> AdaptationState:
        """Take the norms of a step in, if they can be used."""
        state = replace(state, observed=state.observed + 1)
        if observation.clipped is not None:
            looked = state.looked + 1
            change = (observation.clipped - state.clipped_share) / min(looked, _CLIPPING_MEMORY)
            share = state.clipped_share + change
            state = replace(state, clipped_share=share, looked=looked)
        sums, whole = observation.group_sums, observation.global_sqnorm
        if sums is None or whole is None:
            return state
        busy = observation.batches > 0
        found = summed_noise_scale(GroupSums(*sums[busy].sum(axis=0).tolist()), whole)
        return state if found is None else replace(state, noise=state.noise.update(found))

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
        """
        low, high = state.noise.interval()
        scale = state.noise.scale if high is not None else low
        if forecast is None or not scale:
            return None
        model, limits = forecast.model, forecast.limits

        def best_for(phi: float) -> int:
            return best_batch(model, limits, phi, start, (self.lowest, self.highest))

        def least_gain(candidate: int, *ends: float) -> float:
            return min(
                goodput(model, limits, phi, start, candidate)
                / goodput(model, limits, phi, start, batch)
                for phi in ends
            )

        best = best_for(scale)
        enough = 1 + self.least_gain
        # What gains at both ends gains in between, too: without that nothing else has to be tried.
        if least_gain(best, scale) < enough or (high is None and best < batch):
            return None
        if high is None:
            return best
        candidates = sorted({best, best_for(low), best_for(high)})
        gains = {each: least_gain(each, low, high) for each in candidates}
        best = max(candidates, key=lambda each: gains[each])
        return best if gains[best] >= enough else None

    def thought_over(
        self, state: AdaptationState, batch: int, start: int, *, moved: bool
    ) -> AdaptationState:
        """Return the state with the gain that a global batch has now, if that is news.

        The gain lies between 1 and batch / start, also one that is kept from another global
        batch since gradients are clipped too often for a new one to be known. Where the noise
        scale has no upper end yet, it is at least what the lower end says.
        """
        ends = sorted((1.0, batch / start))
        low, high = state.noise.interval()
        if high is None:
            least = gain(low, 1.0, batch, start)
            known = None if least is None else max(state.gain, least)
        else:
            known = gain(state.noise.trace, state.noise.grad_sq, batch, start)
        new = min(max(steady_gain(state.gain, known, state.clipped_share), ends[0]), ends[1])
        if abs(new - state.gain) <= _NEWS * state.gain and ends[0] <= state.gain <= ends[1]:
            new = state.gain
        return replace(state, gain=new, observed=0, quiet=0 if moved else state.quiet + 1)

"""The global batch that learns fastest, and the learning rate that goes with it."""

from dataclasses import dataclass, replace

import numpy as np

from poise.core.goodput import best_batch, goodput
from poise.core.learning_rate import adjustment, gain
from poise.core.noise import GROUPS, NoiseTrack, noise_scale
from poise.core.observation import Observation
from poise.core.plan import Forecast
from poise.errors import InvalidSetting


@dataclass(frozen=True)
class AdaptationState:
    """The noise of the gradients so far, and the factor of the learning rate in effect."""

    noise: NoiseTrack
    factor: float = 1.0
    observed: int = 0
    """Steps since the global batch was last thought over."""


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Lets the global batch follow the gradient noise, within a range.

    It moves only if both ends of the noise scale's confidence interval support a gain.
    """

    lowest: int
    highest: int
    rule: str = "adascale"
    """How the learning rate follows: adascale, sqrt, linear, legw or none."""
    least_gain: float = 0.05
    """Part of the goodput that a move must gain."""
    every: int = 20
    """Steps from one thought to the next."""
    memory: int = 100
    """Global batches at the start that the noise is averaged over."""

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest:
            raise InvalidSetting(
                f"the global batch may lie from {self.lowest} to {self.highest}; "
                "give a range from 1 that rises"
            )
        adjustment(self.rule, batch=1, start=1, gain=1.0)  # raises if there is no such rule

    def start(self, start_batch: int) -> AdaptationState:
        """Return the first state; start_batch is what the learning rate was chosen for."""
        return AdaptationState(NoiseTrack(memory_samples=float(self.memory * start_batch)))

    def learn(self, state: AdaptationState, observation: Observation) -> AdaptationState:
        """Take the norms of a step in, if they can be used.

        They cannot where fewer than two workers have samples, or where a gradient is not finite,
        as when a loss scale is too large.
        """
        state = replace(state, observed=state.observed + 1)
        norms, whole = observation.local_sqnorms, observation.global_sqnorm
        if norms is None or whole is None or not np.isfinite(whole):
            return state
        busy = observation.batches > 0
        if busy.sum() < GROUPS or not np.isfinite(norms[busy]).all():
            return state
        found = noise_scale(observation.split, norms, whole)
        return replace(state, noise=state.noise.update(found))

    def due(self, state: AdaptationState) -> bool:
        """Whether it is time to think the global batch over."""
        return state.observed >= self.every

    def choose(
        self, state: AdaptationState, forecast: Forecast | None, batch: int, start: int
    ) -> tuple[int | None, AdaptationState]:
        """Return a better global batch, or None to keep the one in effect, and the next state."""
        state = replace(state, observed=0)
        low, high = state.noise.interval()
        scale = state.noise.scale
        if forecast is None or not scale or high is None:
            return None, state
        model, limits = forecast.model, forecast.limits
        best = best_batch(model, limits, scale, start, (self.lowest, self.highest))
        gains = [
            goodput(model, limits, phi, start, best) / goodput(model, limits, phi, start, batch)
            for phi in (low, scale, high)
        ]
        if min(gains) < 1 + self.least_gain:
            return None, state
        return best, replace(state, factor=self._factor(state, best, start))

    def _factor(self, state: AdaptationState, batch: int, start: int) -> float:
        """Return what the learning rate is multiplied by at a global batch."""
        known = gain(state.noise.trace, state.noise.grad_sq, batch, start)
        return adjustment(self.rule, batch=batch, start=start, gain=known).factor

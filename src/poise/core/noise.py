"""The gradient noise scale, from the norms of unequal local gradients.

Notation: worker i has a count c_i (the denominator of its loss), C = sum of c_i, v_i = c_i / C;
q_i is the sum over its samples of their squared counts and e_i = c_i^2 / q_i its effective number
of samples; g_i is its mean gradient and g = sum of v_i g_i. Where every sample counts once,
c_i = q_i = e_i = b_i, the local batch.

    S  = ( sum_i v_i |g_i|^2 - |g|^2 ) / ( sum_i v_i (1 - v_i) / e_i )    estimates tr(Sigma)
    G2 = |g|^2 - S / E,   1 / E = sum_i v_i^2 / e_i                       estimates |G|^2

with Sigma the covariance of one sample's gradient and G the true gradient. S / G2 is the noise
scale of McCandlish et al. 2018 (arXiv 1812.06162): the global batch at which noise and signal
are equal. Counted in samples, S = (sum_i b_i |g_i|^2 - B |g|^2) / (n - 1) and E = B; these are
Cannikin's estimates per worker (arXiv 2402.05302) with the weights (B - b_i) / ((n - 1) B), those
of least variance for Gaussian gradients. For equal local batches it is the formula of AdaptDL
(arXiv 2008.12260).

The workers' samples must be exchangeable: data sorted by length is shuffled inside each global
batch before it is split.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from poise.core.entries import check_within
from poise.core.rows import refuse
from poise.core.timing import Floats
from poise.errors import InvalidSetting
from poise.numbers import is_number

GROUPS = 2
"""The fewest local gradients that show a difference."""
_ROUNDING = 1e-6
"""Counts may have been added up in single precision."""
_LARGEST_SQUARE = 1e70
"""The square of this is still far from the largest number."""
_MOST_COUNT = 1e18
"""Samples, or tokens, of one worker in one step."""
_LARGEST_EXPONENT = 700.0
"""e to this power is still a finite number."""


@dataclass(frozen=True)
class NoiseEstimate:
    """What the local gradients of one step say about noise and signal.

    >>> NoiseEstimate(trace=300.0, grad_sq=1.5, samples=64.0).scale
    200.0
    """

    trace: float
    """S, the variance of one sample's gradient, summed over the parameters; may be below 0."""
    grad_sq: float
    """G2, the squared norm of the true gradient; may be below 0."""
    samples: float
    """E, the global batch; with counts other than 1 per sample, its effective size C^2 / Q."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.trace) and math.isfinite(self.grad_sq)):
            raise InvalidSetting(
                f"trace={self.trace} and grad_sq={self.grad_sq} are not both finite; "
                "leave this step out"
            )
        if not 0 < self.samples < math.inf:
            raise InvalidSetting(
                f"samples={self.samples} is not above 0 and finite; give the global batch"
            )

    @property
    def scale(self) -> float | None:
        """The noise scale in samples, S / G2, at least 0; None where G2 <= 0: not known yet."""
        return _ratio(self.trace, self.grad_sq)


def noise_scale(
    local_batches: ArrayLike, local_sqnorms: ArrayLike, global_sqnorm: float
) -> NoiseEstimate:
    """Return the estimate of one step from the squared norms of its gradients.

    S = (sum_i b_i |g_i|^2 - B |g|^2) / (n - 1) and G2 = |g|^2 - S / B, unbiased for any split;
    Var(S) = 2 tr(Sigma^2) / (n - 1) for Gaussian gradients. Norms are those before clipping,
    divided by the square of the loss scale. Workers without a sample are left out.

    >>> noise_scale([6, 2], [3.0, 5.0], 2.75)
    NoiseEstimate(trace=6.0, grad_sq=2.0, samples=8.0)
    >>> noise_scale([6, 2], [3.0, 5.0], 2.75).scale
    3.0
    """
    b, norms = _numbers("local_batches", local_batches), _numbers("local_sqnorms", local_sqnorms)
    if len(b) != len(norms):
        raise InvalidSetting(
            f"there are {len(b)} local_batches and {len(norms)} local_sqnorms; give one of each "
            "per worker"
        )
    wrong = ~((b == 0) | ((b >= 1) & (b <= _MOST_COUNT)))
    refuse(wrong, b, "local_batches", "finite numbers of samples; 0 is idle")
    return token_noise_scale(b, b, norms, global_sqnorm)


def token_noise_scale(
    counts: ArrayLike, squared_counts: ArrayLike, local_sqnorms: ArrayLike, global_sqnorm: float
) -> NoiseEstimate:
    """Return the estimate of one step whose samples count differently, by tokens for instance.

    The formula is at the top of this file. A sample's gradient is its mean over its own tokens,
    and its noise does not depend on how many they are. The noise scale is in effective samples,
    the unit of `NoiseEstimate.samples`.

    >>> token_noise_scale([6, 2], [6, 2], [3.0, 5.0], 2.75).trace  # one token per sample
    6.0
    >>> estimate = token_noise_scale([60, 20], [900, 200], [3.0, 5.0], 2.75)
    >>> round(estimate.trace, 3), round(estimate.samples, 3)
    (5.333, 5.818)
    """
    c, q = _numbers("counts", counts), _numbers("squared_counts", squared_counts)
    norms = _numbers("local_sqnorms", local_sqnorms)
    if not len(c) == len(q) == len(norms):
        raise InvalidSetting(
            f"there are {len(c)} counts, {len(q)} squared counts and {len(norms)} norms; "
            "give one of each per worker"
        )
    refuse(~((c >= 0) & (c <= _MOST_COUNT)), c, "counts", "finite numbers from 0 up; 0 is idle")
    busy = c > 0
    if np.count_nonzero(busy) < GROUPS:
        raise InvalidSetting(
            f"{np.count_nonzero(busy)} of {len(c)} workers have samples; noise shows between at "
            "least 2 local gradients; add workers, or give each micro-batch as a worker"
        )
    norms_wrong = busy & ~((norms >= 0) & (norms < _LARGEST_SQUARE))
    refuse(norms_wrong, norms, "local_sqnorms", "finite numbers from 0 up; leave this step out")
    if not (is_number(global_sqnorm) and 0 <= global_sqnorm < _LARGEST_SQUARE):
        raise InvalidSetting(
            f"global_sqnorm={global_sqnorm!r} is not a finite number from 0 up; leave this step out"
        )
    c, q, norms = c[busy], q[busy], norms[busy]
    wrong = ~((q > 0) & (q <= c * c * (1 + _ROUNDING)))
    refuse(wrong, q, "squared_counts", "above 0 and at most counts squared; add up squares")
    sums = GroupSums(float(c.sum()), float(q.sum()), float((q / c).sum()), float(c @ norms))
    return _estimate(sums, global_sqnorm)


class GroupSums(NamedTuple):
    """What a worker adds up over its groups: its local batch, or each part of it.

    Sums of these over workers are all that `summed_noise_scale` needs, so no norm of a single
    group has to travel.

    >>> GroupSums.of(count=6.0, samples=6, sqnorm=3.0) + GroupSums.of(2.0, 2, 5.0)
    GroupSums(total=8.0, squares=8.0, ratios=2.0, sqnorms=28.0)
    """

    total: float = 0.0
    """sum of c"""
    squares: float = 0.0
    """sum of q"""
    ratios: float = 0.0
    """sum of q / c"""
    sqnorms: float = 0.0
    """sum of c |g|^2"""

    @staticmethod
    def of(count: float, samples: int, sqnorm: float) -> "GroupSums":
        """Return those of one group whose samples are taken to count alike: q = c^2 / b.

        Where they do not, as with texts of unequal length, trace and samples of the estimate are
        both larger by the same factor, and what follows from their ratio is the same.
        """
        return GroupSums(count, count**2 / samples, count / samples, count * sqnorm)

    @property
    def samples(self) -> float:
        """E, the effective number of samples."""
        return self.total**2 / self.squares

    @property
    def between(self) -> float:
        """What the trace is multiplied by in the difference between groups and whole."""
        return self.ratios / self.total - 1 / self.samples

    def __add__(self, other: "GroupSums") -> "GroupSums":  # type: ignore[override]
        return GroupSums(*(mine + its for mine, its in zip(self, other, strict=True)))


def summed_noise_scale(sums: GroupSums, global_sqnorm: float) -> NoiseEstimate | None:
    """Return the estimate of one step from sums over all its groups; None: it says nothing.

    It says nothing with fewer than two groups, or where a gradient is not finite, as when a loss
    scale is too large.

    >>> groups = GroupSums.of(6.0, 6, 3.0) + GroupSums.of(2.0, 2, 5.0)
    >>> summed_noise_scale(groups, 2.75)
    NoiseEstimate(trace=6.0, grad_sq=2.0, samples=8.0)
    """
    if not all(0 <= each < _LARGEST_SQUARE**2 for each in (*sums, global_sqnorm)):
        return None
    if not (sums.total > 0 and sums.squares > 0 and sums.samples < math.inf):
        return None
    if sums.between <= _ROUNDING / sums.samples:
        return None
    diverges = not abs(_trace(sums, global_sqnorm)) + global_sqnorm < _LARGEST_SQUARE
    return None if diverges else _estimate(sums, global_sqnorm)


def _trace(sums: GroupSums, global_sqnorm: float) -> float:
    """Return S by the formula at the top of this file."""
    return (sums.sqnorms / sums.total - global_sqnorm) / sums.between


def _estimate(sums: GroupSums, global_sqnorm: float) -> NoiseEstimate:
    """Return S and G2 by the formula at the top of this file."""
    trace = _trace(sums, global_sqnorm)
    return NoiseEstimate(trace, global_sqnorm - trace / sums.samples, sums.samples)


@dataclass(frozen=True)
class NoiseTrack:
    """Moving averages of S and G2, with what is needed to say how sure they are.

    Memory is in samples, not in steps: an estimate over B samples gets the weight
    1 - exp(-B / memory), all earlier ones are multiplied by exp(-B / memory), and averages are
    divided by the sum of weights. So two equal estimates over B samples move an average as far as
    one over 2 B, and the first estimate is the first average. Variances are weighted likewise
    (West 1979). All fields are plain numbers.

    >>> track = NoiseTrack(memory_samples=1000)
    >>> track.scale, track.interval()
    (None, (0.0, None))
    >>> for trace in (290.0, 310.0, 295.0, 305.0):
    ...     track = track.update(NoiseEstimate(trace, grad_sq=1.5, samples=64.0))
    >>> round(track.scale)
    200
    >>> low, high = track.interval()
    >>> round(low), round(high)
    (190, 210)
    """

    memory_samples: float
    """An estimate this many samples ago counts 1/e of a new one."""
    estimates: int = 0
    """How many have been seen."""
    weight: float = 0.0
    """The sum of weights, from 0 to 1."""
    weight_sq: float = 0.0
    """The sum of their squares."""
    trace: float = 0.0
    """The average of S."""
    grad_sq: float = 0.0
    """The average of G2."""
    trace_var: float = 0.0
    """The weighted mean of squared deviations of S from its average."""
    grad_sq_var: float = 0.0
    """The same of G2."""
    covariance: float = 0.0
    """The same of S times G2."""

    def __post_init__(self) -> None:
        if not 0 < self.memory_samples < math.inf:
            raise InvalidSetting(
                f"memory_samples={self.memory_samples} is not above 0 and finite; "
                "give the samples of some hundred steps"
            )
        if self.estimates < 0 or not all(map(math.isfinite, vars(self).values())):
            raise InvalidSetting("a noise track has numbers that are not finite; start a new one")

    def check_loaded(self) -> None:
        """Raise unless these can be averages over estimates."""
        most = 2 * _LARGEST_SQUARE
        check_within("memory_samples", self.memory_samples, 1, 1e18)
        check_within("estimates", self.estimates, 0, 1e18)
        for name in ("weight", "weight_sq"):
            check_within(name, getattr(self, name), 0, 1 + _ROUNDING)
        for name in ("trace", "grad_sq"):
            check_within(name, getattr(self, name), -most, most)
        for name in ("trace_var", "grad_sq_var"):
            check_within(name, getattr(self, name), 0, most**2)
        check_within("covariance", self.covariance, -(most**2), most**2)

    def update(self, estimate: NoiseEstimate) -> "NoiseTrack":
        """Return the track with one more step."""
        kept = math.exp(-estimate.samples / self.memory_samples)
        new = -math.expm1(-estimate.samples / self.memory_samples)
        weight = kept * self.weight + new
        share = new / weight
        trace_off = estimate.trace - self.trace
        grad_sq_off = estimate.grad_sq - self.grad_sq
        return replace(
            self,
            estimates=self.estimates + 1,
            weight=weight,
            weight_sq=kept**2 * self.weight_sq + new**2,
            trace=self.trace + share * trace_off,
            grad_sq=self.grad_sq + share * grad_sq_off,
            trace_var=(1 - share) * (self.trace_var + share * trace_off**2),
            grad_sq_var=(1 - share) * (self.grad_sq_var + share * grad_sq_off**2),
            covariance=(1 - share) * (self.covariance + share * trace_off * grad_sq_off),
        )

    @property
    def scale(self) -> float | None:
        """The noise scale in samples, average S / average G2; None: not known yet."""
        return _ratio(self.trace, self.grad_sq)

    @property
    def effective_estimates(self) -> float:
        """How many equally weighted estimates would be as sure: (sum w)^2 / sum w^2."""
        return self.weight**2 / self.weight_sq if self.weight_sq else 0.0

    def interval(self, z: float = 2.0) -> tuple[float, float | None]:
        """Return the ends between which the noise scale lies, z standard errors wide each way.

        The interval of Fieller 1954 for a ratio of correlated means: all phi with

            (S - phi G2)^2 <= t^2 ( Var(S) - 2 phi Cov(S, G2) + phi^2 Var(G2) )

        where variances are those of the averages and t is z widened for few estimates. The upper
        end is None, unknown, where G2 - t standard errors is not above 0; a lower end may be known
        even then. It takes steps as independent and the truth as steady within the memory.
        """
        if not 0 < z < math.inf:
            raise InvalidSetting(f"z={z} is not above 0 and finite; 2 means about 95 percent")
        degrees = self.effective_estimates - 1
        if self.estimates < GROUPS or degrees <= 0:
            return 0.0, None
        t = _student(z, degrees)
        if math.isinf(t):
            return 0.0, None
        # a phi^2 - 2 h phi + k <= 0
        a = self.grad_sq**2 - t * t * self.grad_sq_var / degrees
        h = self.trace * self.grad_sq - t * t * self.covariance / degrees
        k = self.trace**2 - t * t * self.trace_var / degrees
        far = h + math.sqrt(max(h * h - a * k, 0.0))
        low = k / far if self.trace > 0 and k > 0 and far > 0 else 0.0
        high = max(far / a, 0.0) if self.grad_sq > 0 and a > 0 else None
        return low, high


def _ratio(trace: float, grad_sq: float) -> float | None:
    return max(trace, 0.0) / grad_sq if grad_sq > 0 else None


def _student(z: float, degrees: float) -> float:
    """Return Student's quantile for the normal quantile z (Wallace 1959).

    Within 1 percent of the true quantile from 4 degrees of freedom up at z = 2, and above it
    below that: 4.7 instead of 4.5 at 2 degrees.
    """
    exponent = (z * (8 * degrees + 3) / (8 * degrees + 1)) ** 2 / degrees
    if exponent > _LARGEST_EXPONENT:
        return math.inf
    return math.sqrt(degrees * math.expm1(exponent))


def _numbers(name: str, values: ArrayLike) -> Floats:
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InvalidSetting(f"{name}={values!r} are no numbers; give one per worker") from None
    if found.ndim != 1:
        raise InvalidSetting(f"{name} has {found.ndim} dimensions; give one number per worker")
    return found

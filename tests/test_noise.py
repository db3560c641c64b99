"""Laws of the gradient noise scale, checked against simulated gradients."""

import json
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from poise.core.noise import NoiseEstimate, NoiseTrack, noise_scale, token_noise_scale
from poise.errors import InvalidSetting

Floats = NDArray[np.float64]
Draw = Callable[[tuple[int, ...]], Floats]

SPREAD = np.linspace(0.2, 2.0, 20)
"""Standard deviation of each of 20 parameters' gradients."""
GRADIENT = np.full(20, 0.3)
TRACE, GRAD_SQ = float((SPREAD**2).sum()), float((GRADIENT**2).sum())
TRACE_OF_SQUARE = float((SPREAD**4).sum())
STEPS = 3000
SPLITS = [[1, 3, 28], [2, 14], [4, 4, 8, 16], [1, 1, 1, 29], [15, 15, 2]]


def gaussian(seed: int) -> Draw:
    return np.random.default_rng(seed).standard_normal


def laplace(seed: int) -> Draw:
    random = np.random.default_rng(seed)
    return lambda size: random.laplace(scale=0.5**0.5, size=size)


def norms(split: list[int], draw: Draw, steps: int = STEPS) -> tuple[Floats, Floats]:
    """Return |g_i|^2 (steps x workers) and |g|^2 (steps) of simulated gradients."""
    local = np.stack(
        [GRADIENT + SPREAD * draw((steps, size, 20)).mean(axis=1) for size in split], axis=1
    )
    share = np.array(split) / sum(split)
    return (local**2).sum(axis=2), ((share @ local) ** 2).sum(axis=1)


def estimates(split: list[int], local: Floats, joint: Floats) -> Floats:
    """Return steps x (S, G2)."""
    found = [noise_scale(split, row, whole) for row, whole in zip(local, joint, strict=True)]
    return np.array([(estimate.trace, estimate.grad_sq) for estimate in found])


def weighted(split: list[int], local: Floats, joint: Floats, weight: Floats) -> Floats:
    """Return steps x (S, G2), Cannikin's estimates of each worker combined with the weights."""
    b, total, whole = np.array(split), sum(split), joint[:, None]
    trace = (local - whole) / (1 / b - 1 / total)
    grad_sq = (total * whole - b * local) / (total - b)
    return np.stack([trace @ weight, grad_sq @ weight], axis=1)


@pytest.mark.parametrize(("draw", "slack"), [(gaussian, 1.0), (laplace, 1.1)])
@pytest.mark.parametrize("split", SPLITS)
def test_estimates_are_unbiased_and_vary_less_than_other_weightings(
    split: list[int], draw: Callable[[int], Draw], slack: float
) -> None:
    """For Gaussian gradients; with heavy tails uniform weights can be a few percent better."""
    local, joint = norms(split, draw(1))
    ours = estimates(split, local, joint)
    error = ours.std(axis=0) / STEPS**0.5
    assert np.all(np.abs(ours.mean(axis=0) - (TRACE, GRAD_SQ)) < 4 * error)

    b, n, total = np.array(split), len(split), sum(split)
    best = weighted(split, local, joint, (total - b) / ((n - 1) * total))
    np.testing.assert_allclose(ours, best, rtol=1e-9, atol=1e-9)
    for other in (np.full(n, 1 / n), b / total):
        spread = weighted(split, local, joint, other).var(axis=0)
        assert np.all(ours.var(axis=0) <= slack * spread)


@pytest.mark.parametrize("split", SPLITS)
def test_the_variance_of_the_trace_depends_on_the_number_of_workers_only(split: list[int]) -> None:
    """Var(S) = 2 tr(Sigma^2) / (n - 1) for Gaussian gradients."""
    trace = estimates(split, *norms(split, gaussian(2)))[:, 0]
    assert trace.var() == pytest.approx(2 * TRACE_OF_SQUARE / (len(split) - 1), rel=0.15)


def test_samples_with_heavy_tails_alone_on_a_worker_raise_the_variance() -> None:
    """The law above is a law of sums: a Laplace sample on its own varies more."""
    trace = estimates([1, 1, 1, 29], *norms([1, 1, 1, 29], laplace(2)))[:, 0]
    assert trace.var() > 1.5 * 2 * TRACE_OF_SQUARE / 3


def test_unequal_batches_taken_as_equal_are_far_off() -> None:
    split = [1, 3, 28]
    local, joint = norms(split, gaussian(3))
    taken_as_equal = (local.mean(axis=1) - joint) / (1 / (32 / 3) - 1 / 32)
    assert taken_as_equal.mean() > 5 * TRACE
    assert (joint - taken_as_equal / 32).mean() < 0


@given(
    local=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=8),
    size=st.integers(1, 1000),
    joint=st.floats(1e-6, 1e6),
)
def test_equal_batches_give_the_formula_of_adaptdl(
    local: list[float], size: int, joint: float
) -> None:
    n, total, mean = len(local), len(local) * size, sum(local) / len(local)
    estimate = noise_scale([size] * n, local, joint)
    assert estimate.samples == pytest.approx(total)
    assert estimate.grad_sq == pytest.approx((n * joint - mean) / (n - 1), rel=1e-9, abs=1e-5)
    trace = (mean - joint) * total / (n - 1)
    assert estimate.trace == pytest.approx(trace, rel=1e-9, abs=1e-8 * total * (mean + joint))


@pytest.mark.parametrize("split", [[2, 6, 24], [3, 13]])
def test_token_counts_leave_the_estimates_unbiased(split: list[int]) -> None:
    random = np.random.default_rng(4)
    found = []
    for _ in range(STEPS):
        tokens = [random.integers(1, 60, size) for size in split]
        sums = [t @ (GRADIENT + SPREAD * random.standard_normal((len(t), 20))) for t in tokens]
        counts = np.array([t.sum() for t in tokens])
        local = np.array([(g @ g) for g in sums]) / counts**2
        joint = float((np.sum(sums, axis=0) ** 2).sum() / counts.sum() ** 2)
        squared = [float((t**2).sum()) for t in tokens]
        estimate = token_noise_scale(counts, squared, local, joint)
        as_samples = noise_scale(split, local, joint)
        found.append((estimate.trace, estimate.grad_sq, as_samples.trace))
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / STEPS**0.5
    assert np.all(np.abs(mean[:2] - (TRACE, GRAD_SQ)) < 4 * error[:2])
    assert mean[2] > TRACE + 4 * error[2], "counting samples instead of tokens is biased"


workers = st.lists(
    st.tuples(st.integers(1, 500), st.floats(0.1, 100.0)), min_size=2, max_size=8
).map(lambda rows: ([b for b, _ in rows], [norm for _, norm in rows]))


@given(workers=workers, joint=st.floats(0.1, 100.0), k=st.floats(1e-6, 1e6))
def test_scaling_the_gradients_leaves_the_scale(
    workers: tuple[list[int], list[float]], joint: float, k: float
) -> None:
    batches, local = workers
    one = noise_scale(batches, local, joint)
    other = noise_scale(batches, [k * k * norm for norm in local], k * k * joint)
    size = sum(batches) * (max(local) + joint)
    assert other.trace / k**2 == pytest.approx(one.trace, rel=1e-6, abs=1e-9 * size)
    assert other.grad_sq / k**2 == pytest.approx(one.grad_sq, rel=1e-6, abs=1e-9 * size)
    if one.grad_sq > 1e-3 * size:
        assert other.scale == pytest.approx(one.scale, rel=1e-4, abs=1e-4)


@given(workers=workers, joint=st.floats(0.1, 100.0), data=st.data())
def test_the_order_of_workers_and_idle_ones_change_nothing(
    workers: tuple[list[int], list[float]], joint: float, data: st.DataObject
) -> None:
    batches, local = workers
    order = data.draw(st.permutations(range(len(batches))))
    one = noise_scale(batches, local, joint)
    other = noise_scale(
        [batches[i] for i in order] + [0], [local[i] for i in order] + [float("nan")], joint
    )
    size = sum(batches) * (max(local) + joint)
    assert other.trace == pytest.approx(one.trace, rel=1e-9, abs=1e-9 * size)
    assert other.grad_sq == pytest.approx(one.grad_sq, rel=1e-9, abs=1e-9 * size)
    assert other.samples == pytest.approx(one.samples)


@pytest.mark.parametrize(
    ("batches", "local", "joint", "message"),
    [
        ([4, 4], [1.0], 1.0, "2 local_batches and 1 local_sqnorms"),
        ([4, -1], [1.0, 1.0], 1.0, r"local_batches\[1\] is -1.0; give finite numbers of samples"),
        ([4, 0], [1.0, 1.0], 1.0, "1 of 2 workers have samples"),
        ([], [], 1.0, "0 of 0 workers"),
        ([4, 4], [1.0, float("nan")], 1.0, r"local_sqnorms\[1\] is nan; .* leave this step out"),
        ([4, 4], [float("inf"), 1.0], 1.0, r"local_sqnorms\[0\] is inf"),
        ([4, 4], [-1.0, 1.0], 1.0, r"local_sqnorms\[0\] is -1.0"),
        ([4, 4], [1.0, 1.0], float("nan"), "global_sqnorm=nan .* leave this step out"),
        ([4, 4], [1.0, 1.0], -1.0, "global_sqnorm=-1.0"),
        ([[4, 4]], [1.0, 1.0], 1.0, "local_batches has 2 dimensions"),
    ],
)
def test_wrong_input_is_refused_with_the_reason(
    batches: list[int], local: list[float], joint: float, message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        noise_scale(batches, local, joint)


@pytest.mark.parametrize("squared", [[17, 16], [0, 16], [16, float("nan")]])
def test_squared_counts_that_cannot_be_are_refused(squared: list[float]) -> None:
    with pytest.raises(InvalidSetting, match=r"squared_counts\[.\] is .*; add up squares"):
        token_noise_scale([4, 4], squared, [1.0, 1.0], 1.0)


def test_an_estimate_without_signal_has_no_scale_and_one_without_noise_has_none() -> None:
    assert NoiseEstimate(trace=5.0, grad_sq=-0.1, samples=8.0).scale is None
    assert NoiseEstimate(trace=5.0, grad_sq=0.0, samples=8.0).scale is None
    assert NoiseEstimate(trace=-5.0, grad_sq=2.0, samples=8.0).scale == 0.0
    with pytest.raises(InvalidSetting, match="leave this step out"):
        NoiseEstimate(trace=float("inf"), grad_sq=1.0, samples=8.0)
    with pytest.raises(InvalidSetting, match="samples=0"):
        NoiseEstimate(trace=1.0, grad_sq=1.0, samples=0)


# Tracks


def follow(split: list[int], seed: int, steps: int, memory_samples: float) -> NoiseTrack:
    track = NoiseTrack(memory_samples)
    for local, joint in zip(*norms(split, gaussian(seed), steps), strict=True):
        track = track.update(noise_scale(split, local, joint))
    return track


@pytest.mark.parametrize(
    ("split", "steps", "memory_samples"),
    [([4, 4, 8, 16], 60, 1e9), ([4, 4, 8, 16], 200, 32 * 30.0), ([2, 14], 5, 1e9)],
)
def test_an_interval_covers_the_truth_as_often_as_it_says(
    split: list[int], steps: int, memory_samples: float
) -> None:
    """Two standard errors: 95 percent, with much memory, with little, and after few steps."""
    truth, covered = TRACE / GRAD_SQ, 0
    for seed in range(200):
        low, high = follow(split, seed, steps, memory_samples).interval(z=2.0)
        covered += low <= truth and (high is None or truth <= high)
    assert covered >= 0.92 * 200


def test_an_interval_narrows_with_estimates_and_widens_with_z() -> None:
    few, many = (follow([4, 4, 8, 16], 5, steps, 1e9) for steps in (50, 800))
    width = {}
    for name, track, z in (("few", few, 2.0), ("many", many, 2.0), ("sure", many, 3.0)):
        low, high = track.interval(z)
        assert track.scale is not None
        assert high is not None
        assert low < track.scale < high
        width[name] = high - low
    assert width["many"] < width["sure"] < width["few"]


def test_the_upper_end_is_unknown_until_the_signal_is_clear() -> None:
    track = NoiseTrack(1e6)
    assert track.interval() == (0.0, None)
    assert track.scale is None
    track = track.update(NoiseEstimate(300.0, 1.5, 64.0))
    assert track.scale == 200.0
    assert track.interval() == (0.0, None)
    for grad_sq in (-9.0, 10.0, -8.0, 12.0) * 3:
        track = track.update(NoiseEstimate(300.0, grad_sq, 64.0))
    low, high = track.interval()
    assert 300 / 10 < low < 300 / 2, "noise is clear, so the scale is at least that over G2's end"
    assert high is None


def test_a_signal_clearly_below_zero_says_nothing() -> None:
    """It cannot be: the workers' samples were not exchangeable."""
    track = NoiseTrack(1e6)
    for wobble in (-0.1, 0.1) * 10:
        track = track.update(NoiseEstimate(300.0, -5.0 + wobble, 64.0))
    assert track.scale is None
    assert track.interval() == (0.0, None)


def test_noise_of_about_zero_has_a_known_upper_end() -> None:
    track = NoiseTrack(1e6)
    for wobble in (-0.3, 0.2) * 10:
        track = track.update(NoiseEstimate(wobble, 2.0, 64.0))
    low, high = track.interval()
    assert track.scale == low == 0.0
    assert high is not None
    assert 0 < high < 0.3


@given(
    first=st.floats(-10, 10),
    second=st.floats(-10, 10),
    samples=st.floats(1, 1000),
    memory_samples=st.floats(10, 1e5),
)
def test_memory_is_in_samples_and_not_in_steps(
    first: float, second: float, samples: float, memory_samples: float
) -> None:
    """Two equal estimates over B samples move the averages as far as one over 2 B."""
    start = NoiseTrack(memory_samples).update(NoiseEstimate(first, -first, samples))
    twice = start.update(NoiseEstimate(second, first, samples))
    twice = twice.update(NoiseEstimate(second, first, samples))
    once = start.update(NoiseEstimate(second, first, 2 * samples))
    assert twice.trace == pytest.approx(once.trace, abs=1e-9)
    assert twice.grad_sq == pytest.approx(once.grad_sq, abs=1e-9)
    assert twice.trace_var == pytest.approx(once.trace_var, abs=1e-9)
    assert twice.weight == pytest.approx(once.weight)


@given(
    values=st.lists(
        st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(1, 99)), min_size=1, max_size=9
    )
)
def test_averages_and_variances_are_those_of_the_weighted_estimates(
    values: list[tuple[float, float, float]],
) -> None:
    track = NoiseTrack(50.0)
    for value in values:
        track = track.update(NoiseEstimate(*value))
    trace, grad_sq, samples = np.array(values).T
    later = np.cumsum(samples[::-1])[::-1] - samples
    weight = -np.expm1(-samples / 50) * np.exp(-later / 50)
    cov = np.cov(trace, grad_sq, bias=True, aweights=weight)
    assert track.trace == pytest.approx(np.average(trace, weights=weight), abs=1e-9)
    assert track.grad_sq == pytest.approx(np.average(grad_sq, weights=weight), abs=1e-9)
    found = [track.trace_var, track.covariance, track.grad_sq_var]
    assert found == pytest.approx([cov[0, 0], cov[0, 1], cov[1, 1]], abs=1e-9)
    assert track.effective_estimates == pytest.approx(weight.sum() ** 2 / (weight**2).sum())


def test_a_track_follows_a_change_within_its_memory() -> None:
    track = NoiseTrack(memory_samples=1000)
    for trace in (100.0,) * 1000 + (400.0,) * 94:
        track = track.update(NoiseEstimate(trace, 1.0, 32.0))
    assert track.scale == pytest.approx(400 - 300 * np.exp(-94 * 32 / 1000))


def test_a_track_survives_json() -> None:
    track = follow([4, 4, 8], 6, steps=20, memory_samples=1e4)
    assert NoiseTrack(**json.loads(json.dumps(asdict(track)))) == track


@pytest.mark.parametrize("memory_samples", [0, -1.0, float("inf"), float("nan")])
def test_a_track_needs_a_memory(memory_samples: float) -> None:
    with pytest.raises(InvalidSetting, match="memory_samples"):
        NoiseTrack(memory_samples)


def test_an_interval_needs_a_width() -> None:
    with pytest.raises(InvalidSetting, match="z=0"):
        NoiseTrack(100.0).interval(z=0)

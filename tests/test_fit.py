"""Laws of the online fit: it recovers the truth, says how sure it is, and notices drift."""

import json
from typing import Any

import numpy as np
import pytest

from poise.core.fit import Fit
from poise.core.observation import Observation
from poise.core.plain import from_plain, to_json
from poise.core.timing import SpeedModel
from poise.errors import InvalidSetting, StateMismatch
from poise.sim.scenes import CORES, by_cores
from poise.sim.simulate import observe

MANY = 500


def lines(fixed: float, rise: float, workers: int = MANY) -> SpeedModel:
    return SpeedModel.of(np.full(workers, fixed), np.full(workers, rise))


def fed(
    model: SpeedModel,
    splits: list[int],
    *,
    cv: float,
    per_split: int = 20,
    seed: int = 0,
    fit: Fit | None = None,
) -> Fit:
    """Show equal local batches of each size in turn."""
    draw = np.random.default_rng(seed)
    fit = Fit.start(model.workers, model.fixed_s.shape[1]) if fit is None else fit
    for number, size in enumerate(splits):
        for step in range(per_split):
            factor = np.exp(cv * draw.standard_normal(model.workers))
            split = (size,) * model.workers
            fit, _ = fit.update(observe(model, number * per_split + step, 0, split, factor))
    return fit


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("cv", [0.01, 0.05, 0.1])
def test_the_truth_is_recovered_within_the_stated_error(share: float, cv: float) -> None:
    """Between the batch sizes seen, predictions lie within 3 standard errors for nearly all."""
    truth = lines(0.1 * share, 0.1 * (1 - share) / 64)
    fit = fed(truth, [64, 32, 96], cv=cv)
    for size in (40, 64, 90):
        found = fit.model().local_s(np.full(MANY, size))
        right = truth.local_s(np.full(MANY, size))
        error = fit.error((size,) * MANY)
        assert np.abs(found / right - 1).mean() < 0.6 * cv
        assert np.mean(np.abs(found / right - 1) > 3 * error + 0.003) < 0.05


def test_one_batch_size_says_little_of_the_slope_and_the_error_says_so() -> None:
    fit = fed(lines(0.09, 0.01 / 64), [64], cv=0.05)
    assert fit.error((64,) * MANY).max() < 0.03
    assert fit.error((8,) * MANY).min() > 0.1


def test_every_bucket_has_its_own_line() -> None:
    truth = SpeedModel.of([[0.01, 0.03]] * MANY, [[0.0002, 0.001]] * MANY, [0.002, 0.001])
    model = fed(truth, [64, 32, 96], cv=0.02).model()
    assert model.fixed_s.mean(axis=0) == pytest.approx([0.01, 0.03], rel=0.1)
    assert model.per_sample_s.mean(axis=0) == pytest.approx([0.0002, 0.001], rel=0.1)


def test_times_of_the_reduction_are_free_of_waiting() -> None:
    """The last worker to arrive waits for nobody; the others measure 10 times as much."""
    truth = SpeedModel.of(
        [[0.01, 0.02], [0.05, 0.1]], [[0.0001, 0.0002], [0.0005, 0.001]], [0.003, 0.001]
    )
    model = fed(truth, [32], cv=0.02).model()
    assert model.bucket_s == pytest.approx([0.003, 0.001], rel=0.05)


@pytest.mark.parametrize("factor", [4.0, 0.25])
@pytest.mark.parametrize("after", [20, 120])
def test_a_change_of_speed_is_found_within_six_observations(factor: float, after: int) -> None:
    truth = lines(0.02, 0.001)
    fit = fed(truth, [32], cv=0.05, per_split=after)
    draw = np.random.default_rng(1)
    slower = lines(0.02 * factor, 0.001 * factor)
    found = np.zeros(MANY, dtype=bool)
    for step in range(6):
        noise = np.exp(0.05 * draw.standard_normal(MANY))
        fit, alarms = fit.update(observe(slower, after + step, 0, (32,) * MANY, noise))
        found[alarms] = True
    assert found.all()
    right = slower.local_s(np.full(MANY, 32))
    assert np.abs(fit.model().local_s(np.full(MANY, 32)) / right - 1).mean() < 0.04
    elsewhere = np.full(MANY, 16)
    scaled = np.abs(fit.model().local_s(elsewhere) / slower.local_s(elsewhere) - 1)
    assert scaled.mean() < 0.35  # a slowdown is multiplicative: the line was rescaled


@pytest.mark.parametrize("cv", [0.02, 0.05, 0.1, 0.2])
def test_false_alarms_are_rarer_than_one_in_ten_thousand(cv: float) -> None:
    draw = np.random.default_rng(2)
    truth, alarms = lines(0.02, 0.001, 2000), 0
    fit = Fit.start(2000)
    for step in range(100):
        noise = np.exp(cv * draw.standard_normal(2000))
        fit, found = fit.update(observe(truth, step, 0, (32,) * 2000, noise))
        alarms += len(found)
    assert alarms < 20


def test_an_outlier_counts_as_at_most_so_much() -> None:
    truth = lines(0.02, 0.001, 2)
    fit = fed(truth, [32], cv=0.01)
    before = fit.model().local_s([32, 32])
    fit, _ = fit.update(observe(truth, 20, 0, (32, 32), np.array([50.0, 1.0])))
    after = fit.model().local_s([32, 32])
    assert after[0] / before[0] < 1.05
    assert after[1] == pytest.approx(before[1], rel=0.01)


def test_noise_that_lasts_is_told_from_noise_that_does_not() -> None:
    truth, draw = lines(0.02, 0.001), np.random.default_rng(3)
    fit, scatter = Fit.start(MANY), np.zeros(MANY)
    for step in range(100):
        scatter = 0.8 * scatter + 0.6 * draw.standard_normal(MANY)
        fit, _ = fit.update(observe(truth, step, 0, (32,) * MANY, np.exp(0.05 * scatter)))
    plain = fed(truth, [32], cv=0.05, per_split=100)
    assert np.median(fit.noise) > 1.5 * np.median(plain.noise)
    assert np.median(plain.noise) == pytest.approx(0.05, rel=0.3)


def test_a_stale_time_counts_for_its_own_batch() -> None:
    """A step that was measured before a plan change is tagged with its own split."""
    truth = lines(0.02, 0.001, 2)
    fit = fed(truth, [32, 16], cv=0.01)
    before = fit.model().local_s([16, 16])
    fit, alarms = fit.update(observe(truth, 99, 0, (32, 32), np.ones(2)))
    assert not alarms.size
    assert fit.model().local_s([16, 16]) == pytest.approx(before, rel=0.02)


def test_missing_measurements_teach_nothing() -> None:
    truth = lines(0.02, 0.001, 3)
    fit = fed(truth, [32], cv=0.01)
    nothing = Observation(9, (32,) * 3, ready_s=np.full((3, 1), np.nan))
    after, alarms = fit.update(nothing)
    assert to_json(after.model()) == to_json(fit.model())
    assert not alarms.size
    with pytest.raises(InvalidSetting, match="step 9 has none"):
        fit.update(Observation(9, (32,) * 3))


def test_an_idle_worker_teaches_nothing_of_its_slope() -> None:
    truth = lines(0.02, 0.001, 2)
    fit = fed(truth, [32, 16], cv=0.01)
    after, _ = fit.update(observe(truth, 50, 0, (32, 0), np.ones(2)))
    assert after.model().per_sample_s[1] == pytest.approx(fit.model().per_sample_s[1], rel=0.02)


def test_workers_taken_along_keep_what_is_known_of_them() -> None:
    truth = SpeedModel.of([0.01, 0.02, 0.04], [0.001, 0.002, 0.004])
    fit = fed(truth, [32, 16], cv=0.0)
    other = fit.take((2, None, 0))
    found = other.model().local_s([32, 32, 32])
    right = truth.local_s([32, 32, 32])
    assert found[0] == pytest.approx(right[2], rel=0.05)
    assert found[2] == pytest.approx(right[0], rel=0.05)
    assert right[0] < found[1] < right[2]
    assert not other.known


def test_a_fit_survives_json() -> None:
    fit = fed(lines(0.02, 0.001, 3), [32, 16], cv=0.05)
    again = from_plain(Fit, json.loads(to_json(fit)))
    assert to_json(again) == to_json(fit)
    fresh = Fit.start(2)
    assert to_json(from_plain(Fit, json.loads(to_json(fresh)))) == to_json(fresh)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("seen"), "needs seen"),
        (lambda data: data.update(extra=1), "has no extra"),
        (lambda data: data.update(bucket_count="many"), "bucket_count: 'many' is of another type"),
        (lambda data: data.update(split=[1.5]), "another type"),
        (lambda data: data.update(split=[True]), "another type"),
    ],
)
def test_a_damaged_state_is_refused(change: Any, message: str) -> None:
    data = json.loads(to_json(fed(lines(0.02, 0.001, 2), [4], cv=0.05)))
    change(data)
    with pytest.raises(StateMismatch, match=f"not a saved Fit.*{message}"):
        from_plain(Fit, data)


def test_other_buckets_begin_a_new_fit() -> None:
    """DistributedDataParallel rebuilds its buckets after the first step."""
    fit = fed(lines(0.02, 0.001, 2), [32], cv=0.01)
    two = SpeedModel.of([[0.01, 0.02]] * 2, [[0.0005, 0.001]] * 2, [0.001, 0.001])
    fit, _ = fit.update(observe(two, 20, 0, (32, 32), np.ones(2)))
    assert fit.model().fixed_s.shape == (2, 2)


def test_steps_learned_together_are_nearly_those_learned_one_by_one() -> None:
    truth, draw = by_cores(CORES[4]), np.random.default_rng(5)
    together, alone = Fit.start(4), Fit.start(4)
    for pack in range(20):
        split = (60, 60, 60, 60) if pack < 10 else (45, 45, 30, 120)
        steps = [
            observe(truth, 4 * pack + number, 0, split, np.exp(0.05 * draw.standard_normal(4)))
            for number in range(4)
        ]
        together, _ = together.update(*steps)
        for step in steps:
            alone, _ = alone.update(step)
    np.testing.assert_allclose(together.mean_y, alone.mean_y, rtol=0.01)
    np.testing.assert_allclose(together.cv, alone.cv, rtol=0.1)
    np.testing.assert_allclose(together.model().per_sample_s, alone.model().per_sample_s, rtol=0.03)


def test_a_slowdown_inside_of_a_pack_is_noticed() -> None:
    truth, draw, fit = by_cores(CORES[1]), np.random.default_rng(6), Fit.start(4)
    changed: set[int] = set()
    for pack in range(16):
        steps = []
        for number in range(4):
            slow = np.array([1.0, 4.0 if 4 * pack + number >= 42 else 1.0, 1.0, 1.0])
            noise = slow * np.exp(0.05 * draw.standard_normal(4))
            steps.append(observe(truth, 4 * pack + number, 0, (60, 60, 60, 60), noise))
        fit, alarms = fit.update(*steps)
        changed |= set(alarms.tolist())
        if pack == 9:
            assert not changed
    assert changed == {1}
    assert 3.0 < fit.model().local_s((60, 60, 60, 60))[1] / truth.local_s((60,) * 4)[1] < 5.0

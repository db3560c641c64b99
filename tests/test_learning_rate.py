"""Laws of the rules that move the learning rate with the global batch."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.core.learning_rate import (
    RULES,
    Adjustment,
    adjustment,
    gain,
    ramp,
    steady_gain,
)
from poise.errors import InvalidSetting

sizes = st.integers(1, 10**6)
positive = st.floats(1e-6, 1e6)


@given(start=sizes, value=positive)
def test_no_rule_changes_anything_at_the_start(start: int, value: float) -> None:
    for rule in RULES:
        assert adjustment(rule, batch=start, start=start, gain=value) == Adjustment(1.0)
    assert gain(value, 1.0, start, start) == 1.0


@given(batch=sizes, start=sizes)
def test_the_square_root_squared_is_linear(batch: int, start: int) -> None:
    root = adjustment("sqrt", batch=batch, start=start)
    linear = adjustment("linear", batch=batch, start=start)
    assert linear.factor == batch / start
    assert root.factor**2 == pytest.approx(linear.factor)
    assert adjustment("legw", batch=batch, start=start).factor == root.factor
    assert adjustment("none", batch=batch, start=start).factor == 1.0


@given(batch=sizes, start=sizes, beta=st.floats(0, 1), eps=st.floats(1e-12, 1))
def test_adam_forgets_in_samples_and_not_in_steps(
    batch: int, start: int, beta: float, eps: float
) -> None:
    found = adjustment("sqrt", batch=batch, start=start)
    kappa = batch / start
    assert 0 <= found.beta(beta) <= 1
    if kappa * (1 - beta) < 1:
        assert 1 - found.beta(beta) == pytest.approx(kappa * (1 - beta), abs=1e-12)
    else:
        assert found.beta(beta) == pytest.approx(0, abs=1e-12)
    assert found.eps(eps) * found.factor == pytest.approx(eps)


@pytest.mark.parametrize("rule", ["adascale", "linear", "legw", "none"])
def test_only_the_square_root_rule_touches_adam(rule: str) -> None:
    found = adjustment(rule, batch=256, start=64, gain=2.0)
    assert (found.forgetting, found.eps_factor) == (1.0, 1.0)
    assert found.beta(0.9) == pytest.approx(0.9)
    assert found.eps(1e-8) == 1e-8


@given(batch=sizes, start=sizes, trace=positive, grad_sq=positive)
def test_a_gain_lies_between_one_and_the_ratio_of_batches(
    batch: int, start: int, trace: float, grad_sq: float
) -> None:
    found = gain(trace, grad_sq, batch, start)
    assert found is not None
    low, high = sorted((1.0, batch / start))
    assert low * (1 - 1e-12) <= found <= high * (1 + 1e-12)
    assert adjustment("adascale", batch=batch, start=start, gain=found).factor == pytest.approx(
        found
    )


@given(start=sizes, trace=positive, grad_sq=positive, data=st.data())
def test_a_gain_grows_with_the_batch_and_falls_with_the_signal(
    start: int, trace: float, grad_sq: float, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(start, 2 * 10**6))
    one = gain(trace, grad_sq, batch, start)
    larger = gain(trace, grad_sq, 2 * batch, start)
    clearer = gain(trace, 2 * grad_sq, batch, start)
    assert one is not None
    assert larger is not None
    assert clearer is not None
    assert clearer <= one * (1 + 1e-12)
    assert one <= larger * (1 + 1e-12)


def test_a_gain_is_the_ratio_under_noise_and_one_without() -> None:
    assert gain(1e12, 1e-6, batch=512, start=64) == pytest.approx(8)
    assert gain(1e-6, 1e6, batch=512, start=64) == pytest.approx(1)
    assert gain(-3.0, 1.0, batch=512, start=64) == 1
    assert gain(1e12, 1e-6, batch=16, start=64) == pytest.approx(1 / 4)


def test_a_gain_is_not_known_without_a_signal() -> None:
    assert gain(5.0, 0.0, batch=512, start=64) is None
    assert gain(5.0, -1.0, batch=512, start=64) is None
    with pytest.raises(InvalidSetting, match="not known yet; keep the last one"):
        adjustment("adascale", batch=512, start=64)


def test_a_gain_kept_from_another_batch_is_held_in_range() -> None:
    assert adjustment("adascale", batch=64, start=64, gain=5.0).factor == 1.0
    assert adjustment("adascale", batch=128, start=64, gain=5.0).factor == 2.0
    assert adjustment("adascale", batch=32, start=64, gain=5.0).factor == 1.0


def test_a_gain_is_kept_while_it_is_unknown_or_gradients_are_clipped() -> None:
    assert steady_gain(1.5, 2.0, clipped_share=0.2) == 2.0
    assert steady_gain(1.5, 2.0, clipped_share=0.21) == 1.5
    assert steady_gain(1.5, None) == 1.5
    with pytest.raises(InvalidSetting, match="clipped_share=3"):
        steady_gain(1.5, 2.0, clipped_share=3)


@given(old=positive, new=positive, momentum=st.floats(0, 0.99))
def test_a_ramp_is_monotone_and_ends_at_the_new_factor(
    old: float, new: float, momentum: float
) -> None:
    path = [ramp(old, new, step, momentum) for step in range(101)]
    moves = [(right - left) * (new - old) for left, right in pairwise([old, *path])]
    assert min(moves) >= -1e-9 * (new - old) ** 2
    assert path[-1] == new
    assert ramp(old, new, 0, momentum=0.0) == new


@pytest.mark.parametrize(("momentum", "steps"), [(0.0, 1), (0.5, 2), (0.9, 10), (0.99, 100)])
def test_a_ramp_takes_as_long_as_momentum_remembers(momentum: float, steps: int) -> None:
    assert ramp(1.0, 2.0, steps - 1, momentum) == 2.0
    if steps > 1:
        assert ramp(1.0, 2.0, steps - 2, momentum) < 2.0


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("adasale", "rule='adasale' is unknown; .* did you mean 'adascale'"),
        ("squareroot", "there are adascale, sqrt, linear, legw, none"),
        ("", "choose one of them"),
    ],
)
def test_an_unknown_rule_is_refused_with_the_nearest_name(rule: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        adjustment(rule, batch=128, start=64)


@pytest.mark.parametrize(("batch", "start"), [(0, 64), (64, 0), (-1, 64), (float("nan"), 64)])
def test_batches_must_be_above_zero(batch: float, start: float) -> None:
    with pytest.raises(InvalidSetting, match="give global batches"):
        adjustment("linear", batch=batch, start=start)
    with pytest.raises(InvalidSetting, match="give global batches"):
        gain(1.0, 1.0, batch, start)


def test_other_wrong_numbers_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="gain=-1"):
        adjustment("adascale", batch=128, start=64, gain=-1)
    with pytest.raises(InvalidSetting, match="grad_sq=nan"):
        gain(1.0, float("nan"), 128, 64)
    with pytest.raises(InvalidSetting, match=r"momentum=1\.0"):
        ramp(1.0, 2.0, 3, momentum=1.0)
    with pytest.raises(InvalidSetting, match="steps_since=-1"):
        ramp(1.0, 2.0, -1, momentum=0.9)

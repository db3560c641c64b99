"""Laws of the memory line: what is learned from peaks, and what it allows."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from poise.core.memory import MARGIN, MemoryLine
from poise.errors import InvalidSetting

NAN, INF = float("nan"), float("inf")
USED = 1 - MARGIN
fixed_bytes = st.floats(0, 2e10)
per_sample = st.floats(1e3, 1e9)
batch_sizes = st.integers(1, 4096)


@given(
    lines=st.lists(st.tuples(fixed_bytes, per_sample), min_size=1, max_size=5),
    sizes=st.lists(batch_sizes, min_size=2, max_size=6, unique=True),
)
def test_the_true_line_is_found_from_two_sizes_on(
    lines: list[tuple[float, float]], sizes: list[int]
) -> None:
    fixed, rise = np.array(lines).T
    line = MemoryLine.unknown(len(lines))
    for size in sizes:
        line = line.update(np.full(len(lines), size), fixed + rise * size)
    largest = fixed + rise * max(sizes)
    np.testing.assert_allclose(line.fixed_bytes, fixed, rtol=1e-6, atol=1e-6 * largest.max())
    np.testing.assert_allclose(line.bytes_per_sample * max(sizes), rise * max(sizes), rtol=1e-3)


@given(
    fixed=fixed_bytes,
    rise=per_sample,
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    limit=st.floats(1e10, 1e12),
    data=st.data(),
)
def test_a_cap_keeps_the_true_peak_below_the_limit(
    fixed: float, rise: float, sizes: list[int], limit: float, data: st.DataObject
) -> None:
    """Peaks are up to 3 percent too high, a tenth is kept free; from the first peak on."""
    assume(fixed + rise * max(sizes) <= limit)  # they ran
    line = MemoryLine.unknown(1)
    for size in sizes:
        too_high = data.draw(st.floats(1.0, 1.03))
        line = line.update([size], [(fixed + rise * size) * too_high])
    cap = float(line.cap(limit)[0])
    assert cap == int(cap) >= 0
    assert fixed + rise * cap <= limit


@given(fixed=fixed_bytes, rise=per_sample, start=st.integers(1, 64), limit=st.floats(1e10, 1e12))
def test_growing_to_the_cap_reaches_the_true_one_without_running_out_of_memory(
    fixed: float, rise: float, start: int, limit: float
) -> None:
    assume(fixed + rise * start <= limit)
    true = np.floor((0.9 * limit - fixed) / rise)
    line, size = MemoryLine.unknown(1), float(start)
    for _ in range(40):
        assert fixed + rise * size <= limit
        line = line.update([size], [fixed + rise * size])
        cap = float(line.cap(limit)[0])
        if cap == size:
            break
        size = cap
    if true > 2 * start and 2 * (fixed + rise * start) < 0.9 * limit:
        assert size == pytest.approx(true, rel=1e-3, abs=1)


def test_one_size_gives_no_slope_but_a_bound() -> None:
    line = MemoryLine.unknown(1).update([10], [2e9]).update([10], [2e9])
    assert np.isnan(line.bytes_per_sample[0])
    assert np.isnan(line.fixed_bytes[0])
    assert line.safe_growth[0] == -INF
    assert line.cap(10e9 / USED) == 50


def test_a_line_is_trusted_near_the_sizes_it_comes_from() -> None:
    line = MemoryLine.unknown(1)
    for size in (10, 12):
        line = line.update([size], [5e9 + 1e6 * size])
    assert line.safe_growth == 16
    assert line.cap(6e9 / USED) == 16
    line = line.update([16], [5e9 + 16e6])
    assert line.cap(6e9 / USED) == 16 + 2 * 6


def test_peaks_that_fall_with_the_batch_give_no_slope() -> None:
    line = MemoryLine.unknown(1).update([10], [2e9]).update([20], [1.9e9])
    assert np.isnan(line.bytes_per_sample[0])
    assert line.cap(3.9e9 / USED) == 30


def test_a_line_that_would_start_below_zero_goes_through_the_origin() -> None:
    line = MemoryLine.unknown(1).update([10], [1e9]).update([20], [4e9])
    assert line.fixed_bytes == 0
    assert line.bytes_per_sample == pytest.approx(2.5e9 / 15)


def test_nothing_is_capped_without_a_limit_or_a_measurement() -> None:
    line = MemoryLine.unknown(3).update([8, 8, 8], [1e9, 1e9, NAN])
    np.testing.assert_array_equal(line.cap([NAN, INF, 1e10]), [INF, INF, INF])
    np.testing.assert_array_equal(line.cap(1e10), [72, 72, INF])


def test_what_is_not_measured_changes_nothing() -> None:
    line = MemoryLine.unknown(2).update([8, 8], [1e9, 2e9])
    for batches, peaks in (([16, 99], [1.5e9, NAN]), ([16, NAN], [1.5e9, 5e9])):
        after = line.update(batches, peaks)
        np.testing.assert_array_equal(after.count, [2, 1])
        assert after.cap(1e10)[1] == line.cap(1e10)[1]
        assert (after.largest[1], after.mean_peak[1]) == (8, 2e9)


def test_an_idle_worker_shows_what_is_fixed() -> None:
    line = MemoryLine.unknown(2).update([0, 0], [3e9, 12e9])
    np.testing.assert_array_equal(line.cap(10e9 / USED), [INF, 0])
    line = line.update([10, NAN], [4e9, NAN])
    assert line.fixed_bytes[0] == 3e9
    assert line.cap(5e9 / USED)[0] == 20


def test_a_model_that_does_not_fit_gets_no_samples() -> None:
    line = MemoryLine.unknown(1).update([0], [12e9]).update([1], [12.1e9])
    assert line.cap(10e9) == 0


@given(failed=batch_sizes, later=st.lists(batch_sizes, max_size=5))
def test_after_running_out_of_memory_the_cap_stays_below_that_batch(
    failed: int, later: list[int]
) -> None:
    line = MemoryLine.unknown(2).update([1, 1], [1.0, 1.0]).out_of_memory(0, failed)
    for size in later:
        line = line.update([size, size], [size, size]).out_of_memory(0, 5000)
    assert line.cap(1e15)[0] < failed
    assert line.cap(NAN)[0] < failed, "also where no limit is known"
    assert line.cap(1e15)[1] > 1e14
    assert line.out_of_memory(0, 1).cap(1e15)[0] == 0


@given(
    sizes=st.lists(batch_sizes, min_size=1, max_size=5),
    limit=st.floats(1e6, 1e12),
    more=st.floats(1, 10),
)
def test_a_cap_grows_with_the_limit(sizes: list[int], limit: float, more: float) -> None:
    line = MemoryLine.unknown(1)
    for size in sizes:
        line = line.update([size], [1e9 + 1e7 * size])
    assert line.cap(limit)[0] <= line.cap(limit * more)[0]


def test_lines_do_not_change_in_place() -> None:
    line = MemoryLine.unknown(2).update([1, 1], [1.1e9, 1.1e9]).update([2, 2], [1.2e9, 1.2e9])
    before = line.cap(1e10)
    line.update([50, 50], [9e9, 9e9])
    line.out_of_memory(1, 3)
    np.testing.assert_array_equal(line.cap(1e10), before)


def test_wrong_input_is_refused_with_the_reason() -> None:
    line = MemoryLine.unknown(2)
    with pytest.raises(InvalidSetting, match=r"peak_bytes\[1\] is -1.0; give bytes from 0 up"):
        line.update([1, 1], [1.0, -1.0])
    with pytest.raises(InvalidSetting, match=r"peak_bytes\[0\] is inf"):
        line.update([1, 1], [INF, 1.0])
    with pytest.raises(InvalidSetting, match=r"batches\[0\] is -1.0"):
        line.update([-1, 1], [1.0, 1.0])
    with pytest.raises(InvalidSetting, match=r"batches has shape \(3,\), .* 2 workers"):
        line.update([1, 1, 1], [1.0, 1.0])
    with pytest.raises(InvalidSetting, match=r"limit_bytes\[0\] is -5.0"):
        line.cap(-5.0)
    with pytest.raises(InvalidSetting, match=r"limit_bytes has shape \(3,\)"):
        line.cap([1.0, 1.0, 1.0])
    with pytest.raises(InvalidSetting, match="worker=2 is not one of 2"):
        line.out_of_memory(2, 4)
    with pytest.raises(InvalidSetting, match="batch=0 is below 1"):
        line.out_of_memory(0, 0)
    with pytest.raises(InvalidSetting, match="workers=0"):
        MemoryLine.unknown(0)

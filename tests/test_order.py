"""The keyed permutation: every sample once, in an order that never changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.core.order import Order
from poise.errors import InvalidSetting

lengths = st.integers(1, 3000)
seeds = st.integers(0, 2**64 - 1)


@given(length=lengths, seed=seeds, epoch=st.integers(0, 10**6))
def test_every_sample_comes_exactly_once(length: int, seed: int, epoch: int) -> None:
    order = Order(length=length, seed=seed, epoch=epoch)
    assert sorted(order.at(0, length).tolist()) == list(range(length))


@given(length=lengths, seed=seeds, data=st.data())
def test_any_slice_is_a_part_of_the_whole(length: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    order = Order(length=length, seed=seed)
    assert order.at(start, stop).tolist() == order.at(0, length).tolist()[start:stop]


def test_slices_join_across_blocks() -> None:
    order = Order(length=20_000, seed=5)
    parts = [order.at(start, min(start + 777, 20_000)) for start in range(0, 20_000, 777)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(20_000))


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "start", "expected"),
    [
        (10, 0, 0, 0, [5, 1, 2, 0, 3, 6, 8, 4, 9, 7]),
        (10, 0, 1, 0, [2, 5, 3, 7, 6, 9, 4, 0, 1, 8]),
        (1797, 42, 3, 1000, [1269, 1330, 300, 586, 439, 150]),
        (60000, 1, 0, 8190, [47193, 9730, 48317, 48703, 23174, 33585]),
        (
            1000000000,
            18446744073709551615,
            99,
            123456789,
            [239080040, 855156108, 832060046, 573803275],
        ),
    ],
)
def test_golden_values(length: int, seed: int, epoch: int, start: int, expected: list[int]) -> None:
    order = Order(length=length, seed=seed, epoch=epoch)
    assert order.at(start, start + len(expected)).tolist() == expected


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {
        tuple(Order(length=100, seed=seed, epoch=epoch).at(0, 100).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


@pytest.mark.parametrize("length", [5, 10, 33])
def test_every_sample_is_as_likely_at_every_position(length: int) -> None:
    counts = np.zeros((length, length))
    for seed in range(1000):
        counts[np.arange(length), Order(length=length, seed=seed).at(0, length)] += 1
    expected = 1000 / length
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = (length - 1) ** 2
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_neighbors_do_not_stay_neighbors() -> None:
    order = Order(length=10_000, seed=1).at(0, 10_000)
    steps = np.abs(np.diff(order))
    assert (steps == 1).sum() < 12  # 2 are expected
    assert abs(float(np.corrcoef(order[:-1], order[1:])[0, 1])) < 0.05


def test_unshuffled_is_the_order_of_the_data_set() -> None:
    order = Order(length=10, seed=3, epoch=4, shuffled=False)
    assert order.at(2, 6).tolist() == [2, 3, 4, 5]


def test_the_digest_tells_length_seed_and_shuffling_apart() -> None:
    orders = [
        Order(length=10),
        Order(length=11),
        Order(length=10, seed=1),
        Order(length=10, shuffled=False),
    ]
    assert len({order.digest() for order in orders}) == 4
    assert Order(length=10, epoch=3).digest() == Order(length=10).digest()


def test_positions_outside_are_refused() -> None:
    with pytest.raises(IndexError, match="8:11 of an order of 10"):
        Order(length=10).at(8, 11)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(InvalidSetting, match="seed"):
        Order(length=10, seed=seed)

"""Laws of splits, plans, batches, progress and policies; no framework, no processes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.core.batch import Batch, batches, steps_per_epoch
from poise.core.plan import Plan, Timetable
from poise.core.split import apportion, check_split, even_split
from poise.core.weight import weights
from poise.engine.progress import Progress
from poise.errors import InfeasibleSplit, InvalidSetting, OutOfOrder
from poise.policy import Fixed

shares = st.lists(st.integers(0, 200), min_size=1, max_size=12).filter(sum)


@given(shares=shares, total=st.integers(0, 5000))
def test_apportioned_parts_add_up_and_are_proportional(shares: list[int], total: int) -> None:
    parts = apportion(shares, total)
    assert sum(parts) == total
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - share * total / sum(shares)) < 1
        assert share or not part
        if total <= sum(shares):
            assert part <= share


@given(workers=st.integers(1, 100), extra=st.integers(0, 1000))
def test_an_even_split_differs_by_at_most_one(workers: int, extra: int) -> None:
    split = even_split(workers, workers + extra)
    assert sum(split) == workers + extra
    assert max(split) - min(split) <= 1


def test_an_even_split_of_too_few_samples_says_what_to_do() -> None:
    with pytest.raises(
        InfeasibleSplit, match=r"global_batch=10 .* 12 workers .* raise global_batch to at least 12"
    ):
        even_split(12, 10)


def test_shares_of_nothing_cannot_be_apportioned() -> None:
    with pytest.raises(InfeasibleSplit):
        apportion((0, 0), 5)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([5, 3], "has 2 entries, but there are 3 workers"),
        ([5, 3, 3], "adds up to 11, but global_batch=12"),
        ([9, 4, -1], "gives worker 2 -1 samples"),
        ([5, 3, 4.0], "gives worker 2 4.0"),
        ([5, 6, True], "gives worker 2 True"),
    ],
)
def test_a_wrong_split_is_refused_with_the_reason(split: list[int], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        check_split(split, 3, 12)


@given(
    length=st.integers(1, 300),
    drop_last=st.booleans(),
    splits=st.lists(
        st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(sum), min_size=1, max_size=9
    ),
    data=st.data(),
)
def test_batches_cover_the_rest_of_an_epoch_without_gap_or_overlap(
    length: int, drop_last: bool, splits: list[list[int]], data: st.DataObject
) -> None:
    """Whatever the plans are, also when the global batch changes with them."""
    position = data.draw(st.integers(0, length))
    plans = [Plan(tuple(split), step) for step, split in enumerate(splits)]
    timetable = Timetable(tuple(plans))
    cut = list(batches(timetable.at, length=length, drop_last=drop_last, position=position, step=0))
    place = position
    for step, batch in enumerate(cut):
        assert (batch.start, batch.step) == (place, step)
        slices = [batch.slice(worker) for worker in range(3)]
        assert slices[0][0] == batch.start
        assert slices[-1][1] == batch.stop
        assert all(left[1] == right[0] for left, right in pairwise(slices))
        assert sum(weights(batch.split)) == pytest.approx(1, abs=1e-15)
        place = batch.stop
    if drop_last:
        assert length - place < max(plan.global_batch for plan in plans)
    else:
        assert place == length


@given(length=st.integers(1, 200), global_batch=st.integers(1, 50), drop_last=st.booleans())
def test_the_length_of_an_epoch_is_the_number_of_its_batches(
    length: int, global_batch: int, drop_last: bool
) -> None:
    plan = Plan((global_batch,))
    cut = list(batches(lambda _: plan, length=length, drop_last=drop_last))
    assert len(cut) == steps_per_epoch(length, global_batch, drop_last=drop_last)


@given(starts=st.lists(st.integers(1, 40), unique=True, max_size=8), step=st.integers(0, 50))
def test_the_plan_of_a_step_is_the_last_that_started(starts: list[int], step: int) -> None:
    timetable = Timetable((Plan((1,), 0),))
    for start in sorted(starts):
        timetable = timetable.announce(Plan((start + 1,), start))
    expected = max([0, *(start for start in starts if start <= step)])
    assert timetable.at(step).start_step == expected


def test_an_announced_plan_replaces_later_ones() -> None:
    timetable = Timetable((Plan((1, 2), 0), Plan((2, 1), 9))).announce(Plan((3, 0), 5))
    assert timetable.at(12).split == (3, 0)


def test_a_step_before_the_first_plan_is_unknown() -> None:
    with pytest.raises(LookupError, match="step 3"):
        Timetable((Plan((1,), 4),)).at(3)


def test_a_plan_scaled_keeps_its_shares() -> None:
    assert Plan((5, 2, 9)).scaled(32).split == (10, 4, 18)
    assert Plan((5, 2, 9)).shares == (5 / 16, 2 / 16, 9 / 16)


BATCH = Batch(step=4, epoch=1, start=20, split=(3, 5))


def test_a_sample_is_consumed_when_its_reduction_is_complete() -> None:
    progress = Progress(epoch=1, position=20, step=4).begin_pass().hand_out(BATCH)
    assert (progress.position, progress.step) == (20, 4)
    progress = progress.reduced()
    assert (progress.position, progress.step, progress.unapplied) == (28, 5, True)
    assert not progress.applied().unapplied


def test_a_second_backward_on_a_batch_consumes_nothing_more() -> None:
    once = Progress().begin_pass().hand_out(BATCH).reduced()
    assert once.reduced() == once


def test_a_backward_without_a_batch_is_refused() -> None:
    with pytest.raises(OutOfOrder, match="without a batch"):
        Progress().begin_pass().reduced()


def test_two_batches_before_one_backward_are_refused() -> None:
    progress = Progress().begin_pass().hand_out(BATCH).hand_out(BATCH)
    with pytest.raises(OutOfOrder, match="2 batches"):
        progress.batch_to_reduce()


def test_an_epoch_ends_only_when_its_samples_are_consumed() -> None:
    seen = Progress().begin_pass().hand_out(BATCH)
    assert seen.end_pass(28).epoch == 0
    ended = seen.reduced(efficiency=0.5).end_pass(28)
    assert ended == Progress(epoch=1, step=5, samples=8, effective_samples=4, unapplied=True)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({3: [1, 2]}, "add one for step 0"),
        ({0: [1, 2], -1: [2, 1]}, "step -1"),
        ({0: [1, 2], 1.5: [2, 1]}, "step 1.5"),
        ({0: 3}, "with 3 for step 0"),
        ("12", "'12' for step 0"),
    ],
)
def test_a_wrong_schedule_is_refused(splits: dict[int, list[int]], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Fixed(splits)

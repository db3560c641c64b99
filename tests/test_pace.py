"""Whether a change of the split is judged by how steps went, as far as they scatter."""

import numpy as np
import pytest

from poise.policy.pace import Pace

QUIET = 0.01
"""The noise of workers' times, far less than that of whole steps here."""


def judged(seed: int, *, before_s: float, after_s: float, cv: float) -> bool:
    """Whether twenty steps with one split and fifteen with the next look like a failure."""
    draw = np.random.default_rng(seed)
    pace = Pace()
    for factor in np.exp(cv * draw.standard_normal(20)):
        pace = pace.stepped(before_s * factor, QUIET)
    pace = pace.changed((5, 5))
    for factor in np.exp(cv * draw.standard_normal(15)):
        pace = pace.stepped(after_s * factor, QUIET)
        if pace.failed(QUIET):
            return True
    return False


@pytest.mark.parametrize("cv", [0.01, 0.05, 0.1])
def test_steps_that_scatter_do_not_undo_a_change_for_the_better(cv: float) -> None:
    undone = sum(judged(seed, before_s=1.03, after_s=1.0, cv=cv) for seed in range(200))
    assert undone <= 20


@pytest.mark.parametrize("cv", [0.01, 0.05, 0.1])
def test_a_change_that_makes_steps_far_longer_is_undone(cv: float) -> None:
    undone = sum(judged(seed, before_s=1.0, after_s=1.25, cv=cv) for seed in range(200))
    assert undone >= 190


def test_a_slow_common_rhythm_does_not_undo_a_change_for_the_better() -> None:
    """Neighboring steps are alike: fifteen of them say less than fifteen others would."""
    undone = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        common, pace = draw.standard_normal(), Pace()
        for step in range(75):
            if step == 60:
                pace = pace.changed((5, 5))
            common = 0.8 * common + 0.6 * draw.standard_normal()
            length_s = (1.03 if step < 60 else 1.0) * np.exp(0.05 * common)
            pace = pace.stepped(length_s, QUIET)
            if step > 60 and pace.failed(QUIET):
                undone += 1
                break
    assert undone <= 15  # 23 if all steps counted as independent


def test_a_change_that_paid_makes_up_for_one_that_failed() -> None:
    pace = Pace(failures=2, before=(5, 5), before_settled=10, before_s=1.0)
    for _ in range(20):
        pace = pace.stepped(1.0, QUIET)
    assert pace.changed((6, 4)).failures == 1
    again = Pace(failures=2)  # the split it went back to: staying there is no success
    for _ in range(20):
        again = again.stepped(1.0, QUIET)
    assert again.changed((6, 4)).failures == 2


def test_steps_that_stay_long_after_going_back_are_no_fault_of_the_split() -> None:
    pace = Pace()
    for _ in range(20):
        pace = pace.stepped(1.0, QUIET)
    pace = pace.changed((5, 5))
    while not pace.failed(QUIET):
        pace = pace.stepped(4.0, QUIET)
    back = pace.went_back()
    calm = back.stepped(1.0, QUIET).stepped(1.0, QUIET)
    assert not calm.mistaken(QUIET)
    still = back.stepped(4.0, QUIET).stepped(4.0, QUIET)
    assert still.mistaken(QUIET)
    assert still.renewed().failures == 0


def test_steps_that_take_no_time_are_no_error() -> None:
    pace = Pace()
    for _ in range(10):
        pace = pace.stepped(0.0, QUIET)
    assert not pace.changed((5, 5)).stepped(0.0, QUIET).failed(QUIET)


def test_one_stall_hardly_changes_how_steps_are_believed_to_scatter() -> None:
    calm = Pace()
    for _ in range(20):
        calm = calm.stepped(1.0, QUIET)
    stalled = calm.stepped(100.0, QUIET)
    assert stalled.spread(QUIET) < 2 * calm.spread(QUIET)


def test_how_steps_scatter_outlives_a_change_of_the_split() -> None:
    pace = Pace()
    for number in range(20):
        pace = pace.stepped(1.0 + 0.2 * (number % 2), QUIET)
    known = pace.spread(QUIET)
    assert known > 5 * QUIET
    for later in (pace.changed((5, 5)), pace.went_back(), pace.renewed()):
        assert later.spread(QUIET) == known
        assert later.steps == 0

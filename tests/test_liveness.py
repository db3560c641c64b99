"""Who is to blame: every worker must come to the same name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from poise.core.liveness import (
    Blame,
    Heard,
    Limits,
    Process,
    Sign,
    View,
    find_culprit,
)

LIMITS = Limits(silent_s=10.0)
ME = Sign(worker=0, host="a", pid=10, reductions=8, step=7)
PEERS = {
    worker: Sign(worker=worker, host="a", pid=10 + worker, reductions=8, step=7, beat=5)
    for worker in (1, 2, 3)
}


def blamed(
    signs: Mapping[int, Sign],
    *,
    silent_s: Mapping[int, float] | None = None,
    processes: Mapping[int, Process] | None = None,
    absent_s: Mapping[int, float] | None = None,
    mine: Sign = ME,
    **facts: Any,
) -> tuple[int, str] | None:
    """Return who is to blame; facts are those of the rendezvous, and this worker's trouble."""
    silences = dict.fromkeys(signs, 0.0) | dict(silent_s or {})
    heard = Heard(signs, silences, absent_s or {})
    blame = find_culprit(View(mine, heard, processes or {}, limits=LIMITS, **facts))
    return None if blame is None else (blame.worker, blame.reason)


def test_a_worker_that_failed_is_named_with_its_own_words() -> None:
    now = {**PEERS, 2: replace(PEERS[2], state="left", why="ValueError: bad sample")}
    assert blamed(now) == (
        2,
        "worker 2 (process 12 on a) left at step 7: ValueError: bad sample",
    )


def test_a_worker_that_left_for_anothers_sake_is_not_blamed() -> None:
    now = {**PEERS, 1: replace(PEERS[1], state="left", why="WorkerLost", knows=True)}
    assert blamed(now, trouble="broken") is None


def test_a_process_that_has_ended_is_named_at_once() -> None:
    found = blamed(PEERS, processes={3: "ended"})
    assert found == (3, "worker 3 (process 13 on a) died at step 7")


def test_a_process_that_has_ended_after_its_work_is_not_blamed() -> None:
    now = {**PEERS, 3: replace(PEERS[3], state="done")}
    assert blamed(now, processes={3: "ended"}) is None


def test_silence_counts_only_after_the_limit() -> None:
    assert blamed(PEERS, silent_s={2: 9.9}) is None
    worker, reason = blamed(PEERS, silent_s={2: 10.0}) or (None, "")
    assert worker == 2
    assert "no sign of life for 10 s at step 7" in reason


def test_after_a_broken_connection_a_shorter_silence_is_enough() -> None:
    assert blamed(PEERS, silent_s={2: 2.0}) is None
    assert blamed(PEERS, silent_s={2: 1.9}, trouble="broken") is None
    found = blamed(PEERS, silent_s={2: 2.0}, trouble="broken")
    assert found == (2, "worker 2 (process 12 on a) died at step 7")


def test_a_process_of_this_machine_that_lives_is_not_dead_after_a_shorter_silence() -> None:
    """Under load, the silent worker need not be the one whose connection broke."""
    for process in ("alive", "idle", "stopped"):
        found = blamed(PEERS, silent_s={2: 5.0}, trouble="broken", processes={2: process})
        assert found is None


def test_a_process_that_computes_is_not_lost_however_silent() -> None:
    """Something may hold the lock of its interpreter."""
    assert blamed(PEERS, silent_s={2: 60.0}, processes={2: "alive"}) is None
    assert blamed(PEERS, silent_s={2: 60.0}, processes={2: "idle"}) is not None


def test_a_stopped_process_is_called_that() -> None:
    worker, reason = blamed(PEERS, silent_s={1: 10.0}, processes={1: "stopped"}) or (None, "")
    assert worker == 1
    assert "stopped, by a signal or a debugger" in reason


def test_of_two_silent_workers_the_one_that_fell_silent_first_is_named() -> None:
    found = blamed(PEERS, silent_s={1: 11.0, 2: 14.0})
    assert found is not None
    assert found[0] == 2


def test_when_all_others_fall_silent_together_this_worker_is_cut_off() -> None:
    found = blamed(PEERS, silent_s={1: 10.0, 2: 9.5, 3: 10.2})
    assert found is not None
    assert found[0] == ME.worker
    assert "is cut off at step 7" in found[1]


def test_a_hanging_worker_is_the_one_behind() -> None:
    now = {**PEERS, 1: replace(PEERS[1], reductions=7, step=6)}
    assert blamed(now) is None
    worker, reason = blamed(now, trouble="timed out") or (None, "")
    assert worker == 1
    assert "hangs at step 7" in reason
    assert "alive" in reason


def test_a_worker_that_hangs_in_silence_is_said_to() -> None:
    now = {**PEERS, 1: replace(PEERS[1], reductions=7, step=6)}
    _, reason = blamed(now, trouble="timed out", silent_s={1: 3.0}) or (None, "")
    assert "no sign of life" in reason


def test_a_worker_that_ended_early_is_named() -> None:
    now = {**PEERS, 3: replace(PEERS[3], state="done", reductions=5, step=4)}
    assert blamed(now) is None
    worker, reason = blamed(now, trouble="broken") or (None, "")
    assert worker == 3
    assert "ended after step 4 without an error" in reason


def test_nobody_is_blamed_while_all_are_well() -> None:
    assert blamed(PEERS) is None
    assert blamed(PEERS, trouble="broken") is None
    assert blamed(PEERS, trouble="timed out") is None


OTHER = replace(ME, worker=4, pid=14)
WORKER_0 = {**PEERS, 0: replace(ME, beat=5)}
LAUNCHER = "worker 0's launcher at a:29500"


def test_a_launcher_that_is_stopped_is_named_by_all_workers_also_by_worker_0() -> None:
    for mine, signs in ((ME, PEERS), (OTHER, WORKER_0)):
        assert blamed(signs, mine=mine, launcher=LAUNCHER, deaf_s=9.9) is None
        worker, reason = blamed(signs, mine=mine, launcher=LAUNCHER, deaf_s=10.0) or (None, "")
        assert worker == 0
        assert reason.startswith(f"{LAUNCHER} has given no sign of life for 10 s at step 7: ")


def test_workers_that_end_because_the_rendezvous_is_silent_are_not_blamed() -> None:
    """One of them is a moment ahead of the others, and its process ends before they say so."""
    for deaf_s in (2.1, 5.0, 9.9):
        assert blamed(PEERS, processes={1: "ended"}, launcher=LAUNCHER, deaf_s=deaf_s) is None
    worker, reason = blamed(
        PEERS, processes={1: "ended"}, trouble="broken", launcher=LAUNCHER, deaf_s=10.0
    ) or (None, "")
    assert (worker, reason.startswith(LAUNCHER)) == (0, True)


def test_a_death_is_named_while_the_rendezvous_answers_or_is_gone() -> None:
    for deaf_s, gone, launcher in ((1.0, False, LAUNCHER), (5.0, True, None)):
        found = blamed(PEERS, processes={3: "ended"}, launcher=launcher, deaf_s=deaf_s, gone=gone)
        assert found == (3, "worker 3 (process 13 on a) died at step 7")


def test_a_launcher_that_ended_is_named_also_when_others_have_ended_for_its_sake() -> None:
    ended: list[Mapping[int, Process]] = [{}, {1: "ended"}]
    for processes in ended:
        found = blamed(PEERS, processes=processes, launcher=LAUNCHER, gone=True, trouble="broken")
        assert found == (0, f"{LAUNCHER} ended at step 7: its store is gone")


def test_worker_0_is_blamed_for_its_store_by_the_others_only() -> None:
    worker, reason = blamed(WORKER_0, mine=OTHER, deaf_s=10.0) or (None, "")
    assert worker == 0
    assert "no sign of life for 10 s at step 7: its store does not answer" in reason
    assert blamed(PEERS, mine=ME, deaf_s=10.0) is None
    found = blamed(WORKER_0, mine=OTHER, gone=True)
    assert found == (0, "worker 0 (process 10 on a) died at step 7: its store is gone")


def test_a_store_that_is_gone_after_the_work_is_nobodys_fault() -> None:
    done = {**PEERS, 0: replace(ME, state="done")}
    assert blamed(done, mine=OTHER, gone=True) is None
    assert blamed(WORKER_0, mine=replace(OTHER, state="done"), gone=True) is None


def test_a_worker_that_met_the_others_and_never_gave_a_sign_is_named() -> None:
    assert blamed(PEERS, absent_s={4: 9.9}) is None
    assert blamed(PEERS, absent_s={4: 1.9}, trouble="broken") is None
    for absent_s, trouble in ((10.0, None), (2.0, "broken")):
        worker, reason = blamed(PEERS, absent_s={4: absent_s}, trouble=trouble) or (None, "")
        assert worker == 4
        assert "no sign of life since all workers met" in reason


def test_absence_is_the_time_until_the_first_sign() -> None:
    heard = Heard().hear({}, None, 0.5, {1, 2}).hear({1: PEERS[1]}, None, 0.5, {2})
    assert heard.absent_s == {2: 1.0}
    assert heard.silent_s == {1: 0.0}


def test_silence_is_the_time_without_a_new_beat() -> None:
    heard = Heard()
    for passed_s in (0.5, 0.5, 0.5):
        heard = heard.hear(PEERS, None, passed_s)
    assert heard.silent_s == {1: 1.0, 2: 1.0, 3: 1.0}
    beating = {**PEERS, 2: replace(PEERS[2], beat=6)}
    assert heard.hear(beating, None, 0.5).silent_s == {1: 1.5, 2: 0.0, 3: 1.5}


def test_the_first_cause_is_kept() -> None:
    first, later = Blame(1, "died"), Blame(2, "a later guess")
    heard = Heard().hear(PEERS, first, 0.5).hear(PEERS, later, 0.5)
    assert heard.cause == first


def test_signs_and_blame_travel_as_text() -> None:
    sign = replace(ME, state="left", why="größer", knows=True)
    assert Sign.from_json(sign.to_json().encode()) == sign
    blame = Blame(2, "größer")
    assert Blame.from_json(blame.to_json()) == blame

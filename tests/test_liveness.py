"""Who is to blame: every worker must come to the same name."""

from dataclasses import replace

from poise.core.liveness import SILENCE_S, Sign, find_culprit

ME = Sign(worker=0, host="a", pid=10, reductions=8, step=7)
PEERS = {
    worker: Sign(worker=worker, host="a", pid=10 + worker, reductions=8, step=7, beat=5)
    for worker in (1, 2, 3)
}
BEATING = {worker: replace(sign, beat=9) for worker, sign in PEERS.items()}


def blamed(
    now: dict[int, Sign],
    *,
    waited_s: float = 0.0,
    timed_out: bool = False,
    gone: frozenset[int] = frozenset(),
) -> tuple[int, str] | None:
    blame = find_culprit(ME, PEERS, now, waited_s=waited_s, timed_out=timed_out, gone=gone)
    return None if blame is None else (blame.worker, blame.reason)


def test_a_worker_that_failed_is_named_with_its_own_words() -> None:
    now = {**PEERS, 2: replace(PEERS[2], state="left", why="ValueError: bad sample")}
    assert blamed(now) == (
        2,
        "worker 2 (process 12 on a) left at step 7: ValueError: bad sample",
    )


def test_a_worker_that_left_for_anothers_sake_is_not_blamed() -> None:
    now = {**PEERS, 1: replace(PEERS[1], state="left", why="worker 3 died", lost=3)}
    assert blamed(now) == (3, "worker 3 died")


def test_the_first_failure_counts_more_than_its_echo() -> None:
    now = {
        1: replace(PEERS[1], state="left", why="echo", lost=2),
        2: replace(PEERS[2], state="left", why="origin"),
        3: PEERS[3],
    }
    blame = blamed(now)
    assert blame is not None
    assert blame[0] == 2
    assert "origin" in blame[1]


def test_silence_counts_only_after_a_while() -> None:
    now = {**BEATING, 2: PEERS[2]}
    assert blamed(now, waited_s=SILENCE_S / 2) is None
    assert blamed(now, waited_s=SILENCE_S) == (2, "worker 2 (process 12 on a) died at step 7")


def test_a_process_that_is_gone_is_named_at_once() -> None:
    assert blamed(PEERS, gone=frozenset({3})) == (3, "worker 3 (process 13 on a) died at step 7")


def test_a_hanging_worker_is_the_one_behind() -> None:
    now = {**BEATING, 1: replace(BEATING[1], reductions=7, step=6)}
    blame = blamed(now, waited_s=SILENCE_S, timed_out=True)
    assert blame is not None
    assert blame[0] == 1
    assert "hangs at step 7" in blame[1]
    assert "alive" in blame[1]


def test_a_frozen_worker_gives_no_sign_of_life() -> None:
    now = {**BEATING, 1: replace(PEERS[1], reductions=7, step=6)}
    blame = blamed(now, waited_s=SILENCE_S, timed_out=True)
    assert blame is not None
    assert "no sign of life" in blame[1]


def test_a_worker_that_ended_early_is_named() -> None:
    now = {**BEATING, 3: replace(BEATING[3], state="done", reductions=5, step=4)}
    blame = blamed(now)
    assert blame is not None
    assert blame[0] == 3
    assert "ended after step 4 without an error" in blame[1]


def test_nobody_is_blamed_while_all_are_well() -> None:
    assert blamed(BEATING, waited_s=SILENCE_S) is None
    assert blamed(BEATING, waited_s=SILENCE_S, timed_out=True) is None


def test_signs_travel_as_text() -> None:
    sign = replace(ME, state="left", why="größer", lost=2)
    assert Sign.from_json(sign.to_json().encode()) == sign

"""One conformance suite for all collectives: gloo between processes, and threads of one."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from poise.runtime.collectives import Collectives, Disconnected
from poise.runtime.rendezvous import Rendezvous
from poise.runtime.threads import ThreadGroup, ThreadRendezvous
from poise.torch.groups import Groups
from tests.cluster import Workers
from tests.numpy_adapter import Team, checked, on_threads

Case = Callable[[Collectives, Rendezvous], Any]
Run = Callable[[Case, int], list[Any]]


def on_gloo(case: Case) -> Any:
    groups = Groups(None)
    generation = groups.generation
    try:
        return case(generation.collectives, groups.rendezvous)
    finally:
        generation.collectives.close()
        groups.leave()


@pytest.fixture(params=["threads", "gloo"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a case on every worker, with each implementation."""
    if request.param == "gloo":
        workers: Workers = request.getfixturevalue("workers")
        yield lambda case, number: workers.run(on_gloo, case, workers=number)
        return

    def with_threads(case: Case, number: int) -> list[Any]:
        team, rendezvous = Team(number), ThreadRendezvous()
        return checked(
            on_threads(team, lambda each: case(team.control.collectives(each), rendezvous))
        )

    yield with_threads


def sums(collectives: Collectives, _: Rendezvous) -> list[list[float]]:
    """Post three sums at once, and await them in the order in which they were posted."""
    tables = [np.full((2, 3), float(collectives.worker + number)) for number in range(3)]
    pending = [collectives.sum(table) for table in tables]
    for each in pending:
        each.wait()
        assert each.done()
    return [table[0].tolist() for table in tables]


def test_everybody_gets_every_sum(run: Run) -> None:
    for found in run(sums, 3):
        assert found == [[3.0] * 3, [6.0] * 3, [9.0] * 3]


def broadcasts(collectives: Collectives, _: Rendezvous) -> list[list[int]]:
    whole = np.arange(4, dtype=np.int64) * (collectives.worker + 1)
    letters = np.frombuffer(bytearray([65 + collectives.worker] * 3), dtype=np.uint8)
    for values, source in ((whole, 0), (letters, 2)):
        collectives.broadcast(values, source).wait()
    return [whole.tolist(), letters.tolist()]


def test_everybody_gets_the_values_of_one(run: Run) -> None:
    for found in run(broadcasts, 3):
        assert found == [[0, 1, 2, 3], [67, 67, 67]]


def gathers(collectives: Collectives, _: Rendezvous) -> list[list[float]]:
    row = np.array([float(collectives.worker), 7.0])
    rows = np.full((collectives.workers, 2), np.nan) if collectives.worker == 0 else None
    pending = collectives.gather(row, rows)
    after = np.zeros(1)
    collectives.sum(after).wait()  # a worker that waits for nothing goes on
    pending.wait()
    return [] if rows is None else rows.tolist()


def test_worker_0_gets_every_row(run: Run) -> None:
    first, *others = run(gathers, 3)
    assert first == [[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]]
    assert others == [[], []]


def numbers(collectives: Collectives, _: Rendezvous) -> tuple[int, int]:
    collectives.sum(np.zeros(1)).wait()
    collectives.close()
    return collectives.worker, collectives.workers


def test_numbers_are_known_after_the_end(run: Run) -> None:
    assert run(numbers, 2) == [(0, 2), (1, 2)]


def texts(collectives: Collectives, rendezvous: Rendezvous) -> list[str]:
    """Leave a text, replace it, and get those that are there, without waiting for others."""
    everybody = [f"key/{worker}" for worker in range(collectives.workers)]
    rendezvous.set(everybody[collectives.worker], "first")
    collectives.sum(np.zeros(1)).wait()
    rendezvous.set(everybody[collectives.worker], f"größer {collectives.worker}")
    collectives.sum(np.zeros(1)).wait()
    found = rendezvous.get([*everybody, "key/nobody"])
    collectives.sum(np.zeros(1)).wait()
    return [found[key] for key in everybody if len(found) == len(everybody)]


def test_texts_are_there_for_all_and_the_last_counts(run: Run) -> None:
    for found in run(texts, 3):
        assert found == ["größer 0", "größer 1", "größer 2"]


def first_words(collectives: Collectives, rendezvous: Rendezvous) -> tuple[str, str]:
    """All say something at once, and later something else."""
    first = rendezvous.first("cause", f"worker {collectives.worker}")
    collectives.sum(np.zeros(1)).wait()
    later = rendezvous.first("cause", "a later guess")
    collectives.sum(np.zeros(1)).wait()
    return first, later


def test_the_first_word_is_everybodys_and_stays(run: Run) -> None:
    found = set(run(first_words, 3))
    assert len(found) == 1
    first, later = found.pop()
    assert first == later
    assert first in ("worker 0", "worker 1", "worker 2")


def cut(collectives: Collectives, rendezvous: Rendezvous) -> str:
    """Wait for a worker that is there and never comes, until another thread cuts."""
    collectives.sum(np.zeros(1)).wait()
    if collectives.worker == 1:
        deadline_s = time.monotonic() + 30
        while "over" not in rendezvous.get(["over"]) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return "did not come"
    pending = collectives.sum(np.zeros(1))
    cutting = threading.Timer(0.2, collectives.cut)
    cutting.start()
    try:
        pending.wait(20)
    except Disconnected as error:
        return f"disconnected, timed out: {error.timed_out}"
    finally:
        cutting.join()
        rendezvous.set("over", "")
    return "nothing noticed"


def test_a_wait_is_ended_by_a_cut_from_another_thread(run: Run) -> None:
    assert run(cut, 2) == ["disconnected, timed out: False", "did not come"]


def leaves_early(collectives: Collectives, _: Rendezvous) -> str:
    """Worker 1 goes; the others wait for it."""
    collectives.sum(np.zeros(1)).wait()
    if collectives.worker == 1:
        raise RuntimeError("gone")
    try:
        collectives.sum(np.zeros(1)).wait()
    except Disconnected as error:
        return f"disconnected, timed out: {error.timed_out}"
    return "nothing noticed"


def test_who_waits_for_a_worker_that_is_gone_is_told_so_on_threads() -> None:
    team, rendezvous = Team(3), ThreadRendezvous()
    found = on_threads(team, lambda each: leaves_early(team.control.collectives(each), rendezvous))
    assert found[0] == found[2] == "disconnected, timed out: False"


def test_who_waits_for_a_worker_that_is_gone_is_told_so_on_gloo(workers: Workers) -> None:
    outcomes = workers.attempt(on_gloo, leaves_early, workers=2)
    assert outcomes[0].value == "disconnected, timed out: False"


def test_a_wait_has_a_limit() -> None:
    group = ThreadGroup(2)
    pending = group.collectives(0).sum(np.zeros(1))
    assert not pending.done()
    with pytest.raises(Disconnected) as raised:
        pending.wait(0.01)
    assert raised.value.timed_out

"""One conformance suite for all adapters: what each of them must keep."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from poise.core.order import Order
from poise.errors import WorkerLost
from poise.policy import Fixed
from poise.runtime.threads import ThreadRendezvous
from tests.adapters import (
    LENGTH,
    Adapter,
    Course,
    NumpyThreads,
    Task,
    TorchProcesses,
    data,
    first_weights,
    in_one_process,
)
from tests.numpy_adapter import Linear, NumpyTraining, Team, checked, on_threads, settings_of
from tests.test_exactness import random_splits
from tests.test_start_step import Restless

EXACT = 1e-12


@pytest.fixture(params=["numpy", "torch"])
def adapter(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    """Each adapter in turn."""
    if request.param == "numpy":
        yield NumpyThreads()
    else:
        yield TorchProcesses(request.getfixturevalue("workers"))


def courses(found: list[Course | str]) -> list[Course]:
    """Return what the workers saw; none of them may have failed."""
    assert all(isinstance(each, Course) for each in found), found
    return [each for each in found if isinstance(each, Course)]


def check_every_sample_once(seen: list[Course], epochs: int) -> None:
    """The joined shares of all workers are the global order, epoch by epoch."""
    for epoch in range(epochs):
        steps = zip(*([s for e, s in each.seen if e == epoch] for each in seen), strict=True)
        joined = [sample for step in steps for share in step for sample in share]
        assert joined == Order(length=LENGTH, seed=0, epoch=epoch).at(0, LENGTH).tolist()


def check_exact(seen: list[Course], task: Task) -> None:
    reference = in_one_process(task.global_batch, task.epochs)
    for each in seen:
        np.testing.assert_allclose(each.weights, reference, atol=EXACT, rtol=0)


@pytest.mark.parametrize("workers_number", [1, 3])
def test_training_equals_one_process_whatever_the_split(
    adapter: Adapter, workers_number: int
) -> None:
    """Splits change in every step, and some workers have no sample in some of them."""
    task = Task(policy=random_splits(3, workers_number, 12, steps=15))
    seen = courses(adapter.train(task, workers_number))
    check_exact(seen, task)
    check_every_sample_once(seen, task.epochs)


def test_counts_of_a_function_weight_the_gradient(adapter: Adapter) -> None:
    task = Task(policy=Fixed([7, 4, 1]), counted=True)
    check_exact(courses(adapter.train(task, 3)), task)


def test_plans_start_on_the_same_step_everywhere(adapter: Adapter) -> None:
    """Worker 0 draws a new split after nearly every report; loaders run ahead by 0, 4 and 1."""
    task = Task(policy=Restless(), leads=(0, 4, 1), epochs=8)
    seen = courses(adapter.train(task, 3))
    assert seen[0].splits == seen[1].splits == seen[2].splits
    assert len(set(seen[0].splits)) > 3
    for step, split in enumerate(seen[0].splits):
        shares = tuple(len(each.seen[step][1]) for each in seen)
        assert shares == split or sum(shares) < task.global_batch
    check_exact(seen, task)
    check_every_sample_once(seen, task.epochs)


def test_a_training_goes_on_with_other_workers_where_it_was_left(adapter: Adapter) -> None:
    first = courses(adapter.train(Task(policy="auto", stop_after=7), 2))
    places = [json.loads(each.state) for each in first]
    for name in ("epoch", "position", "step", "samples"):
        assert len({place[name] for place in places}) == 1
    state, course = first[0].state, first[0]
    task = Task(policy="auto", state=state, weights=(course.weights, course.velocity))
    rest = courses(adapter.train(task, 3))
    check_exact(rest, task)


def test_a_worker_that_fails_is_named_to_the_others(adapter: Adapter) -> None:
    found = adapter.train(Task(raises=(1, 4)), 3)
    assert found[1] == "ValueError: injected fault"
    for worker in (0, 2):
        assert "WorkerLost: worker 1" in str(found[worker])
        assert "ValueError: injected fault" in str(found[worker])


def test_the_suite_notices_an_adapter_that_does_not_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken on purpose: a mean of means."""
    even: Any = lambda counts: (1 / len(counts),) * len(counts)  # noqa: E731
    monkeypatch.setattr("poise.runtime.counts.weights", even)
    task = Task(policy=Fixed([7, 4, 1]))
    seen = courses(NumpyThreads().train(task, 3))
    with pytest.raises(AssertionError):
        check_exact(seen, task)


# membership that is rebuilt in the middle of a pass


class Membership:
    """Hands survivors of a lost worker their next generation."""

    def __init__(self, workers: int) -> None:
        self.teams = [Team(workers)]
        self.rendezvous = ThreadRendezvous()
        self._changed = threading.Condition()

    def next_team(self, after: int, left: int) -> Team:
        """Return the team of those that are left of one."""
        with self._changed:
            if len(self.teams) == after + 1:
                self.teams.append(Team(left, number=after + 1))
            return self.teams[after + 1]


def train_and_lose(
    membership: Membership, policy: Any, lost: int, at_step: int, worker: int
) -> Any:
    """Train; the lost worker goes without a word while the others wait for its gradient."""
    team = membership.teams[0]
    model = Linear(first_weights())
    settings = settings_of(12, policy)
    rendezvous = membership.rendezvous
    training = NumpyTraining(
        settings,
        team.generation(worker),
        rendezvous,
        model,
        data(),
        lead=2,
        name=f"thread {worker}",
    )
    session, course = training.session, Course()
    try:
        for epoch in session.epochs(3):
            while session.progress.epoch == epoch:
                try:
                    for x, y, samples in training.batches():
                        if (worker, session.progress.step) == (lost, at_step) and team.workers == 3:
                            session.peers.liveness.end()
                            team.cut("a worker is gone")
                            return None
                        training.backward(x, y)
                        training.step()
                        course.seen.append((epoch, samples))
                        course.splits.append(session.plan.split)
                except WorkerLost:
                    model.gradient = None
                    left = [each for each in range(team.workers) if each != lost]
                    team = membership.next_team(team.number, len(left))
                    generation = team.generation(left.index(worker))
                    session.rebuild(generation)
    finally:
        session.peers.liveness.end()
    course.weights = model.weights
    return course


@pytest.mark.parametrize("policy", ["even", "auto"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_generation_is_rebuilt_in_the_middle_of_a_pass(policy: Any, lost: int) -> None:
    """One step is given up, and its samples come again on the workers that are left."""
    membership = Membership(3)
    team = membership.teams[0]
    found = checked(
        on_threads(team, lambda worker: train_and_lose(membership, policy, lost, 6, worker))
    )
    seen = [each for each in found if each is not None]
    assert len(seen) == 2
    reference = in_one_process(12, 3)
    for course in seen:
        np.testing.assert_allclose(course.weights, reference, atol=EXACT, rtol=0)
    assert {len(split) for split in seen[0].splits[:6]} == {3}
    assert {len(split) for split in seen[0].splits[6:]} == {2}
    order = [Order(length=LENGTH, seed=0, epoch=epoch).at(0, LENGTH).tolist() for epoch in range(3)]
    steps = list(zip(seen[0].seen, seen[1].seen, strict=True))
    after = [s for (epoch, one), (_, two) in steps[6:] for s in (*one, *two)]
    # Five steps of 12, 12, 12, 12 and 5 samples are an epoch; the seventh step was given up.
    assert after == [*order[1][12:], *order[2]]

"""Instruments and sessions in scripts of unusual shape: threads, several Balancers, rebuilds."""

import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poise.core.plan import Plan
from poise.core.revised import revised
from poise.engine.adaptation import Adaptation
from poise.errors import WorkerLost
from poise.runtime.events import Begun, HandedOut
from poise.runtime.instruments import Instrument, instrumented
from poise.torch import Balancer
from poise.verify.course import Course
from poise.verify.observation import Variant
from poise.verify.observer import Observer
from poise.verify.watching import watching
from tests.adapters import data, first_weights
from tests.numpy_adapter import Linear, NumpyTraining, checked, on_threads, settings_of
from tests.test_adapters import Membership


def given() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), loader


def lose_worker_2(membership: Membership, worker: int) -> list[float] | None:
    """Worker 0 has learned a gain of 1.7, which is announced to all; then worker 2 is lost."""
    team, model = membership.teams[0], Linear(first_weights())
    settings = replace(settings_of(12, "auto"), adapt=Adaptation(lowest=12, highest=24))
    training = NumpyTraining(
        settings,
        team.generation(worker),
        membership.rendezvous,
        model,
        data(),
        name=f"thread {worker}",
    )
    session = training.session
    try:
        while session.progress.step < 10:
            try:
                for x, y, _ in training.batches():
                    if worker == 2 and session.progress.step == 6:
                        team.cut("a worker is gone")
                        return None
                    training.backward(x, y)
                    training.step()
                    if session.progress.step == 6 and team.workers == 3:
                        exchange = session.exchange
                        said = exchange.announcements
                        known = said.timetable.announce(Plan((8, 8, 8), 6, 1.7))
                        exchange.announcements = revised(said, timetable=known)
                        if worker == 0:
                            engine = exchange.engine
                            learned = replace(engine.adapted, gain=1.7)  # type: ignore[type-var]
                            exchange.engine = revised(engine, global_batch=24, adapted=learned)
            except WorkerLost:
                model.gradient = None
                team = membership.next_team(team.number, 2)
                session.rebuild(team.generation(worker))
    finally:
        session.peers.liveness.end()
    return [session.plan.gain, session.progress.effective_samples]


def test_after_a_rebuild_all_workers_have_the_same_gain() -> None:
    membership = Membership(3)
    found = checked(on_threads(membership.teams[0], lambda each: lose_worker_2(membership, each)))
    assert found[0] == found[1]


def test_a_balancer_made_in_a_thread_finds_the_instrument() -> None:
    """Commands used to see it: they replaced methods of the class."""
    heard: list[Begun] = []

    def script() -> None:
        thread = threading.Thread(target=lambda: Balancer(8).close())
        thread.start()
        thread.join()

    with instrumented(Instrument(listen=lambda events: events.on(Begun, heard.append))):
        script()
    assert len(heard) == 1


def test_what_a_subscriber_raises_is_not_lost_if_another_thread_trains() -> None:
    def fail(_: HandedOut) -> None:
        raise ValueError("a subscriber failed")

    raised: list[BaseException] = []
    with instrumented(Instrument(listen=lambda events: events.on(HandedOut, fail))):
        balancer = Balancer(8)

    def train() -> None:
        try:
            model, optimizer, loader = balancer.prepare(*given())
            for x, _ in loader:
                model(x).mean().backward()
                optimizer.step()
            balancer.close()
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    balancer.close()
    assert raised


def test_verify_watches_the_balancer_that_is_prepared(tmp_path: Path) -> None:
    variant = Variant("alone", stilled=False)
    observer = Observer(2, variant, Course(tmp_path, variant))
    with watching(observer, variant):
        balancer, other = Balancer(8), Balancer(16, count=lambda batch: len(batch[0]))
        balancer.prepare(*given())
        balancer.close()
        other.close()
    assert observer.seen is not None
    assert (observer.seen.split, observer.seen.counted) == ((8,), False)


def test_the_warning_that_there_is_no_server_points_to_the_script() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Balancer(8, mode="async").close()
    assert [each.filename for each in caught] == [__file__]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

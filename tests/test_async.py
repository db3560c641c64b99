"""Training with a server: real processes, real gloo pairs. Worker 0 of each case is the server."""

import dataclasses
import json
import os
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from poise import __version__
from poise.core.staleness import lowered_momentum
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.engine.round import Report
from poise.errors import (
    Disagreement,
    InvalidSetting,
    OutOfOrder,
    PoiseWarning,
    ServerLost,
    StateMismatch,
)
from poise.lab.processes import free_port
from poise.policy import Fixed, policy_named
from poise.records import read_record, replay
from poise.runtime.channel import Channel
from poise.runtime.door import knock
from poise.torch import Async, Balancer, BySamples, Stale
from poise.torch.asynchronous import parameters as parameters_module
from poise.torch.asynchronous.course import Course
from poise.torch.asynchronous.desk import Desk
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.link import Link
from poise.torch.asynchronous.messages import About, Push, text_of
from poise.torch.asynchronous.parameters import Parameters
from poise.torch.asynchronous.role import Serving, serving_as
from poise.torch.asynchronous.server import Server
from poise.torch.asynchronous.updates import OpenSteps, Updates
from tests.cluster import Workers
from tests.training import (
    Recipe,
    build,
    dataset,
    distance,
    plain_batches,
    train_plain,
    weights,
)

ANY_FLOAT = json.dumps(
    {"push": dataclasses.asdict(Push((0,), (), (0,), "1", 1.0, None)) | {"count": 10**400}}
)
"""A push whose count is no float."""


def train(
    recipe: Recipe,
    *,
    mode: Any = "async",
    schedule_of: Callable[[Any], Any] | None = None,
    loader_workers: int = 0,
    **stated: Any,
) -> tuple[dict[str, Tensor], list[int], Any]:
    """Train as a script does; return the weights, the samples seen here, and what was served."""
    model, optimizer, _ = build(recipe)
    seen: list[int] = []
    with warnings.catch_warnings(), Balancer(recipe.global_batch, mode=mode, **stated) as balancer:
        warnings.simplefilter("ignore", PoiseWarning)
        loader = DataLoader(
            dataset(recipe), recipe.global_batch, shuffle=True, num_workers=loader_workers
        )
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        schedule: Any = None
        if schedule_of is not None:
            schedule = BySamples(schedule_of(optimizer), balancer, recipe.global_batch)
        for _ in balancer.epochs(recipe.epochs):
            for inputs, targets, samples in shares:
                nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += samples.tolist()
                if schedule is not None:
                    schedule.step()
        training = balancer._training
        served = shares.desk.service() if isinstance(training, Server) else None
        return weights(shared), seen, served


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(model="batchnorm", optimizer="adamw", samples=48),
        Recipe(model="transformer", dtype="float32"),
    ],
    ids=lambda recipe: recipe.model,
)
def test_one_worker_equals_plain_training_exactly(workers: Workers, recipe: Recipe) -> None:
    (served, _, _), (_, seen, _) = workers.run(train, recipe, workers=2)
    (plain,) = workers.run(train_plain, recipe, workers=1)  # with as many threads
    assert distance(served, plain) == 0
    assert Counter(seen) == Counter(list(range(recipe.samples)) * recipe.epochs)


def train_ahead_of_the_loop(recipe: Recipe, mode: Any) -> Any:
    return train(recipe, mode=mode, loader_workers=2)


@pytest.mark.parametrize("mode", ["async", "stale:1"])
def test_a_loader_that_runs_ahead_uses_every_sample_once(workers: Workers, mode: str) -> None:
    recipe = Recipe(samples=100)
    (_, _, service), *others = workers.run(train_ahead_of_the_loop, recipe, mode, workers=3)
    seen = sum((Counter(seen) for _, seen, _ in others), Counter())
    assert seen == Counter(list(range(100)) * recipe.epochs)
    assert service.epoch == recipe.epochs


def cosine(optimizer: Any) -> Any:
    return CosineAnnealingLR(optimizer, 30)


def warmed_up(optimizer: Any) -> Any:
    """A schedule of schedules, whose making changes the rate."""
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 12)]
    return SequentialLR(optimizer, parts, milestones=[4])


def train_by_samples(recipe: Recipe, schedule_of: Callable[[Any], Any]) -> dict[str, Tensor]:
    return train(recipe, schedule_of=schedule_of)[0]


def test_the_rate_of_a_schedule_follows_the_samples(workers: Workers) -> None:
    recipe = Recipe(samples=48, scheduler=True)
    served, _ = workers.run(train_by_samples, recipe, cosine, workers=2)
    assert distance(served, train_plain(recipe)) == 0


def train_bounded(recipe: Recipe, bound: int) -> Any:
    return train(recipe, mode=Stale(bound), policy=Fixed([5, 1, 6]))


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe(optimizer="adamw", samples=53)], ids=["sgd", "adamw"]
)
def test_a_bound_of_zero_equals_synchronous_training(workers: Workers, recipe: Recipe) -> None:
    (served, _, service), *others = workers.run(train_bounded, recipe, 0, workers=4)
    assert distance(served, train_plain(recipe)) < 1e-12
    assert sum((Counter(seen) for _, seen, _ in others), Counter()) == Counter(
        list(range(recipe.samples)) * recipe.epochs
    )
    tallies = [each.tally for each in service.workers] + list(service.gone.values())
    assert {staleness for tally in tallies for staleness in tally.staleness} == {0}


def train_together(recipe: Recipe, mode: Any) -> Any:
    return train(recipe, mode=mode)


def accumulate(recipe: Recipe, port: int) -> Any:
    """Two batches to a step, with a plain loop."""
    if os.environ["RANK"] == "0":
        with as_server(port):
            return train(recipe)[0]
    model, optimizer, _ = build(recipe)
    with as_worker(port), Balancer(recipe.global_batch) as balancer:
        loader = DataLoader(dataset(recipe), recipe.global_batch, shuffle=True)
        model, optimizer, shares = balancer.prepare(model, optimizer, loader)
        batches = 0
        for _ in balancer.epochs(recipe.epochs):
            for inputs, targets, _ in shares:
                nn.functional.cross_entropy(model(inputs), targets).backward()
                batches += 1
                if batches % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return batches


def accumulate_plainly(recipe: Recipe) -> Any:
    model, optimizer, _ = build(recipe)
    inputs, targets, _ = dataset(recipe).tensors  # type: ignore[attr-defined]
    for number, batch in enumerate(plain_batches(recipe), start=1):
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_gradients_that_a_loop_adds_up_are_pushed_once(workers: Workers) -> None:
    recipe = Recipe(samples=60, epochs=2)
    served, batches = workers.run(accumulate, recipe, free_port(), workers=2)
    (plain,) = workers.run(accumulate_plainly, recipe, workers=1)
    assert batches == 10
    assert distance(served, plain) == 0


@pytest.mark.parametrize(
    "mode", [Async(), Async(ahead=True), Stale(2)], ids=["async", "ahead", "stale"]
)
def test_workers_together_push_every_sample_once_and_learn(workers: Workers, mode: Any) -> None:
    recipe = Recipe(samples=240, epochs=8, dtype="float32")
    (served, _, service), *others = workers.run(train_together, recipe, mode, workers=4)
    seen = sum((Counter(seen) for _, seen, _ in others), Counter())
    assert seen == Counter(list(range(recipe.samples)) * recipe.epochs)
    model, _, _ = build(recipe)
    inputs, targets, _ = dataset(recipe).tensors  # type: ignore[attr-defined]
    before = nn.functional.cross_entropy(model(inputs), targets)
    model.load_state_dict(served)
    assert nn.functional.cross_entropy(model(inputs), targets) < 0.9 * before
    tallies = [each.tally for each in service.workers] + list(service.gone.values())
    assert sum(tally.samples for tally in tallies) == recipe.samples * recipe.epochs
    if isinstance(mode, Stale):
        assert max(stale for tally in tallies for stale in tally.staleness) <= mode.steps


def train_in_part(recipe: Recipe, batches: int, epochs: int) -> Any:
    """Take only some batches of each epoch; workers take part in only some epochs.

    Returns how many epochs there were, the samples pushed, and the local batches of this worker.
    """
    model, optimizer, _ = build(recipe)
    passes, taken = 0, list[int]()
    with warnings.catch_warnings(), Balancer(recipe.global_batch, mode="async") as balancer:
        warnings.simplefilter("ignore", PoiseWarning)
        loader = DataLoader(dataset(recipe), recipe.global_batch, shuffle=True)
        model, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(recipe.epochs if balancer.worker == 0 else epochs):
            passes += 1
            for number, (inputs, targets, _) in enumerate(shares):
                if number == batches:
                    break
                taken.append(len(inputs))
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        return passes, balancer.samples, taken


def test_loops_that_leave_an_epoch_early_do_not_hang(workers: Workers) -> None:
    recipe = Recipe(samples=240, epochs=3)
    (passes, samples, _), *others = workers.run(train_in_part, recipe, 2, 3, workers=3)
    assert passes == 3
    assert [found for found, _, _ in others] == [3, 3]
    for _, _, taken in others:
        assert taken[:-2] == [6] * 4
        # In the last epoch the other may have left, and the whole global batch is this worker's.
        assert len(taken) == 6
        assert set(taken[-2:]) <= {6, 12}
    assert samples == sum(sum(taken) for _, _, taken in others)


def test_a_server_is_done_when_its_workers_are(workers: Workers) -> None:
    recipe = Recipe(samples=240, epochs=3)
    (passes, samples, _), *_ = workers.run(train_in_part, recipe, 10**6, 1, workers=3)
    assert passes <= 2  # in the second of which it sees that nobody is left
    assert samples == 240


@contextmanager
def as_server(port: int, **stated: Any) -> Any:
    """Let the script inside be the server, on a port that the others know."""
    launcher = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    with serving_as(Serving(port=port, **stated)):
        yield
    os.environ.update(launcher)


@contextmanager
def as_worker(port: int, secret: str | None = None) -> Any:
    """Let the script inside join the server."""
    os.environ["POISE_SERVER"] = f"127.0.0.1:{port}"
    if secret is not None:
        os.environ["POISE_SECRET"] = secret
    try:
        yield
    finally:
        del os.environ["POISE_SERVER"]
        os.environ.pop("POISE_SECRET", None)


def train_among_strangers(recipe: Recipe, port: int) -> Any:
    """Worker 0 serves, 1 trains; 2 comes with one wrong thing after the other, and garbage."""
    if os.environ["RANK"] == "0":
        with as_server(port):
            return train(recipe)
    if os.environ["RANK"] == "1":
        with as_worker(port):
            return train(recipe)
    refused = []
    with as_worker(port):
        odd: list[tuple[Recipe, dict[str, Any]]] = [
            (recipe, {"global_batch": 13}),
            (recipe, {"seed": 5}),
            (recipe, {"mode": "stale:3"}),
            (recipe, {"mode": "sync"}),
            (Recipe(model="cnn", samples=240), {}),
            (Recipe(samples=51), {}),
        ]
        for other, stated in odd:
            with pytest.raises((Disagreement, InvalidSetting)) as caught:
                _prepare_only(other, **{"global_batch": 12, **stated})
            refused.append(str(caught.value))
    with as_worker(port), pytest.MonkeyPatch.context() as patch:
        patch.setattr("poise.torch.asynchronous.worker.__version__", "9.9")
        with pytest.raises(Disagreement, match=r"9\.9"):
            Balancer(12)
    with as_worker(port, "a word"), pytest.raises(Disagreement, match="POISE_SECRET"):
        Balancer(12)
    for garbage in (b"", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b"poise-1\n" + b"\xff" * 5000):
        with socket.create_connection(("127.0.0.1", port)) as end:
            end.sendall(garbage)
    for answer in (b"[" * 4000, json.dumps({"nonce": "1", "proof": "\u00e4"}).encode()):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as end:
            end.sendall(b"poise-1\n")
            channel = Channel(end)
            channel.hear()
            channel.send(answer)
            with suppress(ConnectionError):
                end.recv(10_000)  # hung up on, or told that it is refused
    for text in (b"[" * 100_000, b'{"failed": "you"}', b'{"about": 1}', b"{}"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as end:
            about = About(__version__, None, None, "here\ud800")
            channel = knock(end, None, text_of(about))
            channel.hear()
            channel.send(text)
            channel.hear()  # why it is refused
    return refused


def train_while_pushes_take_long(recipe: Recipe, port: int) -> list[int]:
    """Worker 0 serves, and is held up between an update and the next samples; 1 trains."""
    if os.environ["RANK"] == "0":
        with as_server(port), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Updates, "push", _held_up(Updates.push))
            train(recipe)
        return []
    with as_worker(port):
        model, optimizer, _ = build(recipe)
        with Balancer(recipe.global_batch) as balancer:
            loader = DataLoader(dataset(recipe), recipe.global_batch, shuffle=True)
            shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
            counts = []
            for _ in balancer.epochs(recipe.epochs):
                seen = 0
                for inputs, targets, samples in shares:
                    nn.functional.cross_entropy(shared(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen += len(samples)
                counts.append(seen)
        return counts


def _held_up(push: Any) -> Any:
    def held_up(*args: Any, **stated: Any) -> Any:
        queued_s = push(*args, **stated)
        time.sleep(0.05)  # time enough for the main thread to end the epoch and open the next
        return queued_s

    return held_up


def test_a_pass_has_the_samples_of_its_own_epoch(workers: Workers) -> None:
    recipe = Recipe(samples=24, epochs=4)
    outcomes = workers.run(train_while_pushes_take_long, recipe, free_port(), workers=2)
    assert outcomes[1] == [24] * 4


def _prepare_only(recipe: Recipe, **stated: Any) -> None:
    model, optimizer, _ = build(recipe)
    with Balancer(**stated) as balancer:
        balancer.prepare(model, optimizer, DataLoader(dataset(recipe), 12, shuffle=True))


def test_strangers_are_refused_with_a_reason_and_disturb_nobody(workers: Workers) -> None:
    recipe = Recipe(samples=240, epochs=60)  # longer than the strangers take
    outcomes = workers.run(train_among_strangers, recipe, free_port(), workers=3)
    (served, _, _), (_, seen, _), refused = outcomes
    assert distance(served, train_plain(recipe)) == 0
    assert Counter(seen) == Counter(list(range(240)) * 60)
    expected = ["global_batch is 13", "seed", "stale:3", "POISE_SERVER", "parameter", "length"]
    for message, word in zip(refused, expected, strict=True):
        assert word in message


def train_with_a_secret(recipe: Recipe, port: int) -> Any:
    """The server has a secret; a worker without it, with another, and with the same one."""
    if os.environ["RANK"] == "0":
        os.environ["POISE_SECRET"] = "open sesame"
        try:
            with as_server(port):
                return train(recipe)
        finally:
            del os.environ["POISE_SECRET"]
    with as_worker(port), pytest.raises(Disagreement, match="wants a secret"):
        Balancer(recipe.global_batch)
    with as_worker(port, "open barley"), pytest.raises(Disagreement, match="is not the server's"):
        Balancer(recipe.global_batch)
    with as_worker(port, "open sesame"):
        return train(recipe)


def test_a_secret_opens_the_door(workers: Workers) -> None:
    recipe = Recipe(epochs=1)
    _, (_, seen, _) = workers.run(train_with_a_secret, recipe, free_port(), workers=2)
    assert sorted(seen) == list(range(recipe.samples))


def train_with_bad_gradients(recipe: Recipe, port: int) -> Any:
    model, optimizer, _ = build(recipe)
    loader = DataLoader(dataset(recipe), recipe.global_batch, shuffle=True)
    if os.environ["RANK"] == "0":
        with (
            warnings.catch_warnings(record=True) as caught,
            as_server(port),
            Balancer(recipe.global_batch) as balancer,
        ):
            warnings.simplefilter("always")
            served, optimizer, passes = balancer.prepare(model, optimizer, loader)
            for _ in balancer.epochs(recipe.epochs):
                for _ in passes:
                    pass
            said = [str(each.message) for each in caught if "finite" in str(each.message)]
            return weights(served), said, passes.desk.service()
    with as_worker(port), Balancer(recipe.global_batch) as balancer:
        model, optimizer, shares = balancer.prepare(model, optimizer, loader)
        step = 0
        for _ in balancer.epochs(recipe.epochs):
            for inputs, targets, _ in shares:
                nn.functional.cross_entropy(model(inputs), targets).backward()
                if step % 2:
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.fill_(float("nan") if step % 4 == 1 else float("inf"))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
        return step, balancer.skipped


def test_pushes_that_are_not_finite_are_dropped_counted_and_said_once(workers: Workers) -> None:
    recipe = Recipe(samples=48, epochs=2)
    outcomes = workers.run(train_with_bad_gradients, recipe, free_port(), workers=2)
    (served, (said,), service), (steps, skipped) = outcomes
    assert "that worker 1 pushed for its step 1 is not finite" in said
    assert all(torch.isfinite(tensor).all() for tensor in served.values())
    assert (steps, skipped) == (8, 4)
    (tally,) = service.gone.values() or [each.tally for each in service.workers]
    assert (tally.dropped, tally.updates, tally.samples) == (4, 4, 96)


def serve_and_fail(port: int, at_epoch: int) -> str:
    """The server's script fails in the middle; its worker hears of it."""
    recipe = Recipe()
    model, optimizer, _ = build(recipe)
    loader = DataLoader(dataset(recipe), 12, shuffle=True)
    if os.environ["RANK"] != "0":
        with as_worker(port), pytest.raises(ServerLost) as caught:
            train(recipe)
        return str(caught.value)
    try:
        with as_server(port, workers=2), Balancer(12) as balancer:
            model, optimizer, shares = balancer.prepare(model, optimizer, loader)
            for epoch in balancer.epochs(3):
                for _ in shares:
                    pass
                if epoch == at_epoch:
                    raise ZeroDivisionError("evaluation failed")
    except ZeroDivisionError:
        return ""
    raise AssertionError("the script did not fail")


def test_a_server_that_fails_is_a_clear_error_on_its_workers(workers: Workers) -> None:
    _, *messages = workers.run(serve_and_fail, free_port(), 1, workers=3)
    for message in messages:
        assert "evaluation failed" in message


def serve_die_and_go_on(
    recipe: Recipe, port: int, save: str, schedule_of: Callable[[Any], Any]
) -> Any:
    """The server is lost in the middle of an epoch, and started again from its last save.

    Its door closes a moment after its connections; a worker that comes back in between would be
    told that the training is over.
    """
    down = Path(save + ".down")
    if os.environ["RANK"] == "0":
        with as_server(port, save=Path(save), save_every_s=0.0):
            if not Path(save).exists():
                _serve_until(recipe, 2 * recipe.samples + 24, schedule_of)
        down.touch()
        with as_server(port, save=Path(save)):
            return train(recipe, schedule_of=schedule_of)
    with as_worker(port):
        with pytest.raises(ServerLost, match="start it again"):
            train(recipe, schedule_of=schedule_of)
        while not down.exists():
            time.sleep(0.01)
        return train(recipe, schedule_of=schedule_of)


def _serve_until(recipe: Recipe, samples: int, schedule_of: Callable[[Any], Any]) -> None:
    """Serve, and vanish without a word once so many samples are pushed."""
    model, optimizer, _ = build(recipe)
    balancer = Balancer(recipe.global_batch)
    loader = DataLoader(dataset(recipe), recipe.global_batch, shuffle=True)
    _, _, shares = balancer.prepare(model, optimizer, loader)
    BySamples(schedule_of(optimizer), balancer, recipe.global_batch)

    links: list[Link] = []
    serve, apply = Desk.serve, Parameters.apply

    def noted(self: Desk, link: Link, worker: int, label: str) -> None:
        links.append(link)
        serve(self, link, worker, label)

    def vanish(self: Parameters, gradient: Flat, *args: Any, **stated: Any) -> tuple[int, float]:
        if balancer.samples >= samples:
            for link in links:
                link.close()
            raise KeyboardInterrupt
        return apply(self, gradient, *args, **stated)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Desk, "serve", noted)
        patch.setattr(Parameters, "apply", vanish)
        with suppress(KeyboardInterrupt):
            for _ in balancer.epochs(recipe.epochs):
                for _ in shares:
                    pass
            raise AssertionError("the server went on")
        patch.setattr("poise.torch.asynchronous.admission._GOODBYE_S", 0.2)
        balancer.close()


@pytest.mark.parametrize("schedule_of", [cosine, warmed_up])
def test_a_server_goes_on_from_its_last_save(
    workers: Workers, tmp_path: Path, schedule_of: Callable[[Any], Any]
) -> None:
    recipe = Recipe(samples=48, epochs=4, optimizer="adamw")
    case = recipe, free_port(), str(tmp_path / "server.pt"), schedule_of
    (served, _, _), _ = workers.run(serve_die_and_go_on, *case, workers=2)
    whole, _ = workers.run(train_by_samples, recipe, schedule_of, workers=2)
    assert distance(served, whole) == 0


def test_a_schedule_that_a_restart_would_begin_anew_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = build(Recipe())
    with serving_as(Serving(save=tmp_path / "server.pt")), Balancer(12) as balancer:
        loader = DataLoader(dataset(Recipe()), 12, shuffle=True)
        _, _, shares = balancer.prepare(model, optimizer, loader)
        CosineAnnealingLR(optimizer, 30)
        with pytest.raises(InvalidSetting, match="BySamples"):
            next(iter(shares))


def test_a_damaged_save_is_refused(tmp_path: Path) -> None:
    save = tmp_path / "server.pt"
    save.write_bytes(b"this is no state")
    model, optimizer, _ = build(Recipe())
    loader = DataLoader(dataset(Recipe()), 12, shuffle=True)
    with serving_as(Serving(save=save)), Balancer(12) as balancer:
        with pytest.raises(StateMismatch, match="move it away") as caught:
            balancer.prepare(model, optimizer, loader)
        assert "\n" not in str(caught.value)


def test_a_script_may_say_more_of_the_mode_than_the_command() -> None:
    with serving_as(Serving(mode=Async())), Balancer(12, mode=Async(ahead=True)) as balancer:
        server: Any = balancer._training
        assert server.mode == Async(ahead=True)
    with (
        serving_as(Serving(mode=Stale(3))),
        pytest.raises(InvalidSetting, match="say it once"),
    ):
        Balancer(12, mode="async")


def keep_while_another_is_lost(port: int, path: str) -> int:
    """Worker 1 adds up two batches to a step; worker 2 is lost with the epoch's last samples."""
    recipe = Recipe(samples=60, global_batch=20, epochs=1)
    if os.environ["RANK"] == "0":
        with as_server(port, workers=2):
            service = train(recipe, policy="even")[2]
            tallies = [each.tally for each in service.workers] + list(service.gone.values())
            return sum(tally.samples for tally in tallies)
    model, optimizer, _ = build(recipe)
    batches = 0
    with as_worker(port), Balancer(20, policy="even") as balancer:
        loader = DataLoader(dataset(recipe), 20, shuffle=True)
        model, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for inputs, targets, _ in shares:
            if balancer.worker == 2:
                while not Path(path).exists():
                    time.sleep(0.01)
                time.sleep(0.3)  # worker 1 is to wait for samples by now
                balancer._training.fail(ZeroDivisionError())
                break
            nn.functional.cross_entropy(model(inputs), targets).backward()
            batches += 1
            if batches % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if batches == 5:
                Path(path).touch()
    return batches


def test_what_is_added_up_counts_once_also_if_another_is_lost(
    workers: Workers, tmp_path: Path
) -> None:
    case = free_port(), str(tmp_path / "five")
    samples, first, second = workers.run(keep_while_another_is_lost, *case, workers=3)
    assert sorted([first, second]) == [0, 6]
    assert samples == 60


class Counting(nn.Module):
    """Keeps a number in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 1)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        out: Tensor = self.last(self.frozen(inputs))
        return out


def unfreeze(port: int) -> str:
    """What a server cannot know is said: buffers of one's own, parameters of later."""
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    place = as_server(port) if os.environ["RANK"] == "0" else as_worker(port)
    said = ""
    with place, Balancer(8) as balancer:
        loader = DataLoader(TensorDataset(torch.randn(40, 4)), 8)
        model, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for number, (inputs,) in enumerate(shares):
            model(inputs).square().mean().backward()
            if number == 0:
                with pytest.warns(PoiseWarning, match="buffers seen"):
                    optimizer.step()
            elif number == 1:
                model.frozen.requires_grad_(True)
                with pytest.raises(OutOfOrder, match="before prepare") as caught:
                    optimizer.step()
                said = str(caught.value)
                model.frozen.requires_grad_(False)
            else:
                optimizer.step()
            optimizer.zero_grad()
    return said


def test_what_the_server_cannot_know_is_said(workers: Workers) -> None:
    served, said = workers.run(unfreeze, free_port(), workers=2)
    assert (served, bool(said)) == ("", True)


@pytest.mark.parametrize(
    "text",
    ['{"failed": "you"}', '{"refused": "you"}', "[" * 100_000, "{}", '{"leave": 1}', ANY_FLOAT],
)
def test_whatever_a_worker_says_is_not_taken_for_an_error_of_the_server(text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        Channel(ours).send(text.encode())
        with pytest.raises(Disagreement):
            Link(Channel(theirs)).listen()


def test_numbers_that_cannot_be_are_refused() -> None:
    fine = Push((0,), (), (0,), "1", 1.0, Report(12, 0.1))
    fine.check(1, [0], global_batch=12)
    wrong: list[dict[str, Any]] = [
        {"report": Report(10**400, 0.1)},
        {"count": 1.7e308},
        {"count": -1.0},
        {"versions": (10**400,)},
    ]
    for each in wrong:
        with pytest.raises(Disagreement, match="numbers that cannot be"):
            dataclasses.replace(fine, **each).check(1, [0], global_batch=12)


@pytest.mark.parametrize("text", [b"\xff\xfe\0abc", b"0/1\0" + b"\xff" * 200])
def test_an_end_that_cannot_be_paired_with_is_refused(text: bytes) -> None:
    """A key that is no text; an address that gloo cannot read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        Channel(ours).send(text)
        link = Link(Channel(theirs))
        link.channel.set_limit(30)
        with pytest.raises(Disagreement, match="cannot be paired with"):
            link.pair_up(server=True)


def end_before_the_first_pass(recipe: Recipe, port: int, failing: bool) -> str:
    """Worker 0 serves, and ends while worker 1 waits for its first pass; returns what 1 is told."""
    if os.environ["RANK"] == "0":
        waiting = threading.Event()
        await_first_pass = Course.await_first_pass

        def noted(self: Course, channel: Channel) -> None:
            waiting.set()
            await_first_pass(self, channel)

        with as_server(port), suppress(KeyError), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Course, "await_first_pass", noted)
            model, optimizer, _ = build(recipe)
            with Balancer(recipe.global_batch) as balancer:
                balancer.prepare(
                    model, optimizer, DataLoader(dataset(recipe), recipe.global_batch, shuffle=True)
                )
                waiting.wait()
                if failing:
                    raise KeyError("no such column")
        return ""
    with as_worker(port):
        try:
            _prepare_only(recipe, global_batch=recipe.global_batch)
        except (Disagreement, ServerLost) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("failing", "told"), [(False, "the training is over"), (True, "server failed: KeyError")]
)
def test_a_worker_that_comes_as_the_server_ends_is_told_why(
    workers: Workers, failing: bool, told: str
) -> None:
    case = end_before_the_first_pass
    assert told in workers.run(case, Recipe(), free_port(), failing, workers=2)[1]


@pytest.mark.parametrize("address", ["here", "here:", "here:0", "here:65536", "here:\u00b2"])
def test_an_address_that_is_none_is_refused(address: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("POISE_SERVER", address)
    with pytest.raises(InvalidSetting, match="give host:port"):
        Balancer(12)


def test_a_stranger_who_speaks_slowly_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.runtime.door._PATIENCE_S", 0.3)
    with serving_as(Serving()), Balancer(12) as balancer:
        server: Any = balancer._training
        host, port = server.address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as end:
            end.sendall(b"poise-1\n\x00\x00\x0f\x00")
            with pytest.raises(OSError, match=r"reset|pipe"):
                _drip(end)


def _drip(end: socket.socket) -> None:
    for _ in range(200):
        end.sendall(b" ")
        time.sleep(0.02)


def train_in_two_parts(recipe: Recipe, port: int, path: str) -> Any:
    """The script itself saves after two epochs, and a second run loads that."""
    for epochs in (2, recipe.epochs):
        model, optimizer, _ = build(recipe)
        place = as_server(port) if os.environ["RANK"] == "0" else as_worker(port)
        with place, Balancer(recipe.global_batch) as balancer:
            loader = DataLoader(dataset(recipe), recipe.global_batch, shuffle=True)
            model, optimizer, shares = balancer.prepare(model, optimizer, loader)
            if Path(path).exists():
                state = torch.load(path, weights_only=True)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                balancer.load_state_dict(state["balancer"])
            for _ in balancer.epochs(epochs):
                for inputs, targets, _ in shares:
                    nn.functional.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if balancer.worker == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "balancer": balancer.state_dict(),
                }
                torch.save(state, path)
    return weights(model)


def test_a_script_saves_and_resumes_as_in_synchronous_training(
    workers: Workers, tmp_path: Path
) -> None:
    recipe = Recipe(epochs=4)
    path = str(tmp_path / "state.pt")
    served, _ = workers.run(train_in_two_parts, recipe, free_port(), path, workers=2)
    assert distance(served, train_plain(recipe)) == 0


def train_drawn(port: int) -> list[int]:
    """The user's own sampler, which draws on the server."""
    torch.manual_seed(int(os.environ["RANK"]))  # workers would draw other samples
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.arange(30.0)[:, None])
    loader = DataLoader(data, 10, sampler=WeightedRandomSampler([1.0] * 15 + [0.0] * 15, 40))
    seen: list[int] = []
    place = as_server(port, workers=2) if os.environ["RANK"] == "0" else as_worker(port)
    with place, Balancer(10) as balancer:
        model, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(1):
            for (inputs,) in shares:
                seen += [int(value) for value in inputs.flatten()]
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return seen


def test_a_sampler_draws_on_the_server(workers: Workers) -> None:
    served, first, second = workers.run(train_drawn, free_port(), workers=3)
    assert served == []
    assert len(first) + len(second) == 40
    assert max(first + second) < 15


def train_recorded(recipe: Recipe, path: str) -> Any:
    return train(recipe, policy="proportional", record=path)


def test_a_record_holds_staleness_and_can_be_replayed(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recipe = Recipe(samples=240, epochs=3, dtype="float32")
    workers.run(train_recorded, recipe, str(path), workers=3)
    record = read_record(path)
    assert record.header.mode == "async"
    assert record.rows
    served = record.rows[-1].served
    assert served is not None
    assert sum(served.updates) == sum(n for own in served.staleness for n in own.values())
    assert served.busy_s > 0
    assert replay(record) is None


def _learn_oddly(model: nn.Module, optimizer: Any, scheduler: Any, shares: Any) -> None:
    for number, (inputs, targets, _) in enumerate(shares):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if number == 1:
            continue
        loss.backward()
        if number == 2:
            with pytest.raises(OutOfOrder, match="closure"):
                optimizer.step(lambda: 0.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def learn_oddly(port: int) -> list[str]:
    """What has no meaning with a server is said; a batch without a step is not pushed."""
    recipe = Recipe(samples=48, epochs=1)
    if os.environ["RANK"] == "0":
        with as_server(port):
            return [str(train(recipe)[2])]
    said = []
    with as_worker(port):
        for odd in (
            {"adapt": (6, 24)},
            {"micro_batch": 3},
            {"ddp": {"static_graph": True}},
            {"comm_hook": max},
        ):
            with pytest.raises(InvalidSetting) as caught:
                Balancer(12, **odd)
            said.append(str(caught.value))
        model, optimizer, _ = build(recipe)
        loader = DataLoader(dataset(recipe), 12, shuffle=True)
        with Balancer(12) as balancer:
            model, optimizer, shares = balancer.prepare(model, optimizer, loader)
            with pytest.raises(OutOfOrder, match="without a batch"):
                optimizer.step()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            with pytest.warns(PoiseWarning, match="BySamples"):
                _learn_oddly(model, optimizer, scheduler, shares)
            said.append(str(balancer.skipped))
            assert balancer.evaluation(loader) == []
            assert balancer.mean(3.0, 2) == 3.0
    return said


def test_what_has_no_meaning_with_a_server_is_said(workers: Workers) -> None:
    (service,), said = workers.run(learn_oddly, free_port(), workers=2)
    for message, word in zip(said, ("adapt", "micro_batch", "ddp", "comm_hook"), strict=False):
        assert word in message
    assert said[-1] == "1"
    assert "updates=3" in service


def test_a_mode_without_a_server_trains_alone() -> None:
    with pytest.warns(PoiseWarning, match="trains alone"):
        found, _, _ = _alone()
    assert distance(found, train_plain(Recipe())) == 0


def _alone() -> Any:
    model, optimizer, _ = build(Recipe())
    with Balancer(12, mode="async") as balancer:
        loader = DataLoader(dataset(Recipe()), 12, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(3):
            for inputs, targets, _ in shares:
                nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        return weights(shared), [], None


def test_a_server_that_others_can_reach_needs_a_secret() -> None:
    with serving_as(Serving(host="0.0.0.0")), pytest.raises(InvalidSetting, match="POISE_SECRET"):
        Balancer(12)


def test_a_server_listens_on_loopback_only() -> None:
    with serving_as(Serving()), Balancer(12) as balancer:
        server: Any = balancer._training
        assert server.address.startswith("127.0.0.1:")


def push(
    held: Parameters, gradient: Flat, *, factor: float = 1.0, late: float = 0.0, part: float = 1.0
) -> tuple[int, float]:
    """Update weights by a gradient of all of them, computed with the first copy."""
    present, since = [True] * len(held.trained), (0,) * len(held.versions)
    return held.apply(gradient, present, since=since, factor=lambda _: factor, late=late, part=part)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_shards_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards, each stepped by itself, equal the user's optimizer as a whole."""
    found = []
    for size in (1, 10**9):
        monkeypatch.setattr(parameters_module, "SHARD_BYTES", size)
        model, optimizer, _ = build(Recipe(optimizer=kind))
        held = Parameters([model], optimizer, most_shards=4)
        assert (len(held.versions) > 1) == (size == 1)
        for step in range(5):
            if step == 3:  # a resume puts another state in the place of the one before
                optimizer.load_state_dict(optimizer.state_dict())
            gradient = held.buffer()
            generator = torch.Generator().manual_seed(step)
            gradient.read(
                [torch.randn(p.shape, generator=generator).double() for p in held.trained]
            )
            push(held, gradient, factor=0.3, late=2, part=0.5)
        found.append((weights(model), optimizer.state_dict()))
    (sharded, states), (whole, expected) = found
    assert distance(sharded, whole) == 0
    assert str(states) == str(expected)


def test_copies_are_never_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All elements of a shard are equal at any time, whoever copies while others push."""
    monkeypatch.setattr(parameters_module, "SHARD_BYTES", 1)
    model = nn.ParameterList([nn.Parameter(torch.zeros(100_000)) for _ in range(2)])
    held = Parameters([model], torch.optim.SGD(model.parameters(), 1.0), most_shards=2)
    gradient = held.buffer()
    gradient.read([torch.ones_like(p) for p in held.trained])

    def push_often() -> None:
        for _ in range(200):
            push(held, gradient)

    pushing = [threading.Thread(target=push_often) for _ in range(2)]
    for thread in pushing:
        thread.start()
    mine: Flat = held.buffer()
    while any(thread.is_alive() for thread in pushing):
        versions, _, _ = held.copy(mine)
        for view, version in zip(mine.views, versions, strict=True):
            assert float(view.min()) == float(view.max()) == -version
    for thread in pushing:
        thread.join()
    assert held.staleness((0, 0)) == 400


def test_a_schedule_and_a_copy_see_the_users_own_rate() -> None:
    """Whoever pushes at a part of the rate at the same time; a schedule multiplies what it sees."""
    model = nn.Linear(200, 200, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    held = Parameters([model], optimizer, most_shards=4)
    seen: list[float] = []

    def follow() -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] *= 0.999

    held.before_update.append(follow)

    def push_often() -> None:
        gradient, mine = held.buffer(), held.buffer()
        for _ in range(100):
            push(held, gradient, factor=0.25)
            copied.append(held.copy(mine)[1])

    copied: list[tuple[float, ...]] = []
    pushing = [threading.Thread(target=push_often) for _ in range(4)]
    for thread in pushing:
        thread.start()
    for thread in pushing:
        thread.join()
    expected = [1.0]
    for _ in range(400):
        expected.append(expected[-1] * 0.999)
    assert seen == expected[:-1]
    assert {rate for rates in copied for rate in rates} <= set(expected)


def test_staleness_is_counted_when_a_push_is_applied() -> None:
    """Updates that come while a push waits for its turn are missed by it, too."""
    model = nn.Linear(2, 2, bias=False)
    held = Parameters([model], torch.optim.SGD(model.parameters(), 1.0), most_shards=1)
    gradient, mine = held.buffer(), held.buffer()
    gradient.views[0].fill_(1.0)
    since, _, _ = held.copy(mine)
    before = model.weight.detach().clone()
    for _ in range(3):
        push(held, held.buffer())  # of zeros
    staleness, _ = held.apply(
        gradient, [True], since=since, factor=lambda stale: 1 / (1 + stale), late=0, part=1.0
    )
    assert staleness == 3
    assert torch.allclose(before - model.weight, torch.tensor(0.25))


def test_momentum_is_lowered_and_statistics_move_by_a_share() -> None:
    linear, norm = nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False)
    optimizer = torch.optim.SGD(linear.parameters(), 1.0, momentum=0.9)
    held = Parameters([linear, norm], optimizer, most_shards=1)
    gradient = held.buffer()
    gradient.views[0].fill_(1.0)
    mean = next(n for n, tensor in enumerate(held.statistics) if tensor is norm.running_mean)
    gradient.views[1 + mean].fill_(8.0)
    before = linear.weight.detach().clone()
    for _ in range(2):
        push(held, gradient, late=3, part=0.25)
    lowered = lowered_momentum(0.9, 3)
    assert norm.running_mean is not None
    assert torch.allclose(before - linear.weight, torch.tensor(2 + lowered))
    assert torch.allclose(norm.running_mean, torch.tensor(2 + 0.25 * 6))
    assert optimizer.param_groups[0]["momentum"] == 0.9


def a_push(held: Parameters, number: int, count: float = 1.0) -> Push:
    present = "1" * len(held.trained)
    return Push((number,), (), held.versions, present, count, None)


def test_a_late_step_is_applied_at_a_part_of_the_rate() -> None:
    model = nn.Linear(2, 2, bias=False)
    held = Parameters([model], torch.optim.SGD(model.parameters(), 1.0), most_shards=1)
    steps, gradient = OpenSteps(held), held.buffer()
    before = model.weight.detach().clone()
    gradient.views[0].fill_(1.0)
    steps.add(0, 1, gradient, a_push(held, 0))
    late = a_push(held, 1, count=3.0)
    push(held, held.buffer())
    push(held, held.buffer())  # zeros: only the version grows
    steps.add(0, 2, gradient, late)
    seen: list[float] = []

    def half(staleness: float) -> float:
        seen.append(staleness)
        return 0.5

    applied = steps.apply(0, half)
    assert seen == [2.0]
    assert applied == ({1: 2, 2: 2}, 0.5)
    assert torch.allclose(before - model.weight, torch.tensor(0.5))


def test_a_step_of_small_numbers_does_not_overflow() -> None:
    model = nn.Linear(2, 2, bias=False).to(torch.float16)
    held = Parameters([model], torch.optim.SGD(model.parameters(), 0.1), most_shards=1)
    steps, gradient = OpenSteps(held), held.buffer()
    before = model.weight.detach().clone()
    gradient.views[0].fill_(10.0)
    for worker in (1, 2):
        steps.add(0, worker, gradient, a_push(held, worker, count=4096.0))
    steps.apply(0, lambda _: 1.0)
    assert torch.allclose(before - model.weight, torch.tensor(1.0).half(), atol=2e-3)


def test_what_cannot_travel_or_be_counted_is_refused() -> None:
    data = TensorDataset(torch.randn(8, 2))
    with serving_as(Serving()), Balancer(4) as balancer:
        model = nn.Linear(2, 2, dtype=torch.complex64)
        with pytest.raises(InvalidSetting, match="complex parameters"):
            balancer.prepare(model, torch.optim.SGD(model.parameters(), 1.0), DataLoader(data))
    endless: Any = NoLength()
    with serving_as(Serving()), Balancer(4) as balancer:
        plain = nn.Linear(2, 2)
        loader = DataLoader(data, sampler=endless)
        with pytest.raises(InvalidSetting, match="has no length"):
            balancer.prepare(plain, torch.optim.SGD(plain.parameters(), 1.0), loader)


class NoLength:
    """A sampler that does not say how many it draws."""

    def __iter__(self) -> Any:
        return iter(range(8))


def test_a_save_waits_for_updates_that_are_under_way() -> None:
    model = nn.Linear(2, 2, bias=False)
    held = Parameters([model], torch.optim.SGD(model.parameters(), 1.0), most_shards=1)
    engine = AsyncEngine.begin(Async(), Engine(policy_named("even"), 1, 4), 8)
    _, engine = engine.join(1)
    share, engine = engine.draw(1)
    assert share is not None
    course = Course()
    course.resume(engine)
    updates = Updates(course, held)
    inside, may_go_on = threading.Event(), threading.Event()
    seen: list[tuple[int, ...]] = []

    def block() -> None:
        inside.set()
        may_go_on.wait(10)

    def save() -> None:
        with course.still():
            seen.append((course.engine.updates, *held.versions))

    held.before_update.append(block)
    pushing = threading.Thread(
        target=lambda: updates.push(1, a_push(held, share.number), held.buffer(), finite=True)
    )
    saving = threading.Thread(target=save)
    pushing.start()
    inside.wait(10)
    saving.start()
    while not (course.paused or seen):
        time.sleep(0.001)
    time.sleep(0.05)
    may_go_on.set()
    pushing.join()
    saving.join()
    assert seen == [(1, 1)]


def test_forked_processes_keep_no_connection_open() -> None:
    """Those of a loader outlive a worker that is killed, and its server must notice at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = Channel(socket.create_connection(listener.getsockname()[:2]))
        other, _ = listener.accept()
    child = os.fork()
    if not child:
        signal.pause()
    try:
        mine.close()
        other.settimeout(10)
        assert other.recv(1) == b""
    finally:
        other.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

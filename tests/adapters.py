"""The two adapters as the conformance suite sees them: one training, described by plain values."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poise.core.order import Order
from poise.runtime.threads import ThreadRendezvous
from poise.torch import Balancer
from tests.cluster import Workers
from tests.numpy_adapter import Floats, Linear, NumpyTraining, Team, on_threads, settings_of

LENGTH, INPUTS, OUTPUTS = 53, 4, 3


@dataclass(frozen=True)
class Task:
    """What is trained, and how."""

    policy: Any = "even"
    global_batch: int = 12
    epochs: int = 3
    leads: tuple[int, ...] = ()
    """How far each worker's loader runs ahead; none: not at all."""
    stop_after: int | None = None
    """Steps after which the training is left."""
    state: str | None = None
    """What an earlier training saved, as JSON."""
    weights: Any = None
    """From which it goes on, with its velocity."""
    raises: tuple[int, int] | None = None
    """A worker, and the step at which it fails."""
    counted: bool = False
    """Whether a function says what each batch's loss is divided by."""


@dataclass
class Course:
    """What one worker saw."""

    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    """The epoch and samples of each step."""
    splits: list[tuple[int, ...]] = field(default_factory=list)
    weights: Any = None
    velocity: Any = None
    state: str = ""


class Adapter(Protocol):
    """Trains a task on so many workers; an error stands in the place of what a worker saw."""

    def train(self, task: Task, workers: int) -> list[Course | str]:
        """Return what each worker saw, or the error that it ended with."""


def data() -> tuple[Floats, Floats]:
    """Return inputs and targets, the same for everybody."""
    draw = np.random.default_rng(5)
    return draw.standard_normal((LENGTH, INPUTS)), draw.standard_normal((LENGTH, OUTPUTS))


def first_weights() -> Floats:
    """Return the weights to start with."""
    return np.random.default_rng(6).standard_normal((INPUTS, OUTPUTS))


def in_one_process(global_batch: int, epochs: int) -> Floats:
    """Train on the joined batches: the reference of all adapters."""
    x, y = data()
    model = Linear(first_weights())
    for epoch in range(epochs):
        order = Order(length=LENGTH, seed=0, epoch=epoch)
        for start in range(0, LENGTH, global_batch):
            batch = order.at(start, min(start + global_batch, LENGTH))
            model.backward(x[batch], y[batch])
            model.step()
    return model.weights


def number_of(batch: Any) -> int:
    """Count samples, as a function of the user's would count tokens."""
    return len(batch[0])


class NumpyThreads:
    """The NumPy adapter, on threads."""

    def train(self, task: Task, workers: int) -> list[Course | str]:
        """Train on so many threads."""
        team, rendezvous = Team(workers), ThreadRendezvous()
        found = on_threads(team, lambda worker: _numpy_worker(task, team, rendezvous, worker))
        return [
            f"{type(each).__name__}: {each}" if isinstance(each, BaseException) else each
            for each in found
        ]


def _numpy_worker(task: Task, team: Team, rendezvous: ThreadRendezvous, worker: int) -> Course:
    model = Linear(first_weights())
    count: Callable[[Any], int] | None = number_of if task.counted else None
    settings = settings_of(task.global_batch, task.policy, count=count)
    lead = task.leads[worker] if task.leads else 0
    training = NumpyTraining(
        settings, team.generation(worker), rendezvous, model, data(), lead=lead
    )
    session, course = training.session, Course()
    if task.state is not None:
        training.load_state_dict(json.loads(task.state))
        model.weights, model.velocity = task.weights
    try:
        for epoch in session.epochs(task.epochs):
            for x, y, samples in training.batches():
                if task.raises == (worker, session.progress.step):
                    raise ValueError("injected fault")
                course.splits.append(session.plan.split)
                course.seen.append((epoch, samples))
                training.backward(x, y)
                training.step()
                if session.progress.step == task.stop_after:
                    break
            if session.progress.step == task.stop_after:
                break
    except BaseException as error:
        session.fail(error)
        raise
    course.state = json.dumps(training.state_dict())
    course.weights, course.velocity = model.weights, model.velocity
    session.close()
    return course


class TorchProcesses:
    """The torch adapter, on processes."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def train(self, task: Task, workers: int) -> list[Course | str]:
        """Train on so many processes."""
        outcomes = self._workers.attempt(_torch_worker, task, workers=workers)
        return [each.error or each.value for each in outcomes]


def _torch_worker(task: Task) -> Course:
    model = nn.Linear(INPUTS, OUTPUTS, bias=False).double()
    model.weight.data = torch.from_numpy(first_weights().T.copy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = (torch.from_numpy(part) for part in data())
    count: Callable[[Any], int] | None = number_of if task.counted else None
    course = Course()
    with Balancer(task.global_batch, policy=task.policy, count=count) as balancer:
        processes = int(bool(task.leads) and task.leads[balancer.worker] > 0)
        loader = DataLoader(
            TensorDataset(x, y, torch.arange(LENGTH)),
            task.global_batch,
            shuffle=True,
            num_workers=processes,
            prefetch_factor=task.leads[balancer.worker] if processes else None,
        )
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        if task.state is not None:
            balancer.load_state_dict(json.loads(task.state))
            weights, velocity = (torch.from_numpy(part.T.copy()) for part in task.weights)
            model.weight.data.copy_(weights)
            optimizer.state[model.weight]["momentum_buffer"] = velocity
        step = 0
        for epoch in balancer.epochs(task.epochs):
            for inputs, targets, samples in shares:
                if task.raises == (balancer.worker, step):
                    raise ValueError("injected fault")
                course.splits.append(balancer.plan.split)
                course.seen.append((epoch, samples.tolist()))
                loss = (shared(inputs) - targets).square().sum(dim=1).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == task.stop_after:
                    break
            if step == task.stop_after:
                break
        course.state = json.dumps(balancer.state_dict())
        course.weights = model.weight.detach().numpy().T.copy()
        course.velocity = optimizer.state[model.weight]["momentum_buffer"].numpy().T.copy()
    return course

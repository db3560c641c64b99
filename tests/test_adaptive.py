"""The global batch that follows the gradient noise, and the learning rate that follows it."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from poise.core.batch import Batch
from poise.core.limits import Limits
from poise.core.noise import GroupSums, summed_noise_scale
from poise.core.observation import Change, Event
from poise.core.order import Order
from poise.core.plan import Forecast, Plan
from poise.core.split import apportion
from poise.core.timing import SpeedModel
from poise.errors import InvalidSetting, PoiseWarning, StateMismatch
from poise.policy import Decision
from poise.records import read_record, replay
from poise.runtime import budget
from poise.runtime.clocks import Stamp
from poise.runtime.events import Applying, BucketReady, Events, HandedOut
from poise.torch import Balancer, BySamples, norms
from poise.torch.part_gradients import Bucket
from poise.torch.rates import Rates
from tests.cluster import Workers
from tests.inside import norms_row, session_of
from tests.test_exactness import EXACT
from tests.training import Recipe, Weights, build, dataset, distance, weights

SLOW = pytest.mark.slow


@dataclass(frozen=True)
class Shares:
    """Splits every global batch by the same weights, and believes in given speeds."""

    weights: tuple[int, ...]
    fixed_s: float = 0.02
    online = True
    state_type = type(None)

    def init(self, workers: int, global_batch: int) -> tuple[Mapping[int, Any], None]:
        assert workers == len(self.weights)
        return {0: apportion(self.weights, global_batch)}, None

    def update(self, state: None, events: Sequence[Event]) -> tuple[Decision | None, None]:
        changes = [event for event in events if isinstance(event, Change)]
        if not changes:
            return None, state
        return Decision(apportion(self.weights, changes[-1].global_batch), "as told"), state

    def forecast(self, state: None) -> Forecast:
        n = len(self.weights)
        rises = [0.001 * sum(self.weights) / weight if weight else 1.0 for weight in self.weights]
        low = [min(weight, 1) for weight in self.weights]
        return Forecast(
            SpeedModel.of([self.fixed_s] * n, rises), Limits.of(n, min_batch=low), poured_s=1.0
        )


@contextmanager
def every_step() -> Iterator[None]:
    """Look at every step, whatever it costs."""
    usual, budget.MOST_COST = budget.MOST_COST, math.inf
    try:
        yield
    finally:
        budget.MOST_COST = usual


# the noise of gradients whose noise is known

DIMENSIONS, SAMPLES, BATCH = 40, 3840, 64


class Distance(nn.Module):
    """Half the squared distance of each sample from the weights: a quadratic."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))

    def forward(self, points: Tensor) -> Tensor:
        distances: Tensor = (self.place - points).square().sum(dim=1) / 2
        return distances


class Regression(nn.Module):
    """Squared errors of a linear function."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(DIMENSIONS, 1, bias=False).double()
        nn.init.zeros_(self.line.weight)

    def forward(self, rows: Tensor) -> Tensor:
        errors: Tensor = (self.line(rows[:, :-1])[:, 0] - rows[:, -1]).square()
        return errors


def problem(name: str) -> tuple[nn.Module, Tensor, float, float]:
    """Return a model, its data, and the trace and squared norm of its gradients."""
    draw = torch.Generator().manual_seed(5)
    points = torch.randn(SAMPLES, DIMENSIONS, generator=draw, dtype=torch.float64)
    if name == "quadratic":
        points = points * torch.linspace(0.5, 2.0, DIMENSIONS) + 0.22
        gradients = -points
        return Distance(), points, *moments(gradients)
    slope = torch.full((DIMENSIONS,), 1.0, dtype=torch.float64)
    noise = torch.randn(SAMPLES, generator=draw, dtype=torch.float64)
    targets = points @ slope + 3 * noise
    gradients = -2 * targets[:, None] * points
    return Regression(), torch.cat([points, targets[:, None]], dim=1), *moments(gradients)


def moments(gradients: Tensor) -> tuple[float, float]:
    mean = gradients.mean(dim=0)
    return float((gradients - mean).square().sum(dim=1).mean()), float(mean.square().sum())


@dataclass(frozen=True)
class Seen:
    """What worker 0 knows at the end, and what is true."""

    trace: float
    grad_sq: float
    estimates: int
    true_trace: float
    true_grad_sq: float
    clipped_share: float
    gain: float

    @property
    def scale(self) -> float:
        return self.trace / self.grad_sq

    @property
    def true_scale(self) -> float:
        return self.true_trace / self.true_grad_sq


def measured(
    name: str,
    shares: tuple[int, ...],
    *,
    epochs: int = 4,
    micro_batch: int | None = None,
    scales: bool = False,
    clip: float | None = None,
    tokens: bool = False,
    record: str | None = None,
    rate: float = 0.0,
) -> Seen | None:
    """Look at the gradients of a problem; with a rate of 0 they stay what they are."""
    model, data, trace, grad_sq = problem(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7, enabled=scales)
    count = (lambda batch: 3 * len(batch[0])) if tokens else None
    with (
        every_step(),
        Balancer(
            BATCH,
            policy=Shares(shares),
            adapt=(BATCH, BATCH),
            micro_batch=micro_batch,
            scaler=scaler,
            count=count,
            record=record,
        ) as balancer,
    ):
        loader = DataLoader(TensorDataset(data), BATCH, shuffle=True)
        shared, optimizer, batches = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(epochs):
            for batch in batches:
                if micro_batch is None:
                    losses = shared(batch[0])
                    loss = losses.mean() if len(losses) else losses.sum()
                    scaler.scale(loss).backward()
                else:
                    for part in balancer.micro_batches(batch):
                        with part as (points,):
                            scaler.scale(shared(points).mean()).backward()
                if clip is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(shared.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        found = balancer.noise
        if found is None:
            return None
        adapted = session_of(balancer).exchange.engine.adapted
        assert adapted is not None
        return Seen(
            found.trace,
            found.grad_sq,
            found.estimates,
            trace,
            grad_sq,
            adapted.clipped_share,
            adapted.gain,
        )


def check_close(seen: Seen, within: float = 0.1) -> None:
    assert seen.trace == pytest.approx(seen.true_trace, rel=within)
    assert seen.grad_sq == pytest.approx(seen.true_grad_sq, rel=within)
    assert seen.scale == pytest.approx(seen.true_scale, rel=within)


@pytest.mark.parametrize("name", ["quadratic", pytest.param("regression", marks=SLOW)])
def test_unequal_workers_find_the_noise_where_taking_them_as_equal_is_far_off(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    record = tmp_path / "run.jsonl"
    outcomes = workers.run(looked_at, name, (2, 10, 52), str(record), workers=3)
    assert outcomes[1:] == [None, None]
    seen = outcomes[0]
    assert seen.estimates > 200
    check_close(seen)
    rows = [row.observation for row in read_record(record).rows if row.observation is not None]
    naive_trace, naive_grad_sq = [], []
    for row in rows:
        if row.group_sums is not None and row.global_sqnorm is not None:
            sqnorms = row.group_sums[:, 3] / row.group_sums[:, 0]
            wrong = (sqnorms.mean() - row.global_sqnorm) / (3 / BATCH - 1 / BATCH)
            naive_trace.append(wrong)
            naive_grad_sq.append(row.global_sqnorm - wrong / BATCH)
    assert np.mean(naive_trace) > 1.5 * seen.true_trace
    assert np.mean(naive_grad_sq) < 0.7 * seen.true_grad_sq


def looked_at(name: str, shares: tuple[int, ...], record: str) -> Seen | None:
    return measured(name, shares, record=record)


def in_parts(name: str, shares: tuple[int, ...], rate: float) -> Seen | None:
    return measured(name, shares, micro_batch=8, epochs=2, rate=rate)


def test_unequal_workers_agree_with_one_that_accumulates(workers: Workers) -> None:
    """In parts of 8 samples their groups are the same; the weights move, and so does the noise."""
    three = workers.run(in_parts, "regression", (8, 16, 40), 0.001, workers=3)[0]
    one = workers.run(in_parts, "regression", (64,), 0.001, workers=1)[0]
    assert three.estimates == one.estimates > 100
    assert three.trace == pytest.approx(one.trace, rel=1e-9)
    assert three.grad_sq == pytest.approx(one.grad_sq, rel=1e-9)
    still = workers.run(in_parts, "regression", (64,), 0.0, workers=1)[0]
    check_close(still)
    moved = one.true_grad_sq - one.grad_sq
    assert moved > 0.2 * one.true_grad_sq


def alone(name: str, scales: bool) -> Seen | None:
    return measured(name, (BATCH,), scales=scales, epochs=8)


@pytest.mark.parametrize("scales", [False, pytest.param(True, marks=SLOW)])
def test_one_worker_alone_compares_steps_that_follow_each_other(
    workers: Workers, scales: bool
) -> None:
    seen = workers.run(alone, "quadratic", scales, workers=1)[0]
    assert 200 < seen.estimates <= 240  # two steps each, without those in which buckets are new
    check_close(seen)


def special(shares: tuple[int, ...], options: dict[str, Any]) -> Seen | None:
    return measured("quadratic", shares, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"scales": True}, marks=SLOW),
        {"scales": True, "clip": 0.1},
        pytest.param({"clip": 0.1}, marks=SLOW),
        {"tokens": True},
    ],
    ids=str,
)
def test_loss_scales_clipping_and_tokens_leave_the_noise_as_it_is(
    workers: Workers, options: dict[str, Any]
) -> None:
    """The scale doubles every 7 steps; clipping cuts every gradient to a part."""
    seen = workers.run(special, (4, 12, 48), options, workers=3)[0]
    check_close(seen)
    assert (seen.clipped_share > 0.9) == ("clip" in options)


def test_idle_workers_are_no_groups(workers: Workers) -> None:
    seen = workers.run(special, (0, 16, 48), {}, workers=3)[0]
    check_close(seen)
    nobody = workers.run(special, (0, 0, 64), {"epochs": 1}, workers=3)[0]
    assert nobody.estimates == 0


def odd(way: str) -> tuple[int, int, float]:
    """Train in an unusual way; return steps, estimates and the noise scale over the true one."""
    model, data, trace, grad_sq = problem("quadratic")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hook = fp16_compress_hook if way == "compressed" else None
    policy = Shares((4, 12, 48))
    steps = 0
    with (
        every_step(),
        Balancer(BATCH, policy=policy, adapt=(BATCH, BATCH), comm_hook=hook) as balancer,
    ):
        loader = DataLoader(TensorDataset(data), BATCH, shuffle=True)
        shared, optimizer, batches = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(4):
            for (points,) in batches:
                shared(points).mean().backward()
                if way == "two losses":
                    shared(points).mean().backward()
                steps += 1
                if way != "accumulated" or steps % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        found = balancer.noise
        if found is None:
            return steps, 0, 1.0
        return steps, found.estimates, (found.scale or math.nan) / (trace / grad_sq)


@pytest.mark.slow
def test_unusual_steps_are_looked_at_only_where_they_say_something(workers: Workers) -> None:
    steps, estimates, ratio = workers.run(odd, "compressed", workers=3)[0]
    assert estimates > 0.9 * steps
    assert ratio == pytest.approx(1, rel=0.1)
    steps, estimates, ratio = workers.run(odd, "accumulated", workers=3)[0]
    assert 0.4 * steps < estimates <= 0.5 * steps
    assert ratio == pytest.approx(1, rel=0.15)
    steps, estimates, _ = workers.run(odd, "two losses", workers=3)[0]
    assert estimates == 0


class Ticking:
    """A clock on which looking takes as long as a test says."""

    lag = 1
    cheap = True

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s
        self._now_s = 0.0

    def mark(self) -> float:
        self._now_s += self._cost_s
        return self._now_s

    def passed(self, mark: float) -> bool:
        return mark <= self._now_s

    def between_s(self, start: float, end: float) -> float:
        return end - start

    def host_s(self) -> float:
        return self._now_s


def second_of_three() -> Any:
    """Return what the second of three workers knows of the others."""
    return SimpleNamespace(
        generation=SimpleNamespace(worker=1, workers=3), counts=SimpleNamespace(own=4.0)
    )


@pytest.mark.parametrize(("cost_s", "seldom"), [(1e-9, 1), (3e-4, 8), (1.0, 64)])
def test_looking_is_as_rare_as_its_cost_demands(cost_s: float, seldom: int) -> None:
    """Steps of 50 ms; a look takes twice as long as from one mark to the next."""
    now_s = 0.0
    seen = norms.Norms(Ticking(cost_s), torch.device("cpu"), second_of_three(), scaler=None)
    events = Events()
    seen.listen(events)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    looked = []
    for step in range(400):
        batch, stamp = Batch(step, 0, 0, (4, 4, 4)), Stamp(now_s, now_s, 0.0)
        events.tell(
            HandedOut(step, stamp, batch, 4, True, None, now_s, 0.0, compiled=False, fresh=True)
        )
        bucket = Bucket(0, last=True, flat=torch.ones(2), members=[])
        events.tell(BucketReady(step, stamp, step, bucket, first=True))
        now_s += 0.05
        events.tell(Applying(step, Stamp(now_s, now_s, 0.0), optimizer))
        if not np.isnan(seen.row(step)[0]):
            looked.append(step)
    assert looked[0] == 0
    late = [step for step in looked if step >= 200]
    assert len(late) == pytest.approx(200 / seldom, rel=0.1, abs=1)
    assert seldom == 1 or {step % 2 for step in late} == {0, 1}


def alone_with_many_parameters() -> tuple[float, float, int]:
    """Return the mean of all estimates' traces, the largest one, and how many there are."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    data = torch.randn(768, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    traces = []
    with every_step(), Balancer(64, adapt=(64, 64)) as balancer:
        loader = DataLoader(TensorDataset(data), 64, shuffle=True)
        shared, optimizer, batches = balancer.prepare(model, optimizer, loader)
        for (points,) in batches:
            shared(points).square().sum(dim=1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for step in range(12):
            row = norms_row(balancer, step)
            if not np.isnan(row[0]):
                found = summed_noise_scale(GroupSums(*row[:4].tolist()), float(row[4]))
                assert found is not None
                traces.append(found.trace)
    return float(np.median(traces)), max(traces), len(traces)


def test_buckets_in_another_order_are_not_compared(workers: Workers) -> None:
    """After the first step DistributedDataParallel turns the order of gradients around."""
    usual, largest, number = workers.run(alone_with_many_parameters, workers=1)[0]
    assert number >= 4
    assert largest < 3 * usual


def rare_optimizers(way: str) -> tuple[int, float]:
    """Return estimates and the share of steps that count as clipped."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(20, 4, sparse=way == "sparse"), nn.Flatten(), nn.Linear(8, 1)
    )
    halves = [list(model[0].parameters()), list(model[2].parameters())]
    kinds: list[Any] = [torch.optim.SparseAdam if way == "sparse" else torch.optim.SGD]
    optimizers = [
        kind(half, lr=0.01) for kind, half in zip([*kinds, torch.optim.SGD], halves, strict=True)
    ]
    data = torch.randint(0, 20, (400, 2))
    with every_step(), Balancer(16, adapt=(8, 64)) as balancer:
        loader = DataLoader(TensorDataset(data), 16, shuffle=True)
        shared, optimizers, batches = balancer.prepare(model, optimizers, loader)
        for step, (rows,) in enumerate(batches):
            (shared(rows) - 1).square().mean().backward()
            for optimizer in optimizers if way == "sparse" else [optimizers[step % 2]]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        noise = balancer.noise
        if noise is None:
            return 0, 0.0
        adapted = session_of(balancer).exchange.engine.adapted
        assert adapted is not None
        return noise.estimates, adapted.clipped_share


@pytest.mark.parametrize("number", [pytest.param(1, marks=SLOW), 2])
@pytest.mark.parametrize("way", ["sparse", "alternating"])
def test_sparse_gradients_and_optimizers_in_turn(workers: Workers, way: str, number: int) -> None:
    estimates, clipped = workers.run(rare_optimizers, way, workers=number)[0]
    assert clipped == 0
    assert estimates > 5 or (way, number) == ("sparse", 1)


# training under a global batch that moves

RECIPE = Recipe(samples=24 * 40 + 5, global_batch=24, epochs=6)


@dataclass
class Course:
    """One worker's adaptive training."""

    weights: Weights
    plans: list[tuple[tuple[int, ...], float]]
    """Split and gain of each step."""
    seen: list[list[int]]
    """This worker's samples of each step."""
    rates: list[tuple[int, float, float]]
    """Samples so far, the optimizer's learning rate as schedulers see it, and the factor."""
    state: dict[str, Any]
    effective: float


def train_adaptively(
    recipe: Recipe,
    policy: Any,
    *,
    stop_at: int = 10**9,
    start: Course | None = None,
    record: str | None = None,
    micro_batch: list[int | None] | None = None,
) -> Course:
    """Train, perhaps up to a step, perhaps from where another one stopped."""
    torch.set_num_threads(1)
    model, optimizer, _ = build(recipe)
    course = Course({}, [], [], [], {}, 0.0)
    with (
        every_step(),
        Balancer(
            recipe.global_batch,
            policy=policy,
            adapt=(8, 240),
            record=record,
            micro_batch=micro_batch,
        ) as balancer,
    ):
        loader = DataLoader(dataset(recipe), recipe.global_batch, shuffle=True)
        shared, optimizer, batches = balancer.prepare(model, optimizer, loader)
        scheduler = BySamples(CosineAnnealingLR(optimizer, 300), balancer, 24)
        if start is not None:
            balancer.load_state_dict(start.state)
            shared.load_state_dict(start.weights)
            optimizer.load_state_dict(start.state["optimizer"])
            scheduler.load_state_dict(start.state["scheduler"])
        for _ in balancer.epochs(recipe.epochs):
            for inputs, targets, samples in batches:
                if micro_batch is None:
                    nn.functional.cross_entropy(shared(inputs), targets).backward()
                else:
                    for part in balancer.micro_batches((inputs, targets)):
                        with part as (some, their):
                            nn.functional.cross_entropy(shared(some), their).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                course.plans.append((balancer.plan.split, balancer.plan.gain))
                course.seen.append(samples.tolist())
                lr = optimizer.param_groups[0]["lr"]
                course.rates.append((balancer.samples, lr, balancer.learning_rate_factor))
                if len(course.plans) == stop_at:
                    break
            if len(course.plans) == stop_at:
                break
        course.weights = weights(shared)
        course.effective = balancer.effective_samples
        course.state = {
            **balancer.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
    return course


def train_plainly(recipe: Recipe, course: Course) -> Weights:
    """Train in one process with the global batches and gains that a course had."""
    model, optimizer, _ = build(recipe)
    plan = Plan((recipe.global_batch,))
    _ = Rates(optimizer, None, recipe.global_batch, lambda: plan).hooks()
    scheduler = CosineAnnealingLR(optimizer, 300)
    inputs, targets, _ = dataset(recipe).tensors  # type: ignore[attr-defined]
    epoch, position, samples, due = 0, 0, 0, 0
    for split, gain in course.plans:
        order = Order(length=recipe.samples, seed=recipe.seed, epoch=epoch)
        stop = min(position + sum(split), recipe.samples)
        batch = torch.from_numpy(order.at(position, stop))
        plan = Plan(split, gain=gain)
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        samples += stop - position
        for _ in range(samples // 24 - due):
            scheduler.step()
        due = samples // 24
        epoch, position = (epoch + 1, 0) if stop == recipe.samples else (epoch, stop)
    assert (epoch, position) == (recipe.epochs, 0)
    return weights(model)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_equals_one_process_whatever_the_global_batch_does(
    workers: Workers, tmp_path: Path, optimizer: str
) -> None:
    recipe = Recipe(**{**vars(RECIPE), "optimizer": optimizer})
    record = tmp_path / "run.jsonl"
    courses = workers.run(recorded, recipe, Shares((1, 3, 8), 0.3), str(record), workers=3)
    assert courses[0].plans == courses[1].plans == courses[2].plans
    sizes = {sum(split) for split, _ in courses[0].plans}
    assert len(sizes) > 1, "the global batch must have moved for this to show anything"
    assert max(sizes) > 48
    for epoch in samples_of_epochs(courses, recipe):
        assert sorted(epoch) == list(range(recipe.samples))
    assert distance(courses[2].weights, train_plainly(recipe, courses[0])) < 100 * EXACT
    assert replay(read_record(record), Shares((1, 3, 8), 0.3)) is None
    check_rates(courses[0])
    gains = [gain for _, gain in courses[0].plans]
    assert courses[0].effective < courses[0].rates[-1][0]
    assert max(gains) > 1
    settled = 0
    for place in range(10, len(gains)):
        split, gain = courses[0].plans[place]
        if all(plan == (split, gain) for plan in courses[0].plans[place - 10 : place]):
            expected = math.sqrt(sum(split) / 24) if optimizer == "adamw" else gain
            assert courses[0].rates[place][2] == pytest.approx(expected)
            settled += gain > 1
    assert settled >= 1


def recorded(recipe: Recipe, policy: Any, record: str) -> Course:
    return train_adaptively(recipe, policy, record=record)


def samples_of_epochs(courses: list[Course], recipe: Recipe) -> Iterator[list[int]]:
    """Yield all workers' samples of each epoch."""
    together: list[int] = []
    for step in range(len(courses[0].seen)):
        for course in courses:
            together += course.seen[step]
        if len(together) >= recipe.samples:
            yield together
            together = []
    assert not together


def check_rates(course: Course) -> None:
    """The learning rate that a scheduler sees at a number of samples is the same for any path."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), course.rates[0][1])
    plain = CosineAnnealingLR(optimizer, 300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [plain.get_last_lr()[0]]
        for _ in range(300):
            plain.step()
            expected.append(plain.get_last_lr()[0])
    expected = [rate * course.rates[0][1] / expected[1] for rate in expected]
    for samples, rate, _ in course.rates:
        assert rate == pytest.approx(expected[samples // 24], rel=1e-9)


def in_limited_parts(recipe: Recipe, policy: Any) -> Course:
    return train_adaptively(recipe, policy, micro_batch=[2, 16, None])


def test_a_global_batch_grows_past_what_fits_at_once(workers: Workers) -> None:
    """By accumulation, in as many parts as each worker needs."""
    courses = workers.run(in_limited_parts, RECIPE, Shares((1, 3, 8), 0.3), workers=3)
    largest = max(split for split, _ in courses[0].plans)
    assert largest[0] > 4
    assert largest[1] > 32
    assert distance(courses[0].weights, train_plainly(RECIPE, courses[0])) < 100 * EXACT


@SLOW
def test_auto_adapts_too_and_stays_exact(workers: Workers) -> None:
    """With times as they come; where the global batch goes is not known beforehand."""
    courses = workers.run(train_adaptively, RECIPE, "auto", workers=3)
    assert courses[0].plans == courses[1].plans == courses[2].plans
    assert distance(courses[1].weights, train_plainly(RECIPE, courses[0])) < 100 * EXACT


@pytest.mark.parametrize("stop_at", [21, pytest.param(40, marks=SLOW)])
def test_a_resumed_training_goes_on_with_batch_rate_and_noise(
    workers: Workers, stop_at: int
) -> None:
    policy = Shares((1, 3, 8), 0.3)
    courses = workers.run(resumed_from_worker_0, RECIPE, policy, stop_at, workers=3)
    first, second = courses[0]
    engine = first.state["engine"]
    decided = tuple(engine["split"]), engine["adapted"]["gain"]
    assert second.plans[0] == first.plans[-1]
    assert decided in second.plans[:8], "what was decided before the stop must come"
    ends = sorted((first.rates[-1][2], second.plans[0][1]))
    assert ends[0] - 1e-9 <= second.rates[0][2] <= ends[1] + 1e-9
    known, known_later = (
        course.state["engine"]["adapted"]["noise"]["estimates"] for course in (first, second)
    )
    assert known_later == pytest.approx(known + len(second.plans), abs=10)
    assert second.rates[-1][0] == RECIPE.epochs * RECIPE.samples
    together = Course(second.weights, first.plans + second.plans, [], [], {}, 0.0)
    assert distance(second.weights, train_plainly(RECIPE, together)) < 100 * EXACT


def resumed_from_worker_0(recipe: Recipe, policy: Any, stop_at: int) -> tuple[Course, Course]:
    """Go on from worker 0's state, as users do."""
    first = train_adaptively(recipe, policy, stop_at=stop_at)
    states = [first.state]
    dist.init_process_group("gloo")
    dist.broadcast_object_list(states, 0)
    dist.destroy_process_group()
    first.state = states[0]
    return first, train_adaptively(recipe, policy, start=first)


def resumed_elsewhere(recipe: Recipe, state: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Go on with other workers or settings; return plans, factors and progress of some steps."""
    model, optimizer, _ = build(recipe)
    plans, factors = [], []
    with Balancer(**{"global_batch": 24, "adapt": (8, 240), **settings}) as balancer:
        loader = DataLoader(dataset(recipe), 24, shuffle=True)
        shared, optimizer, batches = balancer.prepare(model, optimizer, loader)
        before = state["samples"], state["effective_samples"]
        balancer.load_state_dict(state)
        for inputs, targets, _ in batches:
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            plans.append((sum(balancer.plan.split), balancer.plan.gain))
            factors.append(balancer.learning_rate_factor)
            if len(plans) == 3:
                break
        grown = balancer.samples - before[0], balancer.effective_samples - before[1]
    return plans, factors, grown


def test_a_resume_elsewhere_keeps_batch_and_gain_as_far_as_they_are_allowed(
    workers: Workers,
) -> None:
    policy = Shares((1, 2), 0.3)
    state = workers.run(stopped, RECIPE, policy, 40, workers=2)[0]
    batch = sum(state["split"])
    assert batch > 48
    assert state["gain"] > 1.5
    for number, settings, low, high in (
        (2, {"policy": policy}, batch, batch),
        (3, {"policy": Shares((1, 2, 3), 0.3)}, batch, batch),
        (1, {"policy": Shares((1,), 0.3)}, batch, batch),
        (2, {"policy": policy, "adapt": (8, 40)}, 40, 40),
        (2, {"policy": policy, "global_batch": 48}, batch, batch),
        (2, {"policy": policy, "adapt": None}, 24, 24),
    ):
        found = workers.run(resumed_elsewhere, RECIPE, state, settings, workers=number)
        plans, factors, (samples, effective) = found[0]
        assert all(low <= size <= high for size, _ in plans), (settings, plans)
        most = max(plans[0][0] / settings.get("global_batch", 24), 1.0)
        assert all(1 <= gain <= most + 1e-9 for _, gain in plans), (settings, plans)
        assert all(factor <= most + 1e-9 for factor in factors)
        assert effective <= samples * (1 + 1e-9)


def stopped(recipe: Recipe, policy: Any, stop_at: int) -> dict[str, Any]:
    """Return the balancer's state, which holds no tensor."""
    state = train_adaptively(recipe, policy, stop_at=stop_at).state
    return {name: value for name, value in state.items() if name not in ("optimizer", "scheduler")}


@pytest.mark.parametrize(
    "damage",
    [
        {"effective_samples": None},
        {"effective_samples": -1.0},
        {"rates": 3},
        {"rates": [[{"old": [1, 1], "new": [1, math.inf], "steps": 1}]]},
        {"rates": [[{"old": [1, 1], "new": [1, 1], "steps": -1}]]},
        {"rates": [[{"old": [1, 1]}]]},
        {"gain": "x"},
        {"gain": 0.0},
    ],
    ids=str,
)
def test_damaged_states_are_refused_and_leave_the_place_as_it_is(damage: dict[str, Any]) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = DataLoader(TensorDataset(torch.randn(64, 3)), 4)
    with Balancer(4, adapt=(2, 16)) as balancer:
        balancer.prepare(model, optimizer, data)
        state = {**balancer.state_dict(), "step": 5, "samples": 20, "position": 20, **damage}
        with pytest.raises(StateMismatch, match="damaged"):
            balancer.load_state_dict(state)
        assert balancer.samples == 0


# what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapt": 64}, "adapt=64 is no range"),
        ({"adapt": (64,)}, "is no range"),
        ({"adapt": (64, 32)}, "a range from 1 that rises"),
        ({"adapt": (0, 32)}, "two whole numbers from 1"),
        ({"adapt": (32, 64)}, "global_batch=16, .* start inside of it"),
        ({"adapt": (8, 64), "policy": "even"}, "cannot predict step times"),
        ({"rate": "sqrt"}, "rate='sqrt' .* leave rate out"),
        ({"adapt": (8, 64), "rate": "sqr"}, "did you mean 'sqrt'"),
        ({"adapt": (8, 64), "scaler": 3.0}, "scaler=3.0 is no GradScaler"),
        ({"adapt": (8, 64), "scaler": torch.amp.GradScaler}, "is no GradScaler"),
    ],
    ids=str,
)
def test_what_cannot_be_adapted_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Balancer(16, **settings)


def test_data_sets_that_are_too_small_and_several_models_are_refused() -> None:
    data = DataLoader(TensorDataset(torch.zeros(20, 1)), 4)
    models = [nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    with (
        Balancer(4, adapt=(2, 64)) as balancer,
        pytest.raises(InvalidSetting, match="which has 20"),
    ):
        balancer.prepare(models[0], optimizers[0], data)
    with (
        Balancer(4, adapt=(2, 16)) as balancer,
        pytest.raises(InvalidSetting, match="several models have several"),
    ):
        balancer.prepare(models, optimizers, data)
    both = nn.ModuleList(models)
    with (
        Balancer(4, adapt=(2, 16)) as balancer,
        pytest.raises(InvalidSetting, match="a gradient that no optimizer uses"),
    ):
        balancer.prepare(both, optimizers[0], data)


def test_a_scaler_that_is_not_passed_is_asked_for() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    data = DataLoader(TensorDataset(torch.randn(40, 3)), 4)
    with every_step(), Balancer(4, adapt=(2, 16)) as balancer:
        shared, optimizer, batches = balancer.prepare(model, optimizer, data)

        def train() -> None:
            for (inputs,) in batches:
                scaler.scale(shared(inputs).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        with pytest.warns(PoiseWarning, match=r"divided by 512 .* scaler=scaler"):
            train()

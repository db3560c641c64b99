"""Trainings to compare: the same models and data with Poise and in one plain process."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from poise.core.order import Order
from poise.lab import Pacer
from poise.policy import Policy
from poise.torch import Balancer
from tests.cluster import Fault

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """One training, described by plain values so that it can travel to the workers."""

    model: str = "mlp"
    optimizer: str = "sgd"
    global_batch: int = 12
    samples: int = 50
    epochs: int = 3
    seed: int = 0
    dtype: str = "float64"
    clip: float | None = None
    scheduler: bool = False
    shuffled_inside: int | None = None
    """In the plain run: a seed that shuffles the samples inside each batch."""
    extra: dict[str, Any] = field(default_factory=dict)


def build(recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return model, optimizer and scheduler, the same in every process."""
    torch.manual_seed(7)
    model = _MODELS[recipe.model]().to(getattr(torch, recipe.dtype))
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    scheduler = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30) if recipe.scheduler else None
    )
    return model, optimizer, scheduler


def dataset(recipe: Recipe) -> Dataset[Any]:
    """Return inputs, targets and each sample's own index."""
    generator = torch.Generator().manual_seed(recipe.samples)
    inputs = torch.randn(recipe.samples, 24, generator=generator).to(getattr(torch, recipe.dtype))
    targets = torch.randint(0, 5, (recipe.samples,), generator=generator)
    return TensorDataset(inputs, targets, torch.arange(recipe.samples))


def train_plain(recipe: Recipe) -> Weights:
    """Train in this process without Poise."""
    model, optimizer, scheduler = build(recipe)
    inputs, targets, _ = dataset(recipe).tensors  # type: ignore[attr-defined]
    for batch in plain_batches(recipe):
        _learn(recipe, model, optimizer, scheduler, inputs[batch], targets[batch])
    return weights(model)


def plain_batches(recipe: Recipe) -> Iterator[Tensor]:
    """Yield the samples of each global batch."""
    mixer = torch.Generator().manual_seed(recipe.shuffled_inside or 0)
    for epoch in range(recipe.epochs):
        order = Order(length=recipe.samples, seed=recipe.seed, epoch=epoch)
        for start in range(0, recipe.samples, recipe.global_batch):
            stop = min(start + recipe.global_batch, recipe.samples)
            batch = torch.from_numpy(order.at(start, stop))
            if recipe.shuffled_inside is not None:
                batch = batch[torch.randperm(len(batch), generator=mixer)]
            yield batch


@dataclass
class Log:
    """What one worker saw."""

    weights: Weights
    seen: list[tuple[int, int, list[int]]]
    """(epoch, step, samples) of each batch."""
    splits: list[tuple[int, ...]]
    """The plan's split at each step, as this worker believes."""
    gradients: list[tuple[Weights, Weights]]
    """(weights before, reduced gradient) of each step, if asked for."""


def train_balanced(
    recipe: Recipe,
    policy: str | Policy = "even",
    *,
    loader_workers: tuple[int, ...] = (),
    prefetch: tuple[int, ...] = (),
    fault: Fault | None = None,
    keep_gradients: bool = False,
    hang_s: float | None = None,
    after_step: Callable[[Balancer, int], None] | None = None,
    speeds: Mapping[int, tuple[float, ...]] | None = None,
) -> Log:
    """Train with Poise on this worker.

    Speeds, by the step from which on they hold, make workers sleep: 2 ms a sample at speed 1.
    """
    model, optimizer, scheduler = build(recipe)
    log = Log({}, [], [], [])
    with Balancer(
        recipe.global_batch, policy=policy, seed=recipe.seed, hang_s=hang_s, **recipe.extra
    ) as balancer:
        processes = loader_workers[balancer.worker] if loader_workers else 0
        loader = DataLoader(
            dataset(recipe),
            batch_size=recipe.global_batch,
            shuffle=True,
            num_workers=processes,
            prefetch_factor=prefetch[balancer.worker] if processes else None,
        )
        speeds = speeds or {}
        pacer = Pacer(0.002, 0.0, 1.0)
        if speeds:
            pacer.attach(model)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        step = 0
        for epoch in balancer.epochs(recipe.epochs):
            for inputs, targets, samples in shares:
                if fault is not None:
                    fault.strike(balancer.worker, step)
                if step in speeds:
                    pacer.speed = speeds[step][balancer.worker]
                log.splits.append(balancer.plan.split)
                log.seen.append((epoch, step, samples.tolist()))
                before = weights(shared) if keep_gradients else {}
                gradient = _learn(recipe, shared, optimizer, scheduler, inputs, targets)
                if keep_gradients:
                    log.gradients.append((before, gradient))
                if after_step is not None:
                    after_step(balancer, step)
                step += 1
        log.weights = weights(shared)
    return log


def plain_gradient(recipe: Recipe, at: Weights, samples: Tensor) -> Weights:
    """Return the gradient of a batch at given weights, in one process."""
    model, _, _ = build(recipe)
    model.load_state_dict(at)
    inputs, targets, _ = dataset(recipe).tensors  # type: ignore[attr-defined]
    nn.functional.cross_entropy(model(inputs[samples]), targets[samples]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> Weights:
    """Return a copy of the model's state."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def distance(left: Weights, right: Weights) -> float:
    """Return the largest absolute difference between two sets of weights."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def _learn(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    inputs: Tensor,
    targets: Tensor,
) -> Weights:
    """One step as a user writes it; returns the gradient before clipping."""
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    return gradient


class _Attention(nn.Module):
    """A transformer layer over six tokens of four features, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens: Tensor = self.layer(inputs.view(-1, 6, 4))
        flat: Tensor = self.head(tokens.flatten(1))
        return flat


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 5)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 6)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)
    ),
    "transformer": _Attention,
    "batchnorm": lambda: nn.Sequential(
        nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)
    ),
}

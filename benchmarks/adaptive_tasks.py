"""What the adaptive benchmark trains: two data sets, two networks, their optimizers.

Needs torch and numpy alone, so that another library's environment can import it too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import Dataset, TensorDataset

CONTEXT = 64
"""Characters that the transformer reads; it guesses each one's follower."""
CHARACTERS = 64
"""At least as many as the text has."""
_WIDTH, _HEADS, _LAYERS = 64, 4, 2
_CHUNK = 100


@dataclass(frozen=True)
class Task:
    """A training as someone would set it up on equal workers, before any comparison."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    global_batch: int
    """The batch that the learning rate was chosen for."""
    learning_rate: float
    fixed_batches: tuple[int, ...]
    adapt: tuple[int, int]
    """From which to which global batch adaptive trainings may go."""
    samples: int
    """That a training sees."""
    target: float
    """The accuracy to reach, in parts of 1."""
    quick_samples: int
    quick_target: float
    quick_batches: tuple[int, ...]

    def learning_rate_of(self, global_batch: int) -> float:
        """Return the learning rate of a training with another fixed batch: by square root.

        That is the usual rule for AdamW. SGD's usual one, in proportion, learns more slowly here
        from four times the starting batch on.
        """
        return self.learning_rate * math.sqrt(global_batch / self.global_batch)

    def new_model(self, seed: int) -> nn.Module:
        """Return the network as a seed begins it, the same in every process."""
        torch.manual_seed(seed)
        return self.model()


def read_train(path: Path) -> "Dataset[Any]":
    """Return the samples to train on, from the file that the set-up wrote."""
    with np.load(path) as arrays:
        inputs, targets = arrays["train_inputs"], arrays["train_targets"]
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))


def read_test(path: Path) -> tuple[Tensor, Tensor]:
    """Return the samples that are kept for tests, of which any first ones are a fair sample."""
    with np.load(path) as arrays:
        inputs, targets = arrays["test_inputs"], arrays["test_targets"]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    """Make one step; the same for all arms."""
    loss = cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def weights(model: nn.Module) -> Any:
    """Return a copy of all weights as one array."""
    return parameters_to_vector(model.parameters()).detach().numpy().copy()


@torch.inference_mode()
def accuracy(model: nn.Module, values: Any, inputs: Tensor, targets: Tensor) -> float:
    """Return the part of guesses that is right, with these weights."""
    vector_to_parameters(torch.from_numpy(values), model.parameters())
    right = 0
    for some, wanted in zip(inputs.split(_CHUNK), targets.split(_CHUNK), strict=True):
        right += int((model(some).argmax(dim=1) == wanted).sum())
    return right / targets.numel()


def _convolutions() -> nn.Module:
    """Two convolutions and two linear layers: 0.1 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class _Block(nn.Module):
    """Attention and a small network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attend, self.project = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.widen, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Let each character see those before it."""
        batch, length, _ = x.shape
        heads = self.attend(self.norm_1(x)).view(batch, length, 3, _HEADS, _WIDTH // _HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, _WIDTH))
        added: Tensor = self.narrow(gelu(self.widen(self.norm_2(x))))
        return x + added


class _Transformer(nn.Module):
    """Guesses the next character: 0.1 million parameters, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, _WIDTH)
        self.place = nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, CHARACTERS)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits, with places last."""
        places = self.place(torch.arange(inputs.shape[1]))
        seen = self.blocks(self.character(inputs) + places)
        logits: Tensor = self.head(self.norm(seen))
        return logits.transpose(1, 2)


def _sgd(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)


def _adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate)


IMAGES = Task(
    name="images",
    title="Fashion-MNIST, small CNN, SGD",
    model=_convolutions,
    optimizer=_sgd,
    global_batch=64,
    learning_rate=0.04,
    fixed_batches=(64, 128, 256),
    adapt=(32, 1024),
    samples=50_000,
    target=0.84,
    quick_samples=10_000,
    quick_target=0.7,
    quick_batches=(64, 128),
)
TEXT = Task(
    name="text",
    title="King James text, character transformer, AdamW",
    model=_Transformer,
    optimizer=_adamw,
    global_batch=32,
    learning_rate=0.008,
    fixed_batches=(32, 64, 128),
    adapt=(16, 512),
    samples=13_000,
    target=0.44,
    quick_samples=6_000,
    quick_target=0.38,
    quick_batches=(32, 64),
)
TASKS = {task.name: task for task in (IMAGES, TEXT)}

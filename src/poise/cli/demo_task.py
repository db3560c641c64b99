"""What the demo trains: handwritten digits, a small network, and how it is split."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from poise.core.batch import steps_per_epoch
from poise.core.order import Order

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import TensorDataset

WORKERS = 3
EPOCHS = 12
GLOBAL_BATCH = 60
TRAIN_IMAGES = 1500
TEST_IMAGES = 297
SEED = 1
SPLITS = {0: (30, 20, 10), 75: (6, 40, 14), 150: (45, 0, 15), 225: (1, 24, 35)}
"""By first step. Worker 1 rests for a while."""
STEPS = EPOCHS * steps_per_epoch(TRAIN_IMAGES, GLOBAL_BATCH, drop_last=False)


def write_digits(path: Path) -> None:
    """Write scikit-learn's digits to a file, so that only one process needs to import it."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    np.savez(path, images=images / 16, labels=labels)


def read_digits(path: Path) -> "tuple[TensorDataset, TensorDataset]":
    """Return the images to train on and the images to test with."""
    import torch
    from torch.utils.data import TensorDataset

    with np.load(path) as arrays:
        x, y = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).long()
    return (
        TensorDataset(x[:TRAIN_IMAGES], y[:TRAIN_IMAGES]),
        TensorDataset(x[TRAIN_IMAGES:], y[TRAIN_IMAGES:]),
    )


def new_model() -> "nn.Module":
    """Return the network with its initial weights, the same in every process."""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).double()


def new_optimizer(model: "nn.Module") -> "Optimizer":
    """Return stochastic gradient descent with momentum."""
    from torch.optim import SGD

    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_plainly(digits: Path) -> "dict[str, Tensor]":
    """Train in this process, without Poise, on the same global batches; return the weights."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    x, y = read_digits(digits)[0].tensors
    model = new_model()
    optimizer = new_optimizer(model)
    for epoch in range(EPOCHS):
        order = Order(length=len(x), seed=SEED, epoch=epoch)
        for start in range(0, len(x), GLOBAL_BATCH):
            batch = order.at(start, min(start + GLOBAL_BATCH, len(x))).tolist()
            loss = cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()

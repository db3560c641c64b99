"""What the demo trains: images, a small network, and how long."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from poise.core.order import Order

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Arrays = dict[str, NDArray[Any]]

SPEEDS = (0.9, 0.45, 0.22)
"""Cores of each worker."""
GLOBAL_BATCH = 240
SEED = 1
_CLASSES = 10
_CHANNELS = 56
_LARGER = 3
"""A sample is to take some tenths of a millisecond."""
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_TEST_IMAGES = 1500


@dataclass(frozen=True)
class Images:
    """Images to train on and to test with."""

    train: "tuple[Tensor, Tensor]"
    test: "tuple[Tensor, Tensor]"

    @property
    def side(self) -> int:
        """Width and height of an image."""
        return int(self.train[0].shape[-1])


def images_file(directory: Path) -> Path:
    """Where the data set lies for the workers."""
    return directory / "images.npz"


def errors_file(directory: Path, worker: int) -> Path:
    """Where a worker's stderr goes, so that it cannot tear the live table."""
    return directory / f"worker-{worker}.stderr"


def write_images(path: Path, folder: Path = _DEBIAN) -> str:
    """Write the data set to a file, so that only one process needs to look for it; say which."""
    name, arrays = _fashion(folder) if folder.is_dir() else _digits()
    np.savez(path, **arrays)  # type: ignore[arg-type]  # none is an option
    return f"{len(arrays['train_labels']):,} images of {name}"


def read_images(path: Path) -> Images:
    """Return the images that `write_images` wrote."""
    import torch

    with np.load(path) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return Images(
        (tensors["train_images"], tensors["train_labels"].long()),
        (tensors["test_images"], tensors["test_labels"].long()),
    )


def images_of_step(length: int) -> Iterator[list[int]]:
    """Yield the images of each global batch, in the order in which Poise takes them."""
    for epoch in count():
        order = Order(length=length, seed=SEED, epoch=epoch)
        for start in range(0, length - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            yield order.at(start, start + GLOBAL_BATCH).tolist()


def new_model(side: int) -> "nn.Module":
    """Return the network for square images, the same in every process."""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    flat = _CHANNELS * (side // 4) ** 2
    blocks = [_block(1, _CHANNELS // 2), _block(_CHANNELS // 2, _CHANNELS)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(flat, _CLASSES))


def new_optimizer(model: "nn.Module") -> "Optimizer":
    """Return stochastic gradient descent with momentum."""
    from torch.optim import SGD

    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def _block(inputs: int, outputs: int) -> "nn.Module":
    from torch import nn

    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def _fashion(folder: Path) -> tuple[str, Arrays]:
    """Read Fashion-MNIST as Debian's package dataset-fashion-mnist installs it."""

    def read(name: str, header: int) -> NDArray[Any]:
        with gzip.open(folder / name) as file:
            return np.frombuffer(file.read(), dtype=np.uint8, offset=header)

    def images(name: str) -> NDArray[Any]:
        return (read(name, 16).reshape(-1, 1, 28, 28) / 255).astype(np.float32)

    return "Fashion-MNIST", {
        "train_images": images("train-images-idx3-ubyte.gz"),
        "train_labels": read("train-labels-idx1-ubyte.gz", 8),
        "test_images": images("t10k-images-idx3-ubyte.gz")[:_TEST_IMAGES],
        "test_labels": read("t10k-labels-idx1-ubyte.gz", 8)[:_TEST_IMAGES],
    }


def _digits() -> tuple[str, Arrays]:
    """Take the handwritten digits that come with scikit-learn, three times as large."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    images = images.repeat(_LARGER, axis=2).repeat(_LARGER, axis=3)
    test = slice(1440, None)
    return "handwritten digits", {
        "train_images": images[: test.start],
        "train_labels": labels[: test.start],
        "test_images": images[test],
        "test_labels": labels[test],
    }

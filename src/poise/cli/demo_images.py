"""What the demo trains on: images, found by the command and left in a file for its workers."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

SPEEDS = (0.9, 0.45, 0.22)
"""Cores of each worker."""
_LARGER = 3
"""A sample is to take some tenths of a millisecond."""
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_TEST_IMAGES = 1500


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

"""One worker of the demo: `python -m poise.cli.demo_worker DIRECTORY HOW STEPS`, in a lab.

HOW is "plain" for DistributedDataParallel alone, or "poise". Both train on the same images in the
same order. It tells its progress on stdout. Images come from a file in the directory; stderr goes
to a file there.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from poise.cli.demo_images import errors_file, images_file
from poise.cli.worker_messages import send
from poise.core.order import Order
from poise.core.split import even_split
from poise.environment import launched_as
from poise.torch import Balancer
from poise.watch.hooks import watching
from poise.watch.recorder import Recorder

GLOBAL_BATCH = 240
SEED = 1
_CLASSES = 10
_CHANNELS = 56

_HANG_S = 60.0
_TESTS = 10
"""How often the accuracy is measured."""
_TEST_BATCH = 500
_FEWEST = 5
"""Steps between two tests, at least: a step with a test is not timed."""


@dataclass(frozen=True)
class Images:
    """Images to train on and to test with."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def side(self) -> int:
        """Width and height of an image."""
        return int(self.train[0].shape[-1])


class Plain:
    """DistributedDataParallel alone: equal shares."""

    def __init__(self, images: Images) -> None:
        dist.init_process_group("gloo")
        self._images = images
        self.model: nn.Module = DistributedDataParallel(new_model(images.side))
        self.optimizer = new_optimizer(self.model)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield an equal part of the global batches that Poise would take, without end."""
        x, y = self._images.train
        split = even_split(dist.get_world_size(), GLOBAL_BATCH)
        start = sum(split[: dist.get_rank()])
        stop = start + split[dist.get_rank()]
        for epoch in count():
            order = Order(length=len(x), seed=SEED, epoch=epoch)
            for begin in range(0, len(x) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
                mine = order.at(begin + start, begin + stop).tolist()
                yield x[mine], y[mine]

    def accuracy(self) -> float:
        """Return the part of the test images that are right, found by worker 0; the others wait."""
        found = 0.0
        self.model.eval()
        if dist.get_rank() == 0:
            x, y = self._images.test
            with torch.no_grad():
                found = (self.model(x).argmax(dim=1) == y).double().mean().item()
        dist.barrier()
        self.model.train()
        return found

    def close(self) -> None:
        """Wait for the others, and leave the group."""
        dist.barrier()
        dist.destroy_process_group()


class Balanced:
    """Poise, as it comes."""

    def __init__(self, images: Images) -> None:
        self._balancer = Balancer(GLOBAL_BATCH, seed=SEED, hang_s=_HANG_S)
        model = new_model(images.side)
        loader = DataLoader(
            TensorDataset(*images.train), GLOBAL_BATCH, shuffle=True, drop_last=True
        )
        self.model: nn.Module
        self.model, self.optimizer, self._loader = self._balancer.prepare(
            model, new_optimizer(model), loader
        )
        self._test = self._balancer.evaluation(DataLoader(TensorDataset(*images.test), _TEST_BATCH))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this worker's share of each global batch, without end."""
        for _ in self._balancer.epochs(sys.maxsize):
            yield from self._loader

    def accuracy(self) -> float:
        """Return the part of the test images that are right; each worker tests its share."""
        right = seen = 0
        with torch.no_grad():
            for x, y in self._test:
                right += int((self.model(x).argmax(dim=1) == y).sum())
                seen += len(x)
        return self._balancer.mean(right / max(seen, 1), seen)

    def close(self) -> None:
        """Wait for the others, and leave them."""
        self._balancer.close()


def main(directory: Path, how: str, steps: int) -> None:
    """Train as one worker of the group that the environment describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends us
    launch = launched_as()
    assert launch is not None
    with errors_file(directory, launch.worker).open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    images = read_images(images_file(directory))
    recorder = Recorder()
    with watching(recorder):
        training = Plain(images) if how == "plain" else Balanced(images)
        _train(training, recorder, steps)
        training.close()


def _train(training: Plain | Balanced, recorder: Recorder, steps: int) -> None:
    every = max(_FEWEST, steps // _TESTS)
    trained_s, before = 0.0, time.perf_counter()
    for step, (x, y) in enumerate(islice(training.batches(), steps)):
        loss = cross_entropy(training.model(x), y) if len(x) else training.model(x).sum()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        trained_s += time.perf_counter() - before
        for row in recorder.take():
            if row.evaluated:
                continue  # a test lies in between
            send(step=step, samples=len(x), work_s=row.local_s + row.input_s, step_s=row.end_s)
        if (step + 1) % every == 0 or step + 1 == steps:
            send(step=step, trained_s=trained_s, accuracy=training.accuracy())
        before = time.perf_counter()


def read_images(path: Path) -> Images:
    """Return the images that `write_images` wrote."""
    with np.load(path) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return Images(
        (tensors["train_images"], tensors["train_labels"].long()),
        (tensors["test_images"], tensors["test_labels"].long()),
    )


def new_model(side: int) -> nn.Module:
    """Return the network for square images, the same in every process."""
    torch.manual_seed(SEED)
    flat = _CHANNELS * (side // 4) ** 2
    blocks = [_block(1, _CHANNELS // 2), _block(_CHANNELS // 2, _CHANNELS)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(flat, _CLASSES))


def new_optimizer(model: nn.Module) -> SGD:
    """Return stochastic gradient descent with momentum."""
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def _block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

"""One worker of the demo: `python -m poise.cli.demo_worker DIRECTORY`, started by `poise demo`.

It tells its progress on stdout. The data set comes from a file in the directory; stderr and the
final weights go to files there.
"""

import math
import os
import signal
import sys
from pathlib import Path

from poise.cli.demo_task import (
    EPOCHS,
    GLOBAL_BATCH,
    SEED,
    SPLITS,
    TEST_IMAGES,
    new_model,
    new_optimizer,
    read_digits,
)
from poise.cli.worker_messages import send
from poise.environment import launched_as

_HANG_S = 60.0


def digits_file(directory: Path) -> Path:
    """Where the parent puts the data set."""
    return directory / "digits.npz"


def errors_file(directory: Path, worker: int) -> Path:
    """Where a worker's stderr goes, so that it cannot tear the live table."""
    return directory / f"worker-{worker}.stderr"


def weights_file(directory: Path, worker: int) -> Path:
    """Where a worker's final weights go."""
    return directory / f"worker-{worker}.pt"


def main(directory: Path) -> None:
    """Train as one worker of the group that the environment describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends us
    launch = launched_as()
    assert launch is not None
    with errors_file(directory, launch.worker).open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    _train(directory)


def _train(directory: Path) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    from poise.torch import Balancer, Fixed

    torch.set_num_threads(1)
    train, test = read_digits(digits_file(directory))
    with Balancer(GLOBAL_BATCH, policy=Fixed(SPLITS), seed=SEED, hang_s=_HANG_S) as balancer:
        model = new_model()
        model, optimizer, loader = balancer.prepare(
            model,
            new_optimizer(model),
            DataLoader(train, batch_size=GLOBAL_BATCH, shuffle=True),
        )
        step = 0
        for epoch in balancer.epochs(EPOCHS):
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                send(step=step, epoch=epoch, samples=len(x), loss=_number(loss.item()))
                step += 1
        model.eval()
        for x, y in balancer.evaluation(DataLoader(test, batch_size=TEST_IMAGES)):
            with torch.no_grad():
                correct = (model(x).argmax(dim=1) == y).double().mean()
            send(accuracy=balancer.mean(correct, len(x)))
        torch.save(model.state_dict(), weights_file(directory, balancer.worker))


def _number(loss: float) -> float | None:
    """The mean loss of no sample is not a number, which JSON cannot hold."""
    return None if math.isnan(loss) else loss


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`poise demo`: exact training on three unequal workers, watched live and then checked."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from poise.cli.demo_task import (
    EPOCHS,
    STEPS,
    TEST_IMAGES,
    TRAIN_IMAGES,
    WORKERS,
    train_plainly,
    write_digits,
)
from poise.cli.demo_worker import digits_file, errors_file, weights_file
from poise.cli.requirements import require
from poise.cli.worker_messages import Message, WorkerEnded, receive
from poise.lab.processes import local_workers

if TYPE_CHECKING:
    from torch import Tensor

SAME_WITHIN = 1e-12
"""Weights are float64: equal training differs by the order of additions only."""

_INTRODUCTION = (
    f"Three processes of this machine train one network on {TRAIN_IMAGES:,} handwritten digits. "
    "Their shares of each global batch are unequal and change on the way; one of them even rests "
    "for a while. Then one process trains the same network in plain PyTorch, and the weights are "
    "compared."
)
_SAME = "Unequal and changing shares, one worker idle at times: the result is that of one machine."


def demo() -> int:
    """Run the demo; return 0 if both trainings end with the same weights, else 1."""
    require("torch", "sklearn", extra="demo")
    console = Console(highlight=False)
    console.print(_INTRODUCTION, end="\n\n")
    with TemporaryDirectory(prefix="poise-demo-") as name:
        directory = Path(name)
        write_digits(digits_file(directory))
        try:
            accuracy = _train_on_workers(console, directory)
        except WorkerEnded as ended:
            _show_failure(ended, directory)
            return 1
        console.print(f"Test accuracy: {accuracy:.1%} of {TEST_IMAGES} images.")
        console.print("Training the same network in one process, without Poise ...")
        difference = _difference_from_plain(directory)
    return _show_verdict(console, difference)


def largest_difference(weights: "Mapping[str, Tensor]", others: "Mapping[str, Tensor]") -> float:
    """Return the largest absolute difference of any weight; infinite if they do not match up."""
    if not weights or weights.keys() != others.keys():
        return float("inf")
    pairs = [(weights[name], others[name]) for name in weights]
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    differences = [(one - other).abs().max().item() for one, other in pairs]
    # A comparison with NaN is false, so max() could pass over one.
    return max(float("inf") if math.isnan(d) else d for d in differences)


def is_same_training(difference: float) -> bool:
    """Whether weights that differ so much at most come from the same training."""
    return difference <= SAME_WITHIN


@dataclass
class Board:
    """What the table shows: the last step that all workers have reported."""

    step: int = 0
    """Steps complete on all workers."""
    epoch: int = 0
    samples: list[int] = field(default_factory=lambda: [0] * WORKERS)
    """Local batches of the last complete step."""
    seen: list[int] = field(default_factory=lambda: [0] * WORKERS)
    """Samples trained on so far."""
    losses: list[float | None] = field(default_factory=lambda: [None] * WORKERS)
    waiting: dict[int, dict[int, Message]] = field(default_factory=dict)
    """Reports of steps that are not complete yet, by step and worker."""

    def note(self, worker: int, report: Message) -> None:
        """Take in one worker's report of one step."""
        reports = self.waiting.setdefault(report["step"], {})
        reports[worker] = report
        if len(reports) == WORKERS:
            self._complete(self.waiting.pop(report["step"]))

    def _complete(self, reports: Mapping[int, Message]) -> None:
        self.step, self.epoch = reports[0]["step"] + 1, reports[0]["epoch"] + 1
        self.samples = [reports[worker]["samples"] for worker in range(WORKERS)]
        self.losses = [reports[worker]["loss"] for worker in range(WORKERS)]
        self.seen = [sum(pair) for pair in zip(self.seen, self.samples, strict=True)]


def _train_on_workers(console: Console, directory: Path) -> float:
    """Show the workers' progress until they are done; return the test accuracy."""
    command = [sys.executable, "-m", "poise.cli.demo_worker", str(directory)]
    board, accuracy = Board(), float("nan")
    with (
        local_workers(command, WORKERS) as processes,
        Live(_picture(board), console=console, refresh_per_second=15) as live,
    ):
        for worker, message in receive(processes):
            if "accuracy" in message:
                accuracy = message["accuracy"]
            else:
                board.note(worker, message)
                live.update(_picture(board))
    if not console.is_terminal:
        console.print()  # there the last picture comes without the end of its last line
    return accuracy


def _picture(board: Board) -> Group:
    table = Table("worker")
    for heading in ("local batch", "share", "samples so far", "loss"):
        table.add_column(heading, justify="right", min_width=len(heading))
    whole = sum(board.samples)
    for worker, local in enumerate(board.samples):
        share = f"{local / whole:.0%}" if whole else "-"
        row = (str(local), share, f"{board.seen[worker]:,}", _loss_text(board.losses[worker]))
        table.add_row(str(worker), *row, style="dim" if whole and not local else None)
    table.add_section()
    table.add_row("all", str(whole), "100%" if whole else "-", f"{sum(board.seen):,}", _mean(board))
    return Group(table, _bar(board))


def _bar(board: Board) -> Table:
    place = f"step {board.step:>{len(str(STEPS))}} of {STEPS}, epoch {board.epoch} of {EPOCHS}"
    split = f", split {board.samples}" if board.step else ": starting workers ..."
    line = Table.grid(padding=(0, 2))
    line.add_row(ProgressBar(STEPS, board.step, width=24), Text(place + split))
    return line


def _mean(board: Board) -> str:
    """The loss of the global batch: the workers' losses, weighted by their shares."""
    known = [
        (local, loss)
        for local, loss in zip(board.samples, board.losses, strict=True)
        if loss is not None
    ]
    whole = sum(local for local, _ in known)
    return _loss_text(sum(local * loss for local, loss in known) / whole if whole else None)


def _loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _difference_from_plain(directory: Path) -> float:
    """Train plainly and return the largest difference to any worker's weights."""
    plain = train_plainly(digits_file(directory))
    return max(largest_difference(plain, weights) for weights in _weights(directory))


def _weights(directory: Path) -> "Iterable[dict[str, Tensor]]":
    import torch

    for worker in range(WORKERS):
        yield torch.load(weights_file(directory, worker), weights_only=True)


def _show_verdict(console: Console, difference: float) -> int:
    found = f"largest weight difference {difference:.1e}, limit {SAME_WITHIN:.0e} (float64)"
    if is_same_training(difference):
        console.print(f"[bold green]same training[/]: {found}")
        console.print(_SAME)
        return 0
    console.print(f"[bold red]different training[/]: {found}")
    console.print("This must not happen; please report it, with the output of: poise doctor")
    return 1


def _show_failure(ended: WorkerEnded, directory: Path) -> None:
    errors = errors_file(directory, ended.worker)
    text = errors.read_text(errors="replace").strip() if errors.exists() else ""
    print(f"poise: {ended}; its stderr:\n{text or '(nothing)'}", file=sys.stderr)

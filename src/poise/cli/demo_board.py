"""What the demo shows: a live table of one training, and the verdict on two."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from poise.cli.columns import right
from poise.cli.worker_messages import Message

_RECENT = 8
"""Steps over which the live table averages."""


@dataclass
class Lane:
    """One worker of a training."""

    cores: float
    samples: int = 0
    """Its last local batch."""
    work_s: list[float] = field(default_factory=list)
    """Its own work in each step."""
    step_s: list[float] = field(default_factory=list)

    @property
    def waiting(self) -> float:
        """The part of its time in which it waited for the others, over all steps."""
        total = sum(self.step_s)
        return 1 - sum(self.work_s) / total if total else 0.0


@dataclass
class Board:
    """One training as it goes."""

    title: str
    lanes: Sequence[Lane]
    steps: int
    step: int = 0
    tests: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of training so far, and the accuracy then."""

    def note(self, worker: int, message: Message) -> None:
        """Take in what a worker tells."""
        self.step = max(self.step, message["step"] + 1)
        if "accuracy" not in message:
            lane = self.lanes[worker]
            lane.samples = message["samples"]
            lane.work_s.append(message["work_s"])
            lane.step_s.append(message["step_s"])
        elif worker == 0:
            self.tests.append((message["trained_s"], message["accuracy"]))

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.lanes[0].step_s)

    @property
    def waiting(self) -> float:
        """The part of all workers' time that was spent waiting."""
        return statistics.mean(lane.waiting for lane in self.lanes)

    @property
    def trained_s(self) -> float:
        """Seconds of training, without the tests."""
        return self.tests[-1][0]

    @property
    def accuracy(self) -> float:
        """The accuracy at the end."""
        return self.tests[-1][1]

    def seconds_to(self, accuracy: float) -> float:
        """Return how long it took to be so accurate."""
        return next(seconds for seconds, found in self.tests if found >= accuracy)


def picture(board: Board) -> Group:
    """Return the live table with its progress bar."""
    columns = right("cores", "local batch", "ms a step", "waiting", "samples/s")
    table = Table("worker", *columns, title=board.title, title_justify="left")
    for worker, lane in enumerate(board.lanes):
        table.add_row(str(worker), f"{lane.cores:g}", *_cells(lane))
    line = Table.grid(padding=(0, 2))
    place = f"step {board.step:>{len(str(board.steps))}} of {board.steps}"
    if board.tests:
        place += f", accuracy {board.accuracy:.1%}"
    line.add_row(ProgressBar(board.steps, board.step, width=24), Text(place))
    return Group(table, line)


def verdict(plain: Board, balanced: Board) -> tuple[Table, str]:
    """Return the comparison, and a sentence about it."""
    reached = min(plain.accuracy, balanced.accuracy)
    title = "The same images, the same order, the same machine"
    table = Table("", *right("plain DDP", "Poise"), title=title)
    boards = (plain, balanced)
    table.add_row("step, median", *[f"{each.step_s * 1e3:.0f} ms" for each in boards])
    table.add_row("waiting for others and the network", *[f"{each.waiting:.0%}" for each in boards])
    table.add_row("training", *[f"{each.trained_s:.1f} s" for each in boards])
    table.add_row(
        f"until {reached:.1%} accuracy", *[f"{each.seconds_to(reached):.1f} s" for each in boards]
    )
    table.add_row("accuracy at the end", *[f"{each.accuracy:.1%}" for each in boards])
    cores = [lane.cores for lane in plain.lanes]
    ceiling = statistics.mean(cores) / min(cores)
    faster = plain.trained_s / balanced.trained_s
    return table, (
        f"Poise trained {faster:.2f} times as fast, the time to learn the split included; by the "
        f"cores alone no split can be more than {ceiling:.2f} times as fast."
    )


def _cells(lane: Lane) -> tuple[str, ...]:
    if not lane.step_s:
        return ("-",) * 4
    work_s, step_s = (statistics.median(each[-_RECENT:]) for each in (lane.work_s, lane.step_s))
    return (
        str(lane.samples),
        f"{work_s * 1e3:.0f}",
        f"{max(0.0, 1 - work_s / step_s):.0%}",
        f"{lane.samples / step_s:,.0f}",
    )

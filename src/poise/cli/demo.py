"""`poise demo`: three workers of unequal speed train the same twice, plainly and with Poise."""

import sys
from argparse import ArgumentParser
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.live import Live

from poise.cli.demo_board import Board, Lane, picture, verdict
from poise.cli.demo_images import SPEEDS, errors_file, images_file, write_images
from poise.cli.options import require, whole
from poise.cli.worker_messages import WorkerEnded, receive
from poise.lab import Lab

_TITLES = {"plain": "Plain DistributedDataParallel", "poise": "Poise"}
_SAME_WITHIN = 0.02
"""Accuracies that differ by less are the same: rounding may turn a few test images around."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `demo` takes."""
    parser.add_argument(
        "--steps",
        type=whole("a number of steps", 10),  # the first ones are not timed
        default=200,
        metavar="N",
        help="steps of each training, at least 10 (default 200, about a minute)",
    )
    parser.set_defaults(command=demo)


def demo(*, steps: int) -> int:
    """Run the demo; return 0 if both trainings reach the same accuracy, else 1."""
    require("torch", "sklearn", extra="demo")
    console = Console(highlight=False)
    with TemporaryDirectory(prefix="poise-demo-") as name:
        directory = Path(name)
        what = write_images(images_file(directory))
        cores = ", ".join(f"{speed:g}" for speed in SPEEDS)
        console.print(
            f"Three processes of this machine, held to {cores} cores, train one network on "
            f"{what}: first with plain DistributedDataParallel, then with Poise.",
            end="\n\n",
        )
        boards = []
        for how in _TITLES:
            try:
                boards.append(_train(console, directory, how, steps))
            except WorkerEnded as ended:
                _show_failure(ended, directory)
                return 1
    return _show_verdict(console, *boards)


def is_same_accuracy(one: float, other: float) -> bool:
    """Whether two trainings ended alike."""
    return abs(one - other) <= _SAME_WITHIN


def _train(console: Console, directory: Path, how: str, steps: int) -> Board:
    """Show a training until it is done; return what was seen."""
    board = Board(_TITLES[how], [Lane(cores) for cores in SPEEDS], steps)
    script = ["-m", "poise.cli.demo_worker", str(directory), how, str(steps)]
    with (
        Lab(SPEEDS, say=lambda remark: console.print(f"lab: {remark}")) as lab,
        Live(picture(board), console=console, refresh_per_second=8) as live,
    ):
        for worker, message in receive(lab.start(script, stdout=PIPE)):
            board.note(worker, message)
            live.update(picture(board))
    console.print()
    return board


def _show_verdict(console: Console, plain: Board, balanced: Board) -> int:
    table, sentence = verdict(plain, balanced)
    console.print(table)
    console.print(sentence)
    if is_same_accuracy(plain.accuracy, balanced.accuracy):
        console.print("[bold green]same accuracy[/]: unequal shares, weighted gradients")
        return 0
    console.print(
        f"[bold red]different accuracy[/]: {plain.accuracy:.1%} and {balanced.accuracy:.1%}; "
        "this must not happen; please report it, with the output of: poise doctor"
    )
    return 1


def _show_failure(ended: WorkerEnded, directory: Path) -> None:
    errors = errors_file(directory, ended.worker)
    text = errors.read_text(errors="replace").strip() if errors.exists() else ""
    print(f"poise: {ended}; its stderr:\n{text or '(nothing)'}", file=sys.stderr)

"""`poise lab`: real unequal workers on one machine."""

from argparse import ArgumentParser
from typing import Any

from poise.cli.options import add_script, require, without_dashes
from poise.environment import launched_as
from poise.errors import InvalidSetting
from poise.lab import Lab


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `lab` takes."""
    parser.usage = (
        "poise lab [-h] --speeds S,S,... [--mode MODE] [--walk FILE] [--link RATE] "
        "[--pace TIME] [--from-start] -- SCRIPT [ARGS ...]"
    )
    parser.description = (
        f"{parser.description} Each worker gets so many cores from the moment its model is wrapped "
        "in DistributedDataParallel, which Balancer.prepare does too. Output passes through with "
        "the worker's number in front. Exit code: 0, or that of the first worker that fails. With "
        "--mode async or stale:S a server is started too, which no speed limits, and the workers, "
        "from 1, join it; one that fails does not end the others, and the exit code is the "
        "server's, or that of a worker that ended before training started."
    )
    parser.add_argument(
        "--speeds",
        required=True,
        metavar="S,S,...",
        help="cores of each worker, worker 0 first; 0.5x8 means eight of 0.5",
    )
    parser.add_argument(
        "--mode",
        default="sync",
        metavar="MODE",
        help="sync, or with a server: async, or stale:S for workers at most S steps apart "
        "(default sync)",
    )
    parser.add_argument("--walk", metavar="W.toml", help="how the speeds change while running")
    parser.add_argument(
        "--link",
        metavar="RATE[,RATE...]",
        help="limit what each worker sends, as in 100mbit: one rate for all or one each; needs "
        "root and iproute2",
    )
    parser.add_argument(
        "--pace",
        metavar="PER_SAMPLE[+FIXED]",
        help="sleep inside forward and backward, as in 4ms+20ms, instead of limiting the CPU: for "
        "more workers than cores",
    )
    parser.add_argument("--from-start", action="store_true", help="throttle imports and set-up too")
    add_script(parser)
    parser.set_defaults(command=lab)


def lab(*, speeds: str, script: list[str], **settings: Any) -> int:
    """Run a script on unequal workers; return 0 or the exit code of the first that fails.

    With a server, the exit code is its own.

    Args:
        speeds: of the workers, with commas.
        script: a training script and its arguments, maybe after --.
        settings: walk, link, pace, from_start and mode, as `Lab` takes them.
    """
    require("torch", extra="torch")
    if launched_as() is not None:
        raise InvalidSetting("the lab starts its own workers; run it without torchrun")
    with Lab(speeds, **settings) as bench:
        bench.start(without_dashes(script))
        return bench.wait()

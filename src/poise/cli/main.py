"""The command `poise`: reads the command line and hands over to one subcommand."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from poise import __version__
from poise.errors import PoiseError

COMMANDS = {
    "calibrate": "Write a scenario of a cluster from the record of a training that ran on it.",
    "demo": "Train on three workers of unequal speed, first plainly and then with Poise.",
    "doctor": "Report what workers run on: versions, devices, threads, links between machines.",
    "lab": "Run a training script on real workers of this machine that are unequal on purpose.",
    "plan": "Split a global batch over machines that are only described, before any is used.",
    "serve": "Run a training script as the server of workers that need not wait for each other.",
    "simulate": "Train virtually on a cluster that is only described, with each policy in turn.",
    "verify": "Check that a script trains the same on unequal workers as in one process.",
    "watch": "Say what the workers of a plain DistributedDataParallel script wait for.",
}
"""What each command does; the module of its name in `poise.cli` adds its options."""
_FAILED = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an expected error becomes one line on stderr."""
    words = sys.argv[1:] if argv is None else argv
    options = vars(_parser(words).parse_args(words))
    command = options.pop("command")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks
    try:
        code: int = command(**options)
        if not sys.stdout.closed:  # a watched script may have closed it
            sys.stdout.flush()
    except PoiseError as error:
        print(f"poise: {error}", file=sys.stderr)
        return _FAILED
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:  # not about a file that somebody named
            raise
        print(f"poise: {error.filename!s}: {error.strerror}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("poise: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return what understands these words; commands that are not among them are only listed.

    So nothing is imported that the one command does not need.
    """
    parser = argparse.ArgumentParser(
        prog="poise", description="Train one model on unequal machines as fast as their sum allows."
    )
    parser.add_argument("--version", action="version", version=f"poise {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in words:
            import_module(f"poise.cli.{name}").add_arguments(command)
    return parser

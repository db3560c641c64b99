"""The command `poise`: reads the command line and hands over to one subcommand."""

import argparse
import sys
from collections.abc import Sequence

from poise import __version__
from poise.errors import PoiseError

_FAILED = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an expected error becomes one line on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except PoiseError as error:
        print(f"poise: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("poise: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="poise", description="Train one model on unequal machines as fast as their sum allows."
    )
    parser.add_argument("--version", action="version", version=f"poise {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_doctor(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Train on three local workers with unequal shares, and compare with plain PyTorch."
    demo = commands.add_parser("demo", help=text, description=text)
    demo.set_defaults(run=_demo)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Report versions, devices, threads and the speed of the all-reduce."
    doctor = commands.add_parser(
        "doctor",
        help=text,
        description=text + " With a script, also how far its loader runs ahead: the script is run "
        "until Balancer.prepare returns. Works alone and under torchrun.",
        usage="poise doctor [-h] [--workers N] [SCRIPT [ARGS ...]]",
    )
    doctor.add_argument(
        "--workers",
        type=_two_or_more,
        metavar="N",
        help="local processes that time the all-reduce when no launcher started any (default 2)",
    )
    doctor.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a training script, its args"
    )
    doctor.set_defaults(run=_doctor)


def _demo(_: argparse.Namespace) -> int:
    from poise.cli.demo import demo

    return demo()


def _doctor(arguments: argparse.Namespace) -> int:
    from poise.cli.doctor import doctor

    return doctor(workers=arguments.workers, script=arguments.script)


def _two_or_more(text: str) -> int:
    if not text.isdigit() or int(text) < 2:  # noqa: PLR2004 (fewer have nothing to send)
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes from 2 up")
    return int(text)

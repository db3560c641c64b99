"""The command `poise`: reads the command line and hands over to one subcommand."""

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from poise import __version__
from poise.errors import InvalidSetting, PoiseError

_FAILED = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an expected error becomes one line on stderr."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks
    try:
        code: int = arguments.run(arguments)
        if not sys.stdout.closed:  # a watched script may have closed it
            sys.stdout.flush()
    except PoiseError as error:
        print(f"poise: {error}", file=sys.stderr)
        return _FAILED
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
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
    _add_calibrate(commands)
    _add_demo(commands)
    _add_doctor(commands)
    _add_lab(commands)
    _add_plan(commands)
    _add_serve(commands)
    _add_simulate(commands)
    _add_verify(commands)
    _add_watch(commands)
    return parser


def _add_calibrate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Write a scenario of a cluster from the record of a training that ran on it."
    calibrate = commands.add_parser(
        "calibrate",
        help=text,
        description=text + " Speeds, reductions, loaders and noise are those that were measured; "
        "how well they predict is tried on steps that were held out. The scenario is one for "
        "poise simulate: ask there what one more worker or a faster network would bring.",
    )
    calibrate.add_argument("record", metavar="RUN", help='a record: Balancer(record="run.jsonl")')
    calibrate.add_argument(
        "--out", metavar="FILE", help="write the scenario there (default: print it)"
    )
    calibrate.add_argument("--json", action="store_true", help="print what was found as JSON")
    calibrate.set_defaults(run=_calibrate)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Train on three workers of unequal speed, first plainly and then with Poise."
    demo = commands.add_parser("demo", help=text, description=text)
    demo.add_argument(
        "--steps",
        type=_ten_or_more,
        default=200,
        metavar="N",
        help="steps of each training, at least 10 (default 200, about a minute)",
    )
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


def _add_lab(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Run a training script on real workers of this machine that are unequal on purpose."
    lab = commands.add_parser(
        "lab",
        help=text,
        description=text + " Each worker gets so many cores from the moment its model is wrapped "
        "in DistributedDataParallel, which Balancer.prepare does too. Output passes through with "
        "the worker's number in front. Exit code: 0, or that of the first worker that fails. With "
        "--mode async or stale:S a server is started too, which no speed limits, and the workers, "
        "from 1, join it; one that fails does not end the others, and the exit code is the "
        "server's, or that of a worker that ended before training started.",
        usage="poise lab [-h] --speeds S,S,... [--mode MODE] [--walk FILE] [--link RATE] "
        "[--pace TIME] [--from-start] -- SCRIPT [ARGS ...]",
    )
    lab.add_argument(
        "--speeds",
        required=True,
        metavar="S,S,...",
        help="cores of each worker, worker 0 first; 0.5x8 means eight of 0.5",
    )
    lab.add_argument(
        "--mode",
        default="sync",
        metavar="MODE",
        help="sync, or with a server: async, or stale:S for workers at most S steps apart "
        "(default sync)",
    )
    lab.add_argument("--walk", metavar="W.toml", help="how the speeds change while running")
    lab.add_argument(
        "--link",
        metavar="RATE[,RATE...]",
        help="limit what each worker sends, as in 100mbit: one rate for all or one each; needs "
        "root and iproute2",
    )
    lab.add_argument(
        "--pace",
        metavar="PER_SAMPLE[+FIXED]",
        help="sleep inside forward and backward, as in 4ms+20ms, instead of limiting the CPU: for "
        "more workers than cores",
    )
    lab.add_argument("--from-start", action="store_true", help="throttle imports and set-up too")
    lab.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a training script, its args"
    )
    lab.set_defaults(run=_lab)


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Split a global batch over machines that are only described, before any is used."
    plan = commands.add_parser(
        "plan",
        help=text,
        description=text + " Says who gets how many samples, how long a step takes, how much an "
        "even split would lose, and which worker is not worth having.",
    )
    plan.add_argument("file", metavar="CLUSTER.toml", help="workers and network")
    plan.add_argument(
        "--global-batch", required=True, metavar="N", help="samples of a step, over all workers"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument(
        "--sweep",
        metavar="FILE",
        help="draw throughput over the global batch into a .png or .svg; needs poise[report]",
    )
    plan.add_argument(
        "--noise-scale",
        metavar="PHI",
        help="gradient noise scale in samples: also find the global batch that learns fastest "
        "(default: [training] noise_scale of the file)",
    )
    plan.add_argument(
        "--start-batch",
        metavar="B0",
        help="global batch that the learning rate is chosen for (default: [training] start_batch "
        "of the file, else N)",
    )
    plan.set_defaults(run=_plan)


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Run a training script as the server of workers that need not wait for each other."
    serve = commands.add_parser(
        "serve",
        help=text,
        description=text + " The script runs unchanged; it holds the weights, applies the "
        "gradients that workers push, and evaluates and saves as the script says. A worker is the "
        "same script, started anywhere with POISE_SERVER set to the server's address. Workers may "
        "join and leave at any time. Off 127.0.0.1, POISE_SECRET must be set to the same words "
        "on all. A table on stderr shows what each worker contributes. The exit code is the "
        "script's own.",
        usage="poise serve [-h] [--host H] [--port P] [--workers N] [--mode MODE] [--save FILE] "
        "[--save-every S] [--closed] SCRIPT [ARGS ...]",
    )
    serve.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on (default 127.0.0.1)"
    )
    serve.add_argument(
        "--port",
        type=_port,
        default=29400,
        metavar="P",
        help="port to listen on, 0 for any that is free (default 29400)",
    )
    serve.add_argument(
        "--workers",
        type=_one_worker_or_more,
        default=1,
        metavar="N",
        help="training starts when so many have joined; more may join later (default 1)",
    )
    serve.add_argument(
        "--mode",
        metavar="MODE",
        help="async, or stale:S for workers at most S steps apart (default: as the script says, "
        "else async)",
    )
    serve.add_argument(
        "--save",
        metavar="FILE",
        help="save model, optimizer and place there, and go on from there if it exists",
    )
    serve.add_argument(
        "--save-every",
        type=_seconds,
        metavar="S",
        help="seconds between two saves (default 60); it is saved after each epoch too",
    )
    serve.add_argument(
        "--closed",
        action="store_true",
        help="once training has begun, end with an error when all workers are lost, instead of "
        "waiting for others",
    )
    serve.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a training script, its args"
    )
    serve.set_defaults(run=_serve)


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Train virtually on a cluster that is only described, with each policy in turn."
    simulate = commands.add_parser(
        "simulate",
        help=text,
        description=text + " The engine is that of live training; workers and clock are virtual. "
        "Shows the mean step, waiting, regret to the best split, plan changes, the time to the "
        "goal, worker-hours and cost.",
    )
    simulate.add_argument("file", metavar="SCENARIO.toml", help="a cluster, and what happens to it")
    simulate.add_argument("--json", action="store_true", help="print one JSON object")
    simulate.add_argument(
        "--out", metavar="DIR", help="draw pictures and a page, index.html; needs poise[report]"
    )
    simulate.add_argument(
        "--record", metavar="DIR", help="write the record of each policy, POLICY.jsonl"
    )
    simulate.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="only this policy; may be given several times (default: those of the file)",
    )
    simulate.add_argument("--steps", type=_one_or_more, metavar="N", help="instead of the file's")
    simulate.add_argument("--seed", type=_seed, metavar="S", help="instead of the file's")
    simulate.add_argument(
        "--more",
        type=_more,
        action="append",
        default=[],
        metavar="WORKER[=N]",
        help="what if there were one more worker, or N, like those of this name",
    )
    simulate.add_argument(
        "--network",
        type=_factor,
        default=1.0,
        metavar="F",
        help="what if the network were F times as fast",
    )
    simulate.set_defaults(run=_simulate)


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Check that a script trains the same on unequal workers as in one process."
    verify = commands.add_parser(
        "verify",
        help=text,
        description=text + " The script runs unchanged for a few steps: twice in one process and "
        "once on several local workers with unequal shares; gradients and weights are compared. "
        'Says "same training", or names the first parameter that differs and the likely cause. '
        "Exit code 0: the same; 1: not the same; 2: could not be verified.",
        usage="poise verify [-h] [--workers N] [--steps K] SCRIPT [--workers N] [--steps K] "
        "[--] [ARGS ...]",
    )
    _add_verify_options(verify)
    verify.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="a training script, its args; -- before the args if they begin with one of the above",
    )
    verify.set_defaults(run=_verify, workers=3, steps=4)


def _add_verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=_two_or_more,
        metavar="N",
        default=argparse.SUPPRESS,
        help="local processes that train with unequal shares (default 3)",
    )
    parser.add_argument(
        "--steps",
        type=_one_or_more,
        metavar="K",
        default=argparse.SUPPRESS,
        help="steps to compare (default 4)",
    )


def _add_watch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Say what the workers of a plain DistributedDataParallel script wait for."
    watch = commands.add_parser(
        "watch",
        help=text,
        description=text + " The script runs unchanged, and so do its gradients; every worker is "
        "started through this command: torchrun ... -m poise watch train.py. Worker 0 reports on "
        "stderr: time lost waiting, on whom, why, and what another split of the same global batch "
        "would gain. The exit code is the script's own.",
        usage="poise watch [-h] [--every S] [--steps N] [--json] SCRIPT [ARGS ...]",
    )
    watch.add_argument(
        "--every",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds of training between two reports (default 10)",
    )
    watch.add_argument(
        "--steps",
        type=_one_or_more,
        metavar="N",
        help="end the report, not the script, after so many steps (default: the script's end)",
    )
    watch.add_argument(
        "--json", action="store_true", help="print no reports but one JSON object, on stdout, last"
    )
    watch.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a training script, its args"
    )
    watch.set_defaults(run=_watch)


def _calibrate(arguments: argparse.Namespace) -> int:
    from poise.cli.calibrate import calibrate

    return calibrate(run=arguments.record, out=arguments.out, as_json=arguments.json)


def _demo(arguments: argparse.Namespace) -> int:
    from poise.cli.demo import demo

    return demo(steps=arguments.steps)


def _doctor(arguments: argparse.Namespace) -> int:
    from poise.cli.doctor import doctor

    return doctor(workers=arguments.workers, script=arguments.script)


def _lab(arguments: argparse.Namespace) -> int:
    from poise.cli.lab import lab

    return lab(
        speeds=arguments.speeds,
        walk=arguments.walk,
        link=arguments.link,
        pace=arguments.pace,
        from_start=arguments.from_start,
        mode=arguments.mode,
        script=_without_dashes(arguments.script),
    )


def _plan(arguments: argparse.Namespace) -> int:
    from poise.cli.plan import plan

    return plan(
        file=arguments.file,
        global_batch=arguments.global_batch,
        as_json=arguments.json,
        picture=arguments.sweep,
        noise_scale=arguments.noise_scale,
        start_batch=arguments.start_batch,
    )


def _serve(arguments: argparse.Namespace) -> int:
    from poise.cli.serve import serve

    return serve(
        script=_without_dashes(arguments.script),
        host=arguments.host,
        port=arguments.port,
        workers=arguments.workers,
        mode=arguments.mode,
        save=arguments.save,
        save_every_s=arguments.save_every,
        closed=arguments.closed,
    )


def _simulate(arguments: argparse.Namespace) -> int:
    from poise.cli.simulate import Asked, simulate
    from poise.sim.what_if import WhatIf

    return simulate(
        Asked(
            file=arguments.file,
            policies=tuple(arguments.policy),
            steps=arguments.steps,
            seed=arguments.seed,
            what_if=WhatIf(tuple(arguments.more), arguments.network),
            out=arguments.out,
            record=arguments.record,
            as_json=arguments.json,
        )
    )


def _verify(arguments: argparse.Namespace) -> int:
    from poise.cli.verify import verify

    if not arguments.script:
        raise InvalidSetting("verify needs a script; give the path of a Python file")
    script, *words = arguments.script
    ours, theirs = options_first(words)
    options = argparse.ArgumentParser(prog="poise verify", add_help=False, allow_abbrev=False)
    _add_verify_options(options)
    options.parse_args(ours, namespace=arguments)
    return verify(workers=arguments.workers, steps=arguments.steps, script=[script, *theirs])


def _watch(arguments: argparse.Namespace) -> int:
    from poise.cli.watch import watch

    return watch(
        script=arguments.script,
        every_s=arguments.every,
        steps=arguments.steps,
        as_json=arguments.json,
    )


def options_first(words: list[str]) -> tuple[list[str], list[str]]:
    """Part what follows a script's name: options of verify first, then words for the script.

    >>> options_first(["--workers", "3", "--steps=2", "--lr", "1", "--steps", "9"])
    (['--workers', '3', '--steps=2'], ['--lr', '1', '--steps', '9'])
    >>> options_first(["--", "--steps", "9"])
    ([], ['--steps', '9'])
    """
    end = 0
    while end < len(words) and (option := words[end].split("=")[0]) in ("--workers", "--steps"):
        end += 2 if words[end] == option else 1
    return words[:end], words[end + 1 :] if words[end : end + 1] == ["--"] else words[end:]


def _without_dashes(words: list[str]) -> list[str]:
    """Return a script with its arguments, without the -- that may stand before it."""
    return words[1:] if words[:1] == ["--"] else words


def _one_or_more(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps from 1 up")
    return int(text)


def _ten_or_more(text: str) -> int:
    if not text.isdigit() or int(text) < 10:  # noqa: PLR2004 (the first ones are not timed)
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps from 10 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed, a whole number from 0 up")
    return int(text)


def _more(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or (count and (not count.isdigit() or int(count) < 1)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a worker's name, or NAME=N with N from 1"
        )
    return name, int(count or 1)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:  # noqa: PLR2004 (the last port there is)
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _one_worker_or_more(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers from 1 up")
    return int(text)


def _two_or_more(text: str) -> int:
    if not text.isdigit() or int(text) < 2:  # noqa: PLR2004 (fewer have nothing to send)
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes from 2 up")
    return int(text)

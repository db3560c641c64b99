"""`poise verify`: whether a script trains the same on unequal workers as in one process."""

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from poise.cli.options import above_0, add_script, require, whole
from poise.cli.verify_progress import Display, Run, StandsStill, asked
from poise.cli.worker_messages import WorkerEnded
from poise.environment import launched_as
from poise.errors import InvalidSetting, WorkerLost
from poise.lab.processes import local_workers
from poise.script import check_script
from poise.verify.causes import Cause, percent
from poise.verify.split import unequal_split

if TYPE_CHECKING:
    from poise.verify.comparison import Difference, Extent
    from poise.verify.observation import Observation, Runs, Variant
    from poise.verify.verdict import Verdict


_OPTIONS = ("--workers", "--steps", "--patience")
_PATIENCE_S = 300.0


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `verify` takes; its options may also follow the script's name."""
    parser.usage = (
        "poise verify [-h] [--workers N] [--steps K] [--patience S] SCRIPT [--workers N] "
        "[--steps K] [--patience S] [--] [ARGS ...]"
    )
    parser.description = (
        f"{parser.description} The script runs unchanged for a few steps: twice in one process and "
        "once on several local workers with unequal shares; gradients and weights are compared. "
        'Says "same training", or names the first parameter that differs and the likely cause. '
        "Exit code 0: the same; 1: not the same; 2: could not be verified."
    )
    _add_options(parser)
    add_script(parser, more="; -- before the args if they begin with one of the above")
    parser.set_defaults(command=verify, workers=3, steps=4, patience=_PATIENCE_S)


def options_first(words: list[str]) -> tuple[list[str], list[str]]:
    """Part what follows a script's name: options of verify first, then words for the script.

    >>> options_first(["--workers", "3", "--steps=2", "--lr", "1", "--steps", "9"])
    (['--workers', '3', '--steps=2'], ['--lr', '1', '--steps', '9'])
    >>> options_first(["--", "--steps", "9"])
    ([], ['--steps', '9'])
    """
    end = 0
    while end < len(words) and (option := words[end].split("=")[0]) in _OPTIONS:
        end += 2 if words[end] == option else 1
    return words[:end], words[end + 1 :] if words[end : end + 1] == ["--"] else words[end:]


def verify(*, workers: int, steps: int, patience: float, script: Sequence[str]) -> int:
    """Print the verdict; return 0 if the training is the same, 1 if not.

    Args:
        workers: how many unequal workers train, as processes of this machine.
        steps: how many steps they train.
        patience: seconds without a step after which a run is given up.
        script: a training script, and its arguments after options that take the place of these.
    """
    if not script:
        raise InvalidSetting("verify needs a script; give the path of a Python file")
    path, *words = script
    ours, theirs = options_first(words)
    parser = ArgumentParser(prog="poise verify", add_help=False, allow_abbrev=False)
    _add_options(parser)
    stated = parser.parse_args(ours, Namespace(workers=workers, steps=steps, patience=patience))
    require("torch", extra="torch")
    if launched_as() is not None:
        raise InvalidSetting("verify starts its own workers; run it without torchrun")
    check_script(script)
    from poise.verify.verdict import judge

    console = Console(highlight=False, soft_wrap=True)
    with TemporaryDirectory(prefix="poise-verify-") as name:
        bench = _Bench(Display(), Path(name), stated, [path, *theirs])
        runs = bench.runs()
        verdict = judge(runs)
        _print_verdict(console, runs, verdict)
        if verdict.difference is None:
            return 0
        if verdict.causes[0].stillable:
            _print_rest(console, judge(bench.runs(stilled=True)))
    return 1


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=whole("a number of processes", 2),
        metavar="N",
        default=SUPPRESS,
        help="local processes that train with unequal shares (default 3)",
    )
    parser.add_argument(
        "--steps",
        type=whole("a number of steps", 1),
        metavar="K",
        default=SUPPRESS,
        help="steps to compare (default 4)",
    )
    parser.add_argument(
        "--patience",
        type=above_0("a number of seconds"),
        metavar="S",
        default=SUPPRESS,
        help=f"give up after so many seconds without a step (default {_PATIENCE_S:.0f})",
    )


@dataclass(frozen=True)
class _Bench:
    """Runs the script as often and in as many ways as the comparison needs."""

    display: Display
    directory: Path
    stated: Namespace
    """Workers, steps and patience."""
    script: Sequence[str]

    def runs(self, *, stilled: bool = False) -> "Runs":
        """Train in one process, in one process with reordered samples, and on the workers."""
        from poise.verify.observation import Runs, Variant

        workers = self.stated.workers
        (alone,) = self._run(Variant("alone", stilled), 1)
        unequal_split(workers, alone.global_batch)  # raises before more time is spent
        (reordered,) = self._run(Variant("reordered", stilled), 1)
        return Runs(alone, reordered, tuple(self._run(Variant("shared", stilled), workers)))

    def _run(self, variant: "Variant", workers: int) -> "list[Observation]":
        from poise.verify.observation import read

        steps, patience_s = self.stated.steps, self.stated.patience
        command = [sys.executable, "-m", "poise.verify.worker"]
        command += [str(self.directory), str(variant), str(steps), *self.script]
        where = _where(variant, workers)
        run = Run(f"{_which(variant)}, {self.script[0]} {where}", workers, steps, patience_s)
        with local_workers(command, workers) as processes:
            try:
                self.display.follow(run, processes)
            except WorkerEnded as ended:
                raise self._failure(variant, ended, where) from None
            except StandsStill:
                raise self._stands_still(variant, run, processes) from None
        return [read(self.directory, variant, worker) for worker in range(workers)]

    def _stands_still(
        self, variant: "Variant", run: Run, processes: "Sequence[Popen[str]]"
    ) -> WorkerLost:
        """Find out where each process is."""
        from poise.verify.reporting import ASK, place, stack_file

        files = [stack_file(self.directory, variant, each) for each in range(run.workers)]
        stacks = asked(processes, ASK, files)
        found = "".join(
            f"  worker {worker} is {run.stage(worker)}, {place(stack, self.script[0])}\n"
            for worker, stack in enumerate(stacks)
        )
        return WorkerLost(
            f"{run.title} made no progress for {run.patience_s:g} s, so it could not be verified; "
            f"all its processes were ended:\n{found}"
            "If a step takes so long here, raise --patience; else see what the script waits for "
            "there"
        )

    def _failure(self, variant: "Variant", ended: WorkerEnded, where: str) -> Exception:
        from poise.verify.worker import culprit_file, errors_file, refusal_file

        refusal, culprit = refusal_file(self.directory), culprit_file(self.directory)
        if refusal.exists():
            return InvalidSetting(refusal.read_text())
        worker, who = ended.worker, str(ended)
        if culprit.exists():  # others may have ended before it, since they wait for it
            worker = int(culprit.read_text())
            who = f"worker {worker}"
        errors = errors_file(self.directory, variant, worker)
        text = errors.read_text(errors="replace").strip() if errors.exists() else ""
        return WorkerLost(
            f"{self.script[0]} failed {where} ({who}), so it could not be verified; its stderr:\n"
            f"{text or '(nothing)'}"
        )


def _which(variant: "Variant") -> str:
    """Say which of the runs it is."""
    number = ("alone", "reordered", "shared").index(variant.arrangement) + 1
    return f"run {number + 3} of 6" if variant.stilled else f"run {number} of 3"


def _where(variant: "Variant", workers: int) -> str:
    how = {
        "alone": "in one process",
        "reordered": "in one process, with each batch in reversed order",
        "shared": f"on {workers} workers",
    }[variant.arrangement]
    return f"{how}, without dropout and batch statistics" if variant.stilled else how


def _print_verdict(console: Console, runs: "Runs", verdict: "Verdict") -> None:
    """Say whether it is the same training, and if not, what differs and why."""
    if verdict.difference is None:
        _print_same(console, runs, verdict.extent)
    else:
        what = escape(_described(verdict.difference))
        console.print(f"[bold red]NOT the same training[/]: {what} ({_workers(runs)})")
        _print_causes(console, verdict.causes)


def _print_rest(console: Console, stilled: "Verdict") -> None:
    """Say what is left to find without dropout and batch statistics."""
    without = "without dropout and batch statistics"
    if stilled.difference is None:
        console.print(f"[bold]nothing else[/]: {without} it is the same training")
    else:
        what = escape(_described(stilled.difference))
        console.print(f"[bold]something else, too[/]: {without}, {what}")
        _print_causes(console, stilled.causes)


def _print_same(console: Console, runs: "Runs", extent: "Extent") -> None:
    from poise.verify.comparison import HALF

    limit = (
        f"in 16-bit precision up to {HALF.limit:.0e} is rounding; float32 shows more"
        if runs.alone.autocast
        else f"rounding alone gives {extent.rounding:.0e}"
    )
    steps = "1 step" if extent.steps == 1 else f"{extent.steps} steps"
    console.print(
        f"[bold green]same training[/]: {steps}, {_workers(runs)}; gradients differ by at most "
        f"{extent.gradients:.0e} of the largest ({limit})"
    )
    if runs.alone.compressed:
        console.print("The comm_hook was left out: it rounds, which is not what is compared here.")


def _described(difference: "Difference") -> str:
    name, step, amount = f"`{difference.name}`", difference.step, percent(difference.amount)
    return {
        "start": f"{name} differs before the first step, by {amount} of the largest weight",
        "gradient": f"the gradient of {name} differs in step {step}, by {amount} of the largest "
        "gradient",
        "setting": f"the optimizer's {name} differs in step {step}",
        "update": f"the update of {name} differs in step {step}, by {amount} of the whole update",
        "worker": f"after step {step}, {name} on worker {difference.worker} is not that of "
        "worker 0",
        "steps": f"step {step} is taken in some processes and not in others",
    }[difference.kind]


def _print_causes(console: Console, causes: Sequence[Cause]) -> None:
    for number, cause in enumerate(causes):
        title = "likely cause" if number == 0 else "also possible"
        evidence = cause.evidence[:1].upper() + cause.evidence[1:]
        console.print(f"[bold]{title}[/]: {escape(cause.name)}. {escape(evidence)}")
        console.print(f"[bold]what to do[/]: {escape(cause.advice)}")


def _workers(runs: "Runs") -> str:
    first = runs.shared[0]
    shares = ", ".join(map(str, first.split))
    return f"{len(first.split)} workers with {shares} of {first.global_batch} samples"

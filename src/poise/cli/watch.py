"""`poise watch`: run a training script unchanged, and say what its workers wait for."""

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from poise.cli.columns import right
from poise.cli.options import above_0, add_script, require, whole
from poise.errors import InvalidSetting
from poise.script import check_script, run, show_error
from poise.watch.findings import LITTLE, Findings
from poise.watch.recorder import FIRST_STEPS, Recorder

if TYPE_CHECKING:
    from poise.watch.monitor import Monitor

MOST_ROWS = 40
"""A longer table is cut; the JSON is not."""

_FAILED = 1
_INTERRUPTED = 130
_OFTEN = 0.6
"""Part of the steps from which on one worker is the one that others wait for."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `watch` takes."""
    parser.usage = "poise watch [-h] [--every S] [--steps N] [--json] SCRIPT [ARGS ...]"
    parser.description = (
        f"{parser.description} The script runs unchanged, and so do its gradients; every worker is "
        "started through this command: torchrun ... -m poise watch train.py. Worker 0 reports on "
        "stderr: time lost waiting, on whom, why, and what another split of the same global batch "
        "would gain. The exit code is the script's own."
    )
    parser.add_argument(
        "--every",
        dest="every_s",
        type=above_0("a number of seconds"),
        default=10.0,
        metavar="S",
        help="seconds of training between two reports (default 10)",
    )
    parser.add_argument(
        "--steps",
        type=whole("a number of steps", 1),
        metavar="N",
        help="end the report, not the script, after so many steps (default: the script's end)",
    )
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print no reports but one JSON object, on stdout, last",
    )
    add_script(parser)
    parser.set_defaults(command=watch)


def watch(
    *, script: Sequence[str], every_s: float = 10.0, steps: int | None = None, as_json: bool = False
) -> int:
    """Run a script, given with its arguments, as one worker; return its own exit code.

    Args:
        script: the path of a Python file, and its arguments.
        every_s: seconds of training between two reports.
        steps: how many steps to look at; None: all.
        as_json: instead of reports on stderr, print one JSON object on stdout at the end.
    """
    if not script:
        raise InvalidSetting("watch needs a script; give the path of a Python file")
    check_script(script)
    require("torch", extra="torch")
    # Not above: these import torch, whose absence is to be told in one line.
    from poise.watch.hooks import watching
    from poise.watch.monitor import Monitor

    report = _Report(as_json)
    recorder = Recorder(steps=steps)
    monitor = Monitor(recorder, report.show, every_s=every_s)
    with watching(recorder, monitor):
        try:
            code = _run(script)
        finally:
            report.end(monitor)
    return code


def _run(script: Sequence[str]) -> int:
    """Run to the end as `python SCRIPT` does: sys.exit passes, errors are printed as there."""
    try:
        run(script)
    except SystemExit:
        raise
    except BaseException as error:
        show_error(error)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
    return 0


class _Report:
    """Where findings are shown."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._shown: Findings | None = None

    def show(self, findings: Findings) -> None:
        """Print a table, unless JSON is asked for."""
        self._shown = findings
        if not self._as_json:
            with suppress(OSError):  # stderr is on a full disk; the training goes on
                _print(self._console, findings)

    def end(self, monitor: "Monitor") -> None:
        """Print what is known when the script is over."""
        complete = monitor.finished
        monitor.leave()
        found = self._shown if complete else monitor.findings()
        if not monitor.joined:
            self._console.print(
                "poise watch: the script made no DistributedDataParallel in this process, so there "
                "is nothing to report; start every worker through poise watch, as with "
                "torchrun -m poise watch SCRIPT"
            )
        elif monitor.summary is None:
            return
        if self._as_json:
            print(json.dumps(None if found is None else found.as_json()), flush=True)
        elif found is not None:
            if not complete:
                _print(self._console, found)
        elif monitor.joined:
            self._console.print(
                f"poise watch: there were too few steps; the first {FIRST_STEPS} do not count"
            )


def _print(console: Console, findings: Findings) -> None:
    console.print(_table(findings), soft_wrap=False)
    if len(findings.workers) > MOST_ROWS:
        hidden = len(findings.workers) - MOST_ROWS
        console.print(f"{hidden:,} more workers are not shown; --json lists all")
    for sentence in _sentences(findings):
        console.print(sentence)


def _table(findings: Findings) -> Table:
    first, last = findings.first_step, findings.last_step
    table = Table(
        *right("worker", "local batch", "compute", "input", "waiting", "last"),
        title=f"poise watch: steps {first} to {last}, {_ms(findings.step_s)} each",
        title_justify="left",
    )
    rows = sorted(findings.workers, key=lambda each: -each.last)[:MOST_ROWS]
    for each in sorted(rows, key=lambda each: each.worker):
        table.add_row(
            str(each.worker),
            f"{each.local_batch:,}" if each.local_batch else "?",
            _ms(each.compute_s),
            _ms(each.input_s),
            _percent(each.waiting),
            _percent(each.last),
        )
    return table


def _sentences(findings: Findings) -> Iterator[str]:
    part = findings.communication_s / findings.step_s
    yield f"[bold]communication[/]: {_ms(findings.communication_s)} a step, {_percent(part)} of it"
    if len(findings.workers) > 1:
        yield f"[bold]lost waiting[/]: {_percent(findings.waiting)} of the workers' time"
        if findings.waiting >= LITTLE:
            yield f"[bold]on whom[/]: {_on_whom(findings)}"
    else:
        yield "there is one worker, and nobody to wait for"
    yield from _why(findings)
    if len(findings.workers) > 1:
        yield f"[bold]another split[/]: {_split(findings)}"
    if findings.left_out:
        yield (
            f"left out: {findings.left_out} steps with evaluation or a pause, "
            f"{findings.left_out_s:,.1f} s together"
        )


def _on_whom(findings: Findings) -> str:
    often = f"worker {findings.slowest}, the last one in {_percent(findings.slowest_last)} of steps"
    return often if findings.slowest_last >= _OFTEN else f"one another; most often {often}"


def _why(findings: Findings) -> Iterator[str]:
    reason = findings.reason
    times_s = {
        "compute": (reason.compute_s, reason.others_compute_s),
        "input": (reason.input_s, reason.others_input_s),
    }
    if reason.cause == "communication":
        yield "[bold]why[/]: communication takes the largest part of a step"
    elif reason.cause in times_s:
        last, others = map(_ms, times_s[reason.cause])
        yield f"[bold]why[/]: {reason.cause}, {last} on the last worker and {others} on the others"


def _split(findings: Findings) -> str:
    gain = findings.gain
    if gain.verdict == "unknown":
        return "not known, since no tensor with samples was among the model's inputs"
    if gain.verdict == "nothing":
        return "nothing to gain"
    less = [1 - step_s / findings.step_s for step_s in (gain.longest_s, gain.shortest_s)]
    basis = (
        "from several local batches of each worker"
        if gain.slopes_seen
        else "a guess, since one local batch does not show which part of a worker's time is fixed"
    )
    return (
        f"{_numbers(gain.split)} would take {_ms(gain.shortest_s)} to {_ms(gain.longest_s)} "
        f"a step, {_percent(less[0])} to {_percent(less[1])} less; {basis}"
    )


def _numbers(split: Sequence[int]) -> str:
    shown = ", ".join(str(local) for local in split[:MOST_ROWS])
    return shown + (", ..." if len(split) > MOST_ROWS else "")


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"

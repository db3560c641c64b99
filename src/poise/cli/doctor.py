"""`poise doctor`: what a training will run on, and what to change before it starts."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from poise.cli import doctor_network
from poise.cli.columns import right
from poise.cli.doctor_facts import Examination, Facts, advice
from poise.cli.options import add_script, require, whole
from poise.cli.worker_messages import WorkerEnded, receive
from poise.core.plain import from_plain
from poise.environment import launched_as
from poise.errors import InvalidSetting, WorkerLost
from poise.lab.processes import local_workers
from poise.runtime.reaching import host_and_port

_LOCAL_PROCESSES = 2


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `doctor` takes."""
    parser.usage = (
        "poise doctor [-h] [--workers N] [SCRIPT [ARGS ...]]\n"
        "       poise doctor --listen [HOST:]PORT\n"
        "       poise doctor HOST:PORT"
    )
    parser.description = (
        f"{parser.description} With a script, also how far its loader runs ahead: the script is "
        "run until Balancer.prepare returns. Works alone and under torchrun. With HOST:PORT, where "
        "worker 0 is going to listen, it looks for what would keep this machine from training "
        "with that one: names, interfaces, ports, clocks, versions, and the speed of the link. For "
        "all of these, run `poise doctor --listen HOST:PORT` there first, with the same "
        "POISE_SECRET on both. The exit code is 1 if training between the two would fail."
    )
    parser.add_argument(
        "--workers",
        type=whole("a number of processes", 2),  # fewer have nothing to send
        metavar="N",
        help="local processes that time the all-reduce when no launcher started any (default 2)",
    )
    parser.add_argument(
        "--listen",
        metavar="[HOST:]PORT",
        help="wait there for the doctor of another machine (HOST: default 127.0.0.1)",
    )
    add_script(parser, more="; or HOST:PORT of another machine")
    parser.set_defaults(command=doctor)


def doctor(
    *, workers: int | None = None, listen: str | None = None, script: Sequence[str] = ()
) -> int:
    """Print a report on worker 0. Warnings do not change the exit code, which is 0.

    Args:
        workers: how many local processes time the all-reduce when no launcher started any.
        listen: where to wait for the doctor of another machine; None: nowhere.
        script: a training script and its arguments, to be run until its Balancer is prepared; or
            HOST:PORT of another machine.
    """
    if listen is not None or _is_address(script):
        return _doctor_of_two(workers, listen, script)
    require("torch", extra="torch")
    launched = launched_as() is not None
    if launched and workers is not None:
        raise InvalidSetting(
            f"--workers {workers} is for a doctor without launcher; under torchrun, leave it out"
        )
    from poise.cli.doctor_worker import examine_group, examine_script

    console = Console(highlight=False)
    examination = examine_script(script) if script else examine_group()
    if examination is None:
        return 0
    if launched:
        peers = f"{len(examination.workers)} workers"
    else:
        count = workers or _LOCAL_PROCESSES
        peers = f"{count} processes on this machine"
        with console.status(f"Timing the all-reduce between {peers} ..."):
            examination = _with_local_timings(examination, count)
    _print_report(console, examination, peers)
    return 0


def _is_address(script: Sequence[str]) -> bool:
    """Whether what stands where a script may stand is HOST:PORT."""
    return bool(script) and ":" in script[0] and not Path(script[0]).exists()


def _doctor_of_two(workers: int | None, where: str | None, script: Sequence[str]) -> int:
    """Look at what lies between this machine and another one; return 1 if training would fail."""
    if where is not None and script:
        raise InvalidSetting(
            f"--listen {where} waits for another machine, and {script[0]!r} is left over; give one "
            "of the two"
        )
    if workers is not None:
        raise InvalidSetting(
            f"--workers {workers} is for processes on this machine; leave it out to examine another"
        )
    if launched_as() is not None:
        raise InvalidSetting(
            "a launcher has started this doctor, which then examines the launcher's workers; leave "
            "out HOST:PORT and --listen, or start it without launcher on each machine"
        )
    if len(script) > 1:
        raise InvalidSetting(
            f"{script[0]} is followed by {script[1]!r}; give HOST:PORT alone, options before it"
        )
    if where is not None:
        alone = where.isdecimal()
        return doctor_network.listen(*host_and_port(f"127.0.0.1:{where}" if alone else where))
    return doctor_network.examine(*host_and_port(script[0]))


def _with_local_timings(examination: Examination, count: int) -> Examination:
    """Let processes that are started here time the all-reduce."""
    command = [sys.executable, "-m", "poise.cli.doctor_worker"]
    try:
        with local_workers(command, count) as processes:
            ((_, message),) = receive(processes)
    except WorkerEnded as ended:
        raise WorkerLost(
            f"{ended} while {count} local processes timed the all-reduce; its stderr is above"
        ) from None
    found = from_plain(Examination, message)
    return replace(examination, backend=found.backend, timings=found.timings)


def _print_report(console: Console, examination: Examination, peers: str) -> None:
    workers = examination.workers
    versions = workers[0].versions.items()
    console.print("  ".join(f"[bold]{name}[/] {escape(version)}" for name, version in versions))
    console.print(_workers_table(workers))
    leads = [facts.lead for facts in workers if facts.lead is not None]
    if leads:
        from poise.engine.rhythm import delay

        largest = max(leads)
        console.print(
            f"Delay of a new plan: {delay(largest)} steps (the largest lead is {largest})"
        )
    if examination.timings:
        console.print(_timings_table(examination, peers))
    else:
        console.print("All-reduce: there is one worker alone, so nothing travels.")
    _print_verdict(console, advice(workers))


def _workers_table(workers: Sequence[Facts]) -> Table:
    with_lead = any(facts.lead is not None for facts in workers)
    columns = right("cores", "threads", "OpenMP", "accelerators", *(["lead"] if with_lead else []))
    table = Table("worker", "host", *columns, title="Workers", title_justify="left")
    for facts in workers:
        openmp = "not set" if facts.openmp_threads is None else str(facts.openmp_threads)
        row = [str(facts.worker), escape(facts.host), str(facts.cores), str(facts.threads), openmp]
        table.add_row(*row, facts.accelerators, *([str(facts.lead)] if with_lead else []))
    return table


def _timings_table(examination: Examination, peers: str) -> Table:
    title = f"All-reduce between {peers}, backend {examination.backend}"
    columns = right("size", "median ms", "MB/s")
    table = Table(*columns, title=title, title_justify="left", min_width=len(title))
    for size_bytes, median_s in examination.timings.items():
        speed = size_bytes / median_s / 1e6
        table.add_row(_size(size_bytes), f"{median_s * 1e3:.3g}", f"{speed:,.0f}")
    return table


def _size(size_bytes: int) -> str:
    million = 1_000_000
    if size_bytes >= million:
        return f"{size_bytes // million} MB"
    return f"{size_bytes // 1_000} KB"


def _print_verdict(console: Console, warnings: Sequence[str]) -> None:
    for text in warnings:
        console.print(f"[bold yellow]warning[/] {escape(text)}", soft_wrap=True)
    if not warnings:
        console.print("[bold green]all well[/]")
        return
    noun = "warning" if len(warnings) == 1 else "warnings"
    console.print(f"[bold yellow]{len(warnings)} {noun}[/]; see above")

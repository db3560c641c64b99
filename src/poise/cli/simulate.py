"""The command `poise simulate`: policies side by side on a cluster that is only described."""

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from poise.cli.columns import right
from poise.cli.options import above_0, require, whole
from poise.cli.simulate_findings import Findings
from poise.errors import InvalidSetting
from poise.policy.naming import KINDS
from poise.sim.outcome import compare
from poise.sim.scenario import Scenario
from poise.sim.scenario_file import MOST_STEPS, declared_scenario
from poise.sim.step import Step
from poise.sim.what_if import WhatIf
from poise.toml_file import Toml, nearest, read_toml


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `simulate` takes."""
    parser.description = (
        f"{parser.description} The engine is that of live training; workers and clock are virtual. "
        "Shows the mean step, waiting, regret to the best split, plan changes, the time to the "
        "goal, worker-hours and cost."
    )
    parser.add_argument("file", metavar="SCENARIO.toml", help="a cluster, and what happens to it")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--out", metavar="DIR", help="draw pictures and a page, index.html; needs poise[report]"
    )
    parser.add_argument(
        "--record", metavar="DIR", help="write the record of each policy, POLICY.jsonl"
    )
    parser.add_argument(
        "--policy",
        dest="policies",
        action="append",
        default=[],
        metavar="NAME",
        help="only this policy; may be given several times (default: those of the file)",
    )
    parser.add_argument(
        "--steps", type=whole("a number of steps", 1), metavar="N", help="instead of the file's"
    )
    parser.add_argument(
        "--seed", type=whole("a seed, a whole number", 0), metavar="S", help="instead of the file's"
    )
    parser.add_argument(
        "--more",
        type=_more,
        action="append",
        default=[],
        metavar="WORKER[=N]",
        help="what if there were one more worker, or N, like those of this name",
    )
    parser.add_argument(
        "--network",
        type=above_0("a number"),
        default=1.0,
        metavar="F",
        help="what if the network were F times as fast",
    )
    parser.set_defaults(command=simulate)


def simulate(
    *,
    file: str,
    policies: Sequence[str],
    steps: int | None,
    seed: int | None,
    more: Sequence[tuple[str, int]],
    network: float,
    out: str | None,
    record: str | None,
    as_json: bool,
) -> int:
    """Run every policy of a scenario and show what comes of it; return the exit code.

    Args:
        file: the path of a scenario file.
        policies: those to run; none: those of the file.
        steps: how many to make; None: as many as the file says.
        seed: of all chance; None: that of the file.
        more: names of workers, and how many further ones there are like these.
        network: how many times as fast the network is.
        out: a directory for pictures and a page.
        record: a directory for the record of each policy.
        as_json: print one JSON object.
    """
    toml, what_if = read_toml(file), WhatIf(tuple(more), network)
    asked = partial(_asked, policies=policies, steps=steps, seed=seed)
    base = asked(toml)
    scenario = asked(what_if.applied(toml)) if what_if else base
    if out is not None:
        check_directory(Path(out))
    records = _directory(record, scenario.policies)
    with _progress(scenario, again=bool(what_if)) as watch:
        before = compare(base, watch=watch) if what_if else []
        outcomes = compare(scenario, watch=watch, records=records)
    if all(each.refused for each in outcomes):
        raise InvalidSetting(f"{file}: {outcomes[0].refused}")
    findings = Findings(scenario, outcomes, before, what_if)
    written: list[str] = []
    if out is not None:
        from poise.cli.simulate_page import draw_all  # not above: it needs matplotlib

        written = [str(path) for path in draw_all(findings, Path(out))]
    if as_json:
        print(json.dumps({**findings.as_json(), "files": written}, indent=2, allow_nan=False))
    else:
        _show(findings, written)
    return 0


def check_directory(path: Path) -> None:
    """Raise unless pictures can be drawn into a directory, which is made."""
    require("matplotlib", extra="report")
    _make(path, str(path))


def _directory(path: str | None, policies: Sequence[str]) -> Path | None:
    """Make a directory in which no record of these policies exists."""
    if path is None:
        return None
    for name in policies:
        if (Path(path) / f"{name}.jsonl").exists():
            raise InvalidSetting(
                f"--record {path} holds {name}.jsonl, and records are not overwritten; choose "
                "another directory"
            )
    _make(Path(path), f"--record {path}")
    return Path(path)


def _make(path: Path, named: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"{named} cannot be made: {error.strerror or error}") from None


@contextmanager
def _progress(scenario: Scenario, *, again: bool) -> Iterator[Any]:
    """Show how far the simulation is, on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    total = scenario.steps * len(scenario.policies) * (2 if again else 1)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("simulating", total=total)
        seen: list[str] = []

        def watch(policy: str, step: Step) -> None:
            if not seen or seen[-1] != policy:
                seen.append(policy)
            done = (len(seen) - 1) * scenario.steps + step.number
            if step.number % 16 == 0:
                bar.update(task, description=policy, completed=done)

        yield watch


def _show(findings: Findings, written: Sequence[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    title = findings.scenario.cluster.title
    if title:
        console.print(f"[bold]{escape(title)}[/]")
    (policy, *columns), *rows = findings.rows()
    first = Column(policy, no_wrap=True)
    table = Table(first, *right(*columns), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table, soft_wrap=False)
    for sentence in (*findings.sentences(), *(f"written: {path}" for path in written)):
        console.print(escape(sentence))


def _asked(toml: Toml, *, policies: Sequence[str], steps: int | None, seed: int | None) -> Scenario:
    """Return the scenario of a file, with what is asked instead of what the file says."""
    scenario = declared_scenario(toml)
    if steps is not None:
        if steps > MOST_STEPS:
            raise InvalidSetting(f"--steps {steps} is too many; give at most {MOST_STEPS}")
        late = [event.at_step for event in scenario.events if event.at_step is not None]
        if late and max(late) >= steps:
            raise InvalidSetting(
                f"--steps {steps} ends before the event of step {max(late)}; give more"
            )
        scenario = replace(scenario, steps=steps)
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    if len(set(policies)) < len(policies):
        raise InvalidSetting(f"--policy {policies[-1]} is given twice; give it once")
    for name in policies:
        if name not in KINDS:
            raise InvalidSetting(f"--policy {name} is unknown; {nearest(name, KINDS)}")
        if name == "fixed" and not scenario.split:
            raise InvalidSetting(f"--policy fixed needs split = [...] in {toml.name}")
        if name == "static" and not scenario.resources:
            raise InvalidSetting(f"--policy static needs a resource of each worker in {toml.name}")
    return replace(scenario, policies=tuple(policies)) if policies else scenario


def _more(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or (count and (not count.isdigit() or int(count) < 1)):
        raise ArgumentTypeError(f"{text!r} is not a worker's name, or NAME=N with N from 1")
    return name, int(count or 1)

"""The command `poise simulate`: policies side by side on a cluster that is only described."""

import json
import math
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from poise.cli.durations import duration, three_digits
from poise.cli.simulate_asked import Asked, add_options, with_options
from poise.core.split import even_split
from poise.engine.modes import Sync
from poise.errors import InvalidSetting
from poise.sim.conditions import Conditions
from poise.sim.outcome import Outcome, compare
from poise.sim.scenario import Scenario
from poise.sim.scenario_file import declared_scenario
from poise.sim.step import Step
from poise.sim.what_if import WhatIf
from poise.toml_file import read_toml

_SURE = 2.0
"""Standard errors of an interval that is shown."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `simulate` takes."""
    add_options(parser)
    parser.set_defaults(command=_simulate)


def simulate(asked: Asked) -> int:
    """Run every policy of a scenario and show what comes of it; return the exit code."""
    toml = read_toml(asked.file)
    base = with_options(declared_scenario(toml), asked)
    scenario = base
    if asked.what_if:
        scenario = with_options(declared_scenario(asked.what_if.applied(toml)), asked)
    if asked.out is not None:
        from poise.cli.simulate_plots import check_directory

        check_directory(Path(asked.out))
    records = _directory(asked.record, scenario.policies)
    console = Console(highlight=False)
    with _progress(scenario, again=bool(asked.what_if)) as watch:
        before = compare(base, watch=watch) if asked.what_if else []
        outcomes = compare(scenario, watch=watch, records=records)
    if all(each.refused for each in outcomes):
        raise InvalidSetting(f"{asked.file}: {outcomes[0].refused}")
    findings = Findings(scenario, outcomes, before, asked.what_if)
    written = _pictures(findings, asked.out)
    if asked.as_json:
        print(json.dumps({**findings.as_json(), "files": written}, indent=2, allow_nan=False))
        return 0
    _show(console, findings)
    for path in written:
        console.print(f"written: {escape(path)}", soft_wrap=True)
    return 0


@dataclass(frozen=True)
class Ceiling:
    """What no split of the same global batch can exceed, from the first step to the last."""

    times: float | None = None
    """How many times as fast as even a step is with the best split."""
    unknown: str | None = None
    """Why no such number holds for all steps."""

    def __str__(self) -> str:
        if self.times is None:
            return f"no ceiling is known: {self.unknown}"
        return (
            "no split of the same global batch can make steps more than "
            f"{self.times:.2f} times as fast as even"
        )


@dataclass(frozen=True)
class Findings:
    """What comes of a scenario, and of the same without a change that was asked about."""

    scenario: Scenario
    outcomes: Sequence[Outcome]
    before: Sequence[Outcome]
    what_if: WhatIf

    def rows(self) -> list[list[str]]:
        """Return the table, its heading first."""
        columns = _columns(self.scenario)
        return [
            ["policy", *columns],
            *([each.policy, *_cells(each, columns)] for each in self.outcomes),
        ]

    def sentences(self) -> Iterator[str]:
        """Yield what the table does not say."""
        yield from self._gain()
        yield from self._difference()
        yield from (f"note: {each}" for each in self.scenario.notes)
        latest_s = max((each.clock_s for each in self.outcomes), default=0.0)
        for event in self.scenario.events:
            if event.at_s is not None and event.at_s > latest_s:
                yield f"what is to happen at {duration(event.at_s)} never did: all was over before"
        if self.scenario.error is not None:
            yield (
                f"this cluster was calibrated: held-out steps were mispredicted by "
                f"{_percent(self.scenario.error)} on average"
            )
        for each in self.outcomes:
            if each.refused:
                yield f"{each.policy} cannot follow: {each.refused}"
        goal = self.scenario.learning and self.scenario.learning.target_samples
        ran = [each for each in self.outcomes if not each.refused]
        if missed := [each.policy for each in ran if goal and each.target_s is None]:
            yield (
                f"the goal is not reached within {self.scenario.steps:,} steps by "
                f"{', '.join(missed)}; raise steps"
            )

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        scenario = self.scenario
        return {
            "title": scenario.cluster.title,
            "workers": scenario.workers,
            "global_batch": scenario.global_batch,
            "mode": str(scenario.mode),
            "seed": scenario.seed,
            "error": scenario.error,
            "ceiling": self.ceiling.times,
            "ceiling_unknown": self.ceiling.unknown,
            "outcomes": [_plain(each) for each in self.outcomes],
            "what_if": str(self.what_if) or None,
            "before": [_plain(each) for each in self.before],
        }

    @property
    def ceiling(self) -> "Ceiling":
        """How many times as fast as even the best split makes a step."""
        scenario = self.scenario
        if not isinstance(scenario.mode, Sync):
            return Ceiling(unknown="workers do not wait for each other")
        if scenario.changes_over_steps:
            return Ceiling(unknown="the cluster changes, and the best split with it")
        moment = Conditions(scenario).at(0, 0.0)
        if not moment.cluster.is_plain:
            return Ceiling(unknown="the best split is only the best that was found")
        limits = scenario.limits.take(moment.present.tolist())
        even = even_split(len(moment.present), scenario.global_batch)
        if not limits.allow(even):
            return Ceiling(unknown="an even split does not fit")
        _, best_s = moment.cluster.best(scenario.global_batch, limits)
        return Ceiling(moment.cluster.step_s(even) / best_s)

    def _gain(self) -> Iterator[str]:
        """Yield how much faster the fastest is than even."""
        known = {each.policy: each for each in self.outcomes if not each.refused}
        even = known.pop("even", None)
        if even is None or not known:
            return
        best = min(known.values(), key=lambda each: _seconds(each, *known.values()))
        ratio = _seconds(even, best) / _seconds(best, even)
        yield f"{best.policy} {_does(even, best)} {self._times(ratio)} as fast as even"
        yield str(self.ceiling)

    def _difference(self) -> Iterator[str]:
        """Yield what a change brings to each policy."""
        for was, now in zip(self.before, self.outcomes, strict=False):
            if was.refused or now.refused:
                continue
            ratio = _seconds(was, now) / _seconds(now, was)
            hours = now.worker_hours / was.worker_hours
            yield (
                f"with {self.what_if}, {now.policy} {_does(was, now)} {self._times(ratio)} as "
                f"fast, for {hours:.2f} times the worker-hours"
            )

    def _times(self, ratio: float) -> str:
        """Return a ratio, with what a mispredicted step means for it."""
        error = self.scenario.error
        if error is None:
            return f"{ratio:.2f} times"
        return f"{ratio:.2f} (± {_SURE * math.sqrt(2) * error * ratio:.2f}) times"


def _simulate(
    *, policies: list[str], more: list[tuple[str, int]], network: float, **others: Any
) -> int:
    what_if = WhatIf(tuple(more), network)
    return simulate(Asked(policies=tuple(policies), what_if=what_if, **others))


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
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"--record {path} cannot be made: {error.strerror}") from None
    return Path(path)


@contextmanager
def _progress(scenario: Scenario, *, again: bool) -> Iterator[Any]:
    """Show how far the simulation is, on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    names = scenario.policies
    total = scenario.steps * len(names) * (2 if again else 1)
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


def _pictures(findings: Findings, out: str | None) -> list[str]:
    if out is None:
        return []
    from poise.cli.simulate_page import page
    from poise.cli.simulate_plots import draw_all, write

    scenario, outcomes = findings.scenario, findings.outcomes
    drawn = draw_all(scenario, outcomes, Path(out))
    index = Path(out) / "index.html"
    write(index, page(scenario, outcomes, findings.rows(), findings.sentences()).encode())
    return [str(index), *(str(path) for path in drawn)]


def _show(console: Console, findings: Findings) -> None:
    scenario = findings.scenario
    if scenario.cluster.title:
        console.print(f"[bold]{escape(scenario.cluster.title)}[/]", soft_wrap=True)
    heading, *rows = findings.rows()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(heading):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    for sentence in findings.sentences():
        console.print(escape(sentence), soft_wrap=True)


def _columns(scenario: Scenario) -> list[str]:
    columns = ["step", "waiting", "regret", "changes"]
    if not isinstance(scenario.mode, Sync):
        columns.remove("regret")
    if scenario.learning is not None and scenario.learning.target_samples is not None:
        columns.append("to goal")
    columns += ["worker h"]
    return [*columns, "cost"] if scenario.prices else columns


def _cells(outcome: Outcome, columns: Sequence[str]) -> list[str]:
    """Return a policy's row."""
    if outcome.refused:
        return ["-"] * len(columns)
    cells = {
        "step": duration(outcome.step_s),
        "waiting": _percent(outcome.waiting),
        "regret": _percent(outcome.regret),
        "changes": f"{outcome.changes:,}",
        "to goal": "-" if outcome.target_s is None else duration(outcome.target_s),
        "worker h": three_digits(outcome.worker_hours),
        "cost": f"{outcome.money or 0.0:,.2f}",
    }
    return [cells[column] for column in columns]


def _seconds(outcome: Outcome, *others: Outcome) -> float:
    """Return what outcomes are compared by: the time to the goal if all reach it, else a step."""
    if outcome.target_s is not None and all(other.target_s is not None for other in others):
        return outcome.target_s
    return outcome.step_s


def _does(*outcomes: Outcome) -> str:
    reached = all(each.target_s is not None for each in outcomes)
    return "reaches the goal" if reached else "makes steps"


def _plain(outcome: Outcome) -> dict[str, Any]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "policy": outcome.policy,
        "refused": outcome.refused or None,
        "steps": outcome.steps,
        "seconds": outcome.clock_s,
        "step_s": finite(outcome.step_s),
        "samples_per_s": finite(outcome.samples_per_s),
        "waiting": finite(outcome.waiting),
        "regret": finite(outcome.regret),
        "changes": outcome.changes,
        "lost_s": outcome.lost_s,
        "settled_step": outcome.settled_step,
        "settled_s": finite(outcome.settled_s),
        "target_s": finite(outcome.target_s),
        "worker_hours": outcome.worker_hours,
        "cost": finite(outcome.money),
        "last_split": list(outcome.last_split),
    }


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"

"""The command `poise simulate`: policies side by side on a cluster that is only described."""

import json
import math
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from poise.cli.durations import duration, three_digits
from poise.cli.simulate_asked import add_options, asked_scenario
from poise.cli.simulate_page import check_directory, draw_all, page, write
from poise.core.split import even_split
from poise.engine.modes import Sync
from poise.errors import InvalidSetting
from poise.sim.conditions import Conditions
from poise.sim.outcome import Outcome, compare
from poise.sim.scenario import Scenario
from poise.sim.step import Step
from poise.sim.what_if import WhatIf
from poise.toml_file import read_toml

_SURE = 2.0
"""Standard errors of an interval that is shown."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `simulate` takes."""
    add_options(parser)
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
    asked = partial(asked_scenario, policies=policies, steps=steps, seed=seed)
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
    written = _pictures(findings, out)
    if as_json:
        print(json.dumps({**findings.as_json(), "files": written}, indent=2, allow_nan=False))
    else:
        _show(findings, written)
    return 0


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
        ceiling, unknown = self._ceiling()
        return {
            "title": scenario.cluster.title,
            "workers": scenario.workers,
            "global_batch": scenario.global_batch,
            "mode": str(scenario.mode),
            "seed": scenario.seed,
            "error": scenario.error,
            "ceiling": ceiling,
            "ceiling_unknown": unknown,
            "outcomes": [_plain(each) for each in self.outcomes],
            "what_if": str(self.what_if) or None,
            "before": [_plain(each) for each in self.before],
        }

    def _ceiling(self) -> tuple[float | None, str | None]:
        """Return how many times as fast as even the best split makes a step, or why not.

        It is what no split of the same global batch exceeds, from the first step to the last.
        """
        scenario = self.scenario
        if not isinstance(scenario.mode, Sync):
            return None, "workers do not wait for each other"
        if scenario.changes_over_steps:
            return None, "the cluster changes, and the best split with it"
        moment = Conditions(scenario).at(0, 0.0)
        if not moment.cluster.is_plain:
            return None, "the best split is only the best that was found"
        limits = scenario.limits.take(moment.present.tolist())
        even = even_split(len(moment.present), scenario.global_batch)
        if not limits.allow(even):
            return None, "an even split does not fit"
        _, best_s = moment.cluster.best(scenario.global_batch, limits)
        return moment.cluster.step_s(even) / best_s, None

    def _gain(self) -> Iterator[str]:
        """Yield how much faster the fastest is than even."""
        known = {each.policy: each for each in self.outcomes if not each.refused}
        even = known.pop("even", None)
        if even is None or not known:
            return
        reached = all(each.target_s is not None for each in known.values())
        best = min(known.values(), key=attrgetter("target_s" if reached else "step_s"))
        yield f"{self._compared(best, even)} as even"
        ceiling, unknown = self._ceiling()
        if ceiling is None:
            yield f"no ceiling is known: {unknown}"
        else:
            yield (
                "no split of the same global batch can make steps more than "
                f"{ceiling:.2f} times as fast as even"
            )

    def _difference(self) -> Iterator[str]:
        """Yield what a change brings to each policy."""
        for was, now in zip(self.before, self.outcomes, strict=False):
            if not was.refused and not now.refused:
                hours = now.worker_hours / was.worker_hours
                yield (
                    f"with {self.what_if}, {self._compared(now, was)}, for {hours:.2f} times the "
                    "worker-hours"
                )

    def _compared(self, now: Outcome, was: Outcome) -> str:
        """Say how many times as fast one is, by the time to the goal if both reach it.

        Where steps are known to be mispredicted, also what that means for it.
        """
        if now.target_s is not None and was.target_s is not None:
            does, ratio = "reaches the goal", was.target_s / now.target_s
        else:
            does, ratio = "makes steps", was.step_s / now.step_s
        error = self.scenario.error
        sure = "" if error is None else f" (± {_SURE * math.sqrt(2) * error * ratio:.2f})"
        return f"{now.policy} {does} {ratio:.2f}{sure} times as fast"


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


def _pictures(findings: Findings, out: str | None) -> list[str]:
    if out is None:
        return []
    scenario, outcomes = findings.scenario, findings.outcomes
    drawn = draw_all(scenario, outcomes, Path(out))
    index = Path(out) / "index.html"
    write(index, page(scenario, outcomes, findings.rows(), findings.sentences()).encode())
    return [str(index), *(str(path) for path in drawn)]


def _show(findings: Findings, written: Sequence[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    title = findings.scenario.cluster.title
    if title:
        console.print(f"[bold]{escape(title)}[/]")
    heading, *rows = findings.rows()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(heading):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table, soft_wrap=False)
    for sentence in (*findings.sentences(), *(f"written: {path}" for path in written)):
        console.print(escape(sentence))


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

"""`poise plan`: the best split of a global batch over a cluster that is only described."""

import json
import math
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from poise.cli.columns import right
from poise.cli.options import require
from poise.cli.plan_findings import Findings, Learning, Planned, find
from poise.cluster_file import Kind, read_cluster
from poise.core.cluster import Worker
from poise.core.goodput import MOST_NOISE
from poise.core.planning import Worth
from poise.core.timing import Bound
from poise.errors import InvalidSetting, PoiseError

MOST_ROWS = 40
"""A longer table is cut; the JSON is not."""

_GIGABYTE = 1e9
_DIGITS = 12
"""Longer numbers of samples are a slip of the pen."""
_SAME = 0.0005
"""Parts of a time that are too small to speak of."""
_AS_FAST = 0.005
"""Ratios that differ from 1 by less are not put into numbers."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `plan` takes."""
    parser.description = (
        f"{parser.description} Says who gets how many samples, how long a step takes, how much an "
        "even split would lose, and which worker is not worth having."
    )
    parser.add_argument("file", metavar="CLUSTER.toml", help="workers and network")
    parser.add_argument(
        "--global-batch", required=True, metavar="N", help="samples of a step, over all workers"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sweep",
        dest="picture",
        metavar="FILE",
        help="draw throughput over the global batch into a .png or .svg; needs poise[report]",
    )
    parser.add_argument(
        "--noise-scale",
        metavar="PHI",
        help="gradient noise scale in samples: also find the global batch that learns fastest "
        "(default: [training] noise_scale of the file)",
    )
    parser.add_argument(
        "--start-batch",
        metavar="B0",
        help="global batch that the learning rate is chosen for (default: [training] start_batch "
        "of the file, else N)",
    )
    parser.set_defaults(command=plan)


def plan(
    *,
    file: str,
    global_batch: str,
    as_json: bool = False,
    picture: str | None = None,
    noise_scale: str | None = None,
    start_batch: str | None = None,
) -> int:
    """Print the plan of a cluster file, as a table or as JSON; return 0.

    Args:
        file: the path of a cluster file.
        global_batch: samples of a step, as typed.
        as_json: print one JSON object.
        picture: where to draw throughput over the global batch: a .png or .svg.
        noise_scale: the gradient noise scale as typed; None: that of the file.
        start_batch: the global batch of the learning rate as typed; None: that of the file.
    """
    batch = _samples("--global-batch", global_batch)
    if picture is not None:
        _check_picture(Path(picture))
    cluster = read_cluster(file)
    scale = cluster.noise_scale if noise_scale is None else _scale(noise_scale)
    start = cluster.start_batch
    if start_batch is not None:
        start = _samples("--start-batch", start_batch)
        if scale is None:
            raise InvalidSetting(
                "--start-batch means nothing without a noise scale; give --noise-scale too"
            )
    try:
        findings = find(cluster, batch, scale, start)
    except PoiseError as error:
        raise InvalidSetting(f"{file}: {error}") from None
    if picture is not None:
        from poise.cli.plan_sweep import draw  # not above: it needs matplotlib

        draw(findings, Path(picture))
    if as_json:
        print(json.dumps(findings.as_json(), indent=2))
    else:
        _print(findings, picture)
    return 0


def _check_picture(path: Path) -> None:
    """Raise unless a picture of this name can be drawn."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise InvalidSetting(
            f"--sweep {path} is not a picture that can be drawn; name it .png or .svg"
        )
    require("matplotlib", extra="report")


def _samples(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS) or int(text) < 1:
        raise InvalidSetting(
            f"{option} {text} is not a number of samples; give a whole number from 1 up"
        )
    return int(text)


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST_NOISE:
        raise InvalidSetting(
            f"--noise-scale {text} is not a noise scale; give a number of samples from 0 to 1e15"
        )
    return value


@dataclass(frozen=True)
class _Row:
    """Workers of one kind that have the same plan."""

    kind: Kind
    count: int
    worker: Worker
    planned: Planned
    """The same for each of them but for the name."""

    @property
    def name(self) -> str:
        if self.count == 1:
            return self.planned.name
        part = "" if self.count == self.kind.count else f" of {self.kind.count}"
        return f"{self.kind.name} x{self.count}{part}"

    @property
    def bound_by(self) -> str:
        bound = self.planned.bound
        if bound == "max":
            stated = math.inf if self.worker.max_batch is None else self.worker.max_batch
            return "memory" if self.worker.most_samples < stated else "max_batch"
        return "min_batch" if bound == "min" else bound

    @property
    def memory(self) -> str:
        taken, limit = self.planned.memory_bytes, self.planned.memory_limit_bytes
        if taken is None:
            return "-"
        end = "GB" if limit is None else f"of {limit / _GIGABYTE:.3g} GB"
        return f"{taken / _GIGABYTE:.1f} {end}"


def _rows(findings: Findings) -> Iterator[_Row]:
    """Yield a row for all workers of a kind with the same local batch, the largest first."""
    planned = findings.planned()

    def place(worker: int) -> tuple[int, Bound]:
        return -planned[worker].local_batch, planned[worker].bound

    for kind in findings.cluster.kinds:
        for _, alike in groupby(sorted(kind.workers, key=place), key=place):
            first, *more = alike
            worker = findings.cluster.workers[first]
            yield _Row(kind, 1 + len(more), worker, planned[first])


def _print(findings: Findings, picture: str | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if findings.cluster.title:
        console.print(f"[bold]{escape(findings.cluster.title)}[/]")
    rows = list(_rows(findings))
    console.print(_table(rows[:MOST_ROWS], findings.plan.step_s), soft_wrap=False)
    if hidden := sum(row.count for row in rows[MOST_ROWS:]):
        console.print(f"{hidden:,} more workers are not shown; --json lists all")
    for sentence in _sentences(findings):
        console.print(sentence)
    if picture is not None:
        console.print(f"picture: {escape(picture)}")


def _table(rows: list[_Row], step_s: float) -> Table:
    table = Table(
        Column("worker", overflow="fold"),
        *right("local batch", "share", "predicted"),
        Column("bound by", no_wrap=True),
        *right("memory"),
    )
    shares = [row.planned.share for row in rows if row.planned.share > 0]
    smallest = min(shares, default=1.0)
    for row in rows:
        table.add_row(
            escape(row.name),
            f"{row.planned.local_batch:,}",
            _percent(row.planned.share, smallest),
            f"{_ms(row.planned.predicted_s, step_s)} ms",
            row.bound_by,
            row.memory,
        )
    return table


def _sentences(findings: Findings) -> Iterator[str]:
    best = findings.plan
    yield (
        f"[bold]step[/]: {_ms(best.step_s)} ms, {_rate(findings.samples_per_s)}; by these numbers "
        f"no other split of {best.global_batch:,} samples is faster"
    )
    yield _even(findings)
    yield from _worth_sentences(findings)
    if findings.learning is not None:
        yield f"[bold]best global batch[/]: {_learned(findings.learning, best.global_batch)}"


def _even(findings: Findings) -> str:
    even_s, gain = findings.even.step_s, findings.gain
    if even_s is None or gain is None:
        return f"an [bold]even split[/] would not fit: {escape(findings.even.why_not)}"
    rate = _rate(findings.plan.global_batch / even_s)
    return f"[bold]even split[/]: {_ms(even_s)} ms, {rate}; the split above is {_times(gain)}"


def _worth_sentences(findings: Findings) -> Iterator[str]:
    """Yield what can be done without, the least useful first."""
    known = [(kind, worth, worth.without_s) for kind, worth in findings.worths if worth.without_s]
    idle = {kind for kind in findings.cluster.kinds if not findings.plan.split[kind.workers[0]]}
    useless = sorted(
        (each for each in known if not each[1].worth_having or each[0] in idle),
        key=lambda each: each[2],
    )
    for kind, worth, without_s in useless:
        yield f"[bold]not worth having[/]: {escape(_useless(kind, worth.with_s, without_s))}"
    if len(useless) > 1:
        yield "each of these is left out alone; leave the first out and plan again"
    elif findings.worths and not useless:
        yield f"all workers are worth having{escape(_least(known))}"


def _useless(kind: Kind, with_s: float, without_s: float) -> str:
    saved_s = with_s - without_s
    if saved_s < with_s * _SAME:
        return f"{_each_of(kind)}; {_without(kind)} a step takes as long"
    return (
        f"{_each_of(kind)}; {_without(kind)} a step takes {_ms(without_s, with_s)} ms, "
        f"{_ms(saved_s, with_s)} ms ({_percent(saved_s / with_s)}) less"
    )


def _least(known: Sequence[tuple[Kind, Worth, float]]) -> str:
    """Say how much is lost without the worker that is missed least."""
    if not known:
        return ": without one, the others cannot take the whole global batch"
    kind, worth, without_s = min(known, key=lambda each: each[2])
    if without_s < worth.with_s * (1 + _SAME):
        return f", {_each_of(kind)} hardly: {_without(kind)} a step takes as long"
    takes = f"a step takes {_ms(without_s, worth.with_s)} ms"
    return f", {_each_of(kind)} least: {_without(kind)} {takes}"


def _each_of(kind: Kind) -> str:
    return kind.name if kind.count == 1 else f"each of the {kind.count} {kind.name}"


def _without(kind: Kind) -> str:
    return "without it" if kind.count == 1 else "without one of them"


def _learned(learning: Learning, global_batch: int) -> str:
    best = learning.best_global_batch
    if best == global_batch:
        gain = "the one above"
    else:
        gain = f"{best:,}, which learns {_times(learning.gain)} as {global_batch:,}"
    ends = dict(zip(learning.allowed, ("smallest", "largest"), strict=True))
    end = f" (the {ends[best]} that was looked at)" if best in ends else ""
    return f"{gain}{end}, by goodput at a noise scale of {learning.noise_scale:,.0f} samples"


def _times(ratio: float) -> str:
    return "as fast" if abs(ratio - 1) < _AS_FAST else f"{ratio:.2f} times as fast"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f} samples/s"


def _percent(part: float, smallest: float = 1.0) -> str:
    """Return a percentage, with as many decimals as the smallest of its column needs.

    >>> _percent(0.5), _percent(0.5, smallest=0.0002)
    ('50.0 %', '50.00 %')
    """
    decimals = -math.floor(math.log10(100 * smallest)) if smallest > 0 else 1
    return f"{100 * part:.{max(1, decimals)}f} %"


def _ms(seconds: float, scale_s: float | None = None) -> str:
    """Return milliseconds with four digits, counted on the scale of another time if one is given.

    >>> _ms(0.16844), _ms(0.00244, 0.16844), _ms(12.3456)
    ('168.4', '2.4', '12,346')
    """
    scale = (seconds if scale_s is None else scale_s) * 1e3
    decimals = 3 - math.floor(math.log10(scale)) if scale > 0 else 0
    return f"{seconds * 1e3:,.{min(max(decimals, 0), 4)}f}"

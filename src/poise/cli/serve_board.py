"""What a server shows: one table of its workers, in place on a terminal, else now and then."""

import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from poise.cli.columns import right
from poise.engine.member import Tally
from poise.torch.asynchronous.service import Service

EVERY_S = 10.0
"""Between two tables that are not on a terminal."""

MOST_BARS = 12
"""The last bar of a histogram stands for everything beyond."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 160
"""Of a table that is not on a terminal: as wide as it wants to be."""


class ServeBoard:
    """Shows a server as it goes.

    Args:
        file: where to; None: stderr.
        clock: seconds that only grow.
    """

    def __init__(
        self, file: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file or sys.stderr
        self._terminal = self._file.isatty()
        self._clock = clock
        self._live = Live(
            console=Console(file=self._file, highlight=False),
            refresh_per_second=2,
            redirect_stdout=sys.stdout.isatty(),  # else it is not the table's neighbor
        )
        self._first: Service | None = None
        self._last: Service | None = None
        self._printed: tuple[object, ...] = ()
        self._printed_s = clock()

    def say(self, text: str) -> None:
        """Print a line."""
        self._write(f"poise: {text}\n")

    def show(self, service: Service) -> None:
        """Take in what the server does, and show it if it is time."""
        self._first = self._first or service
        self._last = service
        if self._terminal:
            # Painted by its own thread: the server waits for no terminal.
            self._live.update(picture(service, self._first))
            self._live.start()
        elif self._clock() - self._printed_s >= EVERY_S:
            self._print()

    def end(self) -> None:
        """Leave the last state on show."""
        if self._terminal:
            self._live.stop()
        else:
            self._print()

    def _print(self) -> None:
        """Print a table, unless nothing has happened since the last one."""
        self._printed_s = self._clock()
        last = self._last
        if last is not None and self._printed != (last.workers, last.epoch, last.gone):
            self._printed = last.workers, last.epoch, last.gone
            with suppress(OSError):  # rich reads files of its own at the first table
                self._write(as_text(picture(last, self._first)))

    def _write(self, text: str) -> None:
        # Training goes on if nobody reads it any more, or the disk is full.
        with suppress(OSError):
            self._file.write(text)
            self._file.flush()


def picture(service: Service, first: Service | None = None) -> Table:
    """Return the table of a server; its rate of updates is that since the first look at it."""
    dropped = any(tally.dropped for tally in _tallies(service))
    table = Table(
        "worker",
        Column("where", overflow="ellipsis"),
        *right("batch", "iteration", "waiting", "staleness", "most"),
        Column("0, 1, 2 ...", no_wrap=True),
        *right("updates", "samples", *(("dropped",) if dropped else ())),
        title=title(service, first),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for each in service.workers:
        iteration = "-" if math.isnan(each.iteration_s) else f"{each.iteration_s * 1e3:,.0f} ms"
        batch = f"{each.local_batch:,}" if each.local_batch else "-"
        cells = _cells(service, each.tally, dropped=dropped)
        table.add_row(str(each.worker), each.label, batch, iteration, *cells)
    for worker, tally in sorted(service.gone.items()):
        cells = _cells(service, tally, dropped=dropped)
        table.add_row(str(worker), "has left", "-", "-", *cells, style="dim")
    return table


def title(service: Service, first: Service | None = None) -> str:
    """Say in one line how far the training is."""
    parts = [f"poise serve: {service.mode}", _place(service)]
    if service.seconds > 0:
        parts.append(f"{_rate(service, first):,.1f} updates/s")
        parts.append(f"server busy {service.busy_s / service.seconds:.0%}")
    if service.waiting_for:
        more = "worker" if service.waiting_for == 1 else "workers"
        parts.append(f"waiting for {service.waiting_for} more {more}")
    return ", ".join(parts)


def as_text(table: Table) -> str:
    """Return a table as lines without colors, as wide as they must be."""
    console = Console(file=io.StringIO(), width=_WIDTH, force_terminal=False, color_system=None)
    with console.capture() as text:
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in text.get().splitlines())


def bars(staleness: Mapping[int, int]) -> str:
    """Draw how often each staleness was, from 0 up; a dot stands for never.

    >>> bars({0: 1, 1: 8, 2: 4})
    '▁█▄'
    >>> bars({1: 3})
    '·█'
    """
    last = min(max(staleness, default=-1), MOST_BARS - 1)
    heights = [staleness.get(updates, 0) for updates in range(last + 1)]
    if heights:
        heights[-1] += sum(count for updates, count in staleness.items() if updates > last)
    most = max(heights, default=0)
    return "".join(
        _BLOCKS[math.ceil(len(_BLOCKS) * each / most) - 1] if each else "·" for each in heights
    )


def _cells(service: Service, tally: Tally, *, dropped: bool) -> Iterator[str]:
    """Yield what a worker contributed, from waiting on."""
    total = sum(each.updates for each in _tallies(service))
    yield f"{tally.waited_s / service.seconds:.0%}" if service.seconds > 0 else "-"
    yield f"{tally.mean_staleness:.1f}" if tally.staleness else "-"
    yield f"{max(tally.staleness)}" if tally.staleness else "-"
    yield bars(tally.staleness)
    yield f"{tally.updates / total:.0%}" if total else "-"
    yield f"{tally.samples:,}"
    if dropped:
        yield f"{tally.dropped:,}"


def _tallies(service: Service) -> list[Tally]:
    return [*(each.tally for each in service.workers), *service.gone.values()]


def _place(service: Service) -> str:
    if service.epoch and not service.pushed:
        return f"{service.epoch} {'epoch' if service.epoch == 1 else 'epochs'} done"
    return f"epoch {service.epoch}, {service.pushed / service.length:.0%} pushed"


def _rate(service: Service, first: Service | None) -> float:
    """Return updates per second; a resumed training has some that were made in no time of ours."""
    if first is None or service.seconds <= first.seconds:
        return service.updates / service.seconds
    return (service.updates - first.updates) / (service.seconds - first.seconds)

"""Tables that a benchmark prints for people and holds for programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

_WIDTH = 150


@dataclass(frozen=True)
class Sheet:
    """A table with a title, and a sentence about what it means."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def show(self) -> None:
        """Print it."""
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(shown(cell) for cell in row))
        console = Console(width=_WIDTH)
        console.print(table)
        if self.note:
            console.print(self.note, highlight=False, markup=False)
        console.print()

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; what is no number becomes null."""
        rows = [[_plain(cell) for cell in row] for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "note": self.note}


def shown(cell: Any) -> str:
    """Return a cell for people.

    >>> shown(0.12345), shown(float("nan")), shown("1 of 2"), shown(12345.6)
    ('0.123', '-', '1 of 2', '12346')
    """
    if isinstance(cell, str):
        return cell
    if cell is None or not np.isfinite(cell):
        return "-"
    if isinstance(cell, int) or abs(cell) >= _LARGE:
        return f"{cell:.0f}"
    return f"{cell:.3f}" if abs(cell) < _TEN else f"{cell:.1f}"


_TEN, _LARGE, _HALF = 10, 1000, 0.5


def percent(part: float) -> str:
    """Return a part in percent.

    >>> percent(0.256), percent(float("nan"))
    ('25.6 %', '-')
    """
    return f"{100 * part:.1f} %" if np.isfinite(part) else "-"


def less(part: float) -> str:
    """Return by how much a time is shorter, or, if it is far longer, how many times as long.

    >>> less(0.256), less(-1.5)
    ('25.6 %', '2.5 times as long')
    """
    return percent(part) if part > -_HALF else f"{1 - part:.1f} times as long"


def _plain(cell: Any) -> Any:
    if isinstance(cell, float) and not np.isfinite(cell):
        return None
    return cell

"""Keys of a scenario file, read one by one: each is right, or its line is in the error."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from poise.cluster_file import DeclaredCluster
from poise.numbers import is_number, is_whole
from poise.toml_file import Toml

T = TypeVar("T")
Number = TypeVar("Number", bound=float | None)
Whole = TypeVar("Whole", bound=int | None)

MOST, LEAST = 1e15, 1e-9
"""Beyond these a number is a slip of the pen."""


@dataclass(frozen=True)
class Keys:
    """One file, and the workers that it declares."""

    toml: Toml
    cluster: DeclaredCluster

    def number(
        self,
        key: str,
        default: Number,
        table: str = "",
        number: int = 0,
        *,
        least: float = 0.0,
        most: float = MOST,
    ) -> float | Number:
        """Return a number of a table."""
        found = self.toml.table(table, number)
        if key not in found:
            return default
        if not (is_number(found[key]) and least <= found[key] <= most):
            raise self.toml.refused(table, number, key, f"a number from {least:g} to {most:g}")
        return float(found[key])

    def whole(
        self,
        key: str,
        default: Whole,
        table: str = "",
        number: int = 0,
        *,
        least: int = 0,
        most: int = 2**40,
    ) -> int | Whole:
        """Return a whole number of a table."""
        found = self.toml.table(table, number)
        if key not in found:
            return default
        if not (is_whole(found[key]) and least <= found[key] <= most):
            raise self.toml.refused(table, number, key, f"a whole number from {least} to {most}")
        return int(found[key])

    def numbers(self, kind: type[T], table: str, ranges: Mapping[str, tuple[float, float]]) -> T:
        """Return a table of numbers as the dataclass whose fields are its keys.

        Args:
            kind: the dataclass; what the table does not say has its defaults.
            table: its name.
            ranges: the least and the most of each key.
        """
        self.toml.check_keys(ranges, table)
        found = {}
        for key in self.toml.table(table):
            least, most = ranges[key]
            found[key] = self.number(key, 0.0, table, least=least, most=most)
        return kind(**found)

    def of_workers(
        self, key: str, default: T, check: Callable[[Any], T | None], required: str
    ) -> tuple[T, ...]:
        """Return one value per worker; nothing if no table has the key.

        Args:
            key: of the tables [[worker]].
            default: of tables that have it not.
            check: returns what is found as it should be; None: it is not allowed.
            required: what is allowed, in words.
        """
        tables = self.toml.array("worker")
        if not any(key in table for table in tables):
            return ()
        values: list[T] = []
        for number, (table, kind) in enumerate(zip(tables, self.cluster.kinds, strict=True), 1):
            value = check(table[key]) if key in table else default
            if value is None:
                raise self.toml.refused("worker", number, key, required)
            values += [value] * kind.count
        return tuple(values)


def above_0(value: Any) -> float | None:
    """Return a number that is more than nothing; None: it is not."""
    return float(value) if is_number(value) and LEAST <= value <= MOST else None


def from_0(value: Any) -> float | None:
    """Return a number that is not negative; None: it is."""
    return float(value) if is_number(value) and 0 <= value <= MOST else None


def pair_of(value: Any) -> tuple[float, float] | None:
    """Return two numbers that are not negative; None: it is something else."""
    numbers = isinstance(value, list) and len(value) == 2 and all(map(is_number, value))  # noqa: PLR2004
    inside = numbers and all(0 <= each <= MOST for each in value)
    return (float(value[0]), float(value[1])) if inside else None

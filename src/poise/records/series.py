"""The records of a training that was started several times, read together.

A training that is restarted, resumed or run again under the same name writes the next record of a
series: run.jsonl, run.2.jsonl, run.3.jsonl. Each begins with a header of its own, from which, or
from the saved state in its first rows, it is replayed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from poise.errors import InvalidSetting, StateMismatch
from poise.policy import Policy
from poise.records.file import read_record
from poise.records.names import paths_of
from poise.records.replay import Difference, replay
from poise.records.rows import Record


@dataclass(frozen=True, eq=False)
class Series:
    """Records in the order in which they were begun."""

    paths: tuple[Path, ...]
    records: tuple[Record, ...]
    empty: tuple[Path, ...] = ()
    """Files without a complete line: a training was killed before it began."""

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


def read_series(path: str | PathLike[str]) -> Series:
    """Read a record and those that follow it, or say which of them is none.

    Given run.jsonl it reads run.2.jsonl and so on, too; given run.2.jsonl, that one alone.
    """
    place = Path(path)
    found = paths_of(place) or [place]
    empty = [each for each in found if len(found) > 1 and _is_empty(each)]
    paths = [each for each in found if each not in empty]
    if not paths:
        raise StateMismatch(f"{place} and what follows it have no complete line: no record is here")
    return Series(tuple(paths), tuple(read_record(each) for each in paths), tuple(empty))


def replay_series(series: Series, policy: Policy | None = None) -> tuple[Path, Difference] | None:
    """Replay each record from its own start; return the first difference, and where, or None."""
    for path, record in zip(series.paths, series.records, strict=True):
        try:
            found = replay(record, policy)
        except InvalidSetting as error:
            raise InvalidSetting(f"{path}: {error}") from None
        if found is not None:
            return path, found
    return None


def _is_empty(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return not file.readline().endswith(b"\n")
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read as a record: {error}") from None

"""Records on disk: one JSON object per line, readable while they grow."""

import json
import logging
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from poise.core.observation import Change, Event
from poise.core.plain import from_plain, to_plain
from poise.core.plan import Plan
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.engine.round import Round
from poise.errors import InvalidSetting, StateMismatch
from poise.records.lines import MOST_BYTES, LineFile
from poise.records.names import check_series, create, create_next
from poise.records.rows import FORMAT, VERSION, Decided, Header, Lost, Record, Row, Served

Line = TypeVar("Line", Header, Row)
_ROW = '{"start_step":'
_log = logging.getLogger("poise")


class Recorder:
    """Writes a record, line by line.

    A file that exists is never overwritten. Fields that nobody measured are left out, so that
    rows are as short as what is known. Of very large simulations a record holds only some rows:
    each one with a decision, and of so many others one. It cannot be replayed.

    A disk that is full or fails later ends no training: rows wait in memory until they can be
    written. Those that are too many are lost, and a row in their place says so.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        engine: Engine,
        *,
        mode: str | None = None,
        thinned: int = 1,
        series: bool = False,
        held_bytes: int = MOST_BYTES,
    ) -> None:
        """Begin a record.

        Args:
            path: the file to make.
            engine: what decides, as it is at the start.
            mode: of a training with a server; None: all workers take every step together.
            thinned: of so many rows without a decision one is written.
            series: whether to write the next record of a series if the file exists.
            held_bytes: of rows that wait in memory at most, while they cannot be written.
        """
        self._file = _created(Path(path), held_bytes, series=series)
        self._thinned = thinned
        self._calls = 0
        self._lost: Lost | None = None
        """Rows that are missing after the last one that was kept,"""
        self._all_lost = Lost(0)
        """all that are missing so far,"""
        self._why = ""
        """and why."""
        self._file.write([_line(Header.of(engine, mode, thinned))])

    @property
    def path(self) -> Path:
        """Where the record is written."""
        return self._file.path

    def write(self, events: Sequence[Event], start_step: int, plan: Plan | None) -> None:
        """Add what happened, and the plan that was made on all of it."""
        if not events or self._left_out(plan):
            return
        if self._thinned > 1:
            events = events[-1:]
        *before, last = events
        self._write(
            *(Row(start_step, **_told(event), more=True) for event in before),
            Row(start_step, **_told(last), decision=Decided.of(plan)),
        )

    def write_round(self, decided: Round, engine: AsyncEngine, busy_s: float) -> None:
        """Add a round of a training with a server, and what the server has done so far."""
        if self._left_out(decided.plan):
            return
        (event,) = decided.events
        loaded = None if decided.loaded is None else json.dumps(decided.loaded.state_dict())
        decision, served = Decided.of(decided.plan), Served.of(engine, busy_s)
        row = Row(
            decided.start_step, **_told(event), loaded=loaded, decision=decision, served=served
        )
        self._write(row)

    def resume(
        self, engine: Engine, change: Change | None, start_step: int, plan: Plan | None
    ) -> None:
        """Add that training goes on with what an engine knows, and its plan for these workers."""
        loaded, decision = json.dumps(engine.state_dict()), Decided.of(plan)
        self._write(Row(start_step, change=change, loaded=loaded, decision=decision))

    def close(self) -> None:
        """Close the file, and warn of rows that are missing; a second time does nothing."""
        if self._lost is not None:
            self._write()
        for line in self._file.close():
            row = _read(Row, self.path, 0, line) if line.startswith(_ROW) else None
            if row is not None and row.lost is None:
                self._all_lost = self._all_lost.and_row(row)
        if self._all_lost.rows:
            _log.warning("%s lacks %s: %s", self.path, self._all_lost, self._file.why or self._why)
        self._all_lost = Lost(0)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _left_out(self, plan: Plan | None) -> bool:
        """Whether the next row is one of those that are thinned out."""
        self._calls += 1
        return plan is None and (self._calls - 1) % self._thinned > 0

    def _write(self, *rows: Row) -> None:
        """Add rows, after one that says what is missing before them, if anything is."""
        lines = [_line(row) for row in rows]
        if self._lost is not None:
            step = rows[0].start_step if rows else self._lost.last_step or 0
            lines.insert(0, _line(Row(step, lost=self._lost)))
        if self._file.write(lines):
            self._lost = None
            return
        self._why = self._file.why
        for row in rows:
            self._lost = (self._lost or Lost(0)).and_row(row)
            self._all_lost = self._all_lost.and_row(row)


def read_record(path: str | PathLike[str]) -> Record:
    """Read a record, or say in which line it is not one."""
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidSetting(f"there is no file {place}; give the path of a record") from None
    except IsADirectoryError:
        raise InvalidSetting(f"{place} is a directory; give the path of a record") from None
    except OSError as error:
        raise InvalidSetting(f"{place} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidSetting(f"{place} is not text in UTF-8, so it is no record") from None
    except ValueError as error:  # a name that no file can have
        raise InvalidSetting(f"record={str(place)!r} cannot be read: {error}") from None
    *lines, rest = text.split("\n")
    if not lines:
        raise StateMismatch(f"{place} has no complete line, so it is not a record")
    header = _read(Header, place, 1, lines[0])
    rows = [_read(Row, place, number, line) for number, line in enumerate(lines[1:], start=2)]
    return Record(header, tuple(rows), complete=not rest)


def _told(event: Event) -> dict[str, Any]:
    """Return the field of a row that an event belongs to."""
    return {"change" if isinstance(event, Change) else "observation": event}


def _created(path: Path, held_bytes: int, *, series: bool) -> LineFile:
    if series:
        check_series(path)
    try:
        # Absolute, since it may be made later, when the script has changed its directory.
        making = partial(create_next if series else create, path.absolute())
        return LineFile(making, path, most_bytes=held_bytes)
    except FileExistsError:
        raise InvalidSetting(
            f"record={str(path)!r} exists, and records are not overwritten; choose another name "
            "or remove it"
        ) from None
    except OSError as error:
        raise InvalidSetting(f"record={str(path)!r} cannot be written: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have
        raise InvalidSetting(f"record={str(path)!r} cannot be written: {error}") from None


def _line(line: Header | Row) -> str:
    shown = _without_none(to_plain(line))
    return json.dumps(shown, allow_nan=False, separators=(",", ":"))


def _read(kind: type[Line], path: Path, number: int, line: str) -> Line:
    """Return what a line holds."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise StateMismatch(f"line {number} of {path} is not JSON: {error}") from None
    except (ValueError, RecursionError):
        raise StateMismatch(
            f"line {number} of {path} has numbers too long or brackets too deep to be read"
        ) from None
    if not isinstance(found, dict):
        raise StateMismatch(f"line {number} of {path} is not a JSON object")
    if kind is Header:
        _check_format(path, found)
    try:
        return from_plain(kind, found)
    except StateMismatch as error:
        raise StateMismatch(f"line {number} of {path}: {error}") from None


def _check_format(path: Path, found: dict[str, Any]) -> None:
    if found.get("format") != FORMAT:
        raise StateMismatch(f'{path} does not begin with "format": "{FORMAT}", so it is no record')
    if found.get("version") != VERSION:
        raise StateMismatch(
            f"{path} is a record of version {found.get('version')!r}, and this Poise reads version "
            f"{VERSION}; use the version that wrote it"
        )


def _without_none(value: Any) -> Any:
    """Leave out fields that are None; inside lists, null stands for NaN and stays."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value

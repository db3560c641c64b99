"""Records on disk: one JSON object per line, readable while they grow."""

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from poise.core.observation import Change, Event
from poise.core.plain import from_plain, to_plain
from poise.core.plan import Plan
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.engine.round import Round
from poise.errors import InvalidSetting, StateMismatch
from poise.records.rows import FORMAT, VERSION, Decided, Header, Record, Row, Served


class Recorder:
    """Writes a record, line by line.

    A file that exists is never overwritten. Fields that nobody measured are left out, so that
    rows are as short as what is known. Of very large simulations a record holds only some rows:
    each one with a decision, and of so many others one. It cannot be replayed.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        engine: Engine,
        *,
        mode: str | None = None,
        thinned: int = 1,
    ) -> None:
        self._file = _created(Path(path))
        self._thinned = thinned
        self._calls = 0
        self._write(Header.of(engine, mode, thinned))

    def write(self, events: Sequence[Event], start_step: int, plan: Plan | None) -> None:
        """Add what happened, and the plan that was made on all of it."""
        if self._left_out(plan):
            return
        if self._thinned > 1:
            events = events[-1:]
        for number, event in enumerate(events, start=1):
            last = number == len(events)
            decision = Decided.of(plan) if last and plan is not None else None
            more = None if last else True
            self._write(Row(start_step, **_told(event), decision=decision, more=more))

    def write_round(self, decided: Round, engine: AsyncEngine, busy_s: float) -> None:
        """Add a round of a training with a server, and what the server has done so far."""
        if self._left_out(decided.plan):
            return
        (event,) = decided.events
        self._write(
            Row(
                decided.start_step,
                **_told(event),
                loaded=None if decided.loaded is None else json.dumps(decided.loaded.state_dict()),
                decision=None if decided.plan is None else Decided.of(decided.plan),
                served=Served.of(engine, busy_s),
            )
        )

    def resume(
        self, engine: Engine, change: Change | None, start_step: int, plan: Plan | None
    ) -> None:
        """Add that training goes on with what an engine knows, and its plan for these workers."""
        decision = None if plan is None else Decided.of(plan)
        loaded = json.dumps(engine.state_dict())
        self._write(Row(start_step, change=change, loaded=loaded, decision=decision))

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _left_out(self, plan: Plan | None) -> bool:
        """Whether the next row is one of those that are thinned out."""
        self._calls += 1
        return plan is None and (self._calls - 1) % self._thinned > 0

    def _write(self, line: Header | Row) -> None:
        shown = _without_none(to_plain(line))
        self._file.write(json.dumps(shown, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()


def read_record(path: str | PathLike[str]) -> Record:
    """Read a record, or say in which line it is not one."""
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{place} cannot be read as a record: {error}") from None
    *lines, rest = text.split("\n")
    if not lines:
        raise StateMismatch(f"{place} has no complete line, so it is not a record")
    return Record(
        _header(place, lines[0]),
        tuple(_row(place, number, line) for number, line in enumerate(lines[1:], start=2)),
        complete=not rest,
    )


def _told(event: Event) -> dict[str, Any]:
    """Return the field of a row that an event belongs to."""
    return {"change" if isinstance(event, Change) else "observation": event}


def _created(path: Path) -> TextIO:
    try:
        return path.open("x", encoding="utf-8")
    except FileExistsError:
        raise InvalidSetting(
            f"record={str(path)!r} exists, and records are not overwritten; choose another name "
            "or remove it"
        ) from None
    except OSError as error:
        raise InvalidSetting(f"record={str(path)!r} cannot be written: {error.strerror}") from None


def _header(path: Path, line: str) -> Header:
    found = _object(path, 1, line)
    if found.get("format") != FORMAT:
        raise StateMismatch(f'{path} does not begin with "format": "{FORMAT}", so it is no record')
    if found.get("version") != VERSION:
        raise StateMismatch(
            f"{path} is a record of version {found.get('version')}, and this Poise reads version "
            f"{VERSION}; use the version that wrote it"
        )
    header: Header = _read(Header, path, 1, found)
    return header


def _row(path: Path, number: int, line: str) -> Row:
    row: Row = _read(Row, path, number, _object(path, number, line))
    return row


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise StateMismatch(f"line {number} of {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise StateMismatch(f"line {number} of {path} is not a JSON object")
    return found


def _read(kind: Any, path: Path, number: int, found: dict[str, Any]) -> Any:
    try:
        return from_plain(kind, found)
    except StateMismatch as error:
        raise StateMismatch(f"line {number} of {path}: {error}") from None


def _without_none(value: Any) -> Any:
    """Leave out fields that are None; inside lists, null stands for NaN and stays."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value

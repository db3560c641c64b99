"""Records on disk: one JSON object per line, readable while they grow."""

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TextIO, TypeVar

from poise.core.observation import Change, Event
from poise.core.plain import from_plain, to_plain
from poise.core.plan import Plan
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.engine.round import Round
from poise.errors import InvalidSetting, StateMismatch
from poise.records.rows import FORMAT, VERSION, Decided, Header, Record, Row, Served

Line = TypeVar("Line", Header, Row)


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
        if not events or self._left_out(plan):
            return
        if self._thinned > 1:
            events = events[-1:]
        *before, last = events
        for event in before:
            self._write(Row(start_step, **_told(event), more=True))
        self._write(Row(start_step, **_told(last), decision=Decided.of(plan)))

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
    except ValueError as error:  # a name that no file can have
        raise InvalidSetting(f"record={str(path)!r} cannot be written: {error}") from None


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

"""The names of records: a training that is started again writes run.2.jsonl beside run.jsonl."""

import logging
import re
from io import FileIO
from pathlib import Path

from poise.errors import InvalidSetting
from poise.records.rows import FORMAT

_BEGINNING = f'{{"format":"{FORMAT}",'.encode()
_log = logging.getLogger("poise")


def numbered(path: Path, number: int) -> Path:
    """Return the name of a record in its series, from 1.

    >>> numbered(Path("run.jsonl"), 1), numbered(Path("run.jsonl"), 2)
    (PosixPath('run.jsonl'), PosixPath('run.2.jsonl'))
    """
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def paths_of(path: Path) -> list[Path]:
    """Return the records of a series that exist, the first one first."""
    return [numbered(path, number) for number in sorted(_numbers(path))]


def create(path: Path) -> FileIO:
    """Make a file for a record, or raise OSError."""
    return FileIO(path, "x+")


def create_next(path: Path) -> FileIO:
    """Make a file for the next record of a series, or raise OSError."""
    number = max(_numbers(path), default=0) + 1
    while True:
        try:
            file = create(numbered(path, number))
        except FileExistsError:  # another training was faster
            number += 1
        else:
            if number > 1:
                _log.info("%s exists; this run is recorded in %s", path, file.name)
            return file


def check_series(path: Path) -> None:
    """Raise if there is something under the name of a series that is no record."""
    if path.is_dir():
        raise InvalidSetting(f"record={str(path)!r} is a directory; give the path of a file")
    if not path.exists():
        return
    if not path.is_file() or not _begins_as_record(path):
        raise InvalidSetting(
            f"record={str(path)!r} exists and is no record; choose another name, or remove it"
        )


def _begins_as_record(path: Path) -> bool:
    """Whether a file begins as a record does; one that was cut off at once does, too."""
    try:
        with path.open("rb") as file:
            found = file.read(len(_BEGINNING))
    except OSError as error:
        raise InvalidSetting(
            f"record={str(path)!r} exists and cannot be read: {error.strerror}; choose another name"
        ) from None
    return found == _BEGINNING[: len(found)]


def _numbers(path: Path) -> list[int]:
    """Return the numbers of the records of a series that exist."""
    stem, suffix = re.escape(path.stem), re.escape(path.suffix)
    name = re.compile(rf"{stem}(?:\.([2-9]|[1-9]\d{{1,3}}))?{suffix}")  # run.20261118.jsonl is not
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:  # it is said when the file cannot be made
        return []
    found = [match for each in names if (match := name.fullmatch(each)) is not None]
    return [1 if match[1] is None else int(match[1]) for match in found]

"""TOML files whose tables and keys are known by their lines, so that errors can say where.

my.toml, line 12: [[worker]] 2 has unknown key max_bacth; did you mean max_batch?
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from poise.errors import InvalidSetting
from poise.numbers import is_number, is_whole

Number = TypeVar("Number", bound=float | None)
Whole = TypeVar("Whole", bound=int | None)

MOST = 1e15
"""Beyond this a number is a slip of the pen."""

_HEADER = re.compile(r"(?P<open>\[\[?)\s*(?P<name>[\w.-]+)\s*\]")
_KEY = re.compile(r"[\"']?(?P<key>[\w-]+)[\"']?\s*[=.]")
_SHORT_TEXT = re.compile(r"#.*|\"[^\"]*\"|'[^']*'")
"""What brackets are not counted in: comments and texts."""
_LONG_TEXT = re.compile(r'"""|' + "'''")

Place = tuple[str, int, str]
"""A table's name, its number among those of the same name, or 0 if there is one only, and a key;
the top level has no name, and a table itself no key."""


@dataclass(frozen=True)
class Toml:
    """The tables of a TOML file, and where they stand in it."""

    name: str
    """What errors call the file."""
    tables: Mapping[str, Any]
    lines: Mapping[Place, int] = field(default_factory=dict)

    @property
    def top(self) -> "Table":
        """The top level."""
        return Table(self, self.tables)

    def table(self, name: str) -> "Table":
        """Return the table [name], an empty one if it is not there, or raise if it is none."""
        found = self.tables.get(name, {})
        if not isinstance(found, Mapping):
            raise self.top.wrong(name, f"has {name}={found!r}; write one table [{name}]")
        return Table(self, found, name)

    def array(self, name: str) -> list["Table"]:
        """Return the tables [[name]], or raise if it is something else."""
        found = self.tables.get(name, [])
        if isinstance(found, Mapping):
            one = Table(self, found, name)
            raise one.wrong("", f"is one table; write [[{name}]], once for each")
        if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
            raise self.top.wrong(name, f"has {name}={found!r}; write tables [[{name}]]")
        return [Table(self, each, name, number) for number, each in enumerate(found, start=1)]


@dataclass(frozen=True)
class Table:
    """One table of a file: its keys are read as they should be, or their line is in the error."""

    toml: Toml
    values: Mapping[str, Any]
    name: str = ""
    """Empty: the top level."""
    place: int = 0
    """Among the tables [[name]], from 1; 0: it is the only one."""

    def where(self, key: str = "") -> str:
        r"""Return the file, the line of a key or else of the table, and the table.

        >>> toml = Toml("my.toml", {"worker": [{"b": 2}]}, lines_of("a = 1\n[[worker]]\nb = 2"))
        >>> toml.array("worker")[0].where("b")
        'my.toml, line 3: [[worker]] 1'
        """
        places = [(self.name, self.place, key), (self.name, self.place, "")]
        if not self.name:  # a key of the top level may be a table
            places += [(key, 0, ""), (key, 1, "")]
        lines = self.toml.lines
        line = next((lines[place] for place in places if place in lines), None)
        file = self.toml.name if line is None else f"{self.toml.name}, line {line}"
        if not self.name:
            return file
        return f"{file}: [[{self.name}]] {self.place}" if self.place else f"{file}: [{self.name}]"

    def wrong(self, key: str, what: str) -> InvalidSetting:
        """Return an error that says where a key stands, and what is wrong there."""
        return InvalidSetting(f"{self.where(key)} {what}")

    def refused(self, key: str, required: str) -> InvalidSetting:
        """Return the error of a value that is not allowed."""
        return self.wrong(key, f"has {key}={self.values.get(key)!r}; give {required}")

    @contextmanager
    def blamed(self, key: str = "") -> Iterator[None]:
        """Add the line of a key to errors within; without one, of the key that they name."""
        try:
            yield
        except InvalidSetting as error:
            named = [each for each in self.values if f"{each}=" in str(error)]
            place = self.where(key or next(iter(named), ""))
            raise InvalidSetting(f"{place}: {error}") from None

    def check_keys(self, known: Collection[str]) -> None:
        """Raise, with the nearest right name, if there is a key that is not known."""
        for key in self.values:
            if key not in known:
                raise self.wrong(key, f"has unknown key {key}; {nearest(key, known)}")

    def number(
        self, key: str, default: Number, *, least: float = 0.0, most: float = MOST
    ) -> float | Number:
        """Return a number."""
        if key not in self.values:
            return default
        found = self.values[key]
        if not (is_number(found) and least <= found <= most):
            raise self.refused(key, f"a number from {least:g} to {most:g}")
        return float(found)

    def whole(self, key: str, default: Whole, *, least: int = 0, most: int = 2**40) -> int | Whole:
        """Return a whole number."""
        if key not in self.values:
            return default
        found = self.values[key]
        if not (is_whole(found) and least <= found <= most):
            raise self.refused(key, f"a whole number from {least} to {most}")
        return found


def nearest(word: str, known: Collection[str]) -> str:
    """Return a question for the nearest known word, or all of them."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def read_toml(path: str | Path) -> Toml:
    """Return what a TOML file holds; raises InvalidSetting if it is missing or not TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Toml(str(path), tomllib.loads(text), lines_of(text))
    except FileNotFoundError:
        raise InvalidSetting(f"there is no file {path}; give the path of a TOML file") from None
    except IsADirectoryError:
        raise InvalidSetting(f"{path} is a directory; give the path of a TOML file") from None
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidSetting(f"{path} is not text in UTF-8; give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidSetting(f"{path} is not TOML: {_lowered(str(error))}; mend it") from None
    except (ValueError, RecursionError):
        raise InvalidSetting(
            f"{path} has numbers too long or brackets too deep to be read; mend it"
        ) from None


def lines_of(text: str) -> dict[Place, int]:
    r"""Return the lines, from 1, on which the tables and keys of a TOML text begin.

    >>> lines_of("seed = 1\n\n[[worker]]\ncount = 2")
    {('', 0, 'seed'): 1, ('worker', 1, ''): 3, ('worker', 1, 'count'): 4}
    """
    lines: dict[Place, int] = {}
    counts: dict[str, int] = {}
    table, number, inside, depth = "", 0, False, 0
    for line, words in enumerate(map(str.strip, text.split("\n")), start=1):
        began_inside = inside or depth > 0
        bare = _SHORT_TEXT.sub("", words)
        inside ^= len(_LONG_TEXT.findall(words)) % 2 == 1 and not words.startswith("#")
        if not began_inside and (header := _HEADER.match(words)):
            table = header["name"]
            number = counts.get(table, 0) + 1 if header["open"] == "[[" else 0
            counts[table] = number
            lines.setdefault((table, number, ""), line)
            continue
        if not began_inside and (key := _KEY.match(words)):
            lines.setdefault((table, number, key["key"]), line)
        if not inside:
            depth += sum(bare.count(each) for each in "[{") - sum(bare.count(each) for each in "]}")
    return lines


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]

"""TOML files whose tables and keys are known by their lines, so that errors can say where.

my.toml, line 12: [[worker]] 2 has unknown key max_bacth; did you mean max_batch?
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poise.errors import InvalidSetting

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

    def where(self, table: str = "", number: int = 0, key: str = "") -> str:
        r"""Return the file, the line of a key or else of its table, and the table.

        >>> Toml("my.toml", {}, lines_of("a = 1\n[[worker]]\nb = 2")).where("worker", 1, "b")
        'my.toml, line 3: [[worker]] 1'
        """
        places = [(table, number, key), (table, number, "")]
        if not table:  # a key of the top level may be a table
            places += [(key, 0, ""), (key, 1, "")]
        line = next((self.lines[place] for place in places if place in self.lines), None)
        file = self.name if line is None else f"{self.name}, line {line}"
        if not table:
            return file
        return f"{file}: [[{table}]] {number}" if number else f"{file}: [{table}]"

    def check_keys(self, known: Collection[str], table: str = "", number: int = 0) -> None:
        """Raise, with the nearest right name, if a table holds a key that is not known."""
        for key in self.table(table, number):
            if key not in known:
                where = self.where(table, number, key)
                raise InvalidSetting(f"{where} has unknown key {key}; {nearest(key, known)}")

    def table(self, name: str, number: int = 0) -> Mapping[str, Any]:
        """Return a table, the top level for no name; an empty one if it is not there.

        Raises InvalidSetting where something else has its name.
        """
        if not name:
            return self.tables
        if number:
            return self.array(name)[number - 1]
        found = self.tables.get(name, {})
        if not isinstance(found, Mapping):
            raise InvalidSetting(
                f"{self.where(key=name)} has {name}={found!r}; write one table [{name}]"
            )
        return found

    def array(self, name: str) -> list[Mapping[str, Any]]:
        """Return the tables [[name]], or raise if it is something else."""
        found = self.tables.get(name, [])
        if isinstance(found, Mapping):
            raise InvalidSetting(
                f"{self.where(name)} is one table; write [[{name}]], once for each"
            )
        if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
            raise InvalidSetting(
                f"{self.where(key=name)} has {name}={found!r}; write tables [[{name}]]"
            )
        return found

    def refused(self, table: str, number: int, key: str, required: str) -> InvalidSetting:
        """Return the error of a value that is not allowed."""
        found = self.table(table, number).get(key)
        where = self.where(table, number, key)
        return InvalidSetting(f"{where} has {key}={found!r}; give {required}")

    def blame(self, error: Exception, table: str, number: int = 0) -> InvalidSetting:
        """Return an error with the line of the key that it speaks of, if it names one."""
        named = [key for key in self.table(table, number) if f"{key}=" in str(error)]
        where = self.where(table, number, named[0] if named else "")
        return InvalidSetting(f"{where}: {error}")


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

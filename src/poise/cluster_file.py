"""Cluster files: the workers and the network of a plan, declared in TOML.

title = "two machines"                # optional text: title, note

[network]                             # optional; without it the exchange costs nothing
ready = [0.3, 1.0]
bucket_s = [0.020, 0.004]

[training]                            # optional, for the best global batch
noise_scale = 3000.0                  # samples
start_batch = 256                     # the global batch that the learning rate is chosen for

[[worker]]                            # one table per kind; keys are the fields of Worker
name = "a100"
count = 4                             # a100-0 to a100-3
forward_s = [0.0004, 0.004]
backward_s = [0.0008, 0.006]
"""

import difflib
import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from poise.core.cluster import Network, Worker
from poise.errors import InvalidSetting

MOST_WORKERS = 100_000
"""More are taken for a slip of the pen."""

_TOP = ("title", "note", "network", "training", "worker")
_NETWORK = tuple(field.name for field in fields(Network))
_TRAINING = ("noise_scale", "start_batch")
_WORKER = (*(field.name for field in fields(Worker)), "count")


@dataclass(frozen=True)
class Kind:
    """Equal workers, declared by one table."""

    name: str
    """The name in the table; without one, the names of the workers."""
    workers: range
    """Their numbers."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.workers)


@dataclass(frozen=True, kw_only=True)
class DeclaredCluster:
    """What a cluster file says."""

    workers: tuple[Worker, ...]
    network: Network
    kinds: tuple[Kind, ...]
    """The tables that the workers come from, in the same order."""
    noise_scale: float | None = None
    """The gradient noise scale, in samples."""
    start_batch: int | None = None
    """The global batch that the learning rate is chosen for."""
    title: str = ""
    note: str = ""


def read_cluster(path: str | Path) -> DeclaredCluster:
    """Return the cluster that a file declares.

    Raises InvalidSetting, with the file, the table and the key, unless all of it is understood:
    an unknown key is an error.
    """
    return declared_cluster(read_toml(path), str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file; raises InvalidSetting if it is missing or not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
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


def declared_cluster(
    tables: Mapping[str, Any], file: str, *, others: Collection[str] = ()
) -> DeclaredCluster:
    """Return the cluster in the tables of a file.

    Args:
        tables: what the file holds.
        file: what errors call it.
        others: keys at the top level that belong to somebody else.

    >>> line = {"forward_s": [0.001, 0.01], "backward_s": [0.002, 0.02]}
    >>> cluster = declared_cluster({"worker": [{"name": "a", "count": 2, **line}]}, "my.toml")
    >>> [worker.name for worker in cluster.workers]
    ['a-0', 'a-1']
    """
    _check_keys(file, tables, (*_TOP, *others))
    workers, kinds = _workers(file, tables)
    noise_scale, start_batch = _training(file, tables)
    return DeclaredCluster(
        workers=workers,
        network=_network(file, tables),
        kinds=kinds,
        noise_scale=noise_scale,
        start_batch=start_batch,
        title=_text(file, tables, "title"),
        note=_text(file, tables, "note"),
    )


def _network(file: str, tables: Mapping[str, Any]) -> Network:
    table = _table(file, tables, "network", _NETWORK)
    try:
        return Network(**table)
    except InvalidSetting as error:
        raise InvalidSetting(f"{file}: [network]: {error}") from None


def _training(file: str, tables: Mapping[str, Any]) -> tuple[float | None, int | None]:
    table = _table(file, tables, "training", _TRAINING)
    where = f"{file}: [training]"
    scale, start = table.get("noise_scale"), table.get("start_batch")
    if scale is not None and not (_is_number(scale) and 0 <= scale < math.inf):
        raise InvalidSetting(f"{where} has noise_scale={scale!r}; give samples from 0 up")
    if start is not None and not (_is_whole(start) and start >= 1):
        raise InvalidSetting(f"{where} has start_batch={start!r}; give a whole number from 1 up")
    return (None if scale is None else float(scale)), start


def _workers(file: str, tables: Mapping[str, Any]) -> tuple[tuple[Worker, ...], tuple[Kind, ...]]:
    workers: list[Worker] = []
    kinds: list[Kind] = []
    taken: dict[str, str] = {}
    for number, table in enumerate(_worker_tables(file, tables), 1):
        where = f"{file}: [[worker]] {number}"
        worker, count = _worker(where, table)
        first = len(workers)
        if first + count > MOST_WORKERS:
            raise InvalidSetting(
                f"{where} makes it {first + count} workers; give at most {MOST_WORKERS} in all"
            )
        names = _names(worker.name, first, count)
        for name in names:
            if name in taken:
                raise InvalidSetting(
                    f"{where} has a worker {name}, and so has {taken[name]}; name one otherwise"
                )
            taken[name] = f"[[worker]] {number}"
        workers += [replace(worker, name=name) for name in names]
        members = range(first, first + count)
        kinds.append(Kind(worker.name or _default_name(members), members))
    return tuple(workers), tuple(kinds)


def _worker_tables(file: str, tables: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = tables.get("worker", [])
    if isinstance(found, Mapping):
        raise InvalidSetting(f"{file} has a table [worker]; write [[worker]], once per kind")
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise InvalidSetting(f"{file} has worker={found!r}; write tables [[worker]]")
    if not found:
        raise InvalidSetting(f"{file} declares no workers; add a table [[worker]] for each kind")
    return found


def _worker(where: str, table: Mapping[str, Any]) -> tuple[Worker, int]:
    """Return the worker of a table, under the table's name, and how many there are."""
    name, count, ready = table.get("name", ""), table.get("count", 1), table.get("ready_s", [])
    if not isinstance(name, str) or ("name" in table and not name.strip()):
        raise InvalidSetting(f"{where} has name={name!r}; give text, or leave it out")
    _check_keys(f"{where} ({name})" if name else where, table, _WORKER)
    if not (_is_whole(count) and count >= 1):
        raise InvalidSetting(f"{where} has count={count!r}; give a whole number from 1 up")
    if not isinstance(ready, list):
        raise InvalidSetting(f"{where} has ready_s={ready!r}; give a list with a pair per bucket")
    try:
        return Worker(**{key: value for key, value in table.items() if key != "count"}), count
    except InvalidSetting as error:
        raise InvalidSetting(f"{where}: {error}") from None


def _names(name: str, first: int, count: int) -> list[str]:
    if not name:
        return [f"worker-{number}" for number in range(first, first + count)]
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


def _default_name(members: range) -> str:
    return f"worker-{members[0]}" + (f"..{members[-1]}" if len(members) > 1 else "")


def _table(
    file: str, tables: Mapping[str, Any], name: str, known: Collection[str]
) -> Mapping[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, Mapping):
        raise InvalidSetting(f"{file} has {name}={table!r}; write one table [{name}]")
    _check_keys(f"{file}: [{name}]", table, known)
    return table


def _text(file: str, tables: Mapping[str, Any], key: str) -> str:
    value = tables.get(key, "")
    if not isinstance(value, str):
        raise InvalidSetting(f"{file} has {key}={value!r}; give text in quotation marks")
    return value


def _check_keys(where: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise InvalidSetting(f"{where} has unknown key {key}; {hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]

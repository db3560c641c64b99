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

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path

from poise.core.cluster import Network, Worker
from poise.errors import InvalidSetting
from poise.numbers import is_number, is_whole
from poise.toml_file import Toml, read_toml

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

    Raises InvalidSetting, with the file, the line, the table and the key, unless all of it is
    understood: an unknown key is an error.
    """
    return declared_cluster(read_toml(path))


def declared_cluster(
    toml: Toml, *, others: Collection[str] = (), of_workers: Collection[str] = ()
) -> DeclaredCluster:
    """Return the cluster in the tables of a file.

    Args:
        toml: what the file holds.
        others: keys at the top level that belong to somebody else.
        of_workers: keys of the tables of workers that do.

    >>> line = {"forward_s": [0.001, 0.01], "backward_s": [0.002, 0.02]}
    >>> tables = {"worker": [{"name": "a", "count": 2, **line}]}
    >>> [worker.name for worker in declared_cluster(Toml("my.toml", tables)).workers]
    ['a-0', 'a-1']
    """
    toml.check_keys(tuple(dict.fromkeys((*_TOP, *others))))
    workers, kinds = _workers(toml, of_workers)
    noise_scale, start_batch = _training(toml) if "training" not in others else (None, None)
    return DeclaredCluster(
        workers=workers,
        network=_network(toml) if "network" not in others else Network(),
        kinds=kinds,
        noise_scale=noise_scale,
        start_batch=start_batch,
        title=text_of(toml, "title"),
        note=text_of(toml, "note"),
    )


def text_of(toml: Toml, key: str) -> str:
    """Return a text at the top level of a file, or none."""
    value = toml.tables.get(key, "")
    if not isinstance(value, str):
        raise toml.refused("", 0, key, "text in quotation marks")
    return value


def _network(toml: Toml) -> Network:
    table = toml.table("network")
    toml.check_keys(_NETWORK, "network")
    try:
        return Network(**table)
    except InvalidSetting as error:
        raise toml.blame(error, "network") from None


def _training(toml: Toml) -> tuple[float | None, int | None]:
    table = toml.table("training")
    toml.check_keys(_TRAINING, "training")
    scale, start = table.get("noise_scale"), table.get("start_batch")
    if scale is not None and not (is_number(scale) and 0 <= scale < math.inf):
        raise toml.refused("training", 0, "noise_scale", "samples from 0 up")
    if start is not None and not (is_whole(start) and start >= 1):
        raise toml.refused("training", 0, "start_batch", "a whole number from 1 up")
    return (None if scale is None else float(scale)), start


def _workers(toml: Toml, of_others: Collection[str]) -> tuple[tuple[Worker, ...], tuple[Kind, ...]]:
    tables = toml.array("worker")
    if not tables:
        raise InvalidSetting(
            f"{toml.name} declares no workers; add a table [[worker]] for each kind"
        )
    workers: list[Worker] = []
    kinds: list[Kind] = []
    taken: dict[str, str] = {}
    for number in range(1, len(tables) + 1):
        worker, count = _worker(toml, number, of_others)
        first = len(workers)
        if first + count > MOST_WORKERS:
            raise InvalidSetting(
                f"{toml.where('worker', number, 'count')} makes it {first + count} workers; "
                f"give at most {MOST_WORKERS} in all"
            )
        names = _names(worker.name, first, count)
        for name in names:
            if name in taken:
                raise InvalidSetting(
                    f"{toml.where('worker', number, 'name')} has a worker {name}, and so has "
                    f"{taken[name]}; name one otherwise"
                )
            taken[name] = f"[[worker]] {number}"
        workers += [replace(worker, name=name) for name in names]
        members = range(first, first + count)
        kinds.append(Kind(worker.name or _default_name(members), members))
    return tuple(workers), tuple(kinds)


def _worker(toml: Toml, number: int, of_others: Collection[str]) -> tuple[Worker, int]:
    """Return the worker of a table, under the table's name, and how many there are."""
    table = toml.table("worker", number)
    name, count = table.get("name", ""), table.get("count", 1)
    if not isinstance(name, str) or ("name" in table and not name.strip()):
        raise toml.refused("worker", number, "name", "text, or leave it out")
    toml.check_keys((*_WORKER, *of_others), "worker", number)
    if not (is_whole(count) and count >= 1):
        raise toml.refused("worker", number, "count", "a whole number from 1 up")
    if not isinstance(table.get("ready_s", []), list):
        raise toml.refused("worker", number, "ready_s", "a list with a pair per bucket")
    own = {key: value for key, value in table.items() if key != "count" and key not in of_others}
    try:
        return Worker(**own), count
    except InvalidSetting as error:
        raise toml.blame(error, "worker", number) from None


def _names(name: str, first: int, count: int) -> list[str]:
    if not name:
        return [f"worker-{number}" for number in range(first, first + count)]
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


def _default_name(members: range) -> str:
    return f"worker-{members[0]}" + (f"..{members[-1]}" if len(members) > 1 else "")

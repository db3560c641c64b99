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

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path

from poise.core.cluster import Network, Worker
from poise.core.goodput import MOST_NOISE
from poise.core.limits import UNLIMITED
from poise.errors import InvalidSetting
from poise.numbers import is_number, is_whole
from poise.toml_file import Table, Toml, read_toml

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
    toml.top.check_keys(tuple(dict.fromkeys((*_TOP, *others))))
    workers, kinds = _workers(toml, of_workers)
    noise_scale, start_batch = _training(toml) if "training" not in others else (None, None)
    return DeclaredCluster(
        workers=workers,
        network=_network(toml) if "network" not in others else Network(),
        kinds=kinds,
        noise_scale=noise_scale,
        start_batch=start_batch,
        title=_text(toml, "title"),
        note=_text(toml, "note"),
    )


def _text(toml: Toml, key: str) -> str:
    """Return a text at the top level of a file, or none."""
    value = toml.tables.get(key, "")
    if not isinstance(value, str):
        raise toml.top.refused(key, "text in quotation marks")
    return value


def _network(toml: Toml) -> Network:
    table = toml.table("network")
    table.check_keys(_NETWORK)
    with table.blamed():
        return Network(**table.values)


def _training(toml: Toml) -> tuple[float | None, int | None]:
    table = toml.table("training")
    table.check_keys(_TRAINING)
    scale, start = table.values.get("noise_scale"), table.values.get("start_batch")
    if scale is not None and not (is_number(scale) and 0 <= scale <= MOST_NOISE):
        raise table.refused("noise_scale", f"samples from 0 up to {MOST_NOISE:g}")
    if start is not None and not (is_whole(start) and 1 <= start <= UNLIMITED):
        raise table.refused("start_batch", f"a whole number from 1 up to {UNLIMITED}")
    return (None if scale is None else float(scale)), start


def _workers(toml: Toml, of_others: Collection[str]) -> tuple[tuple[Worker, ...], tuple[Kind, ...]]:
    tables = toml.array("worker")
    if not tables:
        raise InvalidSetting(
            f"{toml.name} declares no workers; add a table [[worker]] for each kind"
        )
    workers: list[Worker] = []
    kinds: list[Kind] = []
    taken: dict[str, int] = {}
    for table in tables:
        worker, count = _worker(table, of_others)
        members = range(len(workers), len(workers) + count)
        if members.stop > MOST_WORKERS:
            raise table.wrong(
                "count", f"makes it {members.stop} workers; give at most {MOST_WORKERS} in all"
            )
        for name in _names(worker.name, members):
            if name in taken:
                raise table.wrong(
                    "name",
                    f"has a worker {name}, and so has [[worker]] {taken[name]}; name one otherwise",
                )
            taken[name] = table.place
            workers.append(replace(worker, name=name))
        kinds.append(Kind(worker.name or _default_name(members), members))
    return tuple(workers), tuple(kinds)


def _worker(table: Table, of_others: Collection[str]) -> tuple[Worker, int]:
    """Return the worker of a table, under the table's name, and how many there are."""
    values = table.values
    name, count = values.get("name", ""), values.get("count", 1)
    if not isinstance(name, str) or ("name" in values and not name.strip()):
        raise table.refused("name", "text, or leave it out")
    table.check_keys((*_WORKER, *of_others))
    if not (is_whole(count) and count >= 1):
        raise table.refused("count", "a whole number from 1 up")
    if not isinstance(values.get("ready_s", []), list):
        raise table.refused("ready_s", "a list with a pair per bucket")
    own = {key: value for key, value in values.items() if key not in ("count", *of_others)}
    with table.blamed():
        return Worker(**own), count


def _names(name: str, members: range) -> list[str]:
    if not name:
        return [f"worker-{number}" for number in members]
    count = len(members)
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


def _default_name(members: range) -> str:
    return f"worker-{members[0]}" + (f"..{members[-1]}" if len(members) > 1 else "")

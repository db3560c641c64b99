"""Scenario files: a cluster and what happens to it, declared in TOML.

A scenario is a cluster file (`poise.cluster_file`) with more keys; every one of them is optional
except global_batch.

seed = 1
steps = 2000
global_batch = 512
mode = "sync"                         # or "async", or "stale:4"
policies = ["even", "proportional", "auto"]

[noise]
cv = 0.05

[[event]]
at_step = 500
worker = "rtx6000-0"
slower = 4.0
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from poise.cluster_file import declared_cluster
from poise.core.cluster import Network
from poise.engine.adaptation import Adaptation
from poise.engine.modes import mode_of
from poise.errors import InvalidSetting
from poise.numbers import is_number, is_whole
from poise.policy.naming import KINDS
from poise.sim.reduction import MOST_IN_RING, Ring
from poise.sim.scenario import (
    MOST_CV,
    MOST_SPIKE,
    Drift,
    Failures,
    Learning,
    Noise,
    Scenario,
    Server,
)
from poise.sim.scenario_checks import check
from poise.sim.scenario_events import declared_events
from poise.sim.truth import Bend
from poise.toml_file import MOST, Table, Toml, nearest, read_toml

T = TypeVar("T")
LEAST = 1e-9
"""Below this a number above 0 is a slip of the pen."""
MOST_STEPS = 10_000_000
_VALUES = ("seed", "steps", "global_batch", "mode", "policies", "split", "lead", "restart_s")
_WORKER = ("price_per_hour", "resource", "tile", "knee", "power", "link_bytes_per_s")
_TRAINING = ("noise_scale", "start_batch", "target_samples", "epoch_samples", "adapt", "stride")
_NOISE = {
    "cv": (0, MOST_CV),
    "correlation": (0, 0.999),
    "spike_chance": (0, 1),
    "spike": (1, MOST_SPIKE),
}
_DRIFT = {"per_step": (0, 1), "memory_steps": (1, 1e9)}
_SERVER = {"exchange_s": (0, 1e6), "update_s": (0, 1e6)}
_TABLES: Mapping[str, Collection[str]] = {
    "network": ("ready", "bucket_s", "bucket_bytes", "link_bytes_per_s", "latency_s", "drag"),
    "training": _TRAINING,
    "noise": _NOISE,
    "drift": _DRIFT,
    "failures": ("mean_steps", "down_steps"),
    "loader": ("queue",),
    "server": _SERVER,
    "calibration": ("error", "notes"),
}
_TOP = (*_VALUES, *_TABLES, "event", "walk")
_KNEE = "a pair: the local batch at the knee, and what a sample beyond it counts, from 1 up"
_POWER = "a pair above 0: the exponent, and the local batch at which the line holds"


def read_scenario(path: str | Path) -> Scenario:
    """Return the scenario that a file declares.

    Raises InvalidSetting, with the file, the line and the nearest right name, unless all of it
    is understood.
    """
    return declared_scenario(read_toml(path))


def declared_scenario(toml: Toml) -> Scenario:
    """Return the scenario in the tables of a file."""
    cluster = declared_cluster(toml, others=_TOP, of_workers=_WORKER)
    top, tables = toml.top, {name: toml.table(name) for name in _TABLES}
    for name, known in _TABLES.items():
        tables[name].check_keys(known)
    kinds = zip(toml.array("worker"), cluster.kinds, strict=True)
    workers = [table for table, kind in kinds for _ in kind.workers]
    steps = top.whole("steps", 1000, least=1, most=MOST_STEPS)
    if "global_batch" not in toml.tables:
        raise top.wrong("", "has no global_batch; give the samples of a step over all workers")
    global_batch = top.whole("global_batch", 0, least=1)
    network, ring, drag = _network(tables["network"], workers)
    with top.blamed("mode"):
        mode = mode_of(top.values.get("mode", "sync"))
    scenario = Scenario(
        cluster=replace(cluster, network=network),
        global_batch=global_batch,
        steps=steps,
        mode=mode,
        learning=_learning(tables["training"], global_batch),
        seed=top.whole("seed", 0),
        policies=_policies(top, workers),
        split=_split(top, global_batch),
        resources=_resources(workers),
        noise=_numbers(Noise, tables["noise"], _NOISE),
        drift=_numbers(Drift, tables["drift"], _DRIFT),
        failures=Failures(
            mean_steps=tables["failures"].number("mean_steps", math.inf, least=1.0),
            down_steps=tables["failures"].whole("down_steps", 50, least=1),
        ),
        events=declared_events(toml, cluster, steps),
        bend=_bend(workers),
        ring=ring,
        drag=drag,
        queue=tables["loader"].whole("queue", 2, least=1, most=64),
        lead=top.whole("lead", 0, most=1024),
        restart_s=top.number("restart_s", 0.0),
        epoch_samples=_epoch(tables["training"], global_batch),
        stride=tables["training"].whole("stride", 1, least=1),
        server=_numbers(Server, tables["server"], _SERVER),
        prices=_of_workers(workers, "price_per_hour", 0.0, _from_0, "a number from 0 up"),
        error=tables["calibration"].number("error", None),
        notes=_notes(tables["calibration"]),
    )
    check(toml, scenario)
    return scenario


def _policies(top: Table, workers: Sequence[Table]) -> tuple[str, ...]:
    found = top.values.get("policies", ["even", "proportional", "auto"])
    if not isinstance(found, list) or not found or len(set(map(str, found))) < len(found):
        raise top.refused("policies", "a list of different names")
    for name in found:
        if not isinstance(name, str) or name not in KINDS:
            raise top.wrong("policies", f"has policy {name!r}; {nearest(str(name), KINDS)}")
    if "fixed" in found and "split" not in top.values:
        raise top.wrong("policies", "has the policy fixed; give its split = [...], too")
    if "static" in found and not _resources(workers):
        raise top.wrong(
            "policies",
            "has the policy static; give every [[worker]] a resource, such as its cores",
        )
    return tuple(found)


def _split(top: Table, global_batch: int) -> tuple[int, ...]:
    if "split" not in top.values:
        return ()
    found = top.values["split"]
    whole = isinstance(found, list) and all(is_whole(each) and each >= 0 for each in found)
    if not whole or sum(found) != global_batch:
        raise top.refused("split", f"local batches that add up to global_batch={global_batch}")
    return tuple(found)


def _network(table: Table, workers: Sequence[Table]) -> tuple[Network, Ring | None, float]:
    """Return the network, its ring if it has one, and its drag; each worker has its table."""
    values = table.values
    drag = table.number("drag", 0.0, most=100.0)
    plain = {key: values[key] for key in ("ready", "bucket_s") if key in values}
    with table.blamed():
        if "bucket_bytes" not in values:
            for key in ("link_bytes_per_s", "latency_s"):
                if key in values:
                    raise InvalidSetting(f"{key}={values[key]!r} needs bucket_bytes; give both")
            return Network(**plain), None, drag
        if "bucket_s" in values:
            raise InvalidSetting("bucket_s= and bucket_bytes= exclude each other; give one")
        sizes = values["bucket_bytes"]
        if not isinstance(sizes, list) or not all(_from_0(each) is not None for each in sizes):
            raise InvalidSetting(f"bucket_bytes={sizes!r}; give a list of bytes, one per bucket")
        network = Network(**plain, bucket_s=(0.0,) * len(sizes))
    default = table.number("link_bytes_per_s", None, least=1.0)
    links = [_link(worker, default) for worker in workers]
    ring = Ring(np.array(sizes, dtype=np.float64), np.array(links), table.number("latency_s", 0.0))
    if len(links) > MOST_IN_RING:
        raise table.wrong(
            "bucket_bytes",
            f"makes a ring of {len(links)} workers; give bucket_s instead beyond "
            f"{MOST_IN_RING}, since every round of a ring is simulated",
        )
    return replace(network, bucket_s=tuple(ring.bucket_s.tolist())), ring, drag


def _link(worker: Table, default: float | None) -> float:
    """Return the bytes per second of a worker's link: its own, or that of all."""
    found = worker.number("link_bytes_per_s", default, least=1.0)
    if found is None:
        raise worker.wrong(
            "",
            "has no link_bytes_per_s, which a ring needs; give it there or in [network] for all",
        )
    return found


def _learning(table: Table, global_batch: int) -> Learning | None:
    """Return what is learned; None: nothing is said of it."""
    start = table.whole("start_batch", global_batch, least=1)
    target = table.number("target_samples", None, least=1.0)
    if "noise_scale" not in table.values:
        for key in ("adapt", "start_batch"):
            if key in table.values:
                raise table.wrong(key, f"has {key} and no noise_scale; give both")
        if target is None:
            return None
    course = _noise_scale(table, target)
    adapt = _adapt(table, global_batch, start) if "adapt" in table.values else None
    return Learning(noise_scale=course, start_batch=start, target_samples=target, adapt=adapt)


def _epoch(table: Table, global_batch: int) -> int | None:
    """Return the samples of an epoch; None: it never ends."""
    found = table.whole("epoch_samples", None, least=1)
    if found is not None and found < global_batch:
        raise table.refused("epoch_samples", f"at least global_batch={global_batch} samples")
    return found


def _noise_scale(table: Table, target: float | None) -> tuple[tuple[float, float], ...]:
    found = table.values.get("noise_scale", 1.0)
    if is_number(found):
        return ((0.0, table.number("noise_scale", 1.0, least=LEAST)),)
    listed = found if isinstance(found, list) else []
    pairs = [pair for pair in map(_pair, listed) if pair and pair[0] <= 1 and pair[1] >= LEAST]
    parts = [part for part, _ in pairs]
    if not pairs or len(pairs) < len(listed) or parts != sorted(set(parts)):
        raise table.refused(
            "noise_scale",
            "samples above 0, or pairs of the part of the goal and samples that rise from 0",
        )
    if target is None:
        raise table.wrong(
            "noise_scale",
            "changes on the way to a goal; give target_samples, the samples that it takes with "
            "start_batch",
        )
    return tuple(pairs)


def _adapt(table: Table, global_batch: int, start: int) -> Adaptation:
    found = table.values["adapt"]
    pair = isinstance(found, list) and len(found) == 2  # noqa: PLR2004
    if not pair or not all(is_whole(each) for each in found):
        raise table.refused("adapt", "two global batches, lowest and highest")
    with table.blamed("adapt"):
        if start != global_batch:
            raise InvalidSetting(
                f"a global batch that moves starts at start_batch={start}, and "
                f"global_batch={global_batch}; give the same number"
            )
        adapt = Adaptation(lowest=found[0], highest=found[1])
        adapt.start(global_batch)
    return adapt


def _resources(workers: Sequence[Table]) -> tuple[float, ...]:
    required = "a number above 0, such as the worker's cores"
    return _of_workers(workers, "resource", 0.0, _above_0, required)


def _bend(workers: Sequence[Table]) -> Bend:
    tile = _of_workers(workers, "tile", 1.0, _above_0, "a number of samples above 0")
    knee = _of_workers(workers, "knee", (0.0, 1.0), _knee, _KNEE)
    power = _of_workers(workers, "power", (1.0, 1.0), _power, _POWER)
    bend = {"tile": tile, "knee": tuple(np.array(knee).T), "power": tuple(np.array(power).T)}
    return Bend.of(**{key: values for key, values in bend.items() if values})


def _notes(table: Table) -> tuple[str, ...]:
    found = table.values.get("notes", [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise table.refused("notes", "a list of texts")
    return tuple(found)


def _numbers(kind: type[T], table: Table, ranges: Mapping[str, tuple[float, float]]) -> T:
    """Return a table of numbers as the dataclass whose fields are its keys.

    Args:
        kind: the dataclass; what the table does not say has its defaults.
        table: its values.
        ranges: the least and the most of each key.
    """
    found = {}
    for key in table.values:
        least, most = ranges[key]
        found[key] = table.number(key, 0.0, least=least, most=most)
    return kind(**found)


def _of_workers(
    workers: Sequence[Table], key: str, default: T, check: Callable[[Any], T | None], required: str
) -> tuple[T, ...]:
    """Return one value per worker; nothing if no table has the key.

    Args:
        workers: the table [[worker]] of each.
        key: of these tables.
        default: of tables that have it not.
        check: returns what is found as it should be; None: it is not allowed.
        required: what is allowed, in words.
    """
    if not any(key in table.values for table in workers):
        return ()
    values: list[T] = []
    for table in workers:
        value = check(table.values[key]) if key in table.values else default
        if value is None:
            raise table.refused(key, required)
        values.append(value)
    return tuple(values)


def _above_0(value: Any) -> float | None:
    """Return a number that is more than nothing; None: it is not."""
    return float(value) if is_number(value) and LEAST <= value <= MOST else None


def _from_0(value: Any) -> float | None:
    """Return a number that is not negative; None: it is."""
    return float(value) if is_number(value) and 0 <= value <= MOST else None


def _pair(value: Any) -> tuple[float, float] | None:
    """Return two numbers that are not negative; None: it is something else."""
    numbers = isinstance(value, list) and len(value) == 2 and all(map(is_number, value))  # noqa: PLR2004
    inside = numbers and all(0 <= each <= MOST for each in value)
    return (float(value[0]), float(value[1])) if inside else None


def _knee(value: Any) -> tuple[float, float] | None:
    pair = _pair(value)
    return pair if pair is not None and pair[1] >= 1 else None


def _power(value: Any) -> tuple[float, float] | None:
    pair = _pair(value)
    return pair if pair is not None and min(pair) >= LEAST and pair[0] <= 10 else None  # noqa: PLR2004

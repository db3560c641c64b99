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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from poise.cluster_file import declared_cluster
from poise.engine.modes import Mode, mode_of
from poise.errors import InvalidSetting
from poise.numbers import is_whole
from poise.policy.naming import KINDS
from poise.sim.scenario import Drift, Failures, Noise, Scenario, Server
from poise.sim.scenario_checks import check
from poise.sim.scenario_events import declared_events
from poise.sim.scenario_keys import LEAST, Keys, above_0, from_0, pair_of
from poise.sim.scenario_network import declared_network
from poise.sim.scenario_training import declared_epoch, declared_learning
from poise.sim.truth import Bend
from poise.toml_file import Toml, nearest, read_toml

MOST_STEPS = 10_000_000
_VALUES = ("seed", "steps", "global_batch", "mode", "policies", "split", "lead", "restart_s")
_TABLES = ("network", "training", "noise", "drift", "failures", "loader", "server", "calibration")
_TOP = (*_VALUES, *_TABLES, "event", "walk")
_WORKER = ("price_per_hour", "resource", "tile", "knee", "power", "link_bytes_per_s")
_NOISE = {"cv": (0, 2), "correlation": (0, 0.999), "spike_chance": (0, 1), "spike": (1, 1e6)}
_DRIFT = {"per_step": (0, 1), "memory_steps": (1, 1e9)}
_FAILURES = ("mean_steps", "down_steps")
_LOADER = ("queue",)
_SERVER = {"exchange_s": (0, 1e6), "update_s": (0, 1e6)}
_CALIBRATION = ("error", "notes")
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
    keys = Keys(toml, declared_cluster(toml, others=_TOP, of_workers=_WORKER))
    steps = keys.whole("steps", 1000, least=1, most=MOST_STEPS)
    if "global_batch" not in toml.tables:
        raise InvalidSetting(
            f"{toml.name} has no global_batch; give the samples of a step over all workers"
        )
    global_batch = keys.whole("global_batch", 0, least=1)
    network, ring, drag = declared_network(keys)
    mode = _mode(keys)
    learning = declared_learning(keys, global_batch)
    scenario = Scenario(
        cluster=replace(keys.cluster, network=network),
        global_batch=global_batch,
        steps=steps,
        seed=keys.whole("seed", 0, least=0),
        mode=mode,
        policies=_policies(keys),
        split=_split(keys, global_batch),
        resources=_resources(keys),
        noise=keys.numbers(Noise, "noise", _NOISE),
        drift=keys.numbers(Drift, "drift", _DRIFT),
        failures=_failures(keys),
        events=declared_events(keys, steps),
        learning=learning,
        bend=_bend(keys),
        ring=ring,
        drag=drag,
        queue=_queue(keys),
        lead=keys.whole("lead", 0, least=0, most=1024),
        restart_s=keys.number("restart_s", 0.0),
        epoch_samples=declared_epoch(keys, global_batch),
        stride=keys.whole("stride", 1, "training", least=1),
        server=keys.numbers(Server, "server", _SERVER),
        prices=keys.of_workers("price_per_hour", 0.0, from_0, "a number from 0 up"),
        error=_error(keys),
        notes=_notes(keys),
    )
    check(toml, scenario)
    return scenario


def _mode(keys: Keys) -> Mode:
    stated = keys.toml.tables.get("mode", "sync")
    try:
        return mode_of(stated)
    except InvalidSetting as error:
        raise InvalidSetting(f"{keys.toml.where(key='mode')}: {error}") from None


def _policies(keys: Keys) -> tuple[str, ...]:
    found = keys.toml.tables.get("policies", ["even", "proportional", "auto"])
    where = keys.toml.where(key="policies")
    if not isinstance(found, list) or not found or len(set(map(str, found))) < len(found):
        raise InvalidSetting(f"{where} has policies={found!r}; give a list of different names")
    for name in found:
        if not isinstance(name, str) or name not in KINDS:
            raise InvalidSetting(f"{where} has policy {name!r}; {nearest(str(name), KINDS)}")
    if "fixed" in found and "split" not in keys.toml.tables:
        raise InvalidSetting(f"{where} has the policy fixed; give its split = [...], too")
    if "static" in found and not _resources(keys):
        raise InvalidSetting(
            f"{where} has the policy static; give every [[worker]] a resource, such as its cores"
        )
    return tuple(found)


def _split(keys: Keys, global_batch: int) -> tuple[int, ...]:
    if "split" not in keys.toml.tables:
        return ()
    found = keys.toml.tables["split"]
    whole = isinstance(found, list) and all(is_whole(each) and each >= 0 for each in found)
    if not whole or sum(found) != global_batch:
        raise keys.toml.refused(
            "", 0, "split", f"local batches that add up to global_batch={global_batch}"
        )
    return tuple(found)


def _resources(keys: Keys) -> tuple[float, ...]:
    required = "a number above 0, such as the worker's cores"
    return keys.of_workers("resource", 0.0, above_0, required)


def _bend(keys: Keys) -> Bend:
    tile = keys.of_workers("tile", 1.0, above_0, "a number of samples above 0")
    knee = keys.of_workers("knee", (0.0, 1.0), _knee, _KNEE)
    power = keys.of_workers("power", (1.0, 1.0), _power, _POWER)
    bend = {"tile": tile, "knee": tuple(np.array(knee).T), "power": tuple(np.array(power).T)}
    return Bend.of(**{key: values for key, values in bend.items() if values})


def _failures(keys: Keys) -> Failures:
    keys.toml.check_keys(_FAILURES, "failures")
    return Failures(
        mean_steps=keys.number("mean_steps", math.inf, "failures", least=1.0),
        down_steps=keys.whole("down_steps", 50, "failures", least=1),
    )


def _queue(keys: Keys) -> int:
    keys.toml.check_keys(_LOADER, "loader")
    return keys.whole("queue", 2, "loader", least=1, most=64)


def _error(keys: Keys) -> float | None:
    keys.toml.check_keys(_CALIBRATION, "calibration")
    return keys.number("error", None, "calibration", most=100.0)


def _notes(keys: Keys) -> tuple[str, ...]:
    found = keys.toml.table("calibration").get("notes", [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise keys.toml.refused("calibration", 0, "notes", "a list of texts")
    return tuple(found)


def _knee(value: Any) -> tuple[float, float] | None:
    pair = pair_of(value)
    return pair if pair is not None and pair[0] >= 0 and pair[1] >= 1 else None


def _power(value: Any) -> tuple[float, float] | None:
    pair = pair_of(value)
    return pair if pair is not None and min(pair) >= LEAST and pair[0] <= 10 else None  # noqa: PLR2004

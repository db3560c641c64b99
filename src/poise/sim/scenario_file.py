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
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from poise.cluster_file import declared_cluster
from poise.core.cluster import Network
from poise.core.timing import Floats
from poise.engine.adaptation import Adaptation
from poise.engine.modes import Sync, mode_of
from poise.errors import InvalidSetting, PoiseError
from poise.policy.naming import KINDS
from poise.sim.reduction import MOST_IN_RING, Ring
from poise.sim.scenario import (
    Drift,
    Event,
    Failures,
    Learning,
    Noise,
    Scenario,
    Server,
    What,
)
from poise.sim.truth import Bend
from poise.toml_file import Toml, is_number, is_whole, nearest, read_toml

T = TypeVar("T")

_TOP = (
    "seed",
    "steps",
    "global_batch",
    "mode",
    "policies",
    "split",
    "lead",
    "restart_s",
    "network",
    "training",
    "noise",
    "drift",
    "failures",
    "loader",
    "server",
    "calibration",
    "event",
    "walk",
)
_WORKER = ("price_per_hour", "resource", "tile", "knee", "power", "link_bytes_per_s")
_NETWORK = ("ready", "bucket_s", "bucket_bytes", "link_bytes_per_s", "latency_s", "drag")
_TRAINING = (
    "noise_scale",
    "start_batch",
    "target_samples",
    "epoch_samples",
    "adapt",
    "stride",
)
_NOISE = ("cv", "correlation", "spike_chance", "spike")
_DRIFT = ("per_step", "memory_steps")
_FAILURES = ("mean_steps", "down_steps")
_LOADER = ("queue",)
_SERVER = ("exchange_s", "update_s")
_CALIBRATION = ("error", "notes")
_EVENT = ("at_step", "at_s", "worker", "over_steps", "for_steps")
_WALK = ("at_step", "at_s", "speeds")
_SLOWER: tuple[What, ...] = ("slower", "slower_network", "slower_link", "slower_loader")
_MOVES: tuple[What, ...] = ("leaves", "fails", "joins")
_EVERYONE = "all"
MOST_STEPS = 10_000_000
_MOST, _LEAST = 1e15, 1e-9
"""Beyond these a number is a slip of the pen."""
_REQUIRED = {
    "price_per_hour": "a number from 0 up",
    "resource": "a number above 0, such as the worker's cores",
    "tile": "a number of samples above 0",
    "knee": "a pair: the local batch at the knee, and what a sample beyond it counts, from 1 up",
    "power": "a pair above 0: the exponent, and the local batch at which the line holds",
}


def read_scenario(path: str | Path) -> Scenario:
    """Return the scenario that a file declares.

    Raises InvalidSetting, with the file, the line and the nearest right name, unless all of it
    is understood.
    """
    return declared_scenario(read_toml(path))


def declared_scenario(toml: Toml) -> Scenario:
    """Return the scenario in the tables of a file."""
    return _Reader(toml).scenario()


class _Reader:
    """Reads one file: `number` and `whole` take a key of a table, or say what is wrong with it."""

    def __init__(self, toml: Toml) -> None:
        self._toml = toml
        cluster = declared_cluster(toml, others=_TOP, of_workers=_WORKER)
        self._names = {worker.name: number for number, worker in enumerate(cluster.workers)}
        self._steps = self.whole("steps", 1000, least=1, most=MOST_STEPS)
        self._bare = cluster

    def scenario(self) -> Scenario:
        """Return all of it, checked as a whole."""
        toml = self._toml
        if "global_batch" not in toml.tables:
            raise InvalidSetting(
                f"{toml.name} has no global_batch; give the samples of a step over all workers"
            )
        global_batch = self.whole("global_batch", 0, least=1)
        network, ring, drag = self._network()
        cluster = replace(self._bare, network=network)
        mode = self._mode()
        learning = self._learning(global_batch)
        scenario = Scenario(
            cluster=cluster,
            global_batch=global_batch,
            steps=self._steps,
            seed=self.whole("seed", 0, least=0),
            mode=mode,
            policies=self._policies(),
            split=self._split(global_batch),
            resources=self._of_workers("resource", 0.0, _above_0),
            noise=self._noise(),
            drift=self._drift(),
            failures=self._failures(),
            events=self._events(),
            learning=learning,
            bend=self._bend(),
            ring=ring,
            drag=drag,
            queue=self.whole("queue", 2, "loader", least=1, most=64),
            lead=self.whole("lead", 0, least=0, most=1024),
            restart_s=self.number("restart_s", 0.0),
            epoch_samples=self._epoch_samples(global_batch),
            stride=self.whole("stride", 1, "training", least=1),
            server=self._server(),
            prices=self._prices(),
            error=self._error(),
            notes=self._notes(),
        )
        self._check(scenario)
        return scenario

    def number(
        self,
        key: str,
        default: float,
        table: str = "",
        number: int = 0,
        *,
        least: float = 0.0,
        most: float = _MOST,
    ) -> float:
        """Return a number of a table."""
        found = self._toml.table(table, number)
        value = found.get(key, default)
        if key not in found:
            return default
        within = is_number(value) and least <= value <= most and (value < math.inf or most == value)
        if not within:
            top = f" to {most:g}" if most < math.inf else " up"
            raise self._refused(table, number, key, f"a number from {least:g}{top}")
        return float(value)

    def whole(
        self,
        key: str,
        default: int,
        table: str = "",
        number: int = 0,
        *,
        least: int = 0,
        most: int = 2**40,
    ) -> int:
        """Return a whole number of a table."""
        value = self._toml.table(table, number).get(key, default)
        if not (is_whole(value) and least <= value <= most):
            raise self._refused(table, number, key, f"a whole number from {least} to {most}")
        return int(value)

    def _optional_whole(self, key: str, table: str) -> int | None:
        return self.whole(key, 0, table, least=1) if key in self._toml.table(table) else None

    def _epoch_samples(self, global_batch: int) -> int | None:
        found = self._optional_whole("epoch_samples", "training")
        if found is not None and found < global_batch:
            raise self._refused(
                "training", 0, "epoch_samples", f"at least global_batch={global_batch} samples"
            )
        return found

    def _refused(self, table: str, number: int, key: str, required: str) -> InvalidSetting:
        found = self._toml.table(table, number).get(key)
        where = self._toml.where(table, number, key)
        return InvalidSetting(f"{where} has {key}={found!r}; give {required}")

    def _mode(self) -> Any:
        stated = self._toml.tables.get("mode", "sync")
        try:
            return mode_of(stated)
        except InvalidSetting as error:
            raise InvalidSetting(f"{self._toml.where(key='mode')}: {error}") from None

    def _policies(self) -> tuple[str, ...]:
        found = self._toml.tables.get("policies", ["even", "proportional", "auto"])
        where = self._toml.where(key="policies")
        if not isinstance(found, list) or not found or len(set(map(str, found))) < len(found):
            raise InvalidSetting(f"{where} has policies={found!r}; give a list of different names")
        for name in found:
            if not isinstance(name, str) or name not in KINDS:
                raise InvalidSetting(f"{where} has policy {name!r}; {nearest(str(name), KINDS)}")
        if "fixed" in found and "split" not in self._toml.tables:
            raise InvalidSetting(f"{where} has the policy fixed; give its split = [...], too")
        if "static" in found and not self._of_workers("resource", 0.0, _above_0):
            raise InvalidSetting(
                f"{where} has the policy static; give every [[worker]] a resource, such as its "
                "cores"
            )
        return tuple(found)

    def _split(self, global_batch: int) -> tuple[int, ...]:
        if "split" not in self._toml.tables:
            return ()
        found = self._toml.tables["split"]
        whole = isinstance(found, list) and all(is_whole(each) and each >= 0 for each in found)
        if not whole or sum(found) != global_batch:
            raise self._refused(
                "", 0, "split", f"local batches that add up to global_batch={global_batch}"
            )
        return tuple(found)

    def _network(self) -> tuple[Network, Ring | None, float]:
        toml = self._toml
        table = toml.table("network")
        toml.check_keys(_NETWORK, "network")
        drag = self.number("drag", 0.0, "network", most=100.0)
        plain = {key: table[key] for key in ("ready", "bucket_s") if key in table}
        try:
            if "bucket_bytes" not in table:
                for key in ("link_bytes_per_s", "latency_s"):
                    if key in table:
                        raise InvalidSetting(f"{key}={table[key]!r} needs bucket_bytes; give both")
                return Network(**plain), None, drag
            if "bucket_s" in table:
                raise InvalidSetting("bucket_s= and bucket_bytes= exclude each other; give one")
            sizes = table["bucket_bytes"]
            if not isinstance(sizes, list) or not all(_from_0(each) is not None for each in sizes):
                raise InvalidSetting(
                    f"bucket_bytes={sizes!r}; give a list of bytes, one per bucket"
                )
            network = Network(ready=plain.get("ready", (1.0,)), bucket_s=tuple(sizes))
        except InvalidSetting as error:
            raise toml.blame(error, "network") from None
        links = self._links()
        ring = Ring(np.array(network.bucket_s), links, self.number("latency_s", 0.0, "network"))
        if len(links) > MOST_IN_RING:
            where = toml.where("network", key="bucket_bytes")
            raise InvalidSetting(
                f"{where} makes a ring of {len(links)} workers; give bucket_s instead beyond "
                f"{MOST_IN_RING}, since every round of a ring is simulated"
            )
        return replace(network, bucket_s=tuple(ring.bucket_s.tolist())), ring, drag

    def _links(self) -> Floats:
        table = self._toml.table("network")
        default = None
        if "link_bytes_per_s" in table:
            default = self.number("link_bytes_per_s", 0.0, "network", least=1.0)
        values: list[float] = []
        for number, kind in enumerate(self._bare.kinds, start=1):
            own = self._toml.table("worker", number).get("link_bytes_per_s", default)
            if own is None:
                where = self._toml.where("worker", number)
                raise InvalidSetting(
                    f"{where} has no link_bytes_per_s, which a ring needs; give it there or in "
                    "[network] for all"
                )
            if own is not default:
                own = self.number("link_bytes_per_s", 0.0, "worker", number, least=1.0)
            values += [own] * kind.count
        return np.array(values, dtype=np.float64)

    def _of_workers(self, key: str, default: T, check: Callable[[Any], T | None]) -> tuple[T, ...]:
        """Return one value per worker; nothing if no table has the key."""
        tables = self._toml.array("worker")
        if not any(key in table for table in tables):
            return ()
        values: list[T] = []
        for number, (table, kind) in enumerate(zip(tables, self._bare.kinds, strict=True), 1):
            value = check(table[key]) if key in table else default
            if value is None:
                raise self._refused("worker", number, key, _REQUIRED[key])
            values += [value] * kind.count
        return tuple(values)

    def _prices(self) -> tuple[float, ...]:
        return self._of_workers("price_per_hour", 0.0, _from_0)

    def _bend(self) -> Bend:
        tile = self._of_workers("tile", 1.0, _above_0)
        knee = self._of_workers("knee", (0.0, 1.0), _knee)
        power = self._of_workers("power", (1.0, 1.0), _power)
        bend: dict[str, Any] = {}
        if tile:
            bend["tile"] = tile
        if knee:
            bend["knee"] = tuple(np.array(knee).T)
        if power:
            bend["power"] = tuple(np.array(power).T)
        return Bend.of(**bend)

    def _noise(self) -> Noise:
        self._toml.check_keys(_NOISE, "noise")
        return Noise(
            cv=self.number("cv", 0.0, "noise", most=2.0),
            correlation=self.number("correlation", 0.0, "noise", most=0.999),
            spike_chance=self.number("spike_chance", 0.0, "noise", most=1.0),
            spike=self.number("spike", 1.0, "noise", least=1.0, most=1e6),
        )

    def _drift(self) -> Drift:
        self._toml.check_keys(_DRIFT, "drift")
        return Drift(
            per_step=self.number("per_step", 0.0, "drift", most=1.0),
            memory_steps=self.number("memory_steps", 500.0, "drift", least=1.0, most=1e9),
        )

    def _failures(self) -> Failures:
        self._toml.check_keys(_FAILURES, "failures")
        return Failures(
            mean_steps=self.number("mean_steps", math.inf, "failures", least=1.0),
            down_steps=self.whole("down_steps", 50, "failures", least=1),
        )

    def _server(self) -> Server:
        self._toml.check_keys(_SERVER, "server")
        self._toml.check_keys(_LOADER, "loader")
        return Server(
            exchange_s=self.number("exchange_s", 0.0, "server", most=1e6),
            update_s=self.number("update_s", 0.0, "server", most=1e6),
        )

    def _error(self) -> float | None:
        self._toml.check_keys(_CALIBRATION, "calibration")
        table = self._toml.table("calibration")
        return self.number("error", 0.0, "calibration", most=100.0) if "error" in table else None

    def _notes(self) -> tuple[str, ...]:
        found = self._toml.table("calibration").get("notes", [])
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self._refused("calibration", 0, "notes", "a list of texts")
        return tuple(found)

    def _learning(self, global_batch: int) -> Learning | None:
        toml = self._toml
        table = toml.table("training")
        toml.check_keys(_TRAINING, "training")
        start = self.whole("start_batch", global_batch, "training", least=1)
        target = None
        if "target_samples" in table:
            target = self.number("target_samples", 0.0, "training", least=1.0)
        if "noise_scale" not in table:
            for key in ("adapt", "start_batch"):
                if key in table:
                    where = toml.where("training", key=key)
                    raise InvalidSetting(f"{where} has {key} and no noise_scale; give both")
            if target is None:
                return None
        course = self._noise_scale(table, target)
        adapt = self._adapt(global_batch, start) if "adapt" in table else None
        return Learning(noise_scale=course, start_batch=start, target_samples=target, adapt=adapt)

    def _noise_scale(
        self, table: Mapping[str, Any], target: float | None
    ) -> tuple[tuple[float, float], ...]:
        found = table.get("noise_scale", 1.0)
        if is_number(found):
            return ((0.0, self.number("noise_scale", 1.0, "training", least=1e-9)),)
        pairs = found if isinstance(found, list) else []
        right = bool(pairs) and all(
            isinstance(pair, list)
            and len(pair) == 2  # noqa: PLR2004
            and all(is_number(each) for each in pair)
            and 0 <= pair[0] <= 1
            and _LEAST <= pair[1] <= _MOST
            for pair in pairs
        )
        if not right or [pair[0] for pair in pairs] != sorted({pair[0] for pair in pairs}):
            raise self._refused(
                "training",
                0,
                "noise_scale",
                "samples above 0, or pairs of the part of the goal and samples that rise from 0",
            )
        if target is None:
            where = self._toml.where("training", key="noise_scale")
            raise InvalidSetting(
                f"{where} changes on the way to a goal; give target_samples, the samples that it "
                "takes with start_batch"
            )
        return tuple((float(part), float(scale)) for part, scale in pairs)

    def _adapt(self, global_batch: int, start: int) -> Adaptation:
        found = self._toml.table("training")["adapt"]
        pair = isinstance(found, list) and len(found) == 2  # noqa: PLR2004
        if not pair or not all(is_whole(each) for each in found):
            raise self._refused("training", 0, "adapt", "two global batches, lowest and highest")
        where = self._toml.where("training", key="adapt")
        if start != global_batch:
            raise InvalidSetting(
                f"{where}: a global batch that moves starts at start_batch={start}, and "
                f"global_batch={global_batch}; give the same number"
            )
        try:
            adapt = Adaptation(lowest=found[0], highest=found[1])
            adapt.start(global_batch)
        except InvalidSetting as error:
            raise InvalidSetting(f"{where}: {error}") from None
        return adapt

    def _events(self) -> tuple[Event, ...]:
        walks = len(self._toml.array("walk"))
        events = [self._event(number + 1) for number in range(len(self._toml.array("event")))]
        events += [self._walk(number + 1) for number in range(walks)]
        by_step = sorted((e for e in events if e.at_step is not None), key=lambda e: e.at_step or 0)
        by_time = sorted((e for e in events if e.at_step is None), key=lambda e: e.at_s or 0.0)
        return (*by_step, *by_time)

    def _event(self, number: int) -> Event:
        toml = self._toml
        toml.check_keys((*_EVENT, *_SLOWER, *_MOVES), "event", number)
        table = toml.table("event", number)
        what = [each for each in (*_SLOWER, *_MOVES) if each in table]
        if len(what) != 1:
            raise InvalidSetting(
                f"{toml.where('event', number)} needs one of {', '.join((*_SLOWER, *_MOVES))}; "
                "say what happens"
            )
        (kind,) = what
        when = self._when("event", number)
        workers = () if kind == "slower_network" else self._concerned(number)
        if kind in _MOVES:
            if table[kind] is not True:
                raise self._refused("event", number, kind, "true, or leave it out")
            for key in ("over_steps", "for_steps"):
                if key in table:
                    raise self._refused("event", number, key, f"it to what gets slower, no {kind}")
            return Event(what=kind, workers=workers, **when)
        factor = self.number(kind, 1.0, "event", number, least=1e-6, most=1e6)
        for_steps = None
        if "for_steps" in table:
            for_steps = self.whole("for_steps", 0, "event", number, least=1)
        return Event(
            what=kind,
            workers=workers,
            factors=(factor,) * max(1, len(workers)),
            over_steps=self.whole("over_steps", 0, "event", number),
            for_steps=for_steps,
            **when,
        )

    def _walk(self, number: int) -> Event:
        toml = self._toml
        toml.check_keys(_WALK, "walk", number)
        speeds = toml.table("walk", number).get("speeds")
        workers = len(self._names)
        right = (
            isinstance(speeds, list)
            and len(speeds) == workers
            and all(is_number(each) and 1e-6 <= each <= 1e6 for each in speeds)  # noqa: PLR2004
        )
        if not isinstance(speeds, list) or not right:
            raise self._refused(
                "walk", number, "speeds", f"{workers} numbers above 0: 1 is as fast as declared"
            )
        when = self._when("walk", number)
        factors = tuple(1 / speed for speed in speeds)
        return Event(what="slower", workers=tuple(range(workers)), factors=factors, **when)

    def _when(self, table: str, number: int) -> dict[str, Any]:
        toml = self._toml
        found = toml.table(table, number)
        if ("at_step" in found) == ("at_s" in found):
            where = toml.where(table, number)
            raise InvalidSetting(f"{where} needs one of at_step and at_s; say when it happens")
        if "at_s" in found:
            return {"at_s": self.number("at_s", 0.0, table, number)}
        step = self.whole("at_step", 0, table, number)
        if step >= self._steps:
            where = toml.where(table, number, "at_step")
            raise InvalidSetting(
                f"{where} has at_step={step}, beyond the end: there are {self._steps} steps; "
                "give an earlier one, or raise steps"
            )
        return {"at_step": step}

    def _concerned(self, number: int) -> tuple[int, ...]:
        """Return the workers of a name, a kind, or a list of these."""
        found = self._toml.table("event", number).get("worker", _EVERYONE)
        where = self._toml.where("event", number, "worker")
        words = found if isinstance(found, list) else [found]
        kinds = {kind.name: kind.workers for kind in self._bare.kinds}
        workers: list[int] = []
        for word in words:
            if not isinstance(word, str):
                raise self._refused("event", number, "worker", "a name, or a list of names")
            if word == _EVERYONE:
                workers += self._names.values()
            elif word in self._names:
                workers.append(self._names[word])
            elif word in kinds:
                workers += kinds[word]
            else:
                known = [*kinds, *(name for name in self._names if name not in kinds)]
                hint = nearest(str(word), known if len(known) < 50 else list(kinds))  # noqa: PLR2004
                raise InvalidSetting(f"{where} has worker={word!r}, who is not there; {hint}")
        if not workers:
            raise self._refused("event", number, "worker", "a name, or leave it out for all")
        return tuple(dict.fromkeys(workers))

    def _first_event(self, what: str) -> str:
        """Return where the first event of a kind stands."""
        tables = self._toml.array("event")
        number = next(place for place, table in enumerate(tables, 1) if what in table)
        return self._toml.where("event", number, what)

    def _check_moves(self, scenario: Scenario) -> None:
        """Raise if it is unclear which of two moves of a worker comes first."""
        units: dict[int, bool] = {}
        for event in scenario.events:
            if event.what not in _MOVES:
                continue
            for worker in event.workers:
                if units.setdefault(worker, event.at_step is None) != (event.at_step is None):
                    raise InvalidSetting(
                        f"{self._toml.name} moves {scenario.names[worker]} by at_step and by at_s, "
                        "so that it is unclear what comes first; use one of them"
                    )

    def _check(self, scenario: Scenario) -> None:
        """Raise if the parts do not go together."""
        name = self._toml.name
        try:
            assert scenario.model.workers
        except PoiseError as error:
            raise InvalidSetting(f"{name}: {error}") from None
        if not len(scenario.first):
            raise InvalidSetting(f"{name} has no worker at the start; let one be there from step 0")
        if scenario.ring is None and any(e.what == "slower_link" for e in scenario.events):
            raise InvalidSetting(
                f"{self._first_event('slower_link')} has slower_link, and links are those of a "
                "ring; give "
                "bucket_bytes and link_bytes_per_s in [network], or use slower_network"
            )
        if not scenario.model.input_s.any() and any(
            event.what == "slower_loader" for event in scenario.events
        ):
            raise InvalidSetting(
                f"{self._first_event('slower_loader')} has slower_loader, and no loader is a "
                "limit; give input_s to its [[worker]]"
            )
        self._check_moves(scenario)
        with_server = not isinstance(scenario.mode, Sync)
        if "server" in self._toml.tables and not with_server:
            where = self._toml.where("server")
            raise InvalidSetting(f'{where} means nothing with mode = "sync"; leave it out')
        if scenario.restart_s and with_server:
            where = self._toml.where(key="restart_s")
            raise InvalidSetting(
                f"{where} has restart_s, and with a server nobody else stops; leave it out"
            )
        if not isinstance(scenario.mode, Sync) and (
            scenario.ring is not None or scenario.drag or scenario.stride > 1
        ):
            raise InvalidSetting(
                f"{self._toml.where(key='mode')} has a server, which knows no ring, drag or "
                "stride; leave those out, and say what an exchange takes in [server]"
            )
        adapts = scenario.learning is not None and scenario.learning.adapt is not None
        if adapts and not isinstance(scenario.mode, Sync):
            raise InvalidSetting(
                f"{self._toml.where('training', key='adapt')} lets the global batch move, and "
                'with a server it stays; use mode = "sync", or leave adapt out'
            )
        if scenario.stride > 1 and scenario.changes_over_steps:
            raise InvalidSetting(
                f"{self._toml.where('training', key='stride')} lets a step stand for several, and "
                "events, drift and failures count steps; leave one of them out"
            )
        try:
            here = scenario.limits.take(scenario.first.tolist())
            here.check(scenario.global_batch)
            for each in scenario.policies:
                scenario.policy(each).init(len(scenario.first), scenario.global_batch)
        except PoiseError as error:
            raise InvalidSetting(f"{name}: {error}") from None


def _above_0(value: Any) -> float | None:
    return float(value) if is_number(value) and _LEAST <= value <= _MOST else None


def _from_0(value: Any) -> float | None:
    return float(value) if is_number(value) and 0 <= value <= _MOST else None


def _knee(value: Any) -> tuple[float, float] | None:
    pair = _pair(value)
    return pair if pair is not None and pair[0] >= 0 and pair[1] >= 1 else None


def _power(value: Any) -> tuple[float, float] | None:
    pair = _pair(value)
    return pair if pair is not None and min(pair) >= _LEAST and pair[0] <= 10 else None  # noqa: PLR2004


def _pair(value: Any) -> tuple[float, float] | None:
    numbers = isinstance(value, list) and len(value) == 2 and all(map(is_number, value))  # noqa: PLR2004
    inside = numbers and all(0 <= each <= _MOST for each in value)
    return (float(value[0]), float(value[1])) if inside else None

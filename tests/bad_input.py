"""What is damaged, kind by kind, and what each must do if it is not refused: behave.

A case is a number, of which each kind has every so many-th: `failure` tries one. Run
`python -m tests.bad_input NUMBER ...` to see what becomes of some.
"""

import io
import json
import math
import os
import re
import signal
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from poise import Network, Worker, plan
from poise.cli.main import main
from poise.core.goodput import best_global_batch
from poise.core.noise import noise_scale
from poise.core.timing import SpeedModel
from poise.engine.adaptation import Adaptation
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.engine.modes import Async, Stale
from poise.engine.round import Report
from poise.errors import PoiseError
from poise.lab.walk import checked_walk
from poise.policy import Auto, Bounds, Fixed, LbBsp, OptPerf, Policy, Proportional, Static
from poise.policy.base import Forecasting
from poise.records import Recorder, read_record, replay
from poise.runtime.settings import most_samples
from poise.sim.scenario_file import declared_scenario
from poise.sim.scenes import CORES, by_cores
from poise.sim.simulate import observe
from poise.toml_file import Toml
from tests.mutations import Damage, damaged, damaged_text, damaged_words, json_of, toml_of

LIMIT_S = 60
"""A case that takes longer hangs."""
STEPS = 12
"""Of a simulated training, and of one that goes on from a saved state."""


class Misbehaves(AssertionError):
    """Damage was accepted, and what came of it cannot be right; or it was refused badly."""


@dataclass(frozen=True)
class Kind:
    """One kind of input."""

    damage: Callable[[Random], Damage]
    accepts: Callable[[Any], None]
    """Raises PoiseError if it refuses what it is given, and Misbehaves if that does not behave."""


def must(right: bool, what: str) -> None:
    if not right:
        raise Misbehaves(what)


# --- Commands -------------------------------------------------------------------------------


def run(words: list[str]) -> tuple[str, str]:
    """Run a command in this process; return its output and errors, or raise what it refused.

    Refused means: exit code 1 or 2 and one message, without a traceback.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: Any = main(words)
        except SystemExit as left:
            code = left.code
    said = err.getvalue()
    must("Traceback" not in said, f"poise {words} prints a traceback: {said}")
    if code in (None, 0):
        return out.getvalue(), said
    must(code in (1, 2), f"poise {words} ends with {code}")
    must(bool(re.match(r"poise: \S|usage: poise", said)), f"poise {words} says {said!r}")
    must(out.getvalue() == "", f"poise {words} fails and prints {out.getvalue()!r}")
    lines = 1 + sum(word.count("\n") for word in words)
    must(said.startswith("usage") or said.count("\n") <= lines, f"poise {words} says {said!r}")
    raise PoiseError(said)


def finite_json(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise Misbehaves(f"{word} is in the output")

    return json.loads(text, parse_constant=refuse)


def no_odd_numbers(text: str) -> None:
    found = re.search(r"(?i)\b(nan|inf) (ms|s|min|h|days|%|GB|samples)|= \[?-?(nan|inf)\b", text)
    must(found is None, f"{found and found[0]} is in the output: {text}")


@contextmanager
def written(text: str, name: str) -> Iterator[str]:
    """Write a file of this name and go to its directory."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            Path(name).write_text(text, encoding="utf-8", errors="surrogateescape")
            yield name
        finally:
            os.chdir(here)


def refuses_by(name: str, words: list[str]) -> tuple[str, str]:
    """Run a command on a file; a refusal names the file or an option."""
    try:
        return run(words)
    except PoiseError as error:
        named = name in str(error) or "--" in str(error) or "global_batch=" in str(error)
        must(named, f"poise {words} does not name {name}: {error}")
        raise


# --- Clusters -------------------------------------------------------------------------------

CLUSTER: dict[str, Any] = {
    "title": "two kinds",
    "network": {"ready": [0.3, 1.0], "bucket_s": [0.02, 0.004]},
    "training": {"noise_scale": 3000.0, "start_batch": 64},
    "worker": [
        {
            "name": "a",
            "count": 2,
            "forward_s": [0.0004, 0.004],
            "backward_s": [0.0008, 0.006],
            "memory_bytes": 12e9,
            "fixed_bytes": 6e8,
            "bytes_per_sample": 28e6,
            "max_batch": 512,
        },
        {
            "name": "b",
            "ready_s": [[0.002, 0.01], [0.003, 0.02]],
            "input_s": 0.001,
            "min_batch": 0,
            "multiple_of": 1,
        },
    ],
}


def damaged_toml(tables: dict[str, Any], draw: Random) -> Damage:
    if draw.random() < 0.2:
        return damaged_text(toml_of(tables), draw)
    found = damaged(tables, draw)
    if not isinstance(found.value, dict):
        return replace(found, value=json_of(found.value))
    return replace(found, value=toml_of(found.value))


def damaged_cluster(draw: Random) -> Damage:
    found = damaged_toml(CLUSTER, draw)
    return replace(found, value=(found.value, draw.choice(("2", "64", "63", "600"))))


def plans(given: tuple[str, str]) -> None:
    """The split adds up to the global batch, and all its times are finite and above 0."""
    text, batch = given
    with written(text, "c.toml") as name:
        out, _ = refuses_by(name, ["plan", name, "--global-batch", batch, "--json"])
        found = finite_json(out)
        shown = run(["plan", name, "--global-batch", batch])[0] if batch == "63" else ""
    split = [each["local_batch"] for each in found["workers"]]
    must(sum(split) == int(batch) and min(split) >= 0, f"the split is {split}")
    times = [found["step_s"], *(each["predicted_s"] for each in found["workers"])]
    must(all(0 <= each < 1e18 for each in times) and times[0] > 0, f"times are {times}")
    must(found["samples_per_s"] > 0, f"{found['samples_per_s']} samples a second")
    no_odd_numbers(shown)


# --- Scenarios ------------------------------------------------------------------------------

SCENARIO: dict[str, Any] = {
    "seed": 1,
    "steps": STEPS,
    "global_batch": 64,
    "policies": ["even", "auto"],
    "network": {"ready": [0.3, 1.0], "bucket_s": [0.02, 0.004], "drag": 0.1},
    "noise": {"cv": 0.05, "correlation": 0.5, "spike_chance": 0.1, "spike": 3.0},
    "drift": {"per_step": 0.01, "memory_steps": 100.0},
    "loader": {"queue": 2},
    "training": {"noise_scale": 500.0, "start_batch": 64, "target_samples": 1e5,
                 "epoch_samples": 320, "adapt": [16, 256]},
    "worker": [
        {"name": "a", "count": 2, "forward_s": [0.0004, 0.004], "backward_s": [0.0008, 0.006],
         "price_per_hour": 1.5, "resource": 3, "tile": 4},
        {"name": "b", "forward_s": [0.001, 0.006], "backward_s": [0.002, 0.009],
         "input_s": 0.001, "knee": [8, 1.5], "power": [0.9, 16], "memory_bytes": 1e9,
         "bytes_per_sample": 1e7},
    ],
    "event": [
        {"at_step": 3, "worker": "b", "slower": 4.0, "over_steps": 3},
        {"at_step": 6, "worker": "a-1", "leaves": True},
        {"at_s": 0.5, "slower_network": 2.0, "for_steps": 3},
    ],
}  # fmt: skip
RING: dict[str, Any] = {
    **{key: SCENARIO[key] for key in ("seed", "steps", "global_batch")},
    "policies": ["proportional", "optperf"],
    "restart_s": 3.0,
    "lead": 2,
    "failures": {"mean_steps": 8.0, "down_steps": 3},
    "network": {"ready": [0.5, 1.0], "bucket_bytes": [25e6, 22e6], "link_bytes_per_s": 1e9,
                "latency_s": 5e-5},
    "worker": [{"name": "a", "count": 3, "forward_s": [0.001, 0.0], "backward_s": [0.002, 0.009],
                "link_bytes_per_s": 3e8}],
}  # fmt: skip
SERVED: dict[str, Any] = {
    **{key: SCENARIO[key] for key in ("seed", "steps", "global_batch", "noise")},
    "mode": "stale:2",
    "policies": ["auto", "fixed", "lbbsp"],
    "split": [20, 44],
    "server": {"exchange_s": 0.01, "update_s": 0.002},
    "calibration": {"error": 0.02, "notes": ["one"]},
    "worker": [{"name": "a", "ready_s": [[0.003, 0.01]]}, {"name": "b", "ready_s": [[0.001, 0.0]]}],
    "walk": [{"at_step": 5, "speeds": [1.0, 0.3]}],
}


def damaged_scenario(draw: Random) -> Damage:
    return damaged_toml(draw.choice((SCENARIO, RING, SERVED)), draw)


def simulates(text: str) -> None:
    """The simulation ends, with finite figures."""
    with written(text, "s.toml") as name:
        words = ["simulate", name]
        if "steps = 12\n" not in text:  # millions of steps are allowed, and take their time
            words += ["--steps", str(STEPS)]
        out, _ = refuses_by(name, [*words, "--json"])
    finite_json(out)


# --- Walks ----------------------------------------------------------------------------------

WALK = {
    "change": [
        {"at_step": 100, "speeds": [0.45, 0.45, 0.45]},
        {"at_s": 30.0, "speeds": [0.9, 0.45, 0.22]},
    ]
}


def damaged_walk(draw: Random) -> Damage:
    return damaged_toml(WALK, draw)


def walks(text: str) -> None:
    """Every change has a speed for each worker, and comes in its turn."""
    with written(text, "w.toml") as name:
        try:
            walk = checked_walk(name, 3)
        except PoiseError as error:
            must(name in str(error), f"does not name the file: {error}")
            raise
    for change in walk.changes:
        must(len(change.speeds) == 3 and min(change.speeds) > 0, f"speeds are {change.speeds}")
        must(max(change.speeds) < math.inf, f"speeds are {change.speeds}")
    last, rest = walk.due(10**18, 1e18)
    must(last is not None and not rest.changes, f"{rest} is never due")


# --- Engines, and records of them -----------------------------------------------------------

POLICIES: tuple[tuple[Policy, Adaptation | None], ...] = (
    (Auto(), None),
    (Auto(bounds=Bounds(min_batch=8, max_batch=200, multiple_of=4)), None),
    (Auto(), Adaptation(lowest=60, highest=960, every=5)),
    (Proportional(patience=3), None),
    (LbBsp(samples=4), None),
    (OptPerf(), None),
    (OptPerf(), Adaptation(lowest=60, highest=960, every=5)),
)


def fresh(number: int) -> Engine:
    policy, adapt = POLICIES[number]
    return Engine(policy, 4, 240, adapt)


def driven(engine: Engine, split: Any, steps: int, truth: SpeedModel, seed: int = 0) -> Any:
    """Drive an engine over virtual workers; yield what it saw, what it planned, and itself."""
    draw = np.random.default_rng(seed)
    for step in range(steps):
        factor = np.exp(0.05 * draw.standard_normal(truth.workers))
        seen = observe(truth, step, step // 10, split, factor)
        batches = np.array(split, dtype=np.float64)
        norms = (1 + 300 / np.maximum(batches, 1)) * np.exp(
            0.1 * draw.standard_normal(len(batches))
        )
        sums = np.stack([batches, batches, np.ones(len(batches)), batches * norms], axis=1)
        memory = 1e9 + 1e7 * batches
        seen = replace(
            seen,
            group_sums=sums,
            global_sqnorm=1 + 300 / sum(split),
            clipped=False,
            memory_bytes=memory,
            memory_limit_bytes=np.full(len(batches), 8e9),
        )
        made, engine = engine.update([seen], step + 2)
        yield seen, made, engine
        split = split if made is None else made.split


@cache
def engine_state(number: int) -> Any:
    timetable, engine = fresh(number).start()
    for _, _, last in driven(engine, timetable.at(0).split, 35, by_cores(CORES[8])):
        engine = last
    return json.loads(json.dumps(engine.state_dict(), allow_nan=False))


@cache
def record_lines(number: int) -> tuple[str, ...]:
    start = fresh(number)
    timetable, engine = start.start()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "r.jsonl"
        with Recorder(path, start) as recorder:
            steps = driven(engine, timetable.at(0).split, 40, by_cores(CORES[8]))
            for number_, (seen, made, last) in enumerate(steps):
                recorder.write([seen], number_ + 2, made)
                engine = last
            recorder.resume(engine, None, 42, None)
        return tuple(path.read_text().splitlines())


def damaged_engine(draw: Random) -> Damage:
    number = draw.randrange(len(POLICIES))
    found = damaged(engine_state(number), draw)
    return replace(found, value=(number, found.value), what=f"{POLICIES[number]}: {found.what}")


def goes_on(given: tuple[int, Any]) -> None:
    """A loaded engine learns and plans on, predicts finite times, and saves what loads again."""
    number, state = given
    _, start = fresh(number).start()
    engine = start.load_state_dict(state)
    learns_on(engine, start)


def learns_on(engine: Engine, start: Engine) -> None:
    workers, split = engine.workers, engine.split
    if not split:
        made, engine = engine.update([same_workers(engine)], 0)
        assert made is not None
        split = made.split
    truth = by_cores((CORES[8] * workers)[:workers])
    for _, made, last in driven(engine, split, STEPS, truth):
        engine = last
        if made is not None:
            right = sum(made.split) == engine.global_batch and len(made.split) == workers
            must(right and min(made.split) >= 0, f"plans {made.split} of {engine.global_batch}")
            must(0 < made.gain < math.inf, f"a step is worth {made.gain}")
        predicts(engine)
    saved = json.loads(json.dumps(engine.state_dict(), allow_nan=False))
    again = start.load_state_dict(saved)
    must(again.state_dict() == engine.state_dict(), "it is saved as something else")


def same_workers(engine: Engine) -> Any:
    from poise.core.observation import Change

    return Change(tuple(range(engine.workers)), engine.global_batch)


def predicts(engine: Engine) -> None:
    if not isinstance(engine.policy, Forecasting):
        return
    known = engine.policy.forecast(engine.state)
    if known is not None:
        even = (max(1, engine.global_batch // engine.workers),) * engine.workers
        for split in (engine.split or even, even):
            step_s = known.step_s(split)
            must(0 < step_s < 1e12, f"a step of {split} is to take {step_s} s")


def damaged_record(draw: Random) -> Damage:
    number = draw.randrange(len(POLICIES))
    lines = list(record_lines(number))
    if draw.random() < 0.1:
        return damaged_text("\n".join(lines) + "\n", draw)
    here = draw.choice((0, draw.randrange(len(lines)), draw.randrange(len(lines))))
    found = damaged(json.loads(lines[here]), draw)
    lines[here] = json_of(found.value)
    every = draw.random() < 0.3 and 0 < here < len(lines) - 1
    if every:  # the same in many rows: what is odd there is not an outlier
        lines[1:-1] = [lines[here] if place % 3 else each for place, each in enumerate(lines[1:-1])]
    text = "\n".join(lines) + "\n"
    return replace(found, value=text, what=f"line {here + 1}: {found.what}")


def calibrates(given: str) -> None:
    """No figure is NaN, the scenario is one, and a replay ends."""
    with written(given, "r.jsonl") as name:
        replays(name)
        found = finite_json(refuses_by(name, ["calibrate", name, "--json"])[0])
    for key in ("measured_s", "predicted_s"):
        must(0 < found[key] < 1e12, f"{key} is {found[key]}")
    no_odd_numbers(found["scenario"])
    try:
        declared_scenario(Toml("it", tomllib.loads(found["scenario"])))
    except PoiseError as error:
        raise Misbehaves(f"its scenario is refused: {error}") from None


def replays(name: str) -> None:
    try:
        replay(read_record(name))
    except PoiseError as error:
        must(len(str(error)) > 10, f"says {error}")


# --- Servers --------------------------------------------------------------------------------


def served(mode: Async | Stale, number: int) -> AsyncEngine:
    policy, _ = POLICIES[number]
    return AsyncEngine.begin(mode, Engine(policy, 2, 24), 200)


def work(engine: AsyncEngine, updates: int) -> AsyncEngine:
    """Let two workers compute, push and report, one after the other."""
    for worker in (1, 2):
        _, engine = engine.join(worker, f"host-{worker}")
    for _ in range(updates):
        for worker in (1, 2):
            if engine.over:
                engine = engine.next_epoch()
                engine = engine.unused(1, engine.epoch).unused(2, engine.epoch)
            share, engine = engine.draw(worker)
            if share is None:
                continue
            engine = engine.pushed(worker, [share.number], staleness=1)
            while (step := engine.complete()) is not None:
                engine = engine.applied(step, {worker: 1})
            report = Report(share.samples, 0.01 * share.samples * worker + 0.05)
            _, engine = engine.reported(worker, report)
    return engine


MODES = (Async(), Stale(2), Stale(0))


@cache
def server_state(mode: Async | Stale, number: int) -> Any:
    return json.loads(json.dumps(work(served(mode, number), 9).state_dict(), allow_nan=False))


def damaged_server(draw: Random) -> Damage:
    mode, number = draw.choice(MODES), draw.choice((0, 1, 3, 4, 5))
    found = damaged(server_state(mode, number), draw)
    return replace(found, value=(mode, number, found.value))


def serves_on(given: tuple[Async | Stale, int, Any]) -> None:
    """Workers get the samples that are left, each once, and what is saved loads again."""
    mode, number, state = given
    start = served(mode, number)
    engine = start.load_state_dict(state)
    left = engine.pool.free
    must(0 <= left <= 200, f"{left} samples are left of 200")
    engine = work(engine, 20)
    plan_now = engine.plan
    must(sum(plan_now.split) == 24 and len(plan_now.split) == 2, f"plans {plan_now.split}")
    saved = json.loads(json.dumps(engine.state_dict(), allow_nan=False))
    again = start.load_state_dict(saved)
    must(again.state_dict() == engine.state_dict(), "it is saved as something else")


# --- Functions ------------------------------------------------------------------------------

LINE: dict[str, Any] = {"forward_s": [0.0004, 0.004], "backward_s": [0.0008, 0.006]}
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plan", {"worker": {"name": "a", **LINE, "max_batch": 90, "micro_batch": 4,
                         "memory_bytes": 1e9, "bytes_per_sample": 1e6, "multiple_of": 2},
              "network": {"ready": [0.3, 1.0], "bucket_s": [0.02, 0.004]}, "global_batch": 64}),
    ("best", {"worker": {**LINE, "min_batch": 2}, "noise_scale": 400.0, "start": 64,
              "allowed": [32, 4096]}),
    ("noise", {"local_batches": [6, 2, 3], "local_sqnorms": [3.0, 5.0, 2.5],
               "global_sqnorm": 2.75}),
    ("bounds", {"min_batch": [1, 2, 3], "max_batch": 60, "multiple_of": 1}),
    ("auto", {"least_gain": 0.01, "horizon": 100, "patience": 10, "watchful": 40,
              "careful_gain": 0.1, "free_changes": 3, "unhurried": 2, "longest_wait": 100,
              "furthest": 6, "curiosity": 1.5}),
    ("proportional", {"dead_band": 0.05, "weight": 0.2, "patience": 5}),
    ("lbbsp", {"samples": 4, "weight": 0.3}),
    ("optperf", {"remembered": 10}),
    ("fixed", {"splits": [20, 20, 20]}),
    ("static", {"resources": [1.0, 2.0, 3.0]}),
)  # fmt: skip
KNOWN: dict[str, Any] = {"auto": Auto, "proportional": Proportional, "lbbsp": LbBsp,
                         "optperf": OptPerf, "fixed": Fixed, "static": Static}  # fmt: skip


def damaged_call(draw: Random) -> Damage:
    name, arguments = draw.choice(CALLS)
    found = damaged(arguments, draw)
    while not isinstance(found.value, dict) or set(found.value) != set(arguments):
        found = damaged(arguments, draw)  # Python itself refuses unknown and missing arguments
    return replace(found, value=(name, found.value), what=f"{name}: {found.what}")


def computes(given: tuple[str, dict[str, Any]]) -> None:
    """A plan adds up and has finite times, an estimate is finite, a policy trains."""
    name, arguments = given
    if name == "plan":
        network = made(Network, arguments["network"])
        workers = [made(Worker, arguments["worker"]), Worker(**{**LINE, "name": "b"})]
        best = plan(workers, network, global_batch=arguments["global_batch"])
        must(sum(best.split) == arguments["global_batch"], f"the split is {best.split}")
        must(0 < best.step_s < 1e18, f"a step takes {best.step_s}")
        must(len(best.bound) == 2, f"bounds are {best.bound}")
    elif name == "best":
        workers = [made(Worker, arguments.pop("worker")), Worker(**LINE)]
        found = best_global_batch(workers, None, **arguments)
        low, high = arguments["allowed"]
        must(low <= found <= high, f"{found} is the best of {low} to {high}")
    elif name == "noise":
        estimate = noise_scale(**arguments)
        must(math.isfinite(estimate.trace) and math.isfinite(estimate.grad_sq), f"{estimate}")
        must(estimate.scale is None or 0 <= estimate.scale < math.inf, f"{estimate.scale}")
    elif name == "bounds":
        trains(Auto(bounds=Bounds(**arguments)))
    else:
        trains(KNOWN[name](**arguments))


def made(kind: Any, arguments: Any) -> Any:
    """Call a constructor by keywords that it knows."""
    if not isinstance(arguments, dict) or not set(arguments) <= set(kind.__annotations__):
        raise PoiseError("usage: Python itself refuses unknown arguments")
    return kind(**arguments)


def trains(policy: Policy) -> None:
    timetable, engine = Engine(policy, 3, 60).start()
    truth = by_cores((6, 6, 24), global_batch=60)
    for _, made_, last in driven(engine, timetable.at(0).split, 25, truth):
        engine = last
        if made_ is not None:
            must(sum(made_.split) == 60 and min(made_.split) >= 0, f"plans {made_.split}")
        predicts(engine)


# --- Command lines --------------------------------------------------------------------------

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("plan", "c.toml", "--global-batch", "64", "--noise-scale", "300", "--start-batch", "64"),
    ("plan", "c.toml", "--global-batch", "64", "--json"),
    ("simulate", "s.toml", "--steps", "12", "--seed", "1", "--policy", "even", "--json"),
    ("simulate", "s.toml", "--steps", "12", "--more", "a=2", "--network", "2.0"),
    ("simulate", "s.toml", "--steps", "12", "--record", "records"),
    ("calibrate", "r.jsonl", "--out", "out.toml"),
    ("calibrate", "r.jsonl", "--json"),
    ("lab", "--speeds", "0.5,0.2x2", "--walk", "w.toml", "--pace", "4ms+1ms", "--", "no.py"),
    ("lab", "--speeds", "0.5", "--mode", "async", "--link", "1mbit", "--", "no.py"),
    ("serve", "--host", "127.0.0.1", "--port", "0", "--workers", "2", "--mode", "async", "no.py"),
    ("serve", "--save", "x.pt", "--save-every", "5", "--closed", "no.py"),
    ("verify", "--workers", "2", "--steps", "3", "no.py", "--steps", "2"),
    ("watch", "--every", "3", "--steps", "5", "--json", "no.py"),
    ("doctor", "--workers", "2", "no.py"),
    ("demo", "--steps", "x"),
)
STARTS = {"lab", "serve", "verify", "watch", "doctor", "demo"}
"""Commands that start processes; here they are given no script that there is."""
ODD_FILES = ("no.toml", "directory", "unreadable", "empty", "binary", "c.toml/x", "\u202e.toml")


def damaged_command(draw: Random) -> Damage:
    words = list(draw.choice(COMMANDS))
    found = damaged_words(words, draw)
    if draw.random() < 0.3:
        files = [place for place, word in enumerate(words) if "." in word or word == "records"]
        if files:
            changed = list(words)
            changed[draw.choice(files)] = draw.choice(ODD_FILES)
            found = Damage(changed, f"{words} -> {changed}")
    if found.value and found.value[0] in STARTS and not starts_nothing(found.value):
        return damaged_command(draw)
    return found


def starts_nothing(words: list[str]) -> bool:
    """Whether a command that starts processes is sure to be refused before it does.

    The script is the first word that is neither an option nor its value; here it is none.
    """
    if words[0] == "demo":
        return words[-2:] == ["--steps", "x"]
    scripts = [word for word in words[1:] if word.endswith((".toml", ".jsonl", "empty", "binary"))]
    walks = [word for before, word in pairwise(words) if before == "--walk"]
    return "no.py" in words and scripts == walks[: len(scripts)] and "-m" not in words


def obeys(words: list[str]) -> None:
    """The command does what it says, or is refused."""
    with written(toml_of(CLUSTER), "c.toml"):
        Path("s.toml").write_text(toml_of({**SCENARIO, "event": SCENARIO["event"][:1]}))
        Path("w.toml").write_text(toml_of(WALK))
        Path("r.jsonl").write_text("\n".join(record_lines(0)) + "\n")
        Path("directory").mkdir()
        Path("empty").touch()
        Path("binary").write_bytes(b"\xff\xfe\0\x80")
        Path("unreadable").touch(mode=0o000)
        out, said = run(words)
        if "--json" in words:
            finite_json(out)
        no_odd_numbers(out + said)


# --- Settings of a Balancer -----------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "global_batch": 4,
    "policy": "auto",
    "mode": "sync",
    "adapt": [2, 8],
    "rate": "sqrt",
    "scaler": None,
    "seed": 3,
    "count": None,
    "micro_batch": [2],
    "slicer": None,
    "idle": "empty",
    "ddp": {"bucket_cap_mb": 10},
    "comm_hook": None,
    "silent_s": 10.0,
    "hang_s": 60.0,
    "record": None,
}


def damaged_settings(draw: Random) -> Damage:
    stated = {key: value for key, value in SETTINGS.items() if draw.random() < 0.6}
    found = damaged({"global_batch": 4, **stated}, draw)
    while not isinstance(found.value, dict) or not set(found.value) <= set(SETTINGS):
        found = damaged({"global_batch": 4, **stated}, draw)
    if isinstance(found.value.get("global_batch"), int) and "record" in found.places:
        odd_path = draw.choice((0, b"x", "a\0b", "\ud800", "", "nowhere/x", 2.5, ["x"], "."))
        return replace(found, value={**found.value, "record": odd_path})
    return found


def settles(stated: dict[str, Any]) -> None:
    """What is accepted can be held by a training; workers then agree on it."""
    from poise.torch.settings import TorchSettings

    every = {**dict.fromkeys(SETTINGS), "idle": "empty", "seed": 0, "silent_s": 10.0, **stated}
    every["policy"] = stated.get("policy", "auto")
    if "global_batch" not in stated:
        raise PoiseError("global_batch is missing, as Python says")
    held = TorchSettings.of(**every)
    must(1 <= held.global_batch <= 2**40, f"global_batch={held.global_batch}")
    must(1 <= held.silent_s <= 1e7 and (held.hang_s is None or held.hang_s > 0), "no times")
    must(held.record is None or bool(os.fsencode(held.record)), f"record={held.record!r}")
    must(most_samples(held.micro_batch, 0, 1) != 0, f"micro_batch={held.micro_batch}")
    Engine(held.policy, 1, held.global_batch, held.adapt).start()


KINDS: Mapping[str, Kind] = {
    "cluster": Kind(damaged_cluster, plans),
    "scenario": Kind(damaged_scenario, simulates),
    "walk": Kind(damaged_walk, walks),
    "record": Kind(damaged_record, calibrates),
    "engine": Kind(damaged_engine, goes_on),
    "server": Kind(damaged_server, serves_on),
    "call": Kind(damaged_call, computes),
    "command": Kind(damaged_command, obeys),
    "settings": Kind(damaged_settings, settles),
}


def numbers(kind: str, cases: range) -> range:
    """Return the cases of a kind: each kind has every so many-th number."""
    first = next(n for n in cases if n % SLOTS == [*KINDS, "state"].index(kind))
    return range(first, cases.stop, SLOTS)


SLOTS = len(KINDS) + 1
"""The last kind, states of a Balancer, needs real workers; the tests have it."""


def failure(kind: str, number: int) -> str | None:
    """Try a case; return what is wrong with what became of it, or None."""
    case = KINDS[kind].damage(Random(number))
    try:
        with in_time():
            KINDS[kind].accepts(case.value)
    except PoiseError as error:
        return told(kind, number, case, error) if unnamed(case, str(error)) else None
    except Exception as error:
        return told(kind, number, case, error)
    return None


def unnamed(case: Damage, message: str) -> bool:
    """Whether an error names nothing of what was changed, nor where it stands."""
    stems = {place.removesuffix("s") for place in case.places}
    where = re.search(r"line \d|--\w|\w=|\.toml|\.jsonl|usage: |no script", message)
    return bool(case.places) and where is None and not any(stem in message for stem in stems)


def told(kind: str, number: int, case: Damage, error: Exception) -> str:
    return f"{kind} {number} ({case.what}): {type(error).__name__}: {error}"


@contextmanager
def in_time() -> Iterator[None]:
    """Raise in a case that hangs, so that its number is known."""

    def too_long(*_: object) -> None:
        raise Misbehaves(f"it takes longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        chosen = [*KINDS, "state"][int(word) % SLOTS]
        if chosen in KINDS:
            print(chosen, KINDS[chosen].damage(Random(int(word))).what)
            print(failure(chosen, int(word)) or "as it should be")

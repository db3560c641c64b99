"""Laws of the simulator: virtual workers, real engine, no processes."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.cluster import Network
from poise.core.goodput import best_batch, goodput
from poise.core.noise import GroupSums, summed_noise_scale
from poise.core.split import even_split, optimal_split
from poise.core.timing import Floats, SpeedModel
from poise.engine.modes import mode_of
from poise.errors import InvalidSetting
from poise.policy import Auto, Fixed
from poise.records import Recorder, read_record, replay
from poise.sim.asp import Asynchronous
from poise.sim.bsp import Synchronous, engine_of
from poise.sim.cluster import Cluster
from poise.sim.conditions import Conditions
from poise.sim.learning import Lessons
from poise.sim.outcome import compare, outcome_of, steps_of
from poise.sim.recorded import followed
from poise.sim.reduction import Ring, Together
from poise.sim.scenario import Event, Failures, Learning, Noise, Scenario
from poise.sim.scenario_file import declared_scenario
from poise.sim.step import Step
from poise.sim.truth import Bend, Bent
from poise.toml_file import Toml
from tests.lines import two_lines

ROUNDING = 1e-12
LINE: dict[str, Any] = {"forward_s": [0.0004, 0.004], "backward_s": [0.0008, 0.006]}
SLOW: dict[str, Any] = {"forward_s": [0.0012, 0.004], "backward_s": [0.0024, 0.006]}
NETWORK = {"ready": [0.3, 1.0], "bucket_s": [0.020, 0.004]}


def scenario(**tables: Any) -> Scenario:
    """Return a scenario of two fast workers and a slow one, unless told otherwise."""
    workers = [{"name": "fast", "count": 2, **LINE}, {"name": "slow", **SLOW}]
    base: dict[str, Any] = {"global_batch": 96, "steps": 60, "network": NETWORK, "worker": workers}
    return declared_scenario(Toml("s.toml", {**base, **tables}))


def run(made: Scenario, policy: str = "auto") -> list[Step]:
    return list(steps_of(made, made.policy(policy)))


lines = st.tuples(st.floats(1e-4, 1e-2), st.floats(0.0, 5e-2))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(lines, lines), min_size=1, max_size=6),
    st.lists(st.floats(0.0, 0.05), min_size=1, max_size=4),
    st.data(),
)
def test_a_constant_cluster_takes_what_theory_says(
    workers: list[tuple[tuple[float, float], tuple[float, float]]],
    bucket_s: list[float],
    data: st.DataObject,
) -> None:
    """T = max_i tau_i(b_i), for any lines, any number of buckets and any split."""
    count = len(workers)
    parts = data.draw(st.lists(st.floats(0.01, 1), min_size=len(bucket_s), max_size=len(bucket_s)))
    ready = [*sorted(parts)[:-1], 1.0]
    tables = [{"forward_s": list(a), "backward_s": list(b)} for a, b in workers]
    split = data.draw(st.lists(st.integers(1, 90), min_size=count, max_size=count))
    made = scenario(
        global_batch=sum(split),
        steps=5,
        network={"ready": ready, "bucket_s": bucket_s},
        worker=tables,
        policies=["fixed"],
        split=split,
    )
    model = two_lines([a for a, _ in workers], [b for _, b in workers], ready, bucket_s)
    for step in run(made, "fixed"):
        assert math.isclose(step.lasts_s, model.step_s(split), rel_tol=ROUNDING)
        assert math.isclose(step.clean_s, step.lasts_s, rel_tol=ROUNDING)
    best = optimal_split(model, sum(split)).step_s
    assert math.isclose(step.best_s, best, rel_tol=ROUNDING)


def test_a_loader_bounds_a_step_once_its_queue_is_empty() -> None:
    made = scenario(worker=[{"input_s": 0.004, **LINE}, LINE], global_batch=80, loader={"queue": 3})
    steps = run(made, "even")
    model = made.cluster_of(made.first, np.ones(2)).truth
    computing = replace(made.model, input_s=np.zeros(2)).step_s((40, 40))
    assert computing < 0.16 == model.step_s((40, 40))
    assert [round(step.lasts_s, 9) for step in steps[:3]] == [round(computing, 9)] * 3
    assert math.isclose(sum(step.lasts_s for step in steps[3:]) / 57, 0.16, rel_tol=0.02)
    assert math.isclose(steps[-1].lasts_s, 0.16, rel_tol=ROUNDING)


def test_a_step_that_stands_for_several_waits_for_its_loader_too() -> None:
    training = {"noise_scale": 100.0, "target_samples": 2e5}
    made = [
        scenario(
            worker=[{"count": 3, "input_s": 0.01, **LINE}],
            training={**training, "stride": stride},
            steps=5000,
            policies=["even"],
        )
        for stride in (1, 20)
    ]
    one, other = (outcome_of(each, "even", each.policy("even")) for each in made)
    assert math.isclose(one.step_s, 0.32, rel_tol=0.01)
    assert math.isclose(other.step_s, 0.32, rel_tol=0.02)


def test_a_stall_that_is_shorter_than_the_queue_is_not_felt() -> None:
    event = {"at_step": 20, "worker": "a", "slower_loader": 3.0, "for_steps": 1}
    calm: dict[str, Any] = {
        "worker": [{"name": "a", "input_s": 0.0009, **LINE}, {"name": "b", **LINE}],
        "global_batch": 80,
        "steps": 40,
        "loader": {"queue": 4},
    }
    assert [step.lasts_s for step in run(scenario(**calm), "even")] == [
        step.lasts_s for step in run(scenario(**calm, event=[event]), "even")
    ]


def test_more_than_fits_into_memory_takes_several_passes() -> None:
    tight = {"memory_bytes": 2e9, "fixed_bytes": 0.5e9, "bytes_per_sample": 0.05e9}
    made = scenario(worker=[{**LINE, **tight}, LINE], global_batch=80, policies=["even"])
    (first, *_) = run(made, "even")
    passes = math.ceil(40 / 30)
    assert math.isclose(first.computed_s[0], 40 * 0.0012 + passes * 0.010, rel_tol=ROUNDING)
    for step in run(replace(made, steps=120), "auto")[60:]:
        assert step.split[0] <= 27  # a tenth stays free


def test_no_policy_is_better_than_the_best_split_where_memory_is_short() -> None:
    tight = {"memory_bytes": 300.0, "bytes_per_sample": 5.0}
    made = scenario(worker=[{**LINE, **tight}, SLOW], steps=200)
    for name in ("even", "proportional", "auto"):
        found = outcome_of(made, name, made.policy(name))
        assert found.regret > -1e-9, name


def test_even_shares_that_a_worker_does_not_take_are_refused() -> None:
    made = scenario(worker=[{"name": "a", "max_batch": 40, **LINE}, SLOW])
    found = outcome_of(made, "even", made.policy("even"))
    assert "a would get 48 samples, and takes 1 to 40" in found.refused
    assert not outcome_of(made, "auto", made.policy("auto")).refused


def test_the_last_step_of_an_epoch_may_be_no_sum_of_multiples() -> None:
    workers = [{"count": 2, "multiple_of": 8, **LINE}]
    made = scenario(worker=workers, training={"epoch_samples": 1001}, steps=30)
    found = outcome_of(made, "auto", made.policy("auto"))
    assert not found.refused
    assert found.regret < 0.01


def test_passes_are_those_of_samples_and_not_of_what_they_feel_like() -> None:
    model = SpeedModel.of([0.05], [0.001], micro_batch=100)
    bent = Bent(model, Bend.of(knee=(80, 2.5)))
    assert np.allclose(bent.local_s([100]), 0.05 + 0.001 * 130)
    assert np.allclose(bent.local_s([101]), 2 * 0.05 + 0.001 * 132.5)
    assert np.allclose(bent.ready_s([101])[:, -1], bent.local_s([101]))


def test_a_ring_of_equal_links_takes_what_the_bytes_say() -> None:
    for workers in (1, 2, 3, 8):
        ring = Ring(np.array([4e6, 8e6]), np.full(workers, 1e8), latency_s=1e-4)
        rounds = 2 * (workers - 1)
        expected = rounds * (np.array([4e6, 8e6]) / workers / 1e8 + 1e-4)
        assert np.allclose(ring.bucket_s, expected, rtol=ROUNDING)


def test_a_slow_link_delays_those_behind_it_most() -> None:
    links = np.array([1e8, 1e7, 1e8, 1e8])  # from worker 1 to worker 2
    ends = Ring(np.array([4e6]), links, latency_s=0.0).done_s(0, np.zeros(4), np.zeros(4))
    assert int(ends.argmax()) == 2
    assert math.isclose(ends[2], 6 * 1e6 / 1e7, rel_tol=ROUNDING)
    assert ends[3] > ends[1]
    assert len(set(np.round(ends, 9))) > 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0, 0.2), min_size=2, max_size=6),
    st.floats(1e6, 1e9),
)
def test_no_sum_is_there_before_the_last_worker(arrivals: list[float], rate: float) -> None:
    workers = len(arrivals)
    ring = Ring(np.array([1e6]), np.full(workers, rate), latency_s=0.0)
    arrived = np.array(arrivals)
    ends = ring.done_s(0, arrived, np.zeros(workers))
    assert (ends >= arrived.max()).all()
    assert (ends <= arrived.max() + ring.bucket_s[0] + ROUNDING).all()


def slowly(clean: Floats, bucket_s: Sequence[float], drag: float) -> Floats:
    """Return when each worker hands over each bucket, by walking through time in tiny steps."""
    tick = 2e-5
    workers, buckets = clean.shape
    work = np.diff(clean, axis=1, prepend=0.0)
    ready = np.full((workers, buckets), np.inf)
    left, at = work[:, 0].copy(), np.zeros(workers, dtype=int)
    reducing, ends = 0, -1.0
    now = 0.0
    while np.isinf(ready).any():
        busy = now < ends
        if not busy and reducing < buckets and np.isfinite(ready[:, reducing]).all():
            ends, busy = now + bucket_s[reducing], bucket_s[reducing] > 0
            reducing += 1
        now += tick
        speed = 1 / (1 + drag) if busy else 1.0
        for worker in range(workers):
            if at[worker] < buckets:
                left[worker] -= tick * speed
                if left[worker] <= 0:
                    ready[worker, at[worker]] = now
                    at[worker] += 1
                    if at[worker] < buckets:
                        left[worker] += work[worker, at[worker]]
    return ready


def test_what_drags_computing_agrees_with_a_walk_through_time() -> None:
    model = SpeedModel.of(
        [[0.01, 0.03, 0.05], [0.02, 0.03, 0.06]],
        [[0.0001, 0.0003, 0.0005], [0.0001, 0.0002, 0.0004]],
        [0.015, 0.02, 0.005],
    )
    cluster = Cluster(model, Together(model.bucket_s), drag=0.5)
    found = cluster.passage((30, 50))
    expected = slowly(model.ready_s([30, 50]), model.bucket_s.tolist(), 0.5)
    assert np.allclose(found.ready_s, expected, atol=3e-4)
    plain = Cluster.of(model).passage((30, 50))
    assert (found.ready_s >= plain.ready_s - ROUNDING).all()
    assert found.lasts_s > plain.lasts_s
    none = Cluster(model, Together(model.bucket_s), drag=1e-15).passage((30, 50))
    assert np.allclose(none.ready_s, plain.ready_s, rtol=1e-9)


@pytest.mark.parametrize("kind", ["ring", "drag", "bend"])
def test_the_best_split_of_what_no_line_says_is_not_beaten_nearby(kind: str) -> None:
    made = scenario()
    if kind == "ring":
        network = {"bucket_bytes": [4e6, 1e6], "ready": [0.3, 1.0], "link_bytes_per_s": 1e9}
        made = scenario(
            network=network,
            worker=[
                {"count": 2, **LINE},
                {"link_bytes_per_s": 2e8, **SLOW},
            ],
        )
    cluster = made.cluster_of(made.first, np.ones(3))
    if kind == "drag":
        cluster = replace(cluster, drag=0.4)
    if kind == "bend":
        cluster = Cluster.of(Bent(made.model, Bend.of(tile=8, knee=(20, 3.0))))
    split, best_s = cluster.best(96, made.limits)
    assert best_s == cluster.step_s(split)
    assert best_s <= cluster.step_s(even_split(3, 96))
    for late in range(3):
        for early in range(3):
            near = list(split)
            near[late] -= 1
            near[early] += 1
            assert cluster.step_s(tuple(near)) >= best_s - 1e-9


POLICIES = ["even", "fixed", "static", "proportional", "lbbsp", "optperf", "auto"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_reaches_its_fixed_point(policy: str) -> None:
    """Even, stated and declared shares; equal compute times; the shortest step."""
    workers = [
        {"name": "fast", "count": 2, "resource": 3, **LINE},
        {"name": "slow", "resource": 1, **SLOW},
    ]
    made = scenario(
        worker=workers,
        global_batch=4800,
        steps=900,
        policies=POLICIES,
        split=[2000, 2000, 800],
        training={"epoch_samples": 48_000},
    )
    last = run(made, policy)[-1]
    if policy in ("even", "fixed", "static"):
        known = {"even": (1600, 1600, 1600), "fixed": (2000, 2000, 800)}
        assert last.split == known.get(policy, (2058, 2057, 685))
    elif policy in ("proportional", "lbbsp"):
        assert last.computed_s.max() < 1.06 * last.computed_s.min()
    else:
        assert last.clean_s < 1.01 * last.best_s


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """Records and outcomes, in another process with another order of sets."""
    program = (
        "import sys, pathlib\n"
        "from poise.sim.outcome import compare\n"
        "from poise.sim.scenario_file import read_scenario\n"
        "out = pathlib.Path(sys.argv[2]); out.mkdir()\n"
        "print(compare(read_scenario(sys.argv[1]), records=out))\n"
    )
    text = (
        'seed = {seed}\nsteps = 80\nglobal_batch = 96\nmode = "{mode}"\n'
        'policies = ["even", "auto", "proportional"]\n'
        "[noise]\ncv = 0.1\ncorrelation = 0.5\nspike_chance = 0.05\nspike = 3.0\n"
        "[drift]\nper_step = 0.01\n[failures]\nmean_steps = 100\ndown_steps = 5\n"
        "[training]\nnoise_scale = 300.0\ntarget_samples = 1e9\n{adapt}"
        "[[worker]]\ncount = 3\nforward_s = [0.0004, 0.004]\nbackward_s = [0.0008, 0.006]\n"
        "[[worker]]\nforward_s = [0.0012, 0.004]\nbackward_s = [0.0024, 0.006]\n"
    )
    found: dict[str, list[bytes]] = {}
    for mode in ("sync", "async"):
        adapt = "adapt = [48, 960]\n" if mode == "sync" else ""
        for number, seed in enumerate((7, 7, 8) if mode == "sync" else (7, 7)):
            file = tmp_path / f"{mode}{number}.toml"
            file.write_text(text.format(mode=mode, seed=seed, adapt=adapt))
            out = tmp_path / f"{mode}{number}"
            said = subprocess.run(
                [sys.executable, "-c", program, str(file), str(out)],
                env={**os.environ, "PYTHONHASHSEED": str(number)},
                capture_output=True,
                check=True,
            ).stdout
            records = [path.read_bytes() for path in sorted(out.iterdir())]
            assert len(records) == 3
            found[f"{mode}{number}"] = [said, *records]
        assert found[f"{mode}0"] == found[f"{mode}1"]
    assert found["sync0"][2] != found["sync2"][2]


def test_chance_does_not_depend_on_the_policy() -> None:
    made = scenario(noise={"cv": 0.2, "correlation": 0.7}, drift={"per_step": 0.02}, steps=40)
    ratios = []
    for policy in ("even", "auto"):
        conditions = Conditions(made)
        found = []
        for number in range(40):
            cluster = conditions.at(number, 100.0 * number if policy == "auto" else 0.0).cluster
            found.append(cluster.truth.local_s(np.full(3, 10.0)) * conditions.scatter.next())
        ratios.append(np.array(found))
    assert (ratios[0] == ratios[1]).all()


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_noise_has_the_mean_spread_and_memory_that_it_says(correlation: float) -> None:
    made = scenario(noise={"cv": 0.1, "correlation": correlation})
    scatter = Conditions(made).scatter
    drawn = np.array([scatter.next() for _ in range(20_000)])
    assert np.allclose(drawn.mean(axis=0), 1.0, atol=0.01)
    assert np.allclose(drawn.std(axis=0), 0.1, rtol=0.05)
    neighbors = [np.corrcoef(one[:-1], one[1:])[0, 1] for one in drawn.T]
    assert np.allclose(neighbors, correlation, atol=0.03)


def test_events_begin_when_they_say_come_little_by_little_and_end() -> None:
    made = scenario(
        steps=50,
        event=[
            {"at_step": 10, "worker": "slow", "slower": 4.0, "over_steps": 2},
            {"at_step": 20, "worker": "fast", "slower": 3.0, "for_steps": 5},
            {"at_step": 30, "slower_network": 2.0},
        ],
    )
    conditions, found = Conditions(made), []
    for number in range(50):
        cluster = conditions.at(number, 0.0).cluster
        model = cluster.truth
        assert isinstance(model, SpeedModel)
        factors = model.per_sample_s[:, -1] / made.model.per_sample_s[:, -1]
        found.append([*factors.round(6).tolist(), model.bucket_s[0] / 0.02])
    assert found[9] == [1, 1, 1, 1]
    assert found[10] == [1, 1, 2, 1]
    assert found[11] == [1, 1, 4, 1]
    assert found[20] == found[24] == [3, 3, 4, 1]
    assert found[25] == [1, 1, 4, 1]
    assert found[30] == found[49] == [1, 1, 4, 2]


def test_a_walk_sets_all_speeds_at_once() -> None:
    made = scenario(
        walk=[{"at_step": 5, "speeds": [1, 0.5, 2]}, {"at_s": 1e3, "speeds": [1, 1, 1]}]
    )
    conditions = Conditions(made)
    clusters = [conditions.at(0, 0.0), conditions.at(5, 0.0), conditions.at(6, 2e3)]
    assert all(isinstance(each.cluster.truth, SpeedModel) for each in clusters)
    slopes = [each.cluster.truth.ready_s([1e6] * 3)[:, -1] for each in clusters]
    assert np.allclose(slopes[1] / slopes[0], [1, 2, 0.5], rtol=1e-3)
    assert np.allclose(slopes[2] / slopes[0], 1, rtol=1e-3)


def test_workers_come_and_go_and_what_that_costs_is_lost() -> None:
    made = scenario(
        restart_s=7.0,
        steps=80,
        event=[
            {"at_step": 10, "worker": "slow", "joins": True},
            {"at_step": 30, "worker": "fast-0", "fails": True},
            {"at_step": 50, "worker": "fast-0", "joins": True},
        ],
    )
    steps = run(made)
    counts = [len(step.workers) for step in steps]
    assert counts == [2] * 10 + [3] * 20 + [2] * 20 + [3] * 30
    assert all(sum(step.split) == 96 for step in steps)
    lost = {step.number: step.lost_s for step in steps if step.lost_s}
    assert lost == {10: 7.0, 30: 7.0 + steps[29].lasts_s, 50: 7.0}
    again = steps[51].split  # known by its kind, not learned anew
    assert abs(again[0] - again[1]) <= 1


def test_a_worker_that_comes_back_is_not_held_to_the_loader_of_another_of_its_kind() -> None:
    made = scenario(
        worker=[{"name": "node", "count": 4, "input_s": 0.001, **LINE}],
        global_batch=160,
        steps=300,
        event=[
            {"at_step": 40, "worker": "node-0", "slower_loader": 4.0},
            {"at_step": 100, "worker": "node-2", "fails": True},
            {"at_step": 110, "worker": "node-2", "joins": True},
        ],
    )
    last = run(made)[-1]
    assert last.split[2] > 1.5 * last.split[0]
    assert last.clean_s < 1.05 * last.best_s


def test_a_worker_that_left_does_not_come_back_from_a_failure() -> None:
    made = scenario(
        worker=[{"name": "a", "count": 3, **LINE}],
        steps=200,
        failures={"mean_steps": 40, "down_steps": 20},
        event=[{"at_step": 50, "worker": "a-1", "leaves": True}],
    )
    for seed in range(5):
        conditions = Conditions(replace(made, seed=seed))
        present = [conditions.at(step, 0.0).present.tolist() for step in range(200)]
        assert not any(1 in each for each in present[50:])


def test_plans_for_others_count_as_changes() -> None:
    event = [{"at_step": 20, "worker": "slow", "leaves": True}]
    for mode in ("sync", "async"):
        made = scenario(event=event, mode=mode, policies=["even"])
        assert outcome_of(made, "even", made.policy("even")).changes == 1


def test_with_a_server_a_step_is_a_global_batch() -> None:
    made = scenario(mode="async", policies=["fixed"], split=[90, 3, 3], steps=300)
    found = outcome_of(made, "fixed", made.policy("fixed"))
    assert found.samples == 300 * 96
    assert math.isclose(found.step_s, found.clock_s / 300, rel_tol=1e-9)


def test_random_failures_are_as_rare_as_they_say_and_end() -> None:
    workers = [{"count": 40, **LINE}]
    made = scenario(
        worker=workers,
        global_batch=400,
        steps=400,
        failures={"mean_steps": 200, "down_steps": 10},
    )
    conditions = Conditions(made)
    present = [len(conditions.at(step, 0.0).present) for step in range(2000)]
    assert abs(np.mean(present[100:]) / 40 - 1 / 1.05) < 0.02
    assert len({len(step.workers) for step in run(made)}) > 3


def test_every_sample_of_an_epoch_is_used_exactly_once() -> None:
    made = scenario(training={"epoch_samples": 1000}, noise={"cv": 0.2}, steps=55)
    epochs: dict[int, int] = {}
    recorded = []
    training = list(run(made))
    count = 0
    for step in training:
        epochs[count // 1000] = epochs.get(count // 1000, 0) + sum(step.split)
        count += sum(step.split)
        recorded.append(sum(step.split))
    assert recorded[:11] == [96] * 10 + [40]
    assert [epochs[number] for number in range(5)] == [1000] * 5


def test_a_smaller_last_step_is_not_measured(tmp_path: Path) -> None:
    made = scenario(training={"epoch_samples": 1000}, steps=30)
    path = tmp_path / "r.jsonl"
    policy = Auto()
    with Recorder(path, engine_of(made, policy)) as recorder:
        list(Synchronous(made, policy, recorder).steps())
    seen = [row.observation for row in read_record(path).rows if row.observation]
    smaller = [each for each in seen if sum(each.split) == 40]
    assert smaller
    assert all(each.ready_s is not None and np.isnan(each.ready_s).all() for each in smaller)


def test_a_simulated_record_replays_and_goes_through_the_simulator_again(tmp_path: Path) -> None:
    made = scenario(noise={"cv": 0.05}, steps=200, lead=3)
    outcome_of(made, "auto", Auto(), records=tmp_path)
    record = read_record(tmp_path / "auto.jsonl")
    assert len({row.decision.split for row in record.rows if row.decision}) > 1
    assert replay(record) is None
    assert followed(record, lead=3) is None
    other = followed(record, lead=4)
    assert other is not None
    assert other.recorded is not None


def test_a_large_record_is_thinned_and_says_so(tmp_path: Path) -> None:
    workers = [{"count": 500, **LINE}, {"count": 500, **SLOW}]
    made = scenario(worker=workers, global_batch=32_000, steps=400, noise={"cv": 0.05})
    outcome = outcome_of(made, "auto", Auto(), records=tmp_path)
    record = read_record(tmp_path / "auto.jsonl")
    assert record.header.thinned == 2
    assert sum(row.decision is not None for row in record.rows) == outcome.changes > 0
    assert len(record.rows) < 400 / 2 + outcome.changes
    with pytest.raises(InvalidSetting, match="of 2 decisions the record holds one"):
        replay(record)


def test_steps_to_a_goal_are_those_of_the_global_batch_of_the_start() -> None:
    made = scenario(training={"noise_scale": 500.0, "target_samples": 4848}, steps=200)
    steps = run(made, "even")
    assert len(steps) == 51
    assert math.isclose(steps[-1].part, 0.5, rel_tol=1e-9)
    assert math.isclose(steps[-1].end_s, 50.5 * steps[0].lasts_s, rel_tol=1e-9)


def test_virtual_norms_tell_the_noise_scale() -> None:
    learning = Learning(noise_scale=((0.0, 300.0),), start_batch=64)
    lessons = Lessons(learning, seed=1)
    batches = np.array([10.0, 20.0, 34.0])
    traces, squares = [], []
    for _ in range(4000):
        sums, whole = lessons.norms(batches)
        found = summed_noise_scale(GroupSums(*sums.sum(axis=0)), whole)
        assert found is not None
        traces.append(found.trace)
        squares.append(found.grad_sq)
    assert abs(np.mean(traces) / 300 - 1) < 0.02
    assert abs(np.mean(squares) - 1) < 0.1


def test_a_global_batch_that_may_move_goes_where_it_learns_fastest() -> None:
    made = scenario(
        training={
            "noise_scale": 9000.0,
            "start_batch": 96,
            "adapt": [48, 1920],
            "target_samples": 2e5,
        },
        noise={"cv": 0.03},
        steps=3000,
    )
    fixed = replace(made, learning=replace(made.learning, adapt=None))  # type: ignore[type-var]
    moved, still = (outcome_of(each, "auto", Auto()) for each in (made, fixed))
    best = best_batch(made.model, made.limits, 9000.0, 96, (48, 1920))
    learns = [
        goodput(made.model, made.limits, 9000.0, 96, batch)
        for batch in (96, sum(moved.last_split), best)
    ]
    assert learns[1] > 0.93 * learns[2] > 1.1 * learns[0]
    assert moved.target_s is not None
    assert still.target_s is not None
    assert math.isclose(moved.target_s / still.target_s, learns[0] / learns[1], rel_tol=0.1)


def test_a_step_that_stands_for_several_changes_little_but_the_work() -> None:
    training = {"noise_scale": [[0.0, 300.0], [1.0, 3000.0]], "target_samples": 2e5}
    made = scenario(training=training, steps=5000)
    quick = scenario(training={**training, "stride": 10}, steps=5000)
    one, other = outcome_of(made, "auto", Auto()), outcome_of(quick, "auto", Auto())
    assert one.target_s is not None
    assert other.target_s is not None
    assert math.isclose(one.target_s, other.target_s, rel_tol=0.01)
    assert len(run(quick)) < 0.3 * one.steps


@pytest.mark.parametrize("policy", ["even", "auto"])
def test_asynchronous_shares_and_staleness_are_those_of_theory(policy: str) -> None:
    """(1/t_k) / sum(1/t), and t_k sum_{j != k} 1/t_j; n - 1 on average."""
    made = scenario(mode="async", steps=400, policies=[policy], training={"epoch_samples": 10**6})
    training = Asynchronous(made, made.policy(policy), None)
    last = list(training.steps())[-1]
    times = made.model.ready_s(np.array(last.split, dtype=float))[:, -1]
    members = training._engine.members
    updates = np.array([member.tally.updates for member in members])
    found = np.array([member.tally.mean_staleness for member in members])
    if policy == "even":
        rates = 1 / times
        assert np.allclose(updates / updates.sum(), rates / rates.sum(), atol=0.01)
        assert np.allclose(found, times * rates.sum() - 1, rtol=0.05)
    else:
        assert found.max() < 1.2 * found.min()
    assert math.isclose(float(updates @ found / updates.sum()), 2.0, abs_tol=0.05)


def test_a_bound_of_no_steps_is_synchronous() -> None:
    network = {"ready": [1.0], "bucket_s": [0.0]}
    calm = scenario(network=network, policies=["even"])
    bound = replace(calm, mode=mode_of("stale:0"))
    one, other = run(calm, "even"), run(bound, "even")
    assert math.isclose(one[-1].end_s, other[-1].end_s, rel_tol=1e-9)


@pytest.mark.parametrize("bound", [1, 4])
def test_no_worker_is_more_steps_ahead_than_the_bound(bound: int) -> None:
    made = scenario(mode=f"stale:{bound}", noise={"cv": 0.3}, steps=100)
    training = Asynchronous(made, made.policy("even"), None)
    ahead = 0
    for _ in training.steps():
        at = [training._engine._at(member) for member in training._engine.members]
        doing = [training._doing[w].share.step for w in training._doing]
        ahead = max(ahead, max(doing) - min(at))
    assert ahead == bound


def test_asynchronous_workers_join_leave_and_fail() -> None:
    made = scenario(
        mode="async",
        steps=120,
        noise={"cv": 0.1},
        training={"epoch_samples": 960},
        event=[
            {"at_step": 20, "worker": "slow", "fails": True},
            {"at_step": 50, "worker": "slow", "joins": True},
            {"at_step": 70, "worker": "fast-1", "leaves": True},
        ],
    )
    steps = run(made)
    assert len(steps) == 120
    assert all(step.samples == 96 for step in steps)
    counts = [len(step.workers) for step in steps]
    assert counts[10] == 3
    assert counts[40] == 2
    assert counts[65] == 3
    assert counts[110] == 2


def test_with_a_server_a_loader_is_a_limit_too() -> None:
    workers = [{"count": 2, **LINE}, {"input_s": 0.01, **LINE}]
    made = scenario(mode="async", worker=workers, steps=300)
    training = Asynchronous(made, made.policy("auto"), None)
    last = list(training.steps())[-1]
    assert last.split[2] < 0.4 * last.split[0]
    members = training._engine.members
    assert max(member.tally.mean_staleness for member in members) < 3.5


def test_a_slow_server_holds_all_workers_up() -> None:
    made = scenario(mode="async", server={"update_s": 0.2}, steps=30)
    steps = run(made, "even")
    assert math.isclose(steps[-1].lasts_s, 3 * 0.2, rel_tol=0.2)
    assert float(np.mean([step.idle_s.mean() for step in steps[5:]])) > 0.1


def test_a_policy_that_cannot_follow_is_an_outcome_and_no_error() -> None:
    workers = [{"name": "fast", "count": 2, "resource": 3, **LINE}, {"resource": 1, **SLOW}]
    made = scenario(
        worker=workers,
        policies=["static", "auto"],
        event=[{"at_step": 30, "worker": "fast-1", "leaves": True}],
    )
    static, auto = compare(made)
    assert "others came or went" in static.refused
    assert not auto.refused


def test_time_lost_and_money_are_counted() -> None:
    workers = [{"name": "a", "count": 2, "price_per_hour": 3.0, **LINE}, {"name": "b", **LINE}]
    made = scenario(
        worker=workers,
        policies=["even"],
        restart_s=100.0,
        event=[{"at_step": 30, "worker": "b", "leaves": True}],
    )
    (found,) = compare(made)
    assert found.lost_s == 100.0
    assert math.isclose(found.clock_s, found.step_s * 60 + 100, rel_tol=1e-9)
    assert found.money is not None
    assert math.isclose(found.money, 6.0 * found.clock_s / 3600, rel_tol=1e-9)
    first = 30 * run(made, "even")[0].lasts_s
    assert math.isclose(found.worker_hours * 3600, 2 * found.clock_s + first, rel_tol=1e-9)


@pytest.mark.parametrize(
    "hard",
    [
        {"network": {**NETWORK, "drag": 0.3}},
        {"noise": {"cv": 0.08, "correlation": 0.8}},
        {"worker": [{"count": 2, "input_s": 0.002, **LINE}, SLOW]},
        {
            "network": {"bucket_bytes": [4e6, 1e6], "ready": [0.3, 1.0], "link_bytes_per_s": 1e9},
            "worker": [{"count": 2, **LINE}, {"link_bytes_per_s": 1e8, **SLOW}],
        },
        {"worker": [{"count": 2, "knee": [40, 3.0], **LINE}, {"tile": 8, **SLOW}]},
    ],
    ids=["drag", "lasting noise", "loaders", "ring", "bends"],
)
def test_auto_comes_near_the_best_on_truths_that_it_cannot_represent(hard: dict[str, Any]) -> None:
    made = scenario(steps=400, noise=hard.get("noise", {"cv": 0.03}), **_without(hard, "noise"))
    even, auto = (outcome_of(made, name, made.policy(name)) for name in ("even", "auto"))
    assert auto.regret < 0.15
    assert auto.regret < even.regret


def _without(tables: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: each for name, each in tables.items() if name != key}


def test_ten_thousand_workers_with_drift_and_failures() -> None:
    workers = [{"count": 6000, **LINE}, {"count": 4000, **SLOW}]
    made = scenario(
        worker=workers,
        global_batch=320_000,
        steps=40,
        noise={"cv": 0.05},
        drift={"per_step": 0.005},
        failures={"mean_steps": 5000, "down_steps": 10},
    )
    even, auto = (outcome_of(made, name, made.policy(name)) for name in ("even", "auto"))
    assert auto.step_s < even.step_s
    assert all(sum(point.split) == 320_000 for point in auto.course)
    assert len({len(point.workers) for point in auto.course}) > 5


def test_what_a_scenario_means_does_not_depend_on_how_it_is_made() -> None:
    made = scenario()
    assert made.model.bucket_s.tolist() == [0.020, 0.004]
    direct = Scenario(cluster=made.cluster, global_batch=96, steps=60)
    assert json.dumps([s.split for s in run(direct)]) == json.dumps([s.split for s in run(made)])
    assert direct.cluster.network == Network(ready=(0.3, 1.0), bucket_s=(0.020, 0.004))
    fixed = list(Synchronous(direct, Fixed([40, 40, 16]), None).steps())
    assert {step.split for step in fixed} == {(40, 40, 16)}
    assert not direct.changes_over_steps
    assert replace(direct, failures=Failures(mean_steps=9.0)).changes_over_steps
    event = Event(what="slower", workers=(0,), factors=(2.0,), at_step=3)
    assert replace(direct, events=(event,), noise=Noise(cv=0.1)).changes_over_steps

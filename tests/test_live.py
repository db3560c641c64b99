"""Live balancing: real workers of unequal speed, whose split is learned while they train."""

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from poise.errors import StateMismatch
from poise.lab import Pacer
from poise.policy import Auto, Bounds
from poise.records import read_record, replay
from poise.torch import Balancer
from poise.torch.devices import device_kind
from tests.cluster import Workers
from tests.inside import session_of
from tests.test_exactness import EXACT
from tests.test_start_step import check_every_sample_once_in_order
from tests.training import Log, Recipe, build, dataset, distance, train_balanced, train_plain

RECIPE = Recipe(samples=24 * 11 + 5, global_batch=24, epochs=4)
STEPS = 48


def train_unequally(
    recipe: Recipe, speeds: tuple[float, ...] | dict[int, tuple[float, ...]], policy: Any
) -> Log:
    return train_balanced(
        recipe, policy, speeds=speeds if isinstance(speeds, dict) else {0: speeds}
    )


@pytest.mark.parametrize("speeds", [(1.0, 0.5, 0.25), (0.25, 1.0, 1.0)], ids=str)
def test_auto_learns_the_split_and_the_training_stays_exact(
    workers: Workers, tmp_path: Path, speeds: tuple[float, ...]
) -> None:
    """The default policy; worker 0, which decides, may be the slowest."""
    record = tmp_path / "run.jsonl"
    recipe = Recipe(**{**vars(RECIPE), "extra": {"record": str(record)}})
    logs = workers.run(train_unequally, recipe, speeds, "auto", workers=3)
    assert logs[0].splits == logs[1].splits == logs[2].splits
    first, last = logs[0].splits[0], logs[0].splits[-1]
    assert first == (8, 8, 8)
    assert sorted(range(3), key=lambda w: -last[w])[-1] == speeds.index(min(speeds))
    assert max(last) >= 10
    check_every_sample_once_in_order(logs, RECIPE)
    assert distance(logs[1].weights, train_plain(RECIPE)) < EXACT
    found = read_record(record)
    assert replay(found) is None
    rows = [row.observation for row in found.rows if row.observation]
    assert [row.step for row in rows] == list(range(STEPS))
    measured = [row for row in rows if row.ready_s is not None and (row.ready_s > 0).all()]
    # Left out: warm-up, the first and last of an epoch, the first of a split, and what was not
    # exchanged at the end.
    changes = sum(before.split != after.split for before, after in pairwise(rows))
    assert len(measured) >= STEPS - 2 - 2 * RECIPE.epochs - changes - 4
    assert all(row.memory_bytes is None or (row.memory_bytes > 0).any() for row in measured)


LONG = Recipe(samples=96 * 120, global_batch=96, epochs=1)
UNEQUAL = (0.5, 1.0, 1.0, 0.5)
CHANGED_AT = 50


def split_over_time(
    workers: Workers, speeds: dict[int, tuple[float, ...]]
) -> list[tuple[int, ...]]:
    """Train for long on four paced workers; return the split of each step."""
    logs: list[Log] = workers.run(train_unequally, LONG, speeds, "auto", workers=4)
    check_every_sample_once_in_order(logs, LONG)
    assert distance(logs[3].weights, train_plain(LONG)) < EXACT
    return logs[0].splits


def changes(splits: list[tuple[int, ...]]) -> int:
    return sum(before != after for before, after in pairwise(splits))


@pytest.mark.slow
def test_a_constant_cluster_settles(workers: Workers) -> None:
    splits = split_over_time(workers, {0: UNEQUAL})
    assert changes(splits) <= 8
    assert changes(splits[60:]) <= 2
    assert all(28 <= splits[-1][worker] <= 36 for worker in (1, 2))


@pytest.mark.slow
def test_equal_workers_stay_near_the_even_split(workers: Workers) -> None:
    splits = split_over_time(workers, {0: (0.5,) * 4})
    assert changes(splits) <= 4
    assert 20 <= min(splits[-1]) <= max(splits[-1]) <= 28


@pytest.mark.slow
def test_a_worker_that_stalls_for_a_second_is_not_punished_for_ever(workers: Workers) -> None:
    stalled = (0.5, 0.06, 1.0, 0.5)
    splits = split_over_time(workers, {0: UNEQUAL, CHANGED_AT: stalled, CHANGED_AT + 1: UNEQUAL})
    assert splits[-1][1] >= 0.8 * splits[CHANGED_AT][1]


@pytest.mark.slow
def test_a_worker_that_slows_down_gets_less(workers: Workers) -> None:
    slower = (0.5, 0.25, 1.0, 0.5)
    splits = split_over_time(workers, {0: UNEQUAL, CHANGED_AT: slower})
    before, after = splits[CHANGED_AT][1], splits[CHANGED_AT + 20][1]
    assert after <= 0.6 * before


@pytest.mark.parametrize(
    "policy",
    [
        "proportional",
        pytest.param("lbbsp", marks=pytest.mark.slow),
        pytest.param("optperf", marks=pytest.mark.slow),
    ],
)
def test_other_policies_balance_by_name(workers: Workers, policy: str) -> None:
    logs = workers.run(train_unequally, RECIPE, (1.0, 0.25), policy, workers=2)
    assert logs[0].splits == logs[1].splits
    # Not the last one: after a stall "proportional" takes a larger batch for a slower one.
    assert max(split[0] for split in logs[0].splits) > logs[0].splits[0][0]
    assert distance(logs[1].weights, train_plain(RECIPE)) < EXACT


def train_and_save(
    checkpoint: str, speeds: tuple[float, ...], stop: int | None
) -> list[tuple[int, ...]]:
    """Go on from the checkpoint if there is one; stop and save after so many steps."""
    model, optimizer, _ = build(RECIPE)
    splits: list[tuple[int, ...]] = []
    with Balancer(RECIPE.global_batch, seed=RECIPE.seed) as balancer:
        Pacer(0.002, 0.0, speeds[balancer.worker]).attach(model)
        loader = DataLoader(dataset(RECIPE), RECIPE.global_batch, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        if Path(checkpoint).exists():
            balancer.load_state_dict(torch.load(checkpoint, weights_only=True))
        for _ in balancer.epochs(RECIPE.epochs):
            for inputs, targets, _ in shares:
                splits.append(balancer.plan.split)
                nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                if len(splits) == stop:
                    break
            if len(splits) == stop:
                break
        if balancer.worker == 0:
            torch.save(balancer.state_dict(), checkpoint)
        balancer.mean(0.0, 1)
    return splits


def test_what_was_learned_is_reused_on_resume(workers: Workers, tmp_path: Path) -> None:
    """On the same workers at once; on others after the delay of a plan, by kind of device."""
    checkpoint = str(tmp_path / "state.pt")
    before = workers.run(train_and_save, checkpoint, (1.0, 0.25), 24, workers=2)
    assert before[0][-1][0] > before[0][-1][1]
    again = workers.run(train_and_save, checkpoint, (1.0, 0.25), 3, workers=2)
    assert again[0][0] == again[1][0] == before[0][-1]
    more = workers.run(train_and_save, checkpoint, (1.0, 0.25, 1.0), 4, workers=3)
    assert more[0] == more[1] == more[2]
    assert more[0][0] == (8, 8, 8)
    assert more[0][3][0] > more[0][3][1]
    assert abs(more[0][3][2] - more[0][3][0]) <= 1  # of the kind of worker 0


def test_devices_are_matched_by_kind() -> None:
    assert device_kind(torch.device("cpu")) == device_kind(torch.device("cpu"))


class SlowData(Dataset[Any]):
    """A data set from which a sample takes long on one worker."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s

    def __len__(self) -> int:
        return 24 * 40

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._sample_s)
        return torch.ones(24), index % 5


def train_on_slow_data() -> Any:
    """Worker 1 computes faster and its loader is slow; return the last split and all bounds."""
    model, optimizer, _ = build(Recipe(dtype="float32"))
    with Balancer(24) as balancer:
        Pacer(0.002, 0.0, 1.0 if balancer.worker == 1 else 0.25).attach(model)
        data = SlowData(0.02 if balancer.worker == 1 else 0.0)
        loader = DataLoader(data, 24, num_workers=1)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for inputs, targets in shares:
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        plan = balancer.plan
        return plan.split, plan.bound if plan.forecast is not None else None


@pytest.mark.slow
def test_a_worker_whose_loader_is_slow_is_recognized(workers: Workers) -> None:
    results = workers.run(train_on_slow_data, workers=2)
    split, bound = results[0]
    assert split[0] > split[1]
    assert bound[1] == "input"
    assert bound[0] != "input"


@dataclass
class Tight:
    """Memory of which a sample takes 10 MB, 5 samples' worth before the first, and a limit."""

    balancer: Any = None
    limit_bytes: float = 300e6
    asked: list[float] = field(default_factory=list)

    def peak_bytes(self) -> float:
        if self.balancer is None or not session_of(self.balancer).is_prepared:
            return 50e6
        return 50e6 + 10e6 * float(self.balancer.plan.split[self.balancer.worker])


def train_with_little_memory(policy: Any) -> list[tuple[int, ...]]:
    """Worker 0 is fast and has memory for 22 samples."""
    memory = Tight()
    model, optimizer, _ = build(RECIPE)
    splits = []
    with pytest.MonkeyPatch.context() as patch, Balancer(48, policy=policy) as balancer:
        if balancer.worker == 0:
            memory.balancer = balancer
            patch.setattr("poise.torch.preparation.memory_of", lambda *_, **__: memory)
        Pacer(0.002, 0.0, 1.0 if balancer.worker == 0 else 0.25).attach(model)
        loader = DataLoader(dataset(RECIPE), 48, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(8):
            for inputs, targets, _ in shares:
                splits.append(balancer.plan.split)
                nn.functional.cross_entropy(shared(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    return splits


@pytest.mark.slow
def test_a_local_batch_never_grows_beyond_its_memory(workers: Workers) -> None:
    """By speed worker 0 would get 32 of 48 samples."""
    splits = workers.run(train_with_little_memory, Auto(), workers=3)[0]
    assert splits[0] == (16, 16, 16)
    assert max(split[0] for split in splits) <= 22  # (0.9 x 300 - 50) / 10
    assert splits[-1][0] > 16


class Part(IterableDataset[Any]):
    """A worker's part of a stream, in float64."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        for number in range(self._samples):
            yield torch.full((24,), 0.01 * number, dtype=torch.float64), number % 5


def train_on_unequal_streams(sizes: tuple[int, ...], speeds: tuple[float, ...]) -> Any:
    """Worker 1's part ends long before worker 0's; return the splits that each was told."""
    model, optimizer, _ = build(RECIPE)
    told = []
    with Balancer(24, hang_s=30) as balancer:
        Pacer(0.002, 0.0, speeds[balancer.worker]).attach(model)
        loader = DataLoader(Part(sizes[balancer.worker]), 24)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for inputs, targets in shares:
            told.append(balancer.plan.split)
            nn.functional.cross_entropy(shared(inputs), targets, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
    return told


@pytest.mark.slow
def test_a_stream_that_ends_early_on_one_worker_keeps_the_plans_together(workers: Workers) -> None:
    told = workers.run(train_on_unequal_streams, (400, 60), (0.25, 1.0), workers=2)
    assert len(told[0]) == len(told[1]) > 20
    assert told[0] == told[1]


def resume_elsewhere(checkpoint: str, kinds: tuple[str, ...], policy: Any) -> list[tuple[int, ...]]:
    """Go on for three steps, on devices of these kinds."""
    model, optimizer, _ = build(RECIPE)
    splits = []
    with pytest.MonkeyPatch.context() as patch, Balancer(24, policy=policy) as balancer:
        patch.setattr("poise.torch.devices.device_kind", lambda _: kinds[balancer.worker])
        loader = DataLoader(dataset(RECIPE), 24, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        if Path(checkpoint).exists():
            balancer.load_state_dict(torch.load(checkpoint, weights_only=True))
        for (inputs, targets, _), _ in zip(shares, range(3), strict=False):
            splits.append(balancer.plan.split)
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not Path(checkpoint).exists() and balancer.worker == 0:
            torch.save({**balancer.state_dict(), "split": [19, 5]}, checkpoint)
        balancer.mean(0.0, 1)
    return splits


def test_a_saved_split_is_used_only_by_workers_it_was_made_for(
    workers: Workers, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "state.pt")
    workers.run(resume_elsewhere, checkpoint, ("big", "small"), Auto(), workers=2)
    again = workers.run(resume_elsewhere, checkpoint, ("big", "small"), Auto(), workers=2)
    turned = workers.run(resume_elsewhere, checkpoint, ("small", "big"), Auto(), workers=2)
    bounded = Auto(bounds=Bounds(max_batch=14))
    within = workers.run(resume_elsewhere, checkpoint, ("big", "small"), bounded, workers=2)
    assert again[0][0] == again[1][0] == (19, 5)
    assert turned[0][0] == turned[1][0] == (12, 12)
    assert within[0][0] == within[1][0] == (12, 12)


def load_damaged_states() -> int:
    """Damage a state in many ways; every refusal is Poise's own and changes nothing."""
    model, optimizer, _ = build(RECIPE)
    refused = 0
    with Balancer(24) as balancer:
        loader = DataLoader(dataset(RECIPE), 24, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for (inputs, targets, _), _ in zip(shares, range(4), strict=False):
            nn.functional.cross_entropy(shared(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = balancer.state_dict()
        fit = state["engine"]["policy"]["fit"]
        damages: list[dict[str, Any]] = [
            {"split": None},
            {"split": 5},
            {"split": [8.5]},
            {"kinds": None},
            {"engine": {}},
            {"engine": {**state["engine"], "workers": None}},
            {"engine": {**state["engine"], "policy": {}}},
            *({"engine": _with_fit(state, {**fit, name: [1.0, 2.0]})} for name in fit),
        ]
        for damage in damages:
            before = balancer.state_dict()
            try:
                balancer.load_state_dict({**state, "step": 99, **damage})
            except StateMismatch:
                refused += 1
                assert balancer.state_dict() == before
    return refused


def _with_fit(state: dict[str, Any], fit: dict[str, Any]) -> dict[str, Any]:
    engine = state["engine"]
    return {**engine, "policy": {**engine["policy"], "fit": fit}}


def test_damaged_states_are_refused_as_a_whole(workers: Workers) -> None:
    assert workers.run(load_damaged_states, workers=1)[0] >= 12

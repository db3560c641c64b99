"""Records: what was observed and decided, written, read and replayed."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poise.core.observation import Change, Event, Observation
from poise.core.split import Split, even_split
from poise.engine.adaptation import Adaptation
from poise.engine.bsp import Engine
from poise.errors import InvalidSetting, PoiseError, StateMismatch
from poise.policy import (
    Auto,
    Bounds,
    Decision,
    Even,
    Fixed,
    LbBsp,
    OptPerf,
    Policy,
    Proportional,
    Static,
)
from poise.records import Recorder, read_record, replay
from poise.sim.scenes import CORES, by_cores
from poise.sim.simulate import observe
from poise.torch import Balancer
from tests.cluster import Workers
from tests.test_exactness import EXACT
from tests.test_policies import name
from tests.training import Recipe, distance, train_balanced, train_plain

POLICIES: list[Policy] = [
    Auto(),
    Auto(bounds=Bounds(min_batch=8, max_batch=(200, 100, 100, 200), multiple_of=4)),
    Proportional(patience=3),
    LbBsp(samples=4),
    OptPerf(),
    Even(),
    Static(CORES[8]),
    Fixed({0: [60, 60, 60, 60], 9: [30, 30, 20, 160]}),
]


def recorded(path: Path, policy: Policy, adapt: Adaptation | None = None) -> Path:
    """Drive an engine over virtual workers, and record it."""
    draw = np.random.default_rng(0)
    model = by_cores(CORES[8])
    start = Engine(policy, 4, 240, adapt)
    timetable, engine = start.start()
    with Recorder(path, start) as recorder:
        for step in range(60):
            split = timetable.at(step).split
            seen = observe(model, step, step // 20, split, np.exp(0.05 * draw.standard_normal(4)))
            if step == 30 and seen.ready_s is not None:
                ready = seen.ready_s.copy()
                ready[1] = np.nan
                seen = replace(seen, ready_s=ready)
            plan, engine = engine.update([seen], step + 2)
            recorder.write([seen], step + 2, plan)
            timetable = timetable if plan is None else timetable.announce(plan)
    return path


@pytest.mark.parametrize("policy", POLICIES, ids=name)
def test_the_same_observations_give_the_same_decisions(tmp_path: Path, policy: Policy) -> None:
    record = read_record(recorded(tmp_path / "run.jsonl", policy))
    assert len(record.rows) == 60
    assert record.complete
    assert replay(record) is None
    assert any(row.decision for row in record.rows) == policy.online


def test_a_record_of_an_adapting_engine_replays(tmp_path: Path) -> None:
    record = read_record(
        recorded(tmp_path / "run.jsonl", Auto(), Adaptation(lowest=60, highest=960, every=10))
    )
    assert record.header.adapt is not None
    assert record.header.adapt.every == 10
    assert replay(record) is None


def test_a_change_of_workers_is_recorded_and_replayed(tmp_path: Path) -> None:
    start = Engine(Auto(), 4, 240)
    timetable, engine = start.start()
    change = Change.of(4, global_batch=200, left=[1])
    with Recorder(tmp_path / "run.jsonl", start) as recorder:
        seen = observe(by_cores(CORES[2]), 0, 0, timetable.at(0).split, np.ones(4))
        plan, engine = engine.update([seen], 2)
        recorder.write([seen], 2, plan)
        plan, engine = engine.update([change], 3)
        recorder.write([change], 3, plan)
    record = read_record(tmp_path / "run.jsonl")
    assert record.rows[1].change == change
    assert record.rows[1].decision is not None
    assert len(record.rows[1].decision.split) == 3
    assert replay(record) is None


def test_the_first_difference_is_shown(tmp_path: Path) -> None:
    record = read_record(recorded(tmp_path / "run.jsonl", Auto()))
    found = replay(record, Proportional())
    assert found is not None
    first = next(number for number, row in enumerate(record.rows) if row.decision)
    assert found.row <= max(first, 4)
    assert f"step {found.step}" in str(found)
    assert "recorded" in str(found)
    assert "replayed" in str(found)


def test_a_changed_measurement_is_noticed(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", Auto())
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    row["observation"]["ready_s"][0][0] *= 3
    path.write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")
    assert replay(read_record(path)) is not None


def test_a_policy_of_your_own_is_given_to_the_replay(tmp_path: Path) -> None:
    class Mine(Even):
        pass

    record = read_record(recorded(tmp_path / "run.jsonl", Mine()))
    assert record.header.policy is None
    with pytest.raises(InvalidSetting, match="pass it"):
        replay(record)
    assert replay(record, Mine()) is None


def test_rows_are_plain_json_and_hold_only_what_is_known(tmp_path: Path) -> None:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    path = recorded(tmp_path / "run.jsonl", Auto())
    header, *rows = [json.loads(line, parse_constant=refuse) for line in path.open()]
    assert (header["format"], header["version"]) == ("poise-record", 2)
    assert header["policy"]["name"] == "auto"
    assert rows[30]["observation"]["ready_s"][1] == [None]
    assert "memory_bytes" not in rows[0]["observation"]
    assert "change" not in rows[0]


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", Even())
    with pytest.raises(InvalidSetting, match="exists, and records are not overwritten"):
        Recorder(path, Engine(Even(), 4, 240))
    with pytest.raises(InvalidSetting, match="cannot be written"):
        Recorder(tmp_path / "no" / "run.jsonl", Engine(Even(), 4, 240))


def test_a_record_can_be_read_while_it_grows_or_after_a_kill(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl", Auto())
    text = path.read_text()
    path.write_text(text[: text.rindex("{") + 20])
    record = read_record(path)
    assert not record.complete
    assert len(record.rows) == 59
    assert replay(record) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no complete line"),
        ("[1]\n", "line 1 .* is not a JSON object"),
        ("nonsense\n", "line 1 .* is not JSON"),
        ('{"format":"other"}\n', "so it is no record"),
        ('{"format":"poise-record","version":9}\n', "version 9, and this Poise reads version 2"),
        ('{"format":"poise-record","version":2}\n', "line 1 .*needs workers"),
        (
            '{"format":"poise-record","version":2,"workers":2,"global_batch":8}\n{"step":1}\n',
            "line 2 .*has no step",
        ),
    ],
)
def test_what_is_no_record_is_refused_with_the_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(StateMismatch, match=message):
        read_record(path)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"there is no file .*none\.jsonl; give the path"):
        read_record(tmp_path / "none.jsonl")
    with pytest.raises(InvalidSetting, match="is a directory"):
        read_record(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidSetting, match="is not text in UTF-8"):
        read_record(tmp_path / "bytes")


@dataclass(frozen=True)
class Turning:
    """A policy that hands the largest share on, from worker to worker."""

    online = True
    state_type = int

    def init(self, workers: int, global_batch: int) -> tuple[dict[int, Split], int]:
        return {0: even_split(workers, global_batch)}, 0

    def update(self, state: int, events: Sequence[Event]) -> tuple[Decision | None, int]:
        seen = events[-1]
        assert isinstance(seen, Observation)
        if seen.step % 3 == 0:
            return None, state
        workers, total = len(seen.split), 12
        split = [1 + (worker == state) * (total - workers) for worker in range(workers)]
        return Decision(tuple(split), "the next one's turn"), (state + 1) % workers


@pytest.mark.parametrize("policy", ["even", Turning()], ids=str)
def test_a_training_is_recorded(workers: Workers, tmp_path: Path, policy: Any) -> None:
    """Every step of all workers, what was decided on it, and the splits that came of it."""
    path = tmp_path / "run.jsonl"
    recipe = Recipe(global_batch=12, samples=50, epochs=3, extra={"record": str(path)})
    logs = workers.run(train_balanced, recipe, policy, workers=3)
    record = read_record(path)
    seen = [row.observation for row in record.rows]
    assert [each.step for each in seen if each] == list(range(15))
    assert [each.epoch for each in seen if each] == [0] * 5 + [1] * 5 + [2] * 5
    sizes = [tuple(len(log.seen[step][2]) for log in logs) for step in range(15)]
    assert [each.split for each in seen if each] == sizes
    assert replay(record, policy if isinstance(policy, Turning) else None) is None
    decided = {row.decision.start_step: row.decision.split for row in record.rows if row.decision}
    assert bool(decided) == isinstance(policy, Turning)
    for step, split in decided.items():
        if step < 15 and sum(sizes[step]) == 12:
            assert sizes[step] == split
    reference = train_plain(replace(recipe, extra={}))
    assert distance(logs[0].weights, reference) < EXACT


def refused_record(path: str) -> str:
    with pytest.raises(PoiseError) as found:
        Balancer(12, record=path)
    return str(found.value)


def test_what_exists_and_is_no_record_stops_the_training_before_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("mine")
    assert "exists and is no record; choose another name" in refused_record(str(path))
    assert path.read_text() == "mine"
    assert "is a directory" in refused_record(str(tmp_path))
    assert "exists and is no record" in refused_record("/dev/full")
    assert "cannot be written" in refused_record(str(tmp_path / "no" / "run.jsonl"))
    assert os.listdir(tmp_path) == ["run.jsonl"]

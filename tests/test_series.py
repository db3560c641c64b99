"""Records of trainings that are started again: numbered, never overwritten, read together."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from poise.cli.main import main
from poise.engine.bsp import Engine
from poise.errors import InvalidSetting, StateMismatch
from poise.policy import Auto, Even, Policy, Proportional
from poise.records import Recorder, read_record, read_series, replay_series
from poise.records.names import paths_of
from poise.sim.calibration import calibrated
from tests.machine import needs_mounts, small_disk
from tests.processes import wait_for
from tests.test_full_disk import record
from tests.test_serve import LIMIT_S, running, serving


def begin(path: Path, policy: Policy | None = None) -> Path:
    """Begin the next record of a series, and end it at once."""
    with Recorder(path, Engine(policy or Even(), 4, 240), series=True) as recorder:
        return recorder.path


@pytest.mark.parametrize(
    ("name", "followers"),
    [
        ("run.jsonl", ["run.2.jsonl", "run.3.jsonl"]),
        ("run", ["run.2", "run.3"]),
        ("a.b [1]+.jsonl", ["a.b [1]+.2.jsonl", "a.b [1]+.3.jsonl"]),
        (".jsonl", [".jsonl.2", ".jsonl.3"]),
    ],
)
def test_each_start_takes_the_next_number(
    tmp_path: Path, name: str, followers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for other in ("run.notes.jsonl", "run.02.jsonl", "run.1.jsonl", "run.20261118.jsonl"):
        (tmp_path / other).write_text("mine")
    with caplog.at_level(logging.INFO, "poise"):
        made = [begin(tmp_path / name) for _ in range(3)]
    assert [path.name for path in made] == [name, *followers]
    assert paths_of(tmp_path / name) == made
    said = [each.getMessage() for each in caplog.records]
    assert said == [f"{made[0]} exists; this run is recorded in {each}" for each in made[1:]]


def test_a_number_that_is_free_again_is_not_taken(tmp_path: Path) -> None:
    """Else a later run would stand before an earlier one."""
    path = tmp_path / "run.jsonl"
    made = [begin(path) for _ in range(3)]
    made[1].unlink()
    assert begin(path).name == "run.4.jsonl"
    made[0].unlink()
    assert begin(path).name == "run.5.jsonl"
    assert [each.name for each in read_series(path).paths] == [
        "run.3.jsonl",
        "run.4.jsonl",
        "run.5.jsonl",
    ]


def test_one_record_of_a_series_can_be_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    second = [begin(path) for _ in range(3)][1]
    assert read_series(second).paths == (second,)


def test_a_run_that_was_killed_before_its_header_stops_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("")
    assert begin(path).name == "run.2.jsonl"
    (tmp_path / "run.3.jsonl").write_text('{"format":"poise-rec')
    assert begin(path).name == "run.4.jsonl"
    series = read_series(path)
    assert [each.name for each in series.paths] == ["run.2.jsonl", "run.4.jsonl"]
    assert [each.name for each in series.empty] == ["run.jsonl", "run.3.jsonl"]


def test_a_series_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="there is no file"):
        read_series(tmp_path / "run.jsonl")
    for name in ("run.jsonl", "run.2.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(StateMismatch, match="no complete line"):
        read_series(tmp_path / "run.jsonl")
    begin(tmp_path / "run.jsonl")
    (tmp_path / "run.2.jsonl").write_text("mine\n")
    with pytest.raises(StateMismatch, match=r"line 1 of .*run\.2\.jsonl is not JSON"):
        read_series(tmp_path / "run.jsonl")


def test_each_record_of_a_series_is_replayed_from_its_own_start(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, {}, series=True)
    text = path.read_text()
    path.write_text(text[: text.rindex("{", 0, len(text) // 2) + 20])  # it was killed
    record(path, {}, series=True)
    series = read_series(path)
    assert [each.complete for each in series] == [False, True]
    assert replay_series(series) is None
    found = replay_series(series, Proportional())
    assert found is not None
    assert found[0] == path
    changed = (tmp_path / "run.2.jsonl").read_text().splitlines()
    row = json.loads(changed[1])
    row["observation"]["ready_s"][0][0] *= 3
    changed[1] = json.dumps(row)
    (tmp_path / "run.2.jsonl").write_text("\n".join(changed) + "\n")
    found = replay_series(read_series(path))
    assert found is not None
    assert found[0].name == "run.2.jsonl"


def test_a_calibration_learns_from_all_runs_of_the_last_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        record(path, {}, series=True)
    series = read_series(path)
    alone = [calibrated(each) for each in series]
    together = calibrated(*series)
    assert together.steps > max(each.steps for each in alone)
    assert main(["calibrate", str(path)]) == 0
    assert "read: run.jsonl, run.2.jsonl" in capsys.readouterr().err
    assert main(["calibrate", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["records"] == [str(each) for each in series.paths]
    with Recorder(path, Engine(Auto(), 3, 240), series=True):
        pass
    with pytest.raises(InvalidSetting, match="0 steps that all of its last 3 workers"):
        calibrated(*read_series(path))


RESTARTED = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from poise.torch import Balancer

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
balancer = Balancer(16, record=sys.argv[1])
data = DataLoader(TensorDataset(torch.randn(480, 8)))
model, optimizer, loader = balancer.prepare(model, optimizer, data)
saved = sys.argv[1] + f".{balancer.worker}.pt"
if os.path.exists(saved):
    balancer.load_state_dict(torch.load(saved))
for epoch in balancer.epochs(3):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and balancer.samples == 640:
            torch.save(balancer.state_dict(), saved)
        if first and balancer.samples == 800 and balancer.worker == 1:
            os._exit(3)
print("worker", balancer.worker, "is done with", balancer.samples)
"""


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_ends_well_with_two_records(tmp_path: Path) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run.jsonl"
    script.write_text(RESTARTED)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    result = subprocess.run(
        [sys.executable, *launch, "--standalone", str(script), str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("is done with 1440") == 2
    series = read_series(path)
    assert [each.name for each in series.paths] == ["run.jsonl", "run.2.jsonl"]
    assert replay_series(series) is None
    assert series.records[1].rows[0].loaded is not None
    steps = [[row.observation.step for row in each.rows if row.observation] for each in series]
    assert steps[0] == list(range(len(steps[0])))
    assert len(steps[0]) > 20
    assert steps[1] == list(range(40, 90))
    told = subprocess.run(
        [sys.executable, "-m", "poise", "calibrate", str(path), "--json"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert len(json.loads(told.stdout)["records"]) == 2


SERVED = """
import os, sys, time
import torch
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from poise.torch import Balancer

here = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
balancer = Balancer(16, record=here / "run.jsonl")
data = DataLoader(TensorDataset(torch.randn(160, 64)))
model, optimizer, loader = balancer.prepare(model, optimizer, data)
for epoch in balancer.epochs(100000):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    if (here / "done").exists():
        break
print("worker", balancer.worker, "is done")
"""


@contextmanager
def heard(server: "subprocess.Popen[str]") -> Iterator[list[str]]:
    """What a server says, line by line, as it comes."""
    said: list[str] = []

    def listen() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            said.append(line)

    listening = threading.Thread(target=listen)
    listening.start()
    try:
        yield said
    finally:
        server.kill()
        listening.join(LIMIT_S)


@pytest.mark.slow
@needs_mounts
def test_a_server_lives_through_a_full_disk_and_is_restarted_under_the_same_name(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SERVED)
    with small_disk(tmp_path / "disk", kilobytes=512) as disk:
        save, path = disk.path / "run.pt", disk.path / "run.jsonl"
        options = ("--save", str(save), "--save-every", "0.2")
        with (
            serving(str(script), str(disk.path), *options) as (server, address),
            heard(server) as said,
            running(str(script), str(disk.path), POISE_SERVER=address) as worker,
        ):
            wait_for(lambda: save.exists() and path.read_text().count("\n") > 5)
            why = "cannot be saved to .*No space left on device; it goes on"

            def full() -> bool:
                disk.fill()  # again, as a save that was under way makes room when it ends
                return any(re.search(why, line) for line in said)

            wait_for(full)
            torch.load(save)  # the good one
            assert not save.with_name("run.pt.new").exists()
            disk.free()
            wait_for(lambda: any("is saved to" in line for line in said))
            assert (server.poll(), worker.poll()) == (None, None)
            server.send_signal(signal.SIGKILL)
            worker.communicate(timeout=LIMIT_S)
        with (
            serving(str(script), str(disk.path), *options) as (server, address),
            running(str(script), str(disk.path), POISE_SERVER=address) as worker,
        ):
            second = disk.path / "run.2.jsonl"
            wait_for(lambda: second.exists() and second.read_text().count("\n") > 5)
            (disk.path / "done").write_text("")
            told = [each.communicate(timeout=LIMIT_S) for each in (server, worker)]
            assert [server.returncode, worker.returncode] == [0, 0], told
        series = read_series(path)
        assert [each.name for each in series.paths] == ["run.jsonl", "run.2.jsonl"]
        assert replay_series(series) is None
        assert not any(each.lost for each in series)
        assert read_record(second).complete
        assert sorted(os.listdir(disk.path)) == ["done", "run.2.jsonl", "run.jsonl", "run.pt"]

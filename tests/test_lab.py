"""Unequal workers on one machine: what is asked for, what they get, and what is left of them."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from poise.cli.main import main
from poise.errors import InvalidSetting, OutOfOrder
from poise.lab import Change, Lab, Pace, Pacer, Quota, Walk
from poise.lab.contention import Contention, Sample
from poise.lab.crew import Member
from poise.lab.leftovers import clear, is_stale, lab_name, members, stale_belongings, start_time
from poise.lab.line import PREPARED, STEP, Line
from poise.lab.listener import Listener
from poise.lab.load import busy_s, cpu_s_by_session
from poise.lab.network import parse_link
from poise.lab.output import Output
from poise.lab.pacing import parse_pace
from poise.lab.quota import make_parent, places
from poise.lab.speeds import parse_speeds
from poise.lab.throttle import DutyCycle
from poise.lab.walk import declared_walk
from poise.toml_file import Toml, read_toml
from tests.cluster import Workers
from tests.machine import needs_namespaces, needs_quotas
from tests.processes import running_from, wait_for

ROOT = Path(__file__).parent.parent
PACE = Pace(per_sample_s=0.004, fixed_s=0.02)
LIMIT_S = 120.0
"""No test waits longer for anything."""

COUNT_WORK = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
dist.barrier()
began_s, cpu_s = time.perf_counter(), time.process_time()
while time.perf_counter() - began_s < 2:
    pass
print("share", (time.process_time() - cpu_s) / (time.perf_counter() - began_s))
for _ in range(3):
    ddp(torch.ones(4, 8)).sum().backward()
dist.barrier()
dist.destroy_process_group()
"""

TRAIN_FOREVER = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
data = TensorDataset(torch.ones(80, 8))
while True:
    for (x,) in DataLoader(data, batch_size=8, num_workers=1):
        ddp(x).sum().backward()
        print("training")
"""

FAIL_ON_1 = """
import os
import sys
import time

if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(3600)
"""


@pytest.mark.parametrize(
    "text", ["0", "-1", "nan", "inf", "fast", "", "1,", "0.5x", "0.5x0", "0.5x99999999999"]
)
def test_a_speed_that_cannot_be_kept_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="--speeds"):
        parse_speeds(text)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, "declares no changes"),
        ({"chnage": []}, "unknown key chnage; did you mean change"),
        ({"change": [{"at_step": 1}]}, r"\[\[change\]\] 1 has speeds=None"),
        ({"change": [{"at_step": 1, "speeds": [1]}]}, "has 1 speeds for 2 workers"),
        ({"change": [{"at_step": 1, "speeds": [1, 0]}]}, "has 0; give a number of cores"),
        ({"change": [{"at_step": 1, "speeds": [1, True]}]}, "has True; give a number of cores"),
        ({"change": [{"speeds": [1, 1]}]}, "one of at_step and at_s"),
        ({"change": [{"at_step": 1, "at_s": 1, "speeds": [1, 1]}]}, "one of at_step and at_s"),
        ({"change": [{"at_step": 1.5, "speeds": [1, 1]}]}, "at_step=1.5; give a whole number"),
        ({"change": [{"at_s": -1, "speeds": [1, 1]}]}, "at_s=-1; give a number"),
        ({"change": [{"at_step": 1, "speed": [1, 1]}]}, "unknown key speed; did you mean speeds"),
        ({"change": [{"at_s": s, "speeds": [1, 1]} for s in (2, 1)]}, "in order"),
    ],
)
def test_a_walk_that_is_not_understood_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        declared_walk(Toml("w.toml", tables), workers=2)


def test_a_walk_goes_on_when_its_steps_and_times_come() -> None:
    walk = Walk((Change(at_step=5, speeds=(1.0,)), Change(at_s=9.0, speeds=(0.5,))))
    assert walk.due(step=4, elapsed_s=8.9) == (None, walk)
    change, rest = walk.due(step=4, elapsed_s=9.0)
    assert change == walk.changes[1]
    assert rest.due(step=4, elapsed_s=99.0) == (None, rest)
    assert rest.due(step=6, elapsed_s=99.0) == (walk.changes[0], Walk())


def test_the_walk_in_the_examples_is_for_three_workers() -> None:
    walk = declared_walk(read_toml(ROOT / "examples/walks/slowdown.toml"), workers=3)
    assert [change.at_step for change in walk.changes] == [60, 120, 180]


@pytest.mark.parametrize("text", ["4", "ms", "4ms+", "-4ms", "4ms+1", "4 minutes", "1.2.3ms"])
def test_a_pace_without_units_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="--pace"):
        parse_pace(text)


@pytest.mark.parametrize(
    ("text", "words"), [("fast", "has 'fast'"), ("0mbit", "above 0"), ("1mbit,2mbit", "2 rates")]
)
def test_a_link_that_cannot_be_made_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        parse_link(text, workers=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speeds", "0", "--", "train.py"], "--speeds has 0.0; give"),
        (["--speeds", "1", "--walk", "no.toml", "--", "train.py"], "there is no file no.toml"),
        (["--speeds", "1", "--pace", "1ms", "--from-start", "train.py"], "leave out from_start"),
    ],
)
def test_what_cannot_be_run_is_one_line_on_stderr(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


class Clock:
    """A clock that stands still unless somebody sleeps or works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Working(nn.Module):
    """A layer whose forward takes time of its own."""

    def __init__(self, clock: Clock, work_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self._clock = clock
        self._work_s = work_s

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._clock.sleep(self._work_s)
        result: torch.Tensor = self.layers(batch["x"])
        return result


def paced(clock: Clock, speed: float) -> Pacer:
    return Pacer(PACE.per_sample_s, PACE.fixed_s, speed, clock=clock.read, sleep=clock.sleep)


@pytest.mark.parametrize("work_s", [0.0, 0.01])
@pytest.mark.parametrize("samples", [10, 0])
def test_a_paced_step_takes_what_its_batch_and_speed_say(work_s: float, samples: int) -> None:
    """Real work is a part of it."""
    clock = Clock()
    pacer, module = paced(clock, speed=0.5), Working(clock, work_s)
    pacer.attach(module)
    for speed in (0.5, 0.25):
        pacer.speed = speed
        began_s, step_s = clock.now_s, PACE.step_s(samples, speed)
        result = module({"x": torch.ones(samples, 4)})
        assert clock.now_s - began_s == pytest.approx(step_s / 3)
        result.sum().backward()
        assert clock.now_s - began_s == pytest.approx(step_s)


def test_a_paced_forward_without_gradients_leaves_nothing_for_later() -> None:
    clock = Clock()
    pacer, module = paced(clock, speed=1.0), Working(clock, 0.0)
    pacer.attach(module)
    with torch.no_grad():
        module({"x": torch.ones(10, 4)})
    began_s = clock.now_s
    module({"x": torch.ones(10, 4)}).sum().backward()
    assert clock.now_s - began_s == pytest.approx(PACE.step_s(10, 1.0))


def test_two_forwards_before_a_backward_take_the_time_of_both() -> None:
    clock = Clock()
    pacer, module = paced(clock, speed=1.0), Working(clock, 0.0)
    pacer.attach(module)
    first, second = (module({"x": torch.ones(n, 4)}) for n in (10, 20))
    (first.sum() + second.sum()).backward()
    assert clock.now_s == pytest.approx(PACE.step_s(10, 1.0) + PACE.step_s(20, 1.0))


def test_a_paced_model_without_a_batch_is_refused() -> None:
    module = nn.Linear(4, 4)
    Pacer(0.1, 0.0, 1.0).attach(module)
    with pytest.raises(InvalidSetting, match="without any tensor that has a length"):
        module(None)


def bucket_times() -> tuple[list[float], list[float]]:
    """Return when buckets are ready, and when their parameters have slept."""
    dist.init_process_group("gloo")
    clock = Clock()
    ready_s: list[float] = []
    parameters: list[int] = []

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ready_s.append(clock.now_s)
        parameters.append(sum(each.numel() for each in bucket.parameters()))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)  # a bucket per layer
    ddp.register_comm_hook(None, hook)
    paced(clock, speed=1.0).attach(ddp)
    for _ in range(2):  # the first step finds other buckets
        clock.now_s = 0.0
        ready_s.clear()
        parameters.clear()
        ddp(torch.ones(10, 64)).sum().backward()
    dist.destroy_process_group()
    step_s, total = PACE.step_s(10, 1.0), sum(parameters)
    slept = [sum(parameters[: number + 1]) / total for number in range(len(parameters))]
    return ready_s, [step_s * (1 + 2 * part) / 3 for part in slept]


def test_a_bucket_is_ready_when_its_parameters_have_slept(workers: Workers) -> None:
    """So their hooks run before that of DistributedDataParallel."""
    ((ready_s, slept_s),) = workers.run(bucket_times, workers=1)
    assert len(ready_s) > 1
    assert ready_s == pytest.approx(slept_s)


FILES_V1 = {"cgroup.procs": "", "cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}
FILES_V2 = {"cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.controllers": ""}


class FakeKernel:
    """Fills new groups of a directory tree with files, as cgroup v1 or v2 does."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, own: str) -> None:
        self.root = root
        self.own_groups = root / "own"
        self.own_groups.write_text(own)
        calls = SimpleNamespace(mkdir=self._mkdir, rmdir=shutil.rmtree)
        monkeypatch.setattr("poise.lab.quota.os", calls)

    def group(self, path: str, **files: str) -> Path:
        """Make a group that is there from the beginning."""
        group = self.root / path
        group.mkdir(exist_ok=True, parents=True)
        kinds = FILES_V1 if path.startswith("cpu") else FILES_V2
        for name, text in {**kinds, **{k.replace("__", "."): v for k, v in files.items()}}.items():
            (group / name).write_text(text)
        return group

    def make_parent(self) -> Path | None:
        return make_parent("poise-lab-1-2-3", mounts=self.root, own_groups=self.own_groups)

    def _mkdir(self, path: Path) -> None:
        if (path.parent / "forbidden").exists():
            raise PermissionError
        enabled = path.parent / "cgroup.subtree_control"
        if not enabled.exists():
            self.group(str(path.relative_to(self.root)))
            return
        controllers = enabled.read_text().replace("+", "")
        self.group(str(path.relative_to(self.root)), cgroup__controllers=controllers)
        if "cpu" in controllers:
            (path / "cpu.max").write_text("max 100000")


def test_a_quota_of_cgroup_v1_is_written_where_the_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FakeKernel(tmp_path, monkeypatch, own="4:memory:/a\n3:cpu,cpuacct:/a/b\n0::/\n")
    kernel.group("cpu")
    kernel.group("cpu/a/b")
    parent = kernel.make_parent()
    assert parent == tmp_path / "cpu/a/b/poise-lab-1-2-3"
    quota = Quota.create(parent / "0", pid=77, speed=0.45)
    assert quota.processes() == [77]
    assert (quota.path / "cpu.cfs_quota_us").read_text() == "4500"
    assert (quota.path / "cpu.cfs_period_us").read_text() == "10000"
    Quota(quota.path).set_speed(2.0)
    assert (quota.path / "cpu.cfs_quota_us").read_text() == "20000"
    quota.lift()
    assert (quota.path / "cpu.cfs_quota_us").read_text() == "-1"
    quota.remove()
    quota.remove()
    assert not quota.path.exists()


def test_a_quota_of_cgroup_v2_is_written_where_the_controller_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FakeKernel(tmp_path, monkeypatch, own="0::/user.slice/session.scope\n")
    kernel.group(".", cgroup__controllers="cpu memory", cgroup__subtree_control="cpu")
    kernel.group("user.slice", cgroup__controllers="cpu")
    kernel.group("user.slice/session.scope")
    parent = kernel.make_parent()
    assert parent == tmp_path / "poise-lab-1-2-3"
    assert (parent / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "user.slice/cgroup.subtree_control").read_text() == ""
    quota = Quota.create(parent / "0", pid=77, speed=0.05)
    assert (quota.path / "cpu.max").read_text() == "1000 20000"
    quota.lift()
    assert (quota.path / "cpu.max").read_text() == "max"
    assert not list(tmp_path.glob("user.slice/**/poise*"))


def test_without_a_group_that_can_be_written_there_is_no_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FakeKernel(tmp_path, monkeypatch, own="0::/\n")
    kernel.group(".", forbidden="")
    assert kernel.make_parent() is None
    kernel.own_groups.unlink()
    assert kernel.make_parent() is None


def test_a_refused_quota_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").mkdir()
    with pytest.raises(InvalidSetting, match=r"the kernel refuses a speed of 3 .* lower it"):
        Quota(tmp_path).set_speed(3)


def test_names_tell_whether_their_lab_is_gone() -> None:
    pid, start = os.getpid(), start_time(os.getpid())
    assert start is not None
    assert not is_stale(lab_name(0))
    assert not is_stale(f"poise-lab-{pid}-{start}-4-hub")
    assert is_stale(f"poise-lab-{pid}-{start + 1}-4")
    assert not is_stale("poise-lab-notes")


@needs_quotas
def test_the_next_lab_removes_what_a_dead_one_left() -> None:
    parent = make_parent(f"poise-lab-{os.getpid()}-1-0")
    assert parent is not None
    with sleeper() as process:
        Quota.create(parent / "0", pid=process.pid, speed=0.5)
        clear(stale_belongings())
        assert process.wait(LIMIT_S) == -signal.SIGTERM
    assert not parent.exists()


@contextmanager
def sleeper() -> Iterator["subprocess.Popen[str]"]:
    """A process with a session of its own that does nothing for long."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_members_of_a_session_are_found_by_number_and_start() -> None:
    with sleeper() as process:
        start = start_time(process.pid)
        assert start is not None
        assert members(process.pid, start) == [process.pid]
        assert members(process.pid, start + 1) == []


def state(pid: int) -> str:
    """Return R, S, T ... as in `ps`."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_a_duty_cycle_stops_a_worker_and_lets_it_go_on() -> None:
    ours, theirs = socket.socketpair()
    with sleeper() as process, ours, theirs:
        throttle = DutyCycle(Member(process, ours), speed=0.01)
        wait_for(lambda: state(process.pid) == "T")
        throttle.set_speed(0.99)
        wait_for(lambda: state(process.pid) == "S")
        throttle.lift()
        wait_for(lambda: state(process.pid) == "S")


def test_lines_pass_with_the_number_of_their_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines"
    file.write_text("one\ntwo")
    output = Output()
    with file.open() as lines, file.open() as errors:
        output.pass_on(3, lines)
        output.pass_on(4, errors, errors=True)
        output.finish()
    assert capsys.readouterr() == ("[3] one\n[3] two\n", "[4] one\n[4] two\n")


GUARDED = """
import subprocess, sys, time
from poise.lab.guard import Guard
from poise.lab.leftovers import lab_name
from poise.lab.quota import make_parent, places

guard, name = Guard(), lab_name(0)
for place in places():
    guard.watch("groups", str(place / name))
parent = make_parent(name)
worker = [sys.executable, "-c", sys.argv[1]]
process = subprocess.Popen(worker, stdout=subprocess.PIPE, start_new_session=True)
guard.watch_worker(process.pid)
process.stdout.readline()
print(process.pid, parent, flush=True)
time.sleep(600)
"""
SLEEPING = "import time; print(1, flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPING}"


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(SLEEPING, id="sleeping"),
        pytest.param(STUBBORN, id="stubborn", marks=pytest.mark.slow),
    ],
)
def test_the_guard_cleans_up_when_a_lab_is_killed(worker: str) -> None:
    command = [sys.executable, "-c", GUARDED, worker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as lab:
        assert lab.stdout is not None
        pid, parent = lab.stdout.readline().decode().split()
        assert start_time(int(pid)) is not None
        lab.kill()
        _, errors = lab.communicate(timeout=LIMIT_S)  # ends when the guard closes it, too
    assert errors == b""
    assert start_time(int(pid)) is None
    assert parent == "None" or not Path(parent).exists()


def test_a_worker_hears_its_speed_and_when_it_may_go_on() -> None:
    pacer = Pacer(0.1, 0.0, 1.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(theirs, pacer)
        ours.send(b"0.5\ngo\n0.2")
        assert line.await_go()
        assert pacer.speed == 0.5
        line.step()
        ours.send(b"5\n")
        line.step()
        assert pacer.speed == 0.25
        assert ours.recv(9) == STEP + STEP
        ours.shutdown(socket.SHUT_WR)
        assert not line.await_go()


def test_workers_are_not_left_waiting_when_they_cannot_be_throttled() -> None:
    def refuse(worker: int) -> None:
        raise InvalidSetting(f"worker {worker} cannot be throttled; here is why")

    ours, theirs = socket.socketpair()
    with sleeper() as process, ours, theirs:
        listener = Listener([Member(process, ours)], refuse, lambda: None)
        theirs.send(PREPARED)
        assert not Line(theirs).await_go()
        listener.close()
    assert isinstance(listener.failure, InvalidSetting)


def test_a_lab_needs_no_torch_to_be_imported() -> None:
    code = "import sys, poise.lab, poise.cli.lab; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


def test_a_lab_starts_a_script_that_exists_and_only_once(tmp_path: Path) -> None:
    with Lab([1.0], pace=PACE) as lab:
        with pytest.raises(InvalidSetting, match="there is no script"):
            lab.start(["missing.py"])
        with pytest.raises(InvalidSetting, match="nothing to run"):
            lab.start([])
        with pytest.raises(InvalidSetting, match="2 speeds for 1 workers"):
            lab.set_speeds([1.0, 1.0])
        script = tmp_path / "train.py"
        script.write_text("")
        lab.start([str(script)])
        with pytest.raises(OutOfOrder, match="already"):
            lab.start([str(script)])


def lab_command(tmp_path: Path, text: str, *options: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(text)
    return [sys.executable, "-m", "poise", "lab", *options, "--", str(script)]


def run_lab(tmp_path: Path, text: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run a lab to its end, which leaves nothing behind."""
    command = lab_command(tmp_path, text, *options)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as lab:
        try:
            output, errors = lab.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            lab.kill()
            raise
    assert leftovers(lab.pid) == []
    return subprocess.CompletedProcess(command, lab.returncode, output, errors)


def leftovers(lab: int) -> list[str]:
    """Return groups and namespaces of a lab."""
    return [
        str(path)
        for place in (*places(), Path("/run/netns"))
        for path in place.glob(f"poise-lab-{lab}-*")
    ]


@pytest.mark.slow
@needs_quotas
def test_throttled_workers_get_their_share_of_the_cpu(tmp_path: Path) -> None:
    result = run_lab(tmp_path, COUNT_WORK, "--speeds", "0.4,0.2,0.1")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = dict(line.split(" share ") for line in result.stdout.splitlines())
    shares = [float(lines[f"[{worker}]"]) for worker in range(3)]
    assert shares[0] > shares[1] > shares[2]
    assert all(share < 1.2 * speed for share, speed in zip(shares, (0.4, 0.2, 0.1), strict=True))


def burnt(cores: float, others: float, got: tuple[float, ...], speeds: tuple[float, ...]) -> Any:
    """Return what is found over 6 s in which other processes took so many cores."""
    before = Sample(100.0, 900.0, tuple(50.0 for _ in got), 3.0, speeds)
    workers_s = tuple(50.0 + 6.0 * each for each in got)
    busy_s = 900.0 + 6.0 * (others + sum(got) + 0.05)
    after = Sample(106.0, busy_s, workers_s, 3.0 + 6.0 * 0.05, speeds)
    return Contention.between(before, after, cores=int(cores))


@pytest.mark.parametrize(
    ("others", "got", "speeds"),
    [
        (1.61, (0.09, 0.12, 0.16), (0.9, 0.45, 0.22)),  # recorded beside three busy loops
        (0.9, (0.6, 0.44), (0.9, 0.45)),
    ],
)
def test_speeds_that_others_leave_no_room_for_are_said(
    others: float, got: tuple[float, ...], speeds: tuple[float, ...]
) -> None:
    found = burnt(2, others, got, speeds)
    assert found.is_short
    assert f"other processes took {others:.2f} of 2 cores in 6 s" in found.remark()
    assert f"speeds that add up to {sum(speeds):g}: workers got {got[0]:.2f}, " in found.remark()


@pytest.mark.parametrize(
    ("others", "got", "speeds"),
    [
        (0.03, (0.86, 0.44, 0.22), (0.9, 0.45, 0.22)),  # all is well
        (0.03, (0.3, 0.44, 0.22), (0.9, 0.45, 0.22)),  # worker 0 waits for the others
        (0.8, (0.3, 0.3), (0.6, 0.5)),  # others take much, and yet enough is left
        (1.2, (0.1, 0.1), (0.9, 0.45)),  # workers wait for their input: 0.55 cores are idle
    ],
)
def test_workers_that_wait_are_not_short_of_cores(
    others: float, got: tuple[float, ...], speeds: tuple[float, ...]
) -> None:
    assert not burnt(2, others, got, speeds).is_short


def test_the_use_of_cores_is_read_from_the_kernel() -> None:
    cores = sorted(os.sched_getaffinity(0))
    statistics, mine_s = Path("/proc/stat").read_text, cpu_s_by_session
    before, own = busy_s(statistics(), cores), mine_s()[os.getsid(0)]
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    assert mine_s()[os.getsid(0)] - own > 0.2
    assert busy_s(statistics(), cores) - before > 0.2


BURN = "import time\nend = time.monotonic() + 90\nwhile time.monotonic() < end: pass"


@pytest.mark.slow
@needs_quotas
def test_a_lab_on_a_busy_machine_says_that_its_speeds_do_not_hold(tmp_path: Path) -> None:
    script = COUNT_WORK.replace("began_s < 2", "began_s < 15")
    cores = len(os.sched_getaffinity(0))
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2 * cores)]
    try:
        result = run_lab(tmp_path, script, "--speeds", f"{0.5 * cores},{0.3 * cores}")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if "other processes took" in line]
    assert len(said) == 1, result.stderr
    assert f"of {cores} cores" in said[0]


@pytest.mark.slow
def test_speeds_walk_and_steps_are_counted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COUNT_WORK)
    said: list[str] = []
    walk = Walk((Change(at_step=2, speeds=(0.5, 0.25)), Change(at_s=99.0, speeds=(1.0, 1.0))))
    with Lab("1x2", pace="1ms+1ms", walk=walk, say=said.append) as lab:
        processes = lab.start([str(script)], stdout=subprocess.PIPE)
        assert lab.wait() == 0
        assert lab.steps == (3, 3)
        assert lab.speeds == (0.5, 0.25)
        assert all("share" in process.stdout.read() for process in processes if process.stdout)
    assert [line.split(" from ")[0] for line in said] == ["speeds are 0.5, 0.25"]


@pytest.mark.slow
def test_a_failing_worker_ends_the_others(tmp_path: Path) -> None:
    result = run_lab(tmp_path, FAIL_ON_1, "--speeds", "0.5x2")
    assert result.returncode == 7
    assert "worker 1 ended first, with exit code 7" in result.stderr
    assert "worker 1 ended without ever having been throttled" in result.stderr


def test_a_worker_whose_script_raises_is_no_worker_that_is_done(tmp_path: Path) -> None:
    crash = (Path(__file__).parent / "scripts" / "crash.py").read_text()
    result = run_lab(tmp_path, crash, "--speeds", "0.5x2")
    assert result.returncode == 1
    (own,) = re.findall(r"^\[0\] poise: worker 0: (.*)$", result.stderr, flags=re.MULTILINE)
    assert "ValueError: the disk is full" in own
    assert "lab/worker.py" not in result.stderr, "the script's own frames only"


@contextmanager
def training_lab(tmp_path: Path, *options: str) -> "Iterator[subprocess.Popen[str]]":
    """A lab whose workers train; all that it started has ended afterwards."""
    command = lab_command(tmp_path, TRAIN_FOREVER, "--speeds", "0.5x2", *options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as lab:  # type: ignore[call-overload]
        seen: set[str] = set()
        while seen != {"[0] training\n", "[1] training\n"}:
            seen.add(lab.stdout.readline())
        yield lab
        lab.communicate(timeout=LIMIT_S)
    assert leftovers(lab.pid) == []
    assert not running_from(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_lab_leaves_nothing_behind_however_it_ends(tmp_path: Path, how: signal.Signals) -> None:
    with training_lab(tmp_path) as lab:
        lab.send_signal(how)
    assert lab.returncode == (130 if how == signal.SIGINT else -how)


@pytest.mark.slow
@needs_namespaces
def test_linked_workers_train_and_leave_nothing_behind(tmp_path: Path) -> None:
    result = run_lab(tmp_path, COUNT_WORK, "--speeds", "0.5x2", "--link", "100mbit,20mbit")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("share") == 2
    with training_lab(tmp_path, "--link", "100mbit") as lab:
        assert len([path for path in leftovers(lab.pid) if "netns" in path]) == 3
        lab.kill()


@pytest.mark.slow
@needs_quotas
def test_the_page_about_labs_trains_on_a_walk(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/lab.md").read_text()
    script = page.split("```python\n")[1].split("```")[0].replace("epochs(4)", "epochs(24)")
    walk = str(ROOT / "examples/walks/slowdown.toml")
    result = run_lab(tmp_path, script, "--speeds", "0.9,0.45,0.22", "--walk", walk)
    assert result.returncode == 0, result.stderr
    assert all(f"[{worker}] epoch 23: " in result.stdout for worker in range(3))
    assert result.stderr.count("speeds are ") == 3

"""`poise watch`: what is measured, what is concluded from it, and that nothing is changed."""

import contextlib
import gc
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from poise.cli.main import main
from poise.cli.watch import _sentences, watch
from poise.script import as_main
from poise.watch.findings import Findings, find
from poise.watch.gain import find_gain
from poise.watch.hooks import local_batch
from poise.watch.monitor import Monitor
from poise.watch.post import Inbox, Outbox
from poise.watch.recorder import FIRST_STEPS, Recorder
from poise.watch.rows import Row, pack, unpack
from poise.watch.table import Steps, Table
from tests.cluster import Workers

REDUCTION_S = 0.004

SCRIPT = """
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

mode, file = sys.argv[1:]


class Data(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        if mode == "input" and dist.get_rank() == 1:
            time.sleep(0.01)
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))

    def forward(self, x):
        if mode == "compute" and dist.get_rank() == 1:
            time.sleep(0.01 * len(x))
        return self.layers(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, x in enumerate(DataLoader(Data(), batch_size=4)):
        if mode == "accumulate":
            with model.no_sync():
                model(x).square().sum().backward()
        if mode == "eval" and number == 10:
            model.eval()
            with torch.no_grad():
                model(torch.ones(64, 8))
            model.train()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.module.state_dict(), f"{file}.{dist.get_rank()}")
    time.sleep(0.1)  # torch hangs at times if a group goes while a thread ends its last work
    if mode == "fail":
        raise ValueError("broken on purpose")
    dist.destroy_process_group()


main()
if mode == "exit":
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def row(step: int, local_s: float, end_s: float, **more: Any) -> Row:
    fields: dict[str, Any] = {"batch": 10, "input_s": 0.0, "sync_s": 0.0, **more}
    return Row(step=step, local_s=local_s, end_s=end_s, **fields)


def table(
    local_s: Sequence[float],
    *,
    input_s: Sequence[float] | None = None,
    batch: Sequence[int] | None = None,
    steps: int = 30,
    reduction_s: float = REDUCTION_S,
    cv: float = 0.0,
    prefetched: bool = False,
) -> Table:
    """Workers that meet at the end of each step, with times that are noisy if asked for."""
    noise = np.random.default_rng(0)
    inputs = input_s or [0.0] * len(local_s)
    batches = batch or [10] * len(local_s)
    rows = []
    for step in range(FIRST_STEPS, FIRST_STEPS + steps):
        local = [each * float(np.exp(cv * noise.standard_normal())) for each in local_s]
        end_s = max(a + b for a, b in zip(local, inputs, strict=True)) + reduction_s
        rows.append(
            [
                row(step, a, end_s, input_s=b, batch=c, prefetched=prefetched)
                for a, b, c in zip(local, inputs, batches, strict=True)
            ]
        )
    return Table.of(range(len(local_s)), rows)


def test_rows_survive_the_journey() -> None:
    rows = [row(3, 0.02, 0.03, prefetched=True), row(4, 1e-6, 2.0, evaluated=True)]
    assert unpack(pack(rows)) == rows


def test_waiting_is_what_is_left_of_a_step() -> None:
    found = find(table([0.01, 0.02, 0.05]))
    assert found.step_s == pytest.approx(0.054)
    assert found.communication_s == pytest.approx(REDUCTION_S)
    waiting = [each.waiting * found.step_s for each in found.workers]
    assert waiting == pytest.approx([0.04, 0.03, 0.0], abs=1e-9)
    assert found.waiting == pytest.approx(0.07 / (3 * 0.054))


def test_times_of_a_worker_add_up_to_the_step() -> None:
    seen = table([0.01, 0.02, 0.05], input_s=[0.03, 0.001, 0.0], cv=0.2)
    whole = seen.local_s + seen.input_s + seen.waiting_s + seen.communication_s[:, None]
    assert whole == pytest.approx(seen.end_s)


def test_the_last_worker_is_named() -> None:
    found = find(table([0.01, 0.05, 0.02], cv=0.05))
    assert (found.slowest, found.slowest_last) == (1, 1.0)
    assert sum(each.last for each in found.workers) == pytest.approx(1)


@pytest.mark.parametrize(
    ("local_s", "input_s", "reduction_s", "cause"),
    [
        ([0.01, 0.05, 0.01], [0.0, 0.0, 0.0], 0.004, "compute"),
        ([0.01, 0.01, 0.01], [0.001, 0.001, 0.06], 0.004, "input"),
        ([0.05, 0.05, 0.05], [0.001, 0.001, 0.04], 0.004, "input"),
        ([0.01, 0.011], [0.0, 0.0], 0.1, "communication"),
        ([0.05, 0.05], [0.0, 0.0], 0.004, "nothing"),
        ([0.05], [0.0], 0.0, "nothing"),
    ],
)
def test_the_cause_is_what_the_last_worker_has_more_of(
    local_s: list[float], input_s: list[float], reduction_s: float, cause: str
) -> None:
    assert find(table(local_s, input_s=input_s, reduction_s=reduction_s)).reason.cause == cause


def test_time_in_other_exchanges_is_waiting_and_not_compute() -> None:
    """Worker 1 waits for worker 0 when buffers are broadcast."""
    steps = [
        [row(step, 0.05, 0.064, sync_s=0.01), row(step, 0.01, 0.064, sync_s=0.05)]
        for step in range(3, 9)
    ]
    found = find(Table.of((0, 1), steps))
    assert found.slowest == 0
    assert found.communication_s == pytest.approx(0.014)
    assert found.workers[1].waiting == pytest.approx(0.04 / 0.064)


def test_steps_with_evaluation_are_left_out() -> None:
    steps = [[row(step, 0.01, 0.02), row(step, 0.01, 0.02)] for step in range(3, 30)]
    steps[7] = [row(10, 0.5, 0.51, evaluated=True), row(10, 0.01, 0.51)]
    steps[8] = [row(11, 0.01, 0.02, evaluated=True), row(11, 0.01, 0.02)]  # takes no time
    steps[9] = [row(12, 9.0, 9.01), row(12, 0.01, 9.01)]  # evaluated unseen
    found = find(Table.of((0, 1), steps))
    assert (found.left_out, found.steps) == (2, 25)
    assert found.left_out_s == pytest.approx(9.52)
    assert found.step_s == pytest.approx(0.02)


def test_stalls_of_a_loader_that_works_ahead_count() -> None:
    """Every eighth step waits for all processes of a loader."""
    steps = [
        [row(step, 0.01, 0.09 if step % 8 == 0 else 0.011, input_s=0.079 * (step % 8 == 0))]
        for step in range(3, 43)
    ]
    assert find(Table.of((0,), steps)).left_out == 0


def test_steps_count_when_all_workers_reported_them() -> None:
    steps = Steps((0, 1))
    steps.add({0: [row(3, 0.1, 0.2), row(4, 0.1, 0.2)], 1: []})
    assert steps.table() is None
    steps.add({1: [row(4, 0.1, 0.2), row(5, 0.1, 0.2)]})
    found = steps.table()
    assert found is not None
    assert found.numbers.tolist() == [4]
    assert steps.reaches(5)
    assert not steps.reaches(6)


def test_the_proportional_split_is_within_the_range_of_gains() -> None:
    gain = find_gain(table([0.01, 0.01, 0.04]))
    proportional_s = 3 / (1 / 0.01 + 1 / 0.01 + 1 / 0.04) + REDUCTION_S
    assert gain.verdict == "gain"
    assert sum(gain.split) == 30
    assert gain.split[2] < 10 < gain.split[0]
    assert gain.shortest_s <= proportional_s * 1.05
    assert gain.shortest_s <= gain.longest_s < 0.044
    assert not gain.slopes_seen


def test_time_that_does_not_depend_on_samples_bounds_the_gain() -> None:
    """If 30 of 40 ms are fixed, no split makes the step shorter than those."""
    assert find_gain(table([0.01, 0.01, 0.04])).longest_s > 0.03 + REDUCTION_S


@pytest.mark.parametrize("workers", [2, 3, 16])
def test_equal_workers_have_nothing_to_gain(workers: int) -> None:
    assert find_gain(table([0.02] * workers, cv=0.1)).verdict == "nothing"


def test_one_worker_has_nothing_to_gain() -> None:
    assert find_gain(table([0.02])).verdict == "nothing"


def test_a_gain_needs_local_batches() -> None:
    assert find_gain(table([0.02, 0.04], batch=[0, 8])).verdict == "unknown"


def test_a_balanced_unequal_split_has_nothing_to_gain() -> None:
    assert find_gain(table([0.04, 0.04], batch=[10, 40])).verdict == "nothing"


def test_a_loader_that_does_not_keep_up_is_a_limit() -> None:
    gain = find_gain(table([0.01, 0.01], input_s=[0.0, 0.06], prefetched=True))
    assert gain.verdict == "gain"
    assert gain.split[0] > gain.split[1]


def test_several_local_batches_show_the_slope() -> None:
    small = table([0.01 + 0.005, 0.01 + 0.01], batch=[5, 5], steps=20)
    large = table([0.01 + 0.02, 0.01 + 0.04], batch=[20, 20], steps=40)
    names = ("numbers", "batch", "local_s", "input_s", "sync_s", "reduction_s", "end_s")
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(small, name), getattr(large, name)]) for name in names
    }
    both = Table((0, 1), prefetched=np.zeros((60, 2), dtype=bool), **joined)
    gain = find_gain(both)
    assert gain.slopes_seen
    assert gain.split == pytest.approx((26.7, 13.3), abs=1.5)


class Clock:
    """A clock that stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cheap = True
        self.lag = 1

    def __call__(self) -> float:
        return self.now_s

    def mark(self) -> float:
        return self.now_s

    def host_s(self) -> float:
        return self.now_s

    def passed(self, mark: float) -> bool:
        return mark <= self.now_s

    def between_s(self, earlier: float, later: float) -> float:
        return later - earlier

    def forward(self, seconds: float) -> None:
        self.now_s += seconds


def recorded(clock: Clock, steps: int | None = None) -> Recorder:
    """Return a recorder for which the first steps are over."""
    recorder = Recorder(timer=clock, clock=clock, steps=steps)
    for _ in range(FIRST_STEPS):
        step(recorder, clock)
    assert recorder.take() == []
    return recorder


def step(recorder: Recorder, clock: Clock, *, batch: int = 4, reduced: bool = True) -> None:
    recorder.forward(batch, training=True, grad=True, reduced=reduced)
    clock.forward(0.01)
    recorder.gradient()
    recorder.gradients_done()
    clock.forward(0.002)
    recorder.backward_done()


def test_a_step_lasts_from_reduction_to_reduction() -> None:
    recorder = recorded(clock := Clock())
    clock.forward(0.005)
    with recorder.loading(prefetched=True):
        clock.forward(0.1)
        with recorder.loading(prefetched=False):
            clock.forward(0.1)
    with recorder.meeting():
        clock.forward(0.03)
    step(recorder, clock)
    (found,) = recorder.take()
    assert (found.step, found.batch, found.prefetched) == (FIRST_STEPS, 4, True)
    times = (found.local_s, found.input_s, found.sync_s, found.end_s, found.reduction_s)
    assert times == pytest.approx((0.015, 0.2, 0.03, 0.247, 0.002))


def test_accumulated_backwards_are_one_step() -> None:
    recorder = recorded(clock := Clock())
    step(recorder, clock, batch=4, reduced=False)
    step(recorder, clock, batch=3)
    (found,) = recorder.take()
    assert found.batch == 7
    assert found.local_s == pytest.approx(0.022)


def test_several_calls_for_one_backward_see_the_same_samples() -> None:
    recorder = recorded(clock := Clock())
    recorder.forward(6, training=True, grad=True, reduced=True)
    step(recorder, clock, batch=4)
    assert [found.batch for found in recorder.take()] == [6]


def test_evaluation_is_no_step() -> None:
    recorder = recorded(clock := Clock())
    recorder.forward(64, training=False, grad=False, reduced=True)
    recorder.forward(64, training=False, grad=True, reduced=True)
    step(recorder, clock)
    step(recorder, clock)
    assert [(found.batch, found.evaluated) for found in recorder.take()] == [(4, True), (4, False)]


def test_a_model_may_be_trained_in_evaluation_mode() -> None:
    recorder = recorded(Clock())
    recorder.forward(5, training=False, grad=True, reduced=True)
    recorder.backward_done()
    assert [found.batch for found in recorder.take()] == [5]


def test_stamps_of_an_accelerator_are_read_when_they_have_passed() -> None:
    clock = Clock()
    clock.cheap = False
    recorder = recorded(clock)
    step(recorder, clock)
    clock.forward(-0.001)  # the stream is behind
    assert recorder.take() == []
    clock.forward(0.001)
    assert [found.local_s for found in recorder.take()] == pytest.approx([0.01])


def test_recording_ends_after_the_steps_asked_for() -> None:
    recorder = recorded(clock := Clock(), steps=2)
    for _ in range(5):
        step(recorder, clock)
    assert recorder.complete
    assert len(recorder.take()) == 2


class Gone(dist.HashStore):
    """A store whose server ended."""

    def set(self, *_: Any) -> None:
        raise dist.DistNetworkError("gone")

    def check(self, *_: Any) -> bool:
        raise dist.DistNetworkError("gone")


def test_rows_arrive_in_packs() -> None:
    store, outbox, inbox = dist.HashStore(), Outbox(1), Inbox((0, 1))
    assert inbox.look(store) == {0: [], 1: []}
    for number in (3, 4):
        outbox.send(store, [row(number, 0.01, 0.02)])
    outbox.send(store, [])
    assert [found.step for found in inbox.look(store)[1]] == [3, 4]
    assert inbox.look(store) == {0: [], 1: []}
    assert store.num_keys() == 0


def test_rows_wait_for_another_store_if_one_is_gone() -> None:
    store, outbox, inbox = dist.HashStore(), Outbox(0), Inbox((0,))
    outbox.send(Gone(), [row(3, 0.01, 0.02)], last=True)
    assert inbox.look(Gone(), last=True) == {0: []}
    outbox.send(store, [], last=True)
    assert [found.step for found in inbox.look(store, last=True)[0]] == [3]


def test_the_report_comes_again_and_for_the_last_time_when_complete() -> None:
    shown: list[Findings] = []
    clock = Clock()
    recorder = recorded(clock, steps=20)
    monitor = Monitor(recorder, shown.append, every_s=0.2, clock=clock)
    monitor.join(dist.HashStore(), 0, (0,))
    for _ in range(60):
        monitor.tick()
        step(recorder, clock)
    assert monitor.finished
    assert len(shown) == 2
    assert shown[-1].last_step == FIRST_STEPS + 19
    assert shown[-1].steps == 19  # one in which the watch itself took time does not count


@pytest.mark.parametrize(
    ("inputs", "batch"),
    [
        (((torch.zeros(3, 2),), {}), 3),
        (((), {"words": torch.zeros(5), "mask": torch.zeros(7)}), 5),
        (((torch.tensor(1.0), [torch.zeros(2, 2)]), {}), 2),
        ((("text",), {}), 0),
    ],
)
def test_the_local_batch_is_the_length_of_the_first_tensor(inputs: Any, batch: int) -> None:
    assert local_batch(inputs) == batch


def sentences(local_s: list[float], **more: Any) -> str:
    return "\n".join(_sentences(find(table(local_s, **more))))


def test_the_report_speaks_plainly() -> None:
    said = sentences([0.01, 0.01, 0.05])
    assert "worker 2, the last one in 100 % of steps" in said
    assert "compute, 50.0 ms on the last worker and 10.0 ms on the others" in said
    assert "a guess" in said
    assert "nothing to gain" in sentences([0.02, 0.02])
    assert "nobody to wait for" in sentences([0.02])
    assert "not known" in sentences([0.02, 0.03], batch=[0, 0])


def watched(script: str, *words: str, **options: Any) -> tuple[int, dict[str, Any] | None]:
    """Run a script under watch in this process; return its exit code, and what was found."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        try:
            code = watch(script=[script, *words], as_json=True, **options)
        except SystemExit as left:
            code = int(left.code or 0)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    lines = stdout.getvalue().splitlines()
    return code, json.loads(lines[-1]) if lines else None


def plain(script: str, *words: str) -> None:
    with as_main([script, *words]):
        runpy.run_path(script, run_name="__main__")
    gc.collect()


def state(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path)
    return found


@pytest.mark.parametrize("mode", ["compute", "input"])
def test_the_slow_worker_is_named_with_the_reason(
    workers: Workers, script: Path, mode: str
) -> None:
    found = workers.run(watched, str(script), mode, str(script) + ".pt", workers=3)
    assert found[1:] == [(0, None)] * 2
    code, report = found[0]
    assert code == 0
    assert report is not None
    assert report["slowest"] == 1
    assert report["reason"]["cause"] == mode
    assert report["gain"]["verdict"] == "gain"
    assert [each["local_batch"] for each in report["workers"]] == [4, 4, 4]


@pytest.mark.parametrize("mode", ["accumulate", "eval"])
def test_weights_are_the_same_to_the_last_bit(workers: Workers, script: Path, mode: str) -> None:
    one, other = script.with_name("plain"), script.with_name("watched")
    workers.run(plain, str(script), mode, str(one), workers=2)
    (_, report), _ = workers.run(watched, str(script), mode, str(other), workers=2)
    for worker in range(2):
        expected = state(one.with_name(f"plain.{worker}"))
        found = state(other.with_name(f"watched.{worker}"))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert report is not None
    assert report["last_step"] == 19
    assert report["workers"][0]["local_batch"] == (8 if mode == "accumulate" else 4)


def test_the_exit_code_is_the_script_s_own(workers: Workers, script: Path) -> None:
    for mode, code in (("exit", 7), ("fail", 1)):
        outcomes = workers.attempt(watched, str(script), mode, str(script) + ".pt", workers=2)
        assert [outcome.value[0] for outcome in outcomes] == [code, code]
        assert outcomes[0].value[1]["steps"] > 0
        assert ("ValueError: broken on purpose" in outcomes[1].stderr) == (mode == "fail")
        assert "poise/cli" not in outcomes[1].stderr


def test_one_worker_is_watched_too(workers: Workers, script: Path) -> None:
    ((code, report),) = workers.run(watched, str(script), "compute", str(script) + ".pt", workers=1)
    assert code == 0
    assert report is not None
    assert report["waiting"] == pytest.approx(0, abs=1e-9)


def test_a_script_without_ddp_runs_as_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.py"
    path.write_text("import sys\nprint(sys.argv[1:], __name__)\nsys.exit('bye')\n")
    with pytest.raises(SystemExit, match="bye"):
        main(["watch", "--every", "5", str(path), "--steps", "3"])
    said = capsys.readouterr()
    assert said.out == "['--steps', '3'] __main__\n"
    assert "made no DistributedDataParallel" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "watch needs a script"), (["missing.py"], "there is no script missing.py")],
)
def test_a_watch_needs_a_script(
    words: Iterable[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compute", "input"])
def test_watch_runs_under_torchrun(script: Path, mode: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "poise", "watch", "--json", str(script), mode, f"{script}.pt"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["slowest"], report["reason"]["cause"]) == (1, mode)

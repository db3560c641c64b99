import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch

from poise.cli.demo import is_same_accuracy
from poise.cli.demo_board import Board, Lane, verdict
from poise.cli.demo_images import SPEEDS, images_file, write_images
from poise.cli.demo_worker import read_images
from poise.cli.doctor_facts import Facts, advice, thread_warning
from poise.cli.main import COMMANDS, main
from poise.cli.options import require
from poise.cli.worker_messages import WorkerEnded, receive
from poise.core.plain import from_plain, to_json
from poise.errors import InvalidSetting
from poise.lab.processes import local_workers

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer

if __name__ == "__main__":
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(64, 1))
    loader = DataLoader(data, batch_size=16, num_workers=2, prefetch_factor=4)
    Balancer(16).prepare(model, optimizer, loader)
    print("the script went on")
"""


def poise(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "poise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def imports_torch(code: str) -> bool:
    told = f"import sys\n{code}\nprint('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout.splitlines()[-1] == "True"


def facts(worker: int, *, threads: int = 4, torch_version: str = "2.6") -> Facts:
    versions = {"torch": torch_version}
    return Facts(worker=worker, host="a", versions=versions, cores=8, threads=threads)


def test_help_does_not_import_torch() -> None:
    assert not imports_torch(
        "from poise.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    )


def test_an_import_of_torch_would_be_seen() -> None:
    assert imports_torch("import torch")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_a_command_are_the_keywords_of_its_function(name: str) -> None:
    parser = ArgumentParser()
    import_module(f"poise.cli.{name}").add_arguments(parser)
    words = {action.dest for action in parser._actions} - {"help"}
    signature(parser.get_default("command")).bind(**dict.fromkeys(words))


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["doctor", "--workers", "1"], ["demo", "x"], ["demo", "--steps", "3"]],
)
def test_a_wrong_command_line_gives_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


def test_an_expected_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "missing.py"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("poise: there is no script missing.py")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_missing_package_is_named_with_the_extra_to_install() -> None:
    with pytest.raises(InvalidSetting, match=r'no_such_package .* pip install "poise\[demo\]"'):
        require("sys", "no_such_package", extra="demo")


@pytest.mark.slow
def test_the_demo_trains_the_same_with_and_without_poise() -> None:
    result = poise("demo", "--steps", "12")
    assert result.returncode == 0, result.stderr
    assert "same accuracy" in result.stdout
    assert result.stdout.count("step 12 of 12") == 2
    assert "times as fast" in result.stdout
    assert result.stderr == ""


def test_the_demo_stops_when_a_worker_dies() -> None:
    command = [sys.executable, "-m", "poise", "demo"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as demo:
        os.kill(wait_for_workers(demo)[1], signal.SIGKILL)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert b"worker 1 ended with signal 9" in errors


def wait_for_workers(process: "subprocess.Popen[bytes]") -> list[int]:
    """Return the demo's workers, in their order, once all are there."""
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        children = [int(child) for child in listing.read_text().split()]
        workers = [child for child in children if b"demo_worker" in command_of(child)]
        if len(workers) == len(SPEEDS):
            return workers
        time.sleep(0.01)
    raise AssertionError("the demo ended before its workers were there")


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_a_failed_worker_is_reported_while_others_still_run() -> None:
    code = "import os, signal; os.environ['RANK'] == '1' and exit(3); signal.pause()"
    with (
        local_workers([sys.executable, "-c", code], 2) as processes,
        pytest.raises(WorkerEnded, match="worker 1 ended with exit code 3"),
    ):
        list(receive(processes))


def test_messages_arrive_from_all_workers() -> None:
    code = "from poise.cli.worker_messages import send; send(a=1); send(a=2)"
    with local_workers([sys.executable, "-c", code], 2) as processes:
        received = list(receive(processes))
    assert [message["a"] for worker, message in received if worker == 1] == [1, 2]
    assert len(received) == 4


def reports(board: Board, worker: int, samples: int, work_s: float, step_s: float) -> None:
    for step in range(5):
        told = {"step": step, "samples": samples, "work_s": work_s, "step_s": step_s}
        board.note(worker, told)


def test_the_verdict_compares_time_waiting_and_accuracy() -> None:
    plain, balanced = (Board(how, [Lane(1.0), Lane(0.5)], 5) for how in ("plain", "poise"))
    reports(plain, 0, 8, 0.1, 0.2)
    reports(plain, 1, 8, 0.2, 0.2)
    reports(balanced, 0, 11, 0.1, 0.1)
    reports(balanced, 1, 5, 0.1, 0.1)
    for board, pace in ((plain, 2.0), (balanced, 1.0)):
        for number, accuracy in enumerate([0.5, 0.9, 0.9], start=1):
            told = {"step": number, "trained_s": number * pace, "accuracy": accuracy}
            board.note(0, told)
            board.note(1, {**told, "accuracy": 0.0})
    assert plain.waiting == pytest.approx(0.25)
    assert balanced.waiting == pytest.approx(0.0)
    assert plain.seconds_to(0.9) == 4.0
    assert balanced.accuracy == 0.9
    _, sentence = verdict(plain, balanced)
    assert "2.00 times as fast" in sentence
    assert "more than 1.50 times" in sentence


def test_accuracies_that_differ_are_not_the_same() -> None:
    assert is_same_accuracy(0.921, 0.925)
    assert not is_same_accuracy(0.92, 0.85)
    assert not is_same_accuracy(0.92, math.nan)


def test_the_demo_takes_fashion_where_it_is_installed(tmp_path: Path) -> None:
    folder = tmp_path / "fashion"
    folder.mkdir()
    for part, images in (("train", 300), ("t10k", 40)):
        pixels = bytes(16) + bytes([255]) * (images * 28 * 28)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(pixels))
        labels = bytes(8) + bytes(label % 10 for label in range(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    assert write_images(images_file(tmp_path), folder) == "300 images of Fashion-MNIST"
    found = read_images(images_file(tmp_path))
    assert found.side == 28
    assert found.train[0].shape == (300, 1, 28, 28)
    assert float(found.train[0].min()) == 1.0
    assert found.test[1].tolist() == [label % 10 for label in range(40)]


@pytest.mark.slow
def test_doctor_reports_versions_and_the_speed_of_the_all_reduce() -> None:
    result = poise("doctor")
    assert result.returncode == 0, result.stderr
    assert f"torch {torch.__version__}" in result.stdout
    assert "between 2 processes on this machine, backend gloo" in result.stdout
    assert all(size in result.stdout for size in ("4 KB", "64 KB", "1 MB", "16 MB"))


@pytest.mark.slow
def test_doctor_runs_a_script_until_prepare_and_shows_its_lead(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = poise("doctor", str(script))
    assert result.returncode == 0, result.stderr
    assert "Delay of a new plan: 10 steps (the largest lead is 8)" in result.stdout
    assert "the script went on" not in result.stdout


def test_doctor_refuses_a_script_that_never_prepares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(0)")
    assert main(["doctor", str(script), "--lr", "1"]) == 2
    said = capsys.readouterr()
    assert said.out == "['--lr', '1']\n"
    assert "without calling Balancer.prepare" in said.err


def test_clocks_that_differ_between_workers_are_warned_of() -> None:
    here = [replace(facts(worker), time_s=1000.0 + 0.9 * worker) for worker in range(2)]
    assert advice(here) == advice([facts(0), facts(1)])
    far = [here[0], replace(here[1], time_s=980.0)]
    (text,) = set(advice(far)) - set(advice(here))
    assert text.startswith("worker 1: its clock is 20.0 s behind that of worker 0")


@pytest.mark.parametrize(
    ("threads", "cores", "local_workers", "advised"),
    [(1, 8, 2, "OMP_NUM_THREADS=4"), (1, 2, 1, "OMP_NUM_THREADS=2")],
)
def test_too_few_threads_are_warned_of(
    threads: int, cores: int, local_workers: int, advised: str
) -> None:
    text = thread_warning(threads=threads, cores=cores, local_workers=local_workers)
    assert text is not None
    assert advised in text


@pytest.mark.parametrize(("threads", "cores", "local_workers"), [(4, 8, 2), (1, 2, 3), (1, 3, 2)])
def test_enough_threads_are_not_warned_of(threads: int, cores: int, local_workers: int) -> None:
    assert thread_warning(threads=threads, cores=cores, local_workers=local_workers) is None


def test_one_advice_is_given_once_for_all_its_workers() -> None:
    """Where the launcher does not count the workers of a machine, their host names do."""
    (text,) = advice([facts(0, threads=1), facts(1, threads=1)])
    assert text.startswith("workers 0, 1: 1 thread meets 4 idle cores")


def test_different_versions_are_warned_of() -> None:
    (text,) = advice([facts(0), facts(1, torch_version="2.7")])
    assert text.startswith("worker 1: torch is 2.7, on worker 0 it is 2.6")


def test_facts_travel_as_text() -> None:
    assert from_plain(Facts, json.loads(to_json(facts(1)))) == facts(1)


WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {names}:
            return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from poise.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def poise_without(names: set[str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process where some packages cannot be imported."""
    command = [sys.executable, "-c", WITHOUT.replace("{names}", repr(names)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("demo",), "demo"),
        (("doctor",), "torch"),
        (("doctor", "{script}"), "torch"),
        (("lab", "--speeds", "1,1", "--", "{script}"), "torch"),
        (("serve", "{script}"), "torch"),
        (("verify", "{script}"), "torch"),
        (("watch", "{script}"), "torch"),
    ],
)
def test_without_torch_one_line_names_the_extra(
    arguments: tuple[str, ...], extra: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('the script ran')")
    done = poise_without({"torch"}, *(each.format(script=script) for each in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("poise: torch cannot be imported")
    assert line.endswith(f'pip install "poise[{extra}]"')


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "clusters/two-home-pcs.toml", "--global-batch", "64"),
        ("simulate", "scenarios/slowdown.toml", "--policy", "even"),
        ("calibrate", "{record}"),
    ],
)
def test_the_base_install_plans_simulates_and_calibrates(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    examples = Path(__file__).parent.parent / "examples"
    scenario = str(examples / "scenarios/slowdown.toml")
    recorded = ("simulate", scenario, "--policy", "auto", "--record", str(tmp_path))
    assert poise_without({"torch"}, *recorded).returncode == 0
    given = [each.format(record=tmp_path / "auto.jsonl") for each in arguments]
    given = [str(examples / each) if each.endswith(".toml") else each for each in given]
    done = poise_without({"torch", "matplotlib", "sklearn"}, *given)
    assert done.returncode == 0, done.stderr
    assert done.stdout

"""`poise serve`, its table, and labs with a server: real processes, and what they leave behind."""

import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poise.cli.main import main
from poise.cli.serve import invitation
from poise.cli.serve_board import MOST_BARS, ServeBoard, as_text, bars, picture, title
from poise.engine.member import Tally
from poise.environment import for_joining, for_server
from poise.errors import InvalidSetting
from poise.lab import Lab
from poise.lab.quota import places
from poise.torch.asynchronous.service import ServedWorker, Service
from tests.machine import needs_namespaces
from tests.processes import running_from

LIMIT_S = 120.0
"""No test waits longer for anything."""

TRAIN = """
import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer

if __name__ == "__main__":
    what, number = sys.argv[1], int(os.environ.get("RANK", "0"))
    if what == "worker 2 never joins" and number == 2:
        sys.exit(7)
    if what == "worker 2 ends early" and number == 1:
        time.sleep(4)  # the other one has been gone for a while
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(480, 8))
    balancer = Balancer(16)
    model, optimizer, loader = balancer.prepare(model, optimizer, DataLoader(data))
    if what == "worker 2 ends early" and number == 2:
        os._exit(3)
    for epoch in balancer.epochs(2):
        for step, (x,) in enumerate(loader):
            if what == "worker 2 is killed" and (number, step) == (2, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "worker 1 leaves, worker 2 is killed" and step >= 10:
                if number == 1:
                    sys.exit(0)
                if balancer.workers == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if what == "the server fails" and balancer.worker == 0:
            raise ValueError("the disk is full")
        if what == "it gives up" and balancer.worker == 0:
            sys.exit(5)
    if what == "worker 2 is killed" and balancer.worker == 0:
        time.sleep(6)  # longer than a lab waits for what does not end
    print("worker", balancer.worker, "is done with", balancer.samples)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def a_worker(number: int, tally: Tally, *, iteration_s: float = 0.0125) -> ServedWorker:
    return ServedWorker(number, "vm-cpu", 40, iteration_s, tally)


def a_service(
    *workers: ServedWorker,
    gone: dict[int, Tally] | None = None,
    updates: int = 100,
    seconds: float = 20.0,
    waiting_for: int = 0,
) -> Service:
    return Service(
        mode="stale:4",
        epoch=3,
        pushed=250,
        length=1000,
        updates=updates,
        seconds=seconds,
        busy_s=2.0,
        workers=workers,
        gone=gone or {},
        waiting_for=waiting_for,
    )


FIRST = a_worker(1, Tally(75, 3000, 0, {0: 25, 1: 50}, waited_s=5.0))
SECOND = a_worker(2, Tally(), iteration_s=float("nan"))


def rows(service: Service) -> list[list[str]]:
    """Return the cells of a table, its headings first; at least two spaces are between them."""
    lines = [line.strip() for line in as_text(picture(service)).splitlines()[1:]]
    return [re.split("  +", line) for line in lines if line and line[0] != "─"]


def test_the_table_says_what_each_worker_contributes() -> None:
    gone = {3: Tally(25, 500, 2, {7: 25})}
    headings, first, second, third = rows(a_service(FIRST, SECOND, gone=gone))
    assert headings[:5] == ["worker", "where", "batch", "iteration", "waiting"]
    assert headings[5:] == ["staleness", "most", "0, 1, 2 ...", "updates", "samples", "dropped"]
    assert first == ["1", "vm-cpu", "40", "12 ms", "25%", "0.7", "1", "▄█", "75%", "3,000", "0"]
    assert second == ["2", "vm-cpu", "40", "-", "0%", "-", "-", "0%", "0", "0"]
    assert third[:4] == ["3", "has left", "-", "-"]
    assert third[-3:] == ["25%", "500", "2"]


def test_without_dropped_pushes_there_is_no_column_for_them() -> None:
    assert rows(a_service(FIRST))[0][-1] == "samples"


def test_the_title_says_how_far_the_training_is() -> None:
    said = "poise serve: stale:4, epoch 3, 25% pushed, 5.0 updates/s, server busy 10%"
    assert title(a_service(FIRST)) == said
    resumed = a_service(FIRST, updates=90, seconds=10.0)
    assert "1.0 updates/s" in title(a_service(FIRST), resumed)
    early = title(a_service(seconds=0.0, waiting_for=2))
    assert early == "poise serve: stale:4, epoch 3, 25% pushed, waiting for 2 more workers"


def test_the_last_bar_stands_for_everything_beyond() -> None:
    assert bars({}) == ""
    drawn = bars({0: 4, 50: 2, 90: 2})
    assert len(drawn) == MOST_BARS
    assert (drawn[0], set(drawn[1:-1]), drawn[-1]) == ("█", {"·"}, "█")


def test_off_a_terminal_a_table_is_printed_now_and_then_and_at_the_end() -> None:
    now_s = 0.0
    file = io.StringIO()
    board = ServeBoard(file, clock=lambda: now_s)

    def tables(*shown: tuple[float, Service]) -> int:
        nonlocal now_s
        for at_s, service in shown:
            now_s = at_s
            board.show(service)
        return file.getvalue().count("poise serve:")

    assert tables((1.0, a_service()), (9.0, a_service(SECOND))) == 0
    assert tables((10.0, a_service(FIRST)), (11.0, a_service(FIRST))) == 1
    assert tables((20.0, a_service(FIRST))) == 1  # nothing has happened
    assert tables((30.0, a_service(FIRST, SECOND)), (31.0, a_service(SECOND))) == 2
    board.end()
    assert tables() == 3


class Unread(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_training_goes_on_if_nobody_reads_the_table() -> None:
    board = ServeBoard(Unread())
    board.say("serving")
    board.show(a_service(FIRST))
    board.end()


def test_the_invitation_names_an_address_that_workers_can_reach() -> None:
    everywhere = invitation("0.0.0.0:29600", ["my train.py"])
    assert f"POISE_SERVER={socket.gethostname()}:29600 python 'my train.py'" in everywhere
    assert "POISE_SECRET" in everywhere
    assert "POISE_SECRET" not in invitation("127.0.0.1:29600", ["train.py"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "fast", "SCRIPT"], "mode='fast' is unknown"),
        (["--mode", "sync", "SCRIPT"], "--mode sync has no server"),
        (["--save-every", "5", "SCRIPT"], "give --save FILE too"),
        (["--save", "no/such/place", "SCRIPT"], "in a directory that is not there"),
        (["--save", ".", "SCRIPT"], "is a directory"),
        (["--host", "0.0.0.0", "SCRIPT"], "set POISE_SECRET"),
        (["--port", "PORT", "SCRIPT"], "Address already in use; choose another address or port"),
        (["--port", "0", "SCRIPT"], "ended without Balancer.prepare"),
        (["missing.py"], "there is no script missing.py"),
        ([], "serve needs a script"),
    ],
)
def test_what_cannot_be_served_is_one_line_on_stderr(
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POISE_SECRET", raising=False)
    plain = tmp_path / "plain.py"
    plain.write_text("import sys\nassert __name__ == '__main__'\nsys.exit(0)\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"SCRIPT": str(plain), "PORT": str(taken.getsockname()[1])}
        assert main(["serve", *(known.get(word, word) for word in words)]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["--port", "65536"], ["--port", "x"], ["--workers", "0"], ["--save-every", "0"]]
)
def test_a_wrong_number_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", *words, "train.py"])
    assert left.value.code == 2


def test_a_server_is_not_started_by_a_launcher(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["serve", script]) == 2
    assert "without torchrun" in capsys.readouterr().err
    assert "RANK" not in for_server()


def test_a_worker_of_a_lab_is_placed_after_the_server() -> None:
    placed = for_joining(2, 3, "127.0.0.1:5")
    assert (placed["RANK"], placed["WORLD_SIZE"], placed["POISE_SERVER"]) == (
        "2",
        "4",
        "127.0.0.1:5",
    )


@contextmanager
def running(*words: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that has ended when the block is left."""
    with subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@contextmanager
def serving(script: str, what: str, *options: str) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """A server of a script, and the address that it says."""
    command = ["-m", "poise", "serve", "--port", "0", *options, script, what]
    with running(*command) as server:
        assert server.stderr is not None
        found = re.search(r"POISE_SERVER=(\S+) python", server.stderr.readline())
        assert found is not None, server.communicate(timeout=LIMIT_S)
        yield server, found[1]


def test_two_workers_train_to_the_end(script: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.pt"
    with (
        serving(script, "all", "--workers", "2", "--save", str(saved)) as (server, address),
        running(script, "all", POISE_SERVER=address) as one,
        running(script, "all", POISE_SERVER=address) as other,
    ):
        told = [process.communicate(timeout=LIMIT_S) for process in (server, one, other)]
        codes = [process.returncode for process in (server, one, other)]
    assert codes == [0, 0, 0], told
    assert "worker 0 is done with 960" in told[0][0]
    assert {text.split(" is done")[0] for text, _ in told[1:]} == {"worker 1", "worker 2"}
    assert "poise serve: async, 2 epochs done" in told[0][1]
    assert saved.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "heard"),
    [("the server fails", 1, "ValueError: the disk is full"), ("it gives up", 5, "SystemExit: 5")],
)
def test_an_error_of_the_server_reaches_its_workers(
    script: str, what: str, code: int, heard: str
) -> None:
    with (
        serving(script, what) as (server, address),
        running(script, what, POISE_SERVER=address) as worker,
    ):
        (_, said), (_, told) = (each.communicate(timeout=LIMIT_S) for each in (server, worker))
    assert (server.returncode, worker.returncode) == (code, 1)
    assert heard in told
    assert ("the disk is full" in said) == (what == "the server fails")
    assert "runpy" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "fast"}, "mode='fast' is unknown"),
        ({"mode": "async", "link": "1mbit,2mbit"}, "2 rates for 1 workers"),
    ],
)
def test_a_lab_that_cannot_have_its_server_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        Lab([1.0], **options)  # type: ignore[arg-type] # some of them are text


def run_lab(script: str, what: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run a lab of two workers to its end, which leaves nothing behind."""
    command = ["-m", "poise", "lab", "--speeds", "0.9,0.4", *options, "--", script, what]
    with running(*command) as lab:
        output, errors = lab.communicate(timeout=LIMIT_S)
    assert not [path for place in places() for path in place.glob(f"poise-lab-{lab.pid}-*")]
    assert not running_from(script)
    return subprocess.CompletedProcess(command, lab.returncode, output, errors)


@pytest.mark.slow
def test_a_lab_trains_with_a_server(script: str) -> None:
    result = run_lab(script, "all", "--mode", "stale:2")
    assert result.returncode == 0, result.stderr
    assert "[server] worker 0 is done with 960\n" in result.stdout
    assert "[1] worker 1 is done" in result.stdout
    assert "[2] worker 2 is done" in result.stdout
    assert "[server] poise serve: stale:2, 2 epochs done" in result.stderr
    assert "poise lab: " not in result.stderr


@pytest.mark.slow
def test_a_killed_worker_does_not_end_the_training(script: str) -> None:
    result = run_lab(script, "worker 2 is killed", "--mode", "async")
    assert result.returncode == 0, result.stderr
    assert "[server] worker 0 is done with 960\n" in result.stdout
    assert "[1] worker 1 is done" in result.stdout
    assert result.stderr.count("poise lab: worker 2 ended with signal 9\n") == 1


@pytest.mark.slow
def test_a_lab_ends_with_its_server(script: str) -> None:
    result = run_lab(script, "the server fails", "--mode", "async")
    assert result.returncode == 1
    assert "[server] ValueError: the disk is full" in result.stderr
    assert "poise lab: the server ended with exit code 1\n" in result.stderr
    assert re.search(r"\[1\] .*the disk is full", result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code"), [("worker 2 never joins", 7), ("worker 2 ends early", 3)]
)
def test_a_lab_does_not_wait_forever_for_a_worker_that_is_gone(
    script: str, what: str, code: int
) -> None:
    result = run_lab(script, what, "--mode", "async")
    assert result.returncode == code
    assert "poise lab: worker 2 ended before training started" in result.stderr


def test_a_lab_whose_workers_have_all_ended_does_not_wait_for_others(script: str) -> None:
    result = run_lab(script, "worker 1 leaves, worker 2 is killed", "--mode", "async")
    assert result.returncode == 1
    assert "[server] poise.errors.WorkerLost: all workers are lost" in result.stderr
    assert "poise lab: the server ended with exit code 1" in result.stderr


@pytest.mark.slow
@needs_namespaces
def test_a_server_is_reached_over_slow_links(script: str) -> None:
    result = run_lab(script, "all", "--mode", "async", "--link", "100mbit,20mbit")
    assert result.returncode == 0, result.stderr
    assert "[server] worker 0 is done with 960\n" in result.stdout
    assert re.search(r"\[server\] poise: serving at 10\.77\.", result.stderr)

"""Connections whose other end is stopped or cut off: silence ends them, and nothing else does."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from poise.core.liveness import Limits
from poise.environment import for_joining, for_server
from poise.lab.processes import free_port
from poise.runtime.channel import Channel
from poise.runtime.pulse import Pulse

LIMITS = Limits(silent_s=1.0)
LIMIT_S = 60.0
"""No test waits longer for anything."""


@contextmanager
def two_channels() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
        theirs, _ = listener.accept()
    ends = Channel(ours), Channel(theirs)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@contextmanager
def pulse(*channels: Channel) -> Iterator[threading.Event]:
    """Watch channels; the event is set when one of them is silent."""
    beating, silent = Pulse(LIMITS), threading.Event()

    def cut(channel: Channel, why: str) -> None:
        channel.cut(why)
        silent.set()

    for channel in channels:
        beating.watch(channel, partial(cut, channel))
    try:
        yield silent
    finally:
        beating.end()


def test_an_end_that_gives_no_sign_of_life_is_cut_off_and_whoever_waits_is_told_why() -> None:
    with two_channels() as (ours, _), pulse(ours) as silent:
        ours.set_limit(LIMIT_S)
        with pytest.raises(EOFError, match="no sign of life for 1 s"):
            ours.receive()
        assert silent.is_set()


def test_signs_of_life_keep_a_connection_that_nobody_reads() -> None:
    with two_channels() as (ours, theirs), pulse(ours, theirs) as silent:
        assert not silent.wait(3 * LIMITS.silent_s)
        ours.tell({"text": 1})
        assert theirs.hear() == {"text": 1}


def test_signs_of_life_do_not_extend_the_limit_of_a_text() -> None:
    with two_channels() as (ours, theirs), pulse(ours, theirs):
        ours.set_limit(0.5)
        with pytest.raises(TimeoutError):
            ours.receive()


def test_signs_of_life_do_not_hide_the_end_of_a_connection() -> None:
    with two_channels() as (ours, theirs):
        for _ in range(3):
            theirs.beat()
        assert not ours.ended()
        theirs.beat()
        theirs.close()
        assert ours.ended()


def test_texts_between_signs_of_life_arrive_as_they_are() -> None:
    with two_channels() as (ours, theirs):
        sent = [b"", b"x", b"\xff\xff\xff\xfe", bytes(3 * 2**20)]

        def send() -> None:
            for data in sent:
                ours.beat()
                ours.send(data)
                ours.beat()

        sending = threading.Thread(target=send)
        sending.start()
        assert [theirs.receive() for _ in sent] == sent
        sending.join()


SCRIPT = """
    import os, signal, sys, torch
    from torch.utils.data import DataLoader, TensorDataset
    from poise.torch import Balancer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
    balancer = Balancer(12, mode="async", silent_s=2)
    model, optimizer, loader = balancer.prepare(model, optimizer, DataLoader(data, 12))
    for epoch in balancer.epochs(2):
        for step, (x, y) in enumerate(loader):
            if sys.argv[1:] == [str(balancer.worker), str(step)]:
                if balancer.worker == 1:
                    print("stops", flush=True)
                    os.kill(os.getpid(), signal.SIGSTOP)
            if sys.argv[1:] == ["server", str(step)] and balancer.worker == 1:
                print("stop the server", flush=True)
                sys.stdin.readline()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    print("samples", balancer.samples, flush=True)
"""


@contextmanager
def served(
    tmp_path: Path, *arguments: str, workers: int
) -> Iterator[tuple["subprocess.Popen[str]", list["subprocess.Popen[str]"]]]:
    """Run a server and its workers as processes of their own."""
    script, port = tmp_path / "train.py", free_port()
    script.write_text(textwrap.dedent(SCRIPT))
    serve = ["-m", "poise", "serve", "--port", str(port), "--workers", str(workers)]
    started = []

    def start(words: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        command = [sys.executable, *words, str(script), *arguments]
        process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        started.append(process)
        return process

    try:
        server = start(serve, for_server())
        address = f"127.0.0.1:{port}"
        joining = [for_joining(each, workers, address) for each in range(1, workers + 1)]
        yield server, [start([], environment) for environment in joining]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_worker_whose_server_is_stopped_says_so_and_ends(tmp_path: Path) -> None:
    with served(tmp_path, "server", "3", workers=1) as (server, (worker,)):
        assert worker.stdout is not None
        assert worker.stdout.readline() == "stop the server\n"
        os.kill(server.pid, signal.SIGSTOP)
        _, err = worker.communicate("go on\n", timeout=LIMIT_S)
        assert worker.returncode == 1
        said = [line for line in err.splitlines() if line.startswith("poise: worker 1: ")]
        assert len(said) == 1
        assert "no sign of life for 2 s" in said[0]
        assert re.search(r"ServerLost: the server at .* no sign of life for 2 s", err)


@pytest.mark.slow
def test_the_samples_of_a_worker_that_is_stopped_go_to_others(tmp_path: Path) -> None:
    with served(tmp_path, "1", "2", workers=2) as (server, (stopped, other)):
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "stops\n"
        out, err = other.communicate(timeout=LIMIT_S)
        assert other.returncode == 0, err
        out, err = server.communicate(timeout=LIMIT_S)
        assert server.returncode == 0, err
        assert "samples 480" in out

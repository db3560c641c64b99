"""A server that is out of file descriptors: nobody can join for a while, and training goes on."""

import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poise.errors import ServerLost
from poise.runtime.channel import Channel
from poise.runtime.descriptors import Reserve, check_descriptors
from poise.runtime.door import Door, knock
from tests.processes import wait_for
from tests.test_channel import an_open_door, knocked, name_of
from tests.test_serve import LIMIT_S, running, serving

DOOR = """
import logging, os, resource, sys

from poise.runtime.door import Door

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)


def met(channel, name):
    channel.tell({"welcome": name})
    if name == "guest":
        channel.set_limit(None)
        channel.ended() or channel.read(1)  # stays until it says so


door = Door("127.0.0.1", 0, None, lambda text: text["name"], met)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(door.address, flush=True)
taken = []
for command in sys.stdin:
    try:
        while command == "take\\n":
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        print("taken:", error.strerror, flush=True)
    if command == "free\\n":
        while taken:
            os.close(taken.pop())
        print("freed", flush=True)
door.close(1.0)
print("closed", flush=True)
"""


@contextmanager
def a_door_with_few_descriptors() -> Iterator[tuple["subprocess.Popen[str]", tuple[str, int]]]:
    with subprocess.Popen(
        [sys.executable, "-c", DOOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().rpartition(":")
        try:
            yield process, (host, int(port))
        finally:
            if process.poll() is None:
                process.kill()


def ask(process: "subprocess.Popen[str]", command: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{command}\n")
    process.stdin.flush()
    return process.stdout.readline()


def welcome(place: tuple[str, int], name: str) -> dict[str, str]:
    channel = knocked(place, None, name=name)
    try:
        return channel.hear()
    finally:
        channel.close()


def joins_at_last(place: tuple[str, int], name: str) -> bool:
    """Knock as a worker does, until the door opens."""
    for _ in range(100):
        try:
            return welcome(place, name) == {"welcome": name}
        except ServerLost:
            time.sleep(0.1)
    return False


def test_a_door_lets_in_again_when_descriptors_are_back() -> None:
    with a_door_with_few_descriptors() as (process, place):
        assert welcome(place, "early") == {"welcome": "early"}
        assert ask(process, "take") == "taken: Too many open files\n"
        guest = knocked(place, None, name="guest")  # on the descriptor of a call that waited
        for name in ("late", "later"):
            with pytest.raises(ServerLost, match="another worker now: Too many open files"):
                welcome(place, name)
        guest.send(b"")
        guest.close()
        assert "nobody can join at the moment" in ask(process, "free")
        assert joins_at_last(place, "patient")
        output, _ = process.communicate(timeout=LIMIT_S)
    lines = output.splitlines()
    assert not [line for line in lines if "nobody can join" in line]  # it is said once
    assert "workers can join again" in lines
    assert (lines[-1], process.returncode) == ("closed", 0)


def test_a_door_closes_while_it_is_out_of_descriptors() -> None:
    with a_door_with_few_descriptors() as (process, _):
        ask(process, "take")
        output, _ = process.communicate(timeout=LIMIT_S)
    assert output.splitlines()[-1] == "closed"
    assert process.returncode == 0


class Tired(socket.socket):
    """A listening socket whose first callers are gone when they are accepted."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(fileno=listener.detach())
        self.errors = [103, 71, 105]  # ECONNABORTED, EPROTO, ENOBUFS

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise OSError(self.errors.pop(0), "it passes")
        return super().accept()


def test_what_goes_wrong_for_one_caller_does_not_close_the_door(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **b: Tired(made(*a, **b)))
    met: list[str] = []
    with caplog.at_level(logging.INFO, "poise"), an_open_door(None, met) as place:
        assert welcome(place, "Ali") == {"welcome": "Ali"}
    assert met == ["Ali"]
    assert [each.message for each in caplog.records].count("workers can join again") == 1


def test_a_door_whose_socket_is_broken_says_that_nobody_can_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Tired):
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(9, "Bad file descriptor")

    made = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **b: Broken(made(*a, **b)))
    door: Door[str] = Door("127.0.0.1", 0, None, name_of, lambda *_: None)
    wait_for(lambda: caplog.records)
    door.close(LIMIT_S)
    said = [each.message for each in caplog.records]
    assert said == ["nobody can join any more: [Errno 9] Bad file descriptor"]


def test_a_reserve_is_given_once_and_taken_again() -> None:
    reserve = Reserve()
    assert reserve.give()
    assert not reserve.give()
    reserve.take()
    reserve.take()
    assert reserve.give()


def test_a_server_with_descriptors_can_take_a_worker() -> None:
    before = len(os.listdir("/proc/self/fd"))
    check_descriptors()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_is_told_that_a_server_is_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
        theirs, _ = listener.accept()
        with theirs:
            Channel(theirs).tell({"busy": "Too many open files"})
            with pytest.raises(ServerLost, match="cannot take another worker now: Too many"):
                knock(ours, None, {"name": "Ali"})


TRAIN = """
import os, resource, sys, threading, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer

here = Path(sys.argv[1])


def exhaust():
    # Leaves as many descriptors as the file says; none are held when it is gone.
    taken, wanted = [], here / "left"
    while not (here / "done").exists():
        time.sleep(0.02)
        try:
            left = int(wanted.read_text())
        except (OSError, ValueError):
            if not wanted.exists():
                while taken:
                    os.close(taken.pop())
            continue
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for _ in range(min(left, len(taken))):
            os.close(taken.pop())
        (here / "is left").write_text("") if left else None


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    balancer = Balancer(16, record=here / "run.jsonl")
    data = DataLoader(TensorDataset(torch.randn(160, 8)))
    model, optimizer, loader = balancer.prepare(model, optimizer, data)
    if balancer.worker == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        threading.Thread(target=exhaust, daemon=True).start()
    for epoch in balancer.epochs(100000):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
        if (here / "done").exists():
            break
    print("worker", balancer.worker, "is done")
"""


@pytest.mark.slow
def test_training_goes_on_while_a_server_is_out_of_descriptors(tmp_path: Path) -> None:
    """Newcomers hear why they cannot join, saves wait, and both work when it is over."""
    script, here, save = tmp_path / "train.py", tmp_path, tmp_path / "saved.pt"
    script.write_text(TRAIN)
    options = ("--save", str(save), "--save-every", "0.1")
    with serving(str(script), str(here), *options) as (server, address):
        place = {"POISE_SERVER": address}
        with running(str(script), str(here), **place) as first:
            wait_for(lambda: save.exists() and (here / "run.jsonl").read_text().count("\n") > 3)
            (here / "left").write_text("8")  # enough to be heard, and too few for a pair
            wait_for((here / "is left").exists)
            with running(str(script), str(here), **place) as second:
                _, told = second.communicate(timeout=LIMIT_S)
            assert "cannot take another worker: Too many open files" in told
            (here / "left").write_text("0")
            before_s = save.stat().st_mtime
            with running(str(script), str(here), **place) as third:
                _, told = third.communicate(timeout=LIMIT_S)
            assert re.search("cannot take another worker(?: now)?: Too many open files", told)
            assert save.stat().st_mtime <= before_s + 1.0
            assert not save.with_name("saved.pt.new").exists()
            (here / "left").unlink()
            with running(str(script), str(here), **place) as fourth:
                wait_for(lambda: '"workers":[1,2]' in (here / "run.jsonl").read_text())
                wait_for(lambda: save.stat().st_mtime > before_s + 1.0)
                (here / "done").write_text("")
                told_all = [each.communicate(timeout=LIMIT_S) for each in (server, first, fourth)]
                codes = [each.returncode for each in (server, first, fourth)]
    assert codes == [0, 0, 0], told_all

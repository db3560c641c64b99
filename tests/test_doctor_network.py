"""`poise doctor` of two machines, as two processes of this one."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

from poise.cli.doctor_meeting import Listener, this_machine, visit
from poise.cli.main import main
from poise.core.plain import to_plain
from poise.errors import Disagreement
from poise.lab.processes import free_port
from poise.runtime.channel import Channel
from poise.runtime.door import Door, knock
from poise.runtime.reaching import host_and_port, interfaces, look_at, source_toward

LIMIT_S = 60.0
WITHOUT_TORCH = """
import importlib.metadata as metadata, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
version = metadata.version
def without_torch(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = without_torch
from poise.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


AHEAD = """
import sys, time
clock = time.time
time.time = lambda: clock() + 20
from poise.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def started(*words: str, code: str | None = None) -> "subprocess.Popen[str]":
    start = ["-m", "poise"] if code is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *start, "doctor", *words],
        env={**os.environ, "POISE_SECRET": "", "COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


@contextmanager
def listening() -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """A doctor that waits for another; what it listens on."""
    process = started("--listen", str(free_port()))
    try:
        assert process.stdout is not None
        (address,) = re.findall(r"^listening at (\S+);", process.stdout.readline())
        yield process, address
    finally:
        process.kill()
        process.communicate()


def reached(listener: Listener) -> socket.socket:
    _, end = look_at(*host_and_port(listener.address))
    assert end is not None
    return end


@pytest.mark.slow
def test_two_doctors_print_the_same_and_one_needs_no_torch() -> None:
    with listening() as (first, address):
        code, output, errors = ended(started(address, code=WITHOUT_TORCH))
        assert (code, errors) == (0, "")
        _, theirs, _ = ended(first)
        assert first.returncode == 0
    assert re.search(r"│ torch +│ \d.*│ not installed", output)
    assert "torch is not installed on" in output
    assert "MB/s" in output
    assert output.strip() in theirs


@pytest.mark.slow
def test_a_clock_that_is_ahead_is_noticed() -> None:
    with listening() as (_, address):
        code, output, _ = ended(started(address, code=AHEAD))
    assert code == 0
    assert re.search(r"the clock of \S+ is 20\.0 s ahead", output)


@pytest.mark.parametrize("wrong", [b"b", None])
def test_a_doctor_answers_only_who_knows_the_secret(wrong: bytes | None) -> None:
    listener = Listener("127.0.0.1", 0, b"a")
    try:
        with pytest.raises(Disagreement, match="POISE_SECRET"):
            visit(reached(listener), wrong)
        assert visit(reached(listener), b"a") == listener.next_visit()
    finally:
        listener.close()


@pytest.mark.parametrize(
    "wish",
    [
        {"ask": "gold"},
        {"ask": "take", "bytes": 10**9},
        {"ask": "end"},
        {"ask": "end", "link": {"to_first": 0}},
        {},
    ],
)
def test_what_a_visitor_may_not_ask_for_ends_its_visit(wish: dict[str, Any]) -> None:
    listener = Listener("127.0.0.1", 0, None)
    channel = knock(reached(listener), None, {"doctor": 1})
    try:
        channel.tell({"machine": to_plain(this_machine(None))})
        assert "machine" in channel.hear()
        channel.tell(wish)
        assert isinstance(listener.next_visit(), str)
    finally:
        channel.close()
        listener.close()


def test_a_doctor_that_answers_otherwise_is_refused() -> None:
    def meet(channel: Channel, _: None) -> None:
        channel.hear()
        channel.tell({"machine": to_plain(this_machine(None))})
        channel.hear()
        channel.tell({"time_s": "noon"})

    door = Door("127.0.0.1", 0, None, lambda _: None, meet)
    try:
        _, end = look_at(*host_and_port(door.address))
        assert end is not None
        with pytest.raises(Disagreement, match="something else than expected"):
            visit(end, None)
    finally:
        door.close(1.0)


def test_a_visitor_that_leaves_in_the_middle_is_not_the_last() -> None:
    listener = Listener("127.0.0.1", 0, None)
    try:
        channel = knock(reached(listener), None, {"doctor": 1})
        channel.tell({"machine": "none"})
        channel.close()
        cut_short = listener.next_visit()
        assert isinstance(cut_short, str)
        assert "left before the examination was over" in cut_short
        meeting = visit(reached(listener), None)
        assert listener.next_visit() == meeting
        assert meeting.link.call_first is None, "both are one machine"
        assert abs(meeting.link.clock_s) <= meeting.link.clock_error_s + 0.01
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x:y"], "'x:y' is no HOST:PORT"),
        ([":29500"], "':29500' is no HOST:PORT"),
        (["alpha:70000"], "a port from 1 to 65535"),
        (["alpha:29500", "more"], "alpha:29500 is followed by 'more'"),
        (["--listen", "x"], "'x' is no HOST:PORT"),
        (["--listen", "10.0.0.1:29500"], "set POISE_SECRET"),
        (["--listen", "29500", "alpha:29500"], "give one of the two"),
        (["--workers", "2", "alpha:29500"], "--workers 2 is for processes on this machine"),
    ],
)
def test_a_wrong_line_is_answered_in_one(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POISE_SECRET", raising=False)
    assert main(["doctor", *words]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert said in found.err
    assert found.err.count("\n") == 1


def test_under_a_launcher_the_workers_are_examined(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "alpha:29500"]) == 2
    assert "start it without launcher on each machine" in capsys.readouterr().err


def test_nothing_that_listens_is_said_with_all_else(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["doctor", f"127.0.0.1:{port}"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"127.0.0.1:{port} refuses connections: nothing listens there" in said
    assert f"poise doctor --listen 127.0.0.1:{port}" in said
    assert "torch" in said


def test_whoever_hangs_up_is_no_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            server.accept()[0].close()

        hanging_up = Thread(target=hang_up)
        hanging_up.start()
        assert main(["doctor", f"127.0.0.1:{server.getsockname()[1]}"]) == 0
        hanging_up.join()
    assert "no doctor answers there" in " ".join(capsys.readouterr().out.split())


def test_a_server_of_poise_is_no_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(text: dict[str, Any]) -> None:
        raise Disagreement(f"{text} is no worker")

    door = Door("127.0.0.1", 0, None, refuse, lambda channel, _: channel.close())
    try:
        assert main(["doctor", door.address]) == 0
    finally:
        door.close(1.0)
    assert "no doctor answers there" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_store_of_torch_is_no_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert main(["doctor", f"127.0.0.1:{store.port}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"127.0.0.1:{store.port} is open, but no doctor answers there" in said
    store.set("it", "works on")
    assert store.get("it") == b"works on"


def test_a_machine_knows_its_interfaces_and_its_way() -> None:
    assert ("lo", "127.0.0.1") in {(each.name, each.address) for each in interfaces()}
    listed = {each.name for each in interfaces()}
    assert listed <= set(os.listdir("/sys/class/net"))
    assert source_toward("127.0.0.1") == "127.0.0.1"

"""The authenticated byte channel: it needs no framework, and strangers do not get in."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from poise.errors import Disagreement, InvalidSetting, ServerLost
from poise.runtime import door as door_module
from poise.runtime.channel import GONE, Channel
from poise.runtime.door import MAGIC, Door, check_secret, is_loopback, knock, let_in, listening

LIMIT_S = 30.0
"""No test waits longer for anything."""

CASES: list[Callable[[], None]] = []
"""What is also run where torch cannot be imported."""


def case(test: Callable[[], None]) -> Callable[[], None]:
    CASES.append(test)
    return test


def name_of(text: dict[str, Any]) -> str:
    """Read what newcomers of these tests say of themselves."""
    if not isinstance(text.get("name"), str):
        raise Disagreement("it has no name")
    return str(text["name"])


@contextmanager
def two_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
        theirs, _ = listener.accept()
    theirs.settimeout(LIMIT_S)
    with ours, theirs:
        yield ours, theirs


@contextmanager
def an_open_door(secret: bytes | None, met: list[str]) -> Iterator[tuple[str, int]]:
    """Open a door whose server answers each newcomer with its own name."""

    def meet(channel: Channel, name: str) -> None:
        met.append(name)
        channel.tell({"welcome": name})
        channel.set_limit(LIMIT_S)
        with suppress(*GONE):
            while True:
                channel.send(channel.receive()[::-1])

    door = Door("127.0.0.1", 0, secret, name_of, meet)
    host, _, port = door.address.rpartition(":")
    try:
        yield host, int(port)
    finally:
        door.close(LIMIT_S)


def knocked(place: tuple[str, int], secret: bytes | None, **about: Any) -> Channel:
    return knock(socket.create_connection(place, timeout=LIMIT_S), secret, about)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    before = door_module._PATIENCE_S
    door_module._PATIENCE_S = seconds
    try:
        yield
    finally:
        door_module._PATIENCE_S = before


@case
def test_texts_and_bytes_arrive_as_they_were_sent() -> None:
    with two_ends() as (ours, theirs):
        sender, receiver = Channel(ours), Channel(theirs)
        text = {"text": "\u00e4\ud800", "numbers": [1, 2.5, None]}
        sender.tell(text)
        assert receiver.hear() == text
        for data in (b"", b"\0\xff", bytes(3 * 2**20)):
            sending = threading.Thread(target=sender.send, args=(data,))
            sending.start()
            assert receiver.receive() == data
            sending.join(LIMIT_S)


@case
def test_who_knows_the_secret_is_met_and_heard() -> None:
    met: list[str] = []
    with an_open_door(b"open sesame", met) as place:
        channel = knocked(place, b"open sesame", name="Ali")
        assert channel.hear() == {"welcome": "Ali"}
        channel.send(b"abc")
        assert channel.receive() == b"cba"
        channel.close()
    assert met == ["Ali"]


@case
def test_a_wrong_a_missing_and_a_needless_secret_are_refused_with_the_reason() -> None:
    met: list[str] = []
    for theirs, ours, why in [
        (b"open sesame", b"open barley", "is not the server's"),
        (b"open sesame", None, "wants a secret"),
        (None, b"open sesame", "the server has none"),
    ]:
        with an_open_door(theirs, met) as place, pytest.raises(Disagreement, match=why):
            knocked(place, ours, name="Kasim")
    assert not met


@case
def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    """It may listen where the right one should; the worker tells it nothing of itself."""
    heard: list[dict[str, Any]] = []

    def pretend(end: socket.socket) -> None:
        channel = Channel(end)
        channel.read(len(MAGIC))
        channel.tell({"nonce": "1", "secret": True})
        heard.append(channel.hear())
        channel.tell({"proof": "0" * 64})
        with suppress(*GONE):
            heard.append(channel.hear())

    with two_ends() as (ours, theirs):
        other = threading.Thread(target=pretend, args=(theirs,))
        other.start()
        with pytest.raises(Disagreement, match="does not know POISE_SECRET"):
            knock(ours, b"open sesame", {"name": "Ali"})
        other.join(LIMIT_S)
    assert [each.keys() for each in heard] == [{"nonce", "proof"}]
    assert b"open sesame" not in json.dumps(heard).encode()


@case
def test_a_silent_stranger_and_one_who_drips_are_hung_up_on() -> None:
    met: list[str] = []
    with patience(0.2), an_open_door(None, met) as place:
        with socket.create_connection(place, timeout=LIMIT_S) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(place, timeout=LIMIT_S) as slow:
            slow.sendall(MAGIC + b"\x00\x00\x0f\x00")
            with pytest.raises(OSError, match=r"reset|pipe"):
                drip(slow)
        channel = knocked(place, None, name="Ali")  # nobody else is disturbed
        assert channel.hear() == {"welcome": "Ali"}
        channel.close()
    assert met == ["Ali"]


def drip(end: socket.socket) -> None:
    for _ in range(1000):
        end.sendall(b" ")
        time.sleep(0.02)


@case
def test_who_sends_something_else_or_has_no_name_is_not_met() -> None:
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", MAGIC + b"\xff" * 5000):
        with two_ends() as (ours, theirs):
            ours.sendall(sent)
            ours.shutdown(socket.SHUT_WR)
            assert let_in(theirs, None, name_of) is None
    with two_ends() as (ours, theirs):
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.append(let_in(theirs, None, name_of)))
        asking.start()
        knock(ours, None, {"name": 3})
        asking.join(LIMIT_S)
        assert found == [None]


@case
def test_an_oversized_announcement_is_refused_before_anything_is_read() -> None:
    with two_ends() as (ours, theirs):
        ours.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(Disagreement, match="announced 4294967295 bytes"):
            Channel(theirs).receive()
    with two_ends() as (ours, theirs):
        Channel(ours).tell({"name": "x" * 100})
        with pytest.raises(Disagreement, match="announced"):
            Channel(theirs).hear(most_bytes=64)


@case
def test_what_is_no_text_is_refused() -> None:
    for sent in (b"", b"[1, 2]", b"\xff", b"[" * 100_000, b'{"a": '):
        with two_ends() as (ours, theirs):
            Channel(ours).send(sent)
            with pytest.raises(Disagreement, match="the other end of a connection sent"):
                Channel(theirs).hear()


@case
def test_a_closed_end_is_noticed() -> None:
    with two_ends() as (ours, theirs):
        channel = Channel(theirs)
        assert not channel.ended()
        ours.sendall(b"\x00\x00\x00\x05ab")  # less than it announces
        ours.close()
        assert not channel.ended()  # there is still something to read
        with pytest.raises(EOFError, match="closed"):
            channel.receive()
        assert channel.ended()
    with two_ends() as (ours, theirs):
        theirs.close()
        with pytest.raises(ServerLost, match="no server of Poise"):
            knock(ours, None, {"name": "Ali"})


@case
def test_who_hangs_up_hears_nothing_more_and_can_still_speak() -> None:
    with two_ends() as (ours, theirs):
        channel = Channel(theirs)
        channel.hang_up()
        with pytest.raises(EOFError):
            channel.hear()
        channel.tell({"failed": "why"})
        assert Channel(ours).hear() == {"failed": "why"}


@case
def test_a_limit_holds_for_each_text_and_a_deadline_for_all_of_them() -> None:
    with two_ends() as (ours, theirs):
        channel = Channel(theirs)
        channel.set_limit(0.01)
        with pytest.raises(TimeoutError):
            channel.hear()
        channel.set_deadline(0.0)
        with pytest.raises(TimeoutError):
            channel.hear()
        channel.set_limit(None)
        Channel(ours).tell({})
        assert channel.hear() == {}


@case
def test_others_than_this_machine_need_a_secret() -> None:
    assert all(is_loopback(host) for host in ("localhost", "::1", "127.0.0.1", "127.3.0.1"))
    assert not any(is_loopback(host) for host in ("", "0.0.0.0", "::", "10.0.0.1", "a.example"))
    check_secret("127.0.0.1", None)
    check_secret("0.0.0.0", b"open sesame")
    with pytest.raises(InvalidSetting, match="POISE_SECRET"):
        check_secret("0.0.0.0", None)
    with (
        listening("127.0.0.1", 0) as taken,
        pytest.raises(InvalidSetting, match="choose another address or port"),
    ):
        listening("127.0.0.1", taken.getsockname()[1])


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "rich", "sklearn"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocked())
"""


def without_torch(code: str) -> "subprocess.CompletedProcess[str]":
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", WITHOUT_TORCH + code]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_all_of_this_works_without_torch() -> None:
    run = "from tests.test_channel import CASES\nfor case in CASES:\n    case()\nprint(len(CASES))"
    done = without_torch(run)
    assert done.stderr == ""
    assert int(done.stdout) == len(CASES) > 0


def test_the_look_for_torch_finds_it() -> None:
    assert "torch is not to be imported" in without_torch("import poise.torch").stderr

"""Two doctors, one on each machine: how they meet, and measure what lies between them.

The first listens where worker 0 is going to; the second visits it and leads. Both prove that they
know the secret, as a server and its workers do. For the address that gloo gives to other workers,
each opens a port there for a moment and has the other call it, as gloo will.
"""

import hmac
import os
import platform
import secrets
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from queue import SimpleQueue
from threading import Thread
from typing import Any

from poise import __version__
from poise.cli.doctor_machines import STRANGER, Link, Machine
from poise.core.plain import from_plain, to_plain
from poise.core.reachability import OPEN, published
from poise.errors import Disagreement, PoiseError
from poise.runtime.channel import GONE, Channel
from poise.runtime.door import Door, knock
from poise.runtime.reaching import CONNECT_S, connect, own_addresses

_PROTOCOL = 1
_LIMIT_S = 60.0
"""How long an examination may take."""
_PARTING_S = 5.0
_QUESTIONS = 21
_PIECE = 16_384
_SIZES = tuple(_PIECE * 4**power for power in range(6))
"""Bytes that are sent to measure a rate: ever more, until they take long enough."""
_LONG_S = 0.2
_TOKEN_BYTES = 16
_LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What two machines found out together."""

    first: Machine
    second: Machine
    link: Link


def this_machine(source: str | None) -> Machine:
    """Return what this machine says of itself; `source` is its address on the way to the other."""
    versions = {"Python": platform.python_version(), "Poise": __version__}
    versions |= {name: _version(package) for name, package in _PACKAGES.items()}
    return Machine(versions=versions, addresses=own_addresses(source))


class Listener:
    """The first machine's doctor: waits for a visitor, and answers it."""

    def __init__(self, host: str, port: int, secret: bytes | None) -> None:
        """Listen."""
        self._visits: SimpleQueue[Meeting | str] = SimpleQueue()
        self._door = Door(host, port, secret, _check_visitor, self._meet)

    @property
    def address(self) -> str:
        """Host and port."""
        return self._door.address

    def next_visit(self) -> Meeting | str:
        """Wait for a visitor to leave; return what was found, or why it was cut short."""
        return self._visits.get()

    def close(self) -> None:
        """Stop listening."""
        self._door.close(_PARTING_S)

    def _meet(self, channel: Channel, _: None) -> None:
        try:
            self._visits.put(_answer(channel))
        except (*GONE, PoiseError) as error:
            self._visits.put(f"a visitor left before the examination was over: {error}")


def visit(end: socket.socket, secret: bytes | None) -> Meeting:
    """Examine the link to a doctor that listens, together with it.

    Raises Disagreement if it is of another version or knows another secret, and ServerLost, OSError
    or EOFError if it is no doctor.
    """
    one_machine = end.getpeername()[0] == end.getsockname()[0]
    channel = knock(end, secret, {"doctor": _PROTOCOL})
    try:
        channel.set_deadline(_LIMIT_S)
        second = this_machine(channel.host)
        channel.tell({"machine": to_plain(second)})
        first = from_plain(Machine, _text(channel)["machine"])
        latency_s, clock_s, error_s = _ask_for_time(channel)
        link = Link(
            latency_s=latency_s,
            clock_s=clock_s,
            clock_error_s=error_s,
            to_first=_rate(channel, latency_s, _send),
            to_second=_rate(channel, latency_s, _receive),
            call_first=None if one_machine else _call(channel, first),
            call_second=None if one_machine else _be_called(channel, second),
        )
        channel.tell({"ask": "end", "link": to_plain(link)})
        with suppress(EOFError):
            channel.read(1)  # the other end closes when it has understood
    except (TypeError, ValueError) as error:
        raise Disagreement(f"it sent something else than expected: {error}") from None
    finally:
        channel.close()
    return Meeting(first=first, second=second, link=link)


_PACKAGES = {"NumPy": "numpy", "torch": "torch"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _check_visitor(said: dict[str, Any]) -> None:
    if said != {"doctor": _PROTOCOL}:
        raise Disagreement(f"{said} is no visit of a doctor of this version")


def _answer(channel: Channel) -> Meeting:
    """Do what a visitor asks for, until it says what it found."""
    channel.set_deadline(_LIMIT_S)
    second = from_plain(Machine, _text(channel)["machine"])
    first = this_machine(channel.host)
    channel.tell({"machine": to_plain(first)})
    while True:
        wish = _text(channel)
        match wish:
            case {"ask": "time"}:
                channel.tell({"time_s": time.time()})
            case {"ask": "take", "bytes": int(size)} if size in _SIZES:
                channel.receive(size)
                channel.tell({"taken": size})
            case {"ask": "give", "bytes": int(size)} if size in _SIZES:
                channel.send(_noise(size))
            case {"ask": "listen"}:
                with _listening(published(first.addresses)) as place:
                    channel.tell(place)
                    _text(channel)  # the call is over
            case {"ask": "call", "port": int(port), "token": str(token)}:
                channel.tell({"ended": _called(published(second.addresses), port, token)})
            case {"ask": "end", "link": link}:
                return Meeting(first=first, second=second, link=from_plain(Link, link))
            case _:
                raise Disagreement(f"it asks for {wish}, which this version does not know")


def _ask_for_time(channel: Channel) -> tuple[float, float, float]:
    """Return the median latency, how far the other clock is ahead, and how wrong that may be.

    The answer that came fastest says most about the clock: it was given within that time.
    """
    answers = []
    for _ in range(_QUESTIONS):
        before_s, began_s = time.time(), time.perf_counter()
        channel.tell({"ask": "time"})
        theirs_s = float(_text(channel)["time_s"])
        took_s = time.perf_counter() - began_s
        answers.append((took_s, theirs_s - before_s - took_s / 2))
    fastest_s, ahead_s = min(answers)
    return statistics.median(took_s for took_s, _ in answers), ahead_s, fastest_s / 2


def _rate(channel: Channel, latency_s: float, move: Any) -> float:
    """Return bytes per second, from an amount that takes long enough to tell."""
    rate = 0.0
    for size in _SIZES:
        began_s = time.perf_counter()
        move(channel, size)
        took_s = time.perf_counter() - began_s
        rate = size / took_s
        if took_s > max(_LONG_S, 4 * latency_s):
            break
    return rate


def _send(channel: Channel, size: int) -> None:
    channel.tell({"ask": "take", "bytes": size})
    channel.send(_noise(size))
    _text(channel)


def _noise(size: int) -> bytes:
    """Return bytes that a link which compresses cannot shorten much."""
    return os.urandom(_PIECE) * (size // _PIECE)


def _receive(channel: Channel, size: int) -> None:
    channel.tell({"ask": "give", "bytes": size})
    channel.receive(size)


def _call(channel: Channel, first: Machine) -> str:
    """Have the first machine open a port, and call it there."""
    channel.tell({"ask": "listen"})
    place = _text(channel)
    ended = _called(published(first.addresses), int(place["port"]), str(place["token"]))
    channel.tell({"ask": "over"})
    return ended


def _be_called(channel: Channel, second: Machine) -> str:
    """Open a port, and have the first machine call it."""
    with _listening(published(second.addresses)) as place:
        channel.tell({"ask": "call", **place})
        return str(_text(channel)["ended"])


def _called(address: str | None, port: int, token: str) -> str:
    """Call the other machine at an address that it gives; return how that ended."""
    if address is None or not 0 < port <= _LAST_PORT:
        return "it cannot listen there"
    ended, end = connect(address, port)
    if end is None:
        return ended
    with end:
        end.settimeout(CONNECT_S)
        heard = b""
        with suppress(OSError):
            while len(heard) < 2 * _TOKEN_BYTES and (more := end.recv(2 * _TOKEN_BYTES)):
                heard += more
        return OPEN if hmac.compare_digest(heard, token.encode()) else STRANGER


@contextmanager
def _listening(address: str | None) -> Iterator[dict[str, Any]]:
    """Listen on a free port of an address, and send whoever calls a token that only it can have.

    Port 0: it is no address to listen on.
    """
    token = secrets.token_hex(_TOKEN_BYTES)
    try:
        family = socket.AF_INET6 if ":" in (address or "") else socket.AF_INET
        listener = socket.create_server((address or "", 0), family=family) if address else None
    except OSError:
        listener = None
    if listener is None:
        yield {"port": 0, "token": token}
        return
    thread = Thread(target=_answer_calls, args=(listener, token), name="poise-call", daemon=True)
    thread.start()
    try:
        yield {"port": listener.getsockname()[1], "token": token}
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
        thread.join()


def _answer_calls(listener: socket.socket, token: str) -> None:
    with suppress(OSError):
        while True:
            end, _ = listener.accept()
            with end, suppress(OSError):
                end.sendall(token.encode())


def _text(channel: Channel) -> dict[str, Any]:
    """Return the next text; raise Disagreement where it lacks something."""
    return _Text(channel.hear())


class _Text(dict[str, Any]):
    """A text of another machine, which may lack anything."""

    def __missing__(self, key: str) -> Any:
        raise Disagreement(f"the other doctor left {key} out; it is of another version")

"""One worker's connection with the server: short texts on a socket, tensors in a gloo pair.

Nothing is pickled. The socket says what comes; what is large travels in a process group of two,
whose ends find each other through the socket. The end of a process closes both, and is noticed
on the other side at once; the end of a machine, by the keep-alive of the socket.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed import ProcessGroupGloo, Store

from poise.core.plain import from_plain, to_plain
from poise.errors import Disagreement, ServerLost, StateMismatch
from poise.torch.asynchronous.messages import KINDS, Message, name_of

_LENGTH = struct.Struct("!I")
MOST_BYTES = 64 * 1024**2
"""The longest text; that of a large model's parameter names has some megabytes."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""Seconds of silence, seconds from one question to the next, how many stay unanswered; and, in
milliseconds, how long what was sent may stay unanswered."""
_TRANSFER = timedelta(minutes=5)
_LEAST_S = 0.001
_open: "WeakSet[socket.socket]" = WeakSet()
_watching: list[bool] = []


def keep_from_children(end: socket.socket) -> None:
    """Have processes that are forked later, such as a loader's, let go of a socket.

    Else it would stay open after the end of this process, until they notice it.
    """
    if not _watching:
        _watching.append(True)
        os.register_at_fork(after_in_child=_let_go)
    _open.add(end)


def _let_go() -> None:
    for end in list(_open):
        end.close()


class Link:
    """One end of a connection. A closed one raises EOFError or OSError."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._pair: Any = None
        """A ProcessGroupGloo, of which torch's stubs know little."""
        self._server = False
        self._deadline_s: float | None = None
        keep_from_children(end)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def host(self) -> str:
        """The address of this machine by which the other end knows it."""
        return str(self._socket.getsockname()[0])

    def set_limit(self, seconds: float | None) -> None:
        """Set how long a text is waited for; None: for ever."""
        self._deadline_s = None
        self._socket.settimeout(seconds)

    def set_deadline(self, seconds: float) -> None:
        """Set how long all texts until the next limit may take together."""
        self._deadline_s = time.monotonic() + seconds

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a text."""
        self._send(json.dumps(message).encode())

    def hear(self, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
        """Return the next text."""
        try:
            found = json.loads(self._receive(most_bytes))
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or brackets too deep
            raise Disagreement(f"the other end of a connection sent {error}") from None
        if not isinstance(found, dict):
            raise Disagreement(f"the other end of a connection sent a {type(found).__name__}")
        return found

    def say(self, message: Message) -> None:
        """Send a message."""
        self.tell({name_of(message): to_plain(message)})

    def answer(self) -> Message:
        """Return the server's next message, or raise what it says instead."""
        found = self.hear()
        if "refused" in found:
            raise Disagreement(str(found["refused"]))
        if "failed" in found:
            raise ServerLost(str(found["failed"]))
        return _message(found)

    def listen(self, most_bytes: int = MOST_BYTES) -> Message:
        """Return a worker's next message."""
        return _message(self.hear(most_bytes))

    def ended(self) -> bool:
        """Whether the other end has closed the connection, as far as is known now."""
        limit = self._socket.gettimeout()
        self._socket.setblocking(False)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._socket.settimeout(limit)

    def pair_up(self, *, server: bool) -> None:
        """Make the process group of two; both ends call it together."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.host)]
        options._threads = 1
        options._timeout = _TRANSFER
        self._server = server
        with _as_connection():
            try:
                self._pair = gloo(_Letters(self), 0 if server else 1, 2, options)
            except (ValueError, LookupError, ArithmeticError, MemoryError) as error:
                # Of gloo, which reads what the other end says, or of a key that is no UTF-8.
                raise Disagreement("the other end of a connection cannot be paired with") from error

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor on the CPU."""
        assert self._pair is not None
        with _as_connection():
            self._pair.send([tensor], 1 if self._server else 0, 0).wait()

    def receive(self, tensor: torch.Tensor) -> None:
        """Receive a tensor into another one of the same size."""
        assert self._pair is not None
        with _as_connection():
            self._pair.recv([tensor], 1 if self._server else 0, 0).wait()

    def hang_up(self) -> None:
        """Hear nothing more; what is being sent still arrives."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Let go of the connection."""
        self._pair = None
        self._socket.close()

    def _send(self, text: bytes) -> None:
        self._socket.sendall(_LENGTH.pack(len(text)) + text)

    def _receive(self, most_bytes: int = MOST_BYTES) -> bytes:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > most_bytes:
            raise Disagreement(f"the other end of a connection announced {length} bytes")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        parts, missing = [], count
        while missing:
            if self._deadline_s is not None:
                left_s = self._deadline_s - time.monotonic()
                self._socket.settimeout(max(left_s, _LEAST_S))
            part = self._socket.recv(min(missing, 2**20))
            if not part:
                raise EOFError("the connection is closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def _message(found: Mapping[str, Any]) -> Message:
    """Return the message that a text holds, or raise."""
    for name, kind in KINDS.items():
        if name in found:
            try:
                message: Message = from_plain(kind, found[name])
            except (StateMismatch, OverflowError) as error:
                raise Disagreement(f"the other end of a connection sent {error}") from None
            return message
    raise Disagreement(f"the other end of a connection sent {sorted(found)[:3]}")


@contextmanager
def _as_connection() -> Iterator[None]:
    """Raise what gloo says of a lost pair as what a socket would raise."""
    try:
        yield
    except RuntimeError as error:
        slow = "timed out" in str(error).lower()
        raise ConnectionError(
            "a transfer took too long" if slow else "the connection is closed"
        ) from error


class _Letters(Store):
    """A store of two: whatever one end sets is sent to the other."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a value, and send it."""
        text = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = text
        self._link._send(key.encode() + b"\0" + text)

    def get(self, key: str) -> bytes:
        """Return a value as soon as it is there."""
        while key not in self._known:
            name, _, text = self._link._receive().partition(b"\0")
            self._known[name.decode()] = text
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until values are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""
        return all(key in self._known for key in keys)

"""One end of a connection: texts and bytes on a socket, each announced by its length.

Texts are JSON, and nothing is pickled. The end of a process closes the connection, and is noticed
on the other side at once; the end of a machine, by the keep-alive of the socket.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from poise.errors import Disagreement

GONE = (OSError, EOFError)
"""What a channel raises whose other end is gone."""
MOST_BYTES = 64 * 1024**2
"""The longest text; that of a large model's parameter names has some megabytes."""
_LENGTH = struct.Struct("!I")
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""Seconds of silence, seconds from one question to the next, how many stay unanswered; and, in
milliseconds, how long what was sent may stay unanswered."""
_PIECE = 2**20
"""Bytes that are asked for at a time, however many are announced."""
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


class Channel:
    """One end of a connection. A closed one raises EOFError or OSError."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
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
        self.send(json.dumps(message).encode())

    def hear(self, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
        """Return the next text, or raise Disagreement if it is none or too long."""
        try:
            found = json.loads(self.receive(most_bytes))
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or brackets too deep
            raise Disagreement(f"the other end of a connection sent {error}") from None
        if not isinstance(found, dict):
            raise Disagreement(f"the other end of a connection sent a {type(found).__name__}")
        return found

    def send(self, data: bytes) -> None:
        """Send bytes, announced by their number."""
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the next bytes, or raise Disagreement if more are announced than are allowed."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > most_bytes:
            raise Disagreement(f"the other end of a connection announced {length} bytes")
        return self.read(length)

    def read(self, count: int) -> bytes:
        """Return so many bytes, which nothing announces."""
        parts, missing = [], count
        while missing:
            if self._deadline_s is not None:
                left_s = self._deadline_s - time.monotonic()
                self._socket.settimeout(max(left_s, _LEAST_S))
            part = self._socket.recv(min(missing, _PIECE))
            if not part:
                raise EOFError("the connection is closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

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

    def hang_up(self) -> None:
        """Hear nothing more; what is being sent still arrives."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()

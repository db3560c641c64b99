"""One end of a connection: texts and bytes on a socket, each announced by its length.

Texts are JSON, and nothing is pickled. One length, which no text has, is a sign of life. The end of
a process closes the connection, and is noticed on the other side at once; that one is stopped, or a
machine or link gone, by its silence.
"""

import fcntl
import json
import os
import socket
import struct
import termios
import threading
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
_NOTHING = 2**32 - 2
_BEAT = _LENGTH.pack(_NOTHING)
"""A sign of life: nothing follows."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""Seconds of silence, seconds from one question to the next, how many stay unanswered; and, in
milliseconds, how long what was sent may stay unanswered."""
_PIECE = 2**20
"""Bytes that are asked for at a time, however many are announced."""
_LEAST_S, _LONG_S, _CLOSING_S = 0.001, 1e6, 1.0
_UNREAD = struct.Struct("i")
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
        self._sending = threading.Lock()
        self._unsent = b""
        """The rest of a sign of life for which there was no room."""
        self._received = 0
        self._limit_s: float | None = end.gettimeout()
        self._deadline_s: float | None = None
        self._why = "the connection is closed"
        # It always has a limit: then its descriptor does not block, and a sign of life never waits.
        end.settimeout(_LONG_S if self._limit_s is None else self._limit_s)
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
        """Set how long a text is waited for; None: as long as the other end lives."""
        self._deadline_s, self._limit_s = None, seconds

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
        with self._sending:
            self._socket.settimeout(_LONG_S if self._limit_s is None else self._limit_s)
            unsent, self._unsent = self._unsent, b""
            self._socket.sendall(unsent + _LENGTH.pack(len(data)) + data)

    def beat(self) -> None:
        """Give a sign of life, unless something is being sent, which is one; never waits."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            beat = self._unsent or _BEAT
            self._unsent = beat[os.write(self._socket.fileno(), beat) :]
        except OSError:  # no room, or closed: whoever reads is told
            pass
        finally:
            self._sending.release()

    def arrived(self) -> int:
        """Return how many bytes have come, whether they are read or not."""
        try:
            answer = fcntl.ioctl(self._socket.fileno(), termios.FIONREAD, bytes(_UNREAD.size))
        except (OSError, ValueError):  # it is closed
            return self._received
        unread: int = _UNREAD.unpack(answer)[0]
        return self._received + unread

    def receive(self, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the next bytes, or raise Disagreement if more are announced than are allowed."""
        deadline_s = self._deadline_s
        if deadline_s is None and self._limit_s is not None:
            deadline_s = time.monotonic() + self._limit_s
        length = _NOTHING
        while length == _NOTHING:  # signs of life do not extend the limit
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline_s))
        if length > most_bytes:
            raise Disagreement(f"the other end of a connection announced {length} bytes")
        return self._read(length, deadline_s)

    def read(self, count: int) -> bytes:
        """Return so many bytes, which nothing announces."""
        return self._read(count, self._deadline_s)

    def _read(self, count: int, deadline_s: float | None) -> bytes:
        parts, missing = [], count
        while missing:
            left_s = _LONG_S if deadline_s is None else deadline_s - time.monotonic()
            self._socket.settimeout(max(left_s, _LEAST_S))
            part = self._socket.recv(min(missing, _PIECE))
            if not part:
                raise EOFError(self._why)
            self._received += len(part)
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def ended(self) -> bool:
        """Whether the other end has closed the connection, as far as is known now.

        Between two texts only: signs of life that wait in front of the end are taken out.
        """
        self._socket.setblocking(False)
        try:
            while (found := self._socket.recv(len(_BEAT), socket.MSG_PEEK)) == _BEAT:
                self._received += len(self._socket.recv(len(_BEAT)))
        except BlockingIOError:
            return False
        except OSError:
            return True
        return found == b""

    def hang_up(self) -> None:
        """Hear nothing more; what is being sent still arrives."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RD)

    def cut(self, why: str) -> None:
        """End the connection from another thread; whoever uses it is told why."""
        self._why = why
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection, but not in the middle of a sign of life.

        Its descriptor may be a file's a moment later.
        """
        sending = self._sending.acquire(timeout=_CLOSING_S)
        self._socket.close()
        if sending:
            self._sending.release()

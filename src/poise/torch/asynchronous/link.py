"""A worker's connection with the server: messages on a channel, tensors in a gloo pair.

The channel says what comes; what is large travels in a process group of two, whose ends find each
other through the channel. The end of a process closes both.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from poise.errors import Disagreement, ServerLost
from poise.runtime.channel import GONE, Channel
from poise.torch.asynchronous.messages import Message, message_of, text_of
from poise.torch.sockets import Sockets
from poise.torch.torch_private import gloo_pair

_TRANSFER = timedelta(minutes=5)


class Link:
    """One end of a connection. A closed one raises EOFError or OSError."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._pair: Any = None
        """A ProcessGroupGloo."""
        self._peer = 0
        """The other end's place in it."""
        self._sockets = Sockets()
        """What the pair is connected by."""
        self._why = "the connection is closed"

    def say(self, message: Message) -> None:
        """Send a message."""
        self.channel.tell(text_of(message))

    def answer(self) -> Message:
        """Return the server's next message, or raise what it says instead."""
        return message_of(heard(self.channel))

    def listen(self) -> Message:
        """Return a worker's next message."""
        return message_of(self.channel.hear())

    def pair_up(self, *, server: bool) -> None:
        """Make the process group of two; both ends call it together."""
        self._peer = 1 if server else 0
        with self._as_connection():
            try:
                letters = _Letters(self.channel)
                # A server pairs with several at a time, and cannot tell whose sockets are whose.
                with nullcontext() if server else self._sockets.opening():
                    self._pair = gloo_pair(letters, 1 - self._peer, self.channel.host, _TRANSFER)
            except (ValueError, LookupError, ArithmeticError, MemoryError) as error:
                # Of gloo, which reads what the other end says, or of a key that is no UTF-8.
                raise Disagreement("the other end of a connection cannot be paired with") from error

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor on the CPU."""
        with self._as_connection():
            self._pair.send([tensor], self._peer, 0).wait()

    def receive(self, tensor: torch.Tensor) -> None:
        """Receive a tensor into another one of the same size."""
        with self._as_connection():
            self._pair.recv([tensor], self._peer, 0).wait()

    def cut(self, why: str) -> None:
        """End the connection, from another thread; whoever waits in it is told why."""
        self._why = why
        self.channel.cut(why)
        self._sockets.cut()

    def close(self) -> None:
        """Let go of the connection."""
        self._pair = None
        self._sockets.forget()
        self.channel.close()

    @contextmanager
    def _as_connection(self) -> Iterator[None]:
        """Raise what gloo says of a lost pair as what a socket would raise."""
        try:
            yield
        except RuntimeError as error:
            slow = "timed out" in str(error).lower()
            raise ConnectionError("a transfer took too long" if slow else self._why) from error


def heard(channel: Channel, refusing: str = "") -> dict[str, Any]:
    """Return what the server says next, or raise that it refuses this worker, or failed."""
    found = channel.hear()
    if "refused" in found:
        raise Disagreement(f"{refusing}{found['refused']}")
    if "failed" in found:
        raise ServerLost(str(found["failed"]))
    return found


@contextmanager
def server_needed(address: str, doing: str = "") -> Iterator[None]:
    """Raise what a closed connection raises as the loss of the server, with what to do."""
    try:
        yield
    except GONE as error:
        why = f"{doing} cannot go on: {error}" if doing else str(error)
        raise ServerLost(
            f"the server at {address} is gone, or has given this worker up ({why}); if it does "
            "not run, start it again, from its last save; then start this worker"
        ) from error


class _Letters(Store):
    """A store of two: whatever one end sets is sent to the other."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a value, and send it."""
        text = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = text
        self._channel.send(key.encode() + b"\0" + text)

    def get(self, key: str) -> bytes:
        """Return a value as soon as it is there."""
        while key not in self._known:
            name, _, text = self._channel.receive().partition(b"\0")
            self._known[name.decode()] = text
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until values are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""
        return all(key in self._known for key in keys)

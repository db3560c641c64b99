"""A worker's way into a training: to the door, through it, and to the server's weights."""

import socket
import sys
import time
from contextlib import suppress
from typing import Any

from poise.core.liveness import Limits
from poise.environment import shared_secret
from poise.errors import InvalidSetting, ServerLost
from poise.runtime.channel import Channel
from poise.runtime.door import knock
from poise.runtime.pulse import Pulse
from poise.torch.asynchronous.facts import Given
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.link import Link, heard, server_needed
from poise.torch.asynchronous.messages import About, text_of
from poise.torch.asynchronous.parameters import everything
from poise.torch.devices import device_kind

_PATIENCE_S = 300.0
"""How long a server is waited for that does not listen yet."""
_AGAIN_S = 0.2
_SAY_S = 3.0
_CLOSED_S = 15.0
"""How long a server may hang up at once: it hears only so many at a time that it does not know."""
_ANSWER_S = 10.0
_LAST_PORT = 65535


class Joining:
    """A worker that has come through a server's door, and joins its training step by step."""

    def __init__(self, address: str, about: About, limits: Limits) -> None:
        """Knock at the server's door, which may not be there yet."""
        self.address = address
        self.link = Link(_let_in(address, about))
        self.link.channel.set_limit(max(limits.silent_s, _ANSWER_S))
        with server_needed(address):
            answer = self._heard()
        self.link.channel.set_limit(None)  # from here on, its signs of life tell
        self.worker = int(answer["worker"])
        """The number that the server gives to this worker."""
        self.ahead = bool(answer["ahead"])
        """Whether this worker is to compute while its push travels."""
        self._pulse = Pulse(limits)
        self._pulse.watch(self.link.channel, self._silent)

    def enter(self, given: Given) -> int:
        """Give models the server's values once it trains the same and has begun; return the epoch.

        Raises what the server says against it.
        """
        whole = Flat(everything(given.models))
        with server_needed(self.address):
            self.link.channel.tell({"facts": given.facts, "device": device_kind(given.device)})
            self._heard()  # it is accepted
            self.link.pair_up(server=False)
            epoch = int(self._heard()["epoch"])
            self.link.receive(whole.bytes)
        whole.write(everything(given.models))
        return epoch

    def leave(self) -> None:
        """Let go of the connection."""
        self._pulse.end()
        self.link.close()

    def _silent(self, why: str) -> None:
        """The server is lost: say so at once, since this worker may compute for long."""
        self.link.cut(why)
        with suppress(Exception):  # a disk may be full, or nobody read
            sys.stderr.write(f"poise: worker {self.worker}: the server at {self.address}: {why}\n")
            sys.stderr.flush()

    def _heard(self) -> dict[str, Any]:
        return heard(self.link.channel, f"the server at {self.address} refuses: ")


def _let_in(address: str, about: About) -> Channel:
    """Return a channel to a server that has let this worker in."""
    begin_s = time.monotonic()
    while True:
        end = _reached(address)
        try:
            return knock(end, shared_secret(), text_of(about))
        except ServerLost:
            if time.monotonic() - begin_s > _CLOSED_S:
                raise
            time.sleep(_AGAIN_S)


def _reached(address: str) -> socket.socket:
    """Return a connection with the server, which may not have started yet."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise InvalidSetting(f"POISE_SERVER={address!r} is no address; give host:port")
    host = host.removeprefix("[").removesuffix("]")
    begin_s = time.monotonic()
    said = False
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=10)
        except OSError as error:
            waited_s = time.monotonic() - begin_s
            if waited_s > _PATIENCE_S or isinstance(error, socket.gaierror):
                raise ServerLost(
                    f"no server can be reached at {address}: {error}; start `poise serve` there"
                ) from error
            if waited_s > _SAY_S and not said:
                said = True
                with suppress(OSError):  # stderr may be on a full disk
                    sys.stderr.write(f"poise: waiting for the server at {address}\n")
            time.sleep(_AGAIN_S)

"""Who may join a server: whoever speaks its protocol, knows its secret, and says who it is.

Both ends prove that they know the secret, by a keyed hash of two random numbers; it never travels.
Off loopback a secret is needed. Whoever sends something else is hung up on, and nobody else is
disturbed. What follows is not encrypted.
"""

import errno
import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from poise.errors import Disagreement, InvalidSetting, ServerLost
from poise.runtime.channel import GONE, Channel, keep_from_children
from poise.runtime.descriptors import OUT_OF_DESCRIPTORS, Reserve, why_full

MAGIC = b"poise-1\n"
_SHORT = 4096
"""Bytes of a text before the other end is known."""
_PATIENCE_S = 10.0
_STRANGERS = 64
"""Connections at a time that have not yet shown who they are."""
_AGAIN_S = 0.1
"""How long a door that cannot let anybody in waits until it tries again."""
_HEAR_OUT_S = 0.5
"""How long someone who cannot be let in may take to say its first words."""
_BROKEN = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
"""What accepting raises on a socket that listens no more."""
_log = logging.getLogger("poise")

About = TypeVar("About")
"""What a newcomer says of itself."""
Text = dict[str, Any]


class Door(Generic[About]):
    """Listens, and has whoever may join met in a thread of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes | None,
        read: Callable[[Text], About],
        meet: Callable[[Channel, About], None],
    ) -> None:
        """Listen.

        Args:
            host: the address to listen on.
            port: the port; 0: any that is free.
            secret: what whoever joins must know; None: nothing.
            read: returns what a newcomer's text says of it, or raises Disagreement.
            meet: is called with each newcomer, and returns when it has left.
        """
        self._listener = listening(host, port)
        keep_from_children(self._listener)
        self._secret = secret
        self._read = read
        self._meet = meet
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._threads: list[threading.Thread] = []
        self._channels: set[Channel] = set()
        self._closing = threading.Event()
        self._reserve = Reserve()
        self._thread = threading.Thread(target=self._accept, name="poise-door", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Host and port."""
        host, port, *_ = self._listener.getsockname()
        return f"{host}:{port}"

    def close(self, patience_s: float) -> None:
        """Let nobody in any more, hear nothing more, and let what is under way come to an end."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self._reserve.give()
        for channel in list(self._channels):
            channel.hang_up()
        for thread in self._threads:
            thread.join(patience_s)

    def _accept(self) -> None:
        """Accept connections until the door is closed.

        A shortage, such as of descriptors, passes. Whoever comes meanwhile is told of it, on the
        descriptor that is held in reserve.
        """
        said = False
        while not self._closing.is_set():
            try:
                end, _ = self._listener.accept()
                self._receive(end)
            except (OSError, RuntimeError) as error:
                if self._closing.is_set():
                    return
                if isinstance(error, OSError) and error.errno in _BROKEN:
                    _log.error("nobody can join any more: %s", error)
                    return
                if not said:
                    said = True
                    _log.warning("nobody can join at the moment: %s; training goes on", error)
                if not self._turn_away(error):
                    self._closing.wait(_AGAIN_S)
            else:
                self._reserve.take()
                if said:
                    said = False
                    _log.info("workers can join again")

    def _receive(self, end: socket.socket) -> None:
        """Hear a newcomer in a thread of its own, or raise."""
        if not self._strangers.acquire(blocking=False):
            end.close()
            return
        thread = threading.Thread(target=self._let_in, args=(end,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads
            self._strangers.release()
            end.close()
            raise
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _turn_away(self, error: OSError | RuntimeError) -> bool:
        """Tell one newcomer why it cannot come in now; False: nobody could be told."""
        if not isinstance(error, OSError) or error.errno not in OUT_OF_DESCRIPTORS:
            return False
        if not self._reserve.give():
            self._reserve.take()
            return False
        try:
            self._listener.settimeout(0.0)  # without a descriptor, accepting waits for nobody
            end, _ = self._listener.accept()
        except OSError:
            return False
        else:
            _hear_out(end, {"busy": why_full(error)})
            return True
        finally:
            with suppress(OSError):  # it may be closed meanwhile
                self._listener.settimeout(None)
            self._reserve.take()

    def _let_in(self, end: socket.socket) -> None:
        try:
            met = let_in(end, self._secret, self._read)
        finally:
            self._strangers.release()
        if met is None:
            return
        channel, about = met
        self._channels.add(channel)
        try:
            self._meet(channel, about)
        finally:
            self._channels.discard(channel)
            channel.close()


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or raise."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise InvalidSetting(
            f"the server cannot listen on {host}:{port}: {why}; choose another address or port"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def check_secret(host: str, secret: bytes | None) -> None:
    """Raise if others than this machine could join without a secret."""
    if secret is None and not is_loopback(host):
        raise InvalidSetting(
            f"the server is to listen on {host}, where other machines can reach it; set "
            "POISE_SECRET to the same words here and on every worker"
        )


def let_in(
    end: socket.socket, secret: bytes | None, read: Callable[[Text], About]
) -> tuple[Channel, About] | None:
    """Return a channel to a newcomer, and what it says of itself; None: it may not join."""
    channel = Channel(end)
    channel.set_deadline(_PATIENCE_S)
    with suppress(*GONE, ValueError, Disagreement):  # whatever it may send
        if channel.read(len(MAGIC)) == MAGIC and _is_proven(channel, secret):
            return channel, read(channel.hear(_SHORT))
    channel.close()
    return None


def knock(end: socket.socket, secret: bytes | None, about: Mapping[str, Any]) -> Channel:
    """Return a channel to a server, which is told what this worker says of itself; or raise."""
    channel = Channel(end)
    channel.set_deadline(_PATIENCE_S)
    try:
        end.sendall(MAGIC)
        _prove(channel, secret)
        channel.tell(about)
    except GONE as error:
        channel.close()
        raise ServerLost(f"whoever listens there is no server of Poise: {error}") from error
    except (Disagreement, ServerLost):
        channel.close()
        raise
    return channel


def _hear_out(end: socket.socket, answer: Text) -> None:
    """Answer someone who cannot be let in, and hang up."""
    with end, suppress(OSError):
        end.settimeout(_HEAR_OUT_S)
        Channel(end).tell(answer)
        end.shutdown(socket.SHUT_WR)
        end.recv(len(MAGIC))  # what is not read would take the answer back


def _is_proven(channel: Channel, secret: bytes | None) -> bool:
    """Ask a newcomer to prove that it knows the secret, and prove it in turn."""
    ours = secrets.token_hex(16)
    channel.tell({"nonce": ours, "secret": secret is not None})
    answer = channel.hear(_SHORT)
    theirs = str(answer.get("nonce", ""))
    proven = _same(_proof(secret, "worker", ours, theirs), _text(answer, "proof"))
    if proven:
        channel.tell({"proof": _proof(secret, "server", ours, theirs)})
    else:
        channel.tell({"refused": "POISE_SECRET is not the server's"})
    return proven


def _prove(channel: Channel, secret: bytes | None) -> None:
    """Prove to a server that this worker knows the secret, and raise unless it knows it, too."""
    asked = channel.hear(_SHORT)
    if "busy" in asked:
        raise ServerLost(f"the server cannot take another worker now: {asked['busy']}")
    if asked.get("secret") and secret is None:
        raise Disagreement("the server wants a secret; set POISE_SECRET as it is set there")
    if secret is not None and not asked.get("secret"):
        raise Disagreement("POISE_SECRET is set here, and the server has none; set it there")
    theirs, ours = _text(asked, "nonce"), secrets.token_hex(16)
    channel.tell({"nonce": ours, "proof": _proof(secret, "worker", theirs, ours)})
    answer = channel.hear(_SHORT)
    if "refused" in answer:
        raise Disagreement(f"the server refuses this worker: {answer['refused']}")
    if not _same(_proof(secret, "server", theirs, ours), _text(answer, "proof")):
        raise Disagreement("the server does not know POISE_SECRET; it may be another's")


def _proof(secret: bytes | None, who: str, server_nonce: str, worker_nonce: str) -> str:
    text = f"{who} {server_nonce} {worker_nonce}".encode()
    return hmac.new(secret or b"", text, hashlib.sha256).hexdigest()


def _same(proof: str, other: str) -> bool:
    return hmac.compare_digest(proof.encode(), other.encode())


def _text(message: Mapping[str, Any], key: str) -> str:
    found = message.get(key)
    if not isinstance(found, str):
        raise Disagreement(f"the other end left {key} out; it is no Poise, or of another version")
    return found

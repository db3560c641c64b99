"""What this machine can find out about its own addresses, and about the way to another machine.

No answer takes longer than a few seconds: names are looked up in a thread that may be left behind.
"""

import ctypes
import errno
import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from poise.core.reachability import (
    NO_ROUTE,
    OPEN,
    REFUSED,
    SILENT,
    UNRESOLVED,
    Addresses,
    Interface,
    Sight,
)
from poise.environment import gloo_interface
from poise.errors import InvalidSetting

CONNECT_S = 3.0
"""How long a connection may take; packets that are lost are sent again after 1 s and 3 s."""
_RESOLVE_S = 10.0
_MOST_ADDRESSES = 3
"""Of a host, that are tried in turn."""
_LAST_PORT = 65535
_SIOCGIFCONF = 0x8912
_ENTRY = 40
"""Bytes of the kernel's `struct ifreq` on 64-bit machines: a name of 16, and an address."""
_ENTRIES = 256


def host_and_port(text: str) -> tuple[str, int]:
    """Read HOST:PORT, or raise.

    >>> host_and_port("alpha:29500"), host_and_port("[fe80::1]:29500")
    (('alpha', 29500), ('fe80::1', 29500))
    """
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    digits = port.isascii() and port.isdecimal()
    if not bare or not digits or not 0 < int(port) <= _LAST_PORT:
        raise InvalidSetting(
            f"{text!r} is no HOST:PORT; give a host and a port from 1 to {_LAST_PORT}, such as "
            "10.0.0.1:29500"
        )
    return bare, int(port)


def own_addresses(source: str | None) -> Addresses:
    """Return the addresses of this machine.

    Args:
        source: its address on the way to the other machine; None: not known.
    """
    host = socket.gethostname()
    return Addresses(
        host=host,
        resolved=resolved(host),
        interfaces=interfaces(),
        chosen=gloo_interface(),
        source=source,
    )


def resolved(host: str) -> tuple[str, ...]:
    """Return the addresses of a host; none if it is unknown, or nobody answers in time."""
    answers: SimpleQueue[tuple[str, ...]] = SimpleQueue()
    Thread(target=lambda: answers.put(_resolve(host)), name="poise-names", daemon=True).start()
    with suppress(Empty):
        return answers.get(timeout=_RESOLVE_S)
    return ()


def source_toward(address: str) -> str | None:
    """Return this machine's own address on the way to another, or None; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # any port: connecting a datagram socket only asks for a route
        return str(probe.getsockname()[0])
    return None


def look_at(host: str, port: int) -> tuple[Sight, socket.socket | None]:
    """Try to connect; return what was seen, and the connection if there is one."""
    addresses = resolved(host)
    outcome = UNRESOLVED
    for address in addresses[:_MOST_ADDRESSES]:
        outcome, end = connect(address, port)
        if end is not None:
            return Sight(host=host, port=port, addresses=addresses, outcome=OPEN), end
    return Sight(host=host, port=port, addresses=addresses, outcome=outcome), None


def connect(address: str, port: int) -> tuple[str, socket.socket | None]:
    """Try to connect to an address; return how that ended, and the connection if there is one."""
    try:
        return OPEN, socket.create_connection((address, port), timeout=CONNECT_S)
    except TimeoutError:
        return SILENT, None
    except ConnectionError:
        return REFUSED, None
    except OSError as error:
        unanswered = error.errno == errno.ETIMEDOUT
        return (SILENT if unanswered else NO_ROUTE), None


def interfaces() -> tuple[Interface, ...]:
    """Return all addresses of this machine's interfaces that are up."""
    return (*_version_4(), *_version_6())


def _resolve(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown, or no name at all
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _version_4() -> tuple[Interface, ...]:
    """Ask the kernel, which answers with one entry per address; only Linux understands."""
    room = ctypes.create_string_buffer(_ENTRY * _ENTRIES)
    request = struct.pack("iP", len(room), ctypes.addressof(room))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, request)
        except OSError:
            return ()
    (length, _) = struct.unpack("iP", answer)
    entries = (room.raw[place : place + _ENTRY] for place in range(0, length, _ENTRY))
    return tuple(
        Interface(
            name=entry[:16].split(b"\0")[0].decode().split(":")[0],  # eth0:1 is of eth0
            address=socket.inet_ntoa(entry[20:24]),
        )
        for entry in entries
    )


def _version_6() -> tuple[Interface, ...]:
    """Read the kernel's list; link-local addresses, which need a zone to be used, are left out."""
    with suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        rows = [line.split() for line in lines]
        found = (
            Interface(
                name=row[-1], address=socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))
            )
            for row in rows
        )
        return tuple(each for each in found if not each.address.startswith("fe80:"))
    return ()

r"""Slow links: workers in network namespaces of their own, joined by a bridge in another one.

    worker 0: lab0, limited on its way out --- w0 \
    worker 1: lab0, limited on its way out --- w1 --- bridge
    worker 2: lab0, limited on its way out --- w2 /

A server has a namespace, too. Its own link has no limit; those of the workers are limited on
their way in as well, since weights come to them all from there.

The machine's own interfaces are left alone.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from poise.errors import InvalidSetting

INTERFACE = "lab0"
PORT = 29400
"""Any will do: nobody else lives in a new namespace."""

_RATE = re.compile(r"\d+(\.\d+)?(bit|kbit|mbit|gbit)")
_NONE = re.compile(r"0+(\.0+)?[a-z]+")
_BURST = "32kb"
_LATENCY = "200ms"


def parse_link(text: str, workers: int) -> tuple[str, ...]:
    """Return the rate of each worker; one that is given alone is for all.

    >>> parse_link("100mbit", 3)
    ('100mbit', '100mbit', '100mbit')
    """
    rates = tuple(rate.strip().lower() for rate in text.split(","))
    for rate in rates:
        if not _RATE.fullmatch(rate) or _NONE.fullmatch(rate):
            raise InvalidSetting(
                f"--link has {rate!r}; give a rate above 0 in bit, kbit, mbit or gbit, "
                "such as 100mbit"
            )
    if len(rates) not in (1, workers):
        raise InvalidSetting(
            f"--link has {len(rates)} rates for {workers} workers; give one for all or one each"
        )
    return rates * workers if len(rates) == 1 else rates


def check_privileges() -> None:
    """Raise unless namespaces can be made here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise InvalidSetting(
            f"--link needs {' and '.join(missing)}, not found here; install iproute2, "
            "or leave --link out"
        )
    if os.geteuid() != 0:
        raise InvalidSetting(
            "--link needs root to make network namespaces; run as root, or leave --link out"
        )


@dataclass(frozen=True)
class Network:
    """The namespaces of one lab, by names that begin with the lab's."""

    lab: str
    rates: Sequence[str]
    """Of each worker."""
    has_server: bool

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All names: the hub, one per worker, and the server's."""
        return (self._hub, *(self._namespace(place) for place in range(self._places)))

    @property
    def server_host(self) -> str:
        """The address by which workers reach a server, whose place is after all of theirs."""
        return _address(len(self.rates))

    def build(self) -> None:
        """Make the namespaces and the links."""
        _run(f"ip netns add {self._hub}")
        _run(f"ip -n {self._hub} link add hub type bridge")
        _run(f"ip -n {self._hub} link set hub up")
        for place in range(self._places):
            self._join(place)
        for worker, rate in enumerate(self.rates):
            _limit(self._namespace(worker), INTERFACE, rate)
            if self.has_server:
                _limit(self._hub, _port(worker), rate)

    def environment(self) -> dict[str, str]:
        """Return the variables by which workers find each other."""
        return {
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def inside(self, place: int) -> list[str]:
        """Return what stands before a command to run it in a worker's namespace, or a server's."""
        return ["ip", "netns", "exec", self._namespace(place)]

    @property
    def _places(self) -> int:
        return len(self.rates) + self.has_server

    @property
    def _hub(self) -> str:
        return f"{self.lab}-hub"

    def _namespace(self, place: int) -> str:
        return f"{self.lab}-{place}"

    def _join(self, place: int) -> None:
        own, port = self._namespace(place), _port(place)
        _run(f"ip netns add {own}")
        _run(f"ip -n {self._hub} link add {port} type veth peer name {INTERFACE} netns {own}")
        _run(f"ip -n {self._hub} link set {port} master hub up")
        _run(f"ip -n {own} addr add {_address(place)}/16 dev {INTERFACE}")
        _run(f"ip -n {own} link set {INTERFACE} up")
        _run(f"ip -n {own} link set lo up")


def _limit(namespace: str, interface: str, rate: str) -> None:
    """Have an interface send no faster."""
    queue = f"tbf rate {rate} burst {_BURST} latency {_LATENCY}"
    _run(f"tc -n {namespace} qdisc add dev {interface} root {queue}")


def _port(place: int) -> str:
    """Return what the hub calls its end of a link."""
    return f"w{place}"


def _address(place: int) -> str:
    return f"10.77.{place // 250}.{place % 250 + 1}"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InvalidSetting(
            f"`{command}` failed ({done.stderr.strip()}), but --link needs it; "
            "allow network namespaces and the tbf queue here, or leave --link out"
        )

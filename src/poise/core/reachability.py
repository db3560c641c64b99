"""Whether workers on several machines can reach each other, from what one machine knows.

Workers meet at one address, worker 0's. There each leaves the address at which gloo listens, and
the others connect to that, on any port. So two things must be right: the way to worker 0, and the
address that each machine gives of itself.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

UNRESOLVED, OPEN, REFUSED, SILENT, NO_ROUTE = "unresolved", "open", "refused", "silent", "no route"
"""How an attempt to connect ends."""
_REMOTE = re.compile(r"remote=\[([^\]]+)\]:(\d+)")
"""How gloo names the worker that it could not connect to."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """An address of a network interface."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """What a machine knows of its own addresses."""

    host: str
    """Its name."""
    resolved: tuple[str, ...] = ()
    """What its name resolves to there; empty: nothing."""
    interfaces: tuple[Interface, ...] = ()
    chosen: str | None = None
    """GLOO_SOCKET_IFNAME, if set."""
    source: str | None = None
    """Its own address on the way to the other machine; None: there is no way."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one machine sees of an address where another is to listen."""

    host: str
    port: int
    addresses: tuple[str, ...] = ()
    """What the host resolves to here; empty: nothing."""
    outcome: str = UNRESOLVED
    """How an attempt to connect ended."""

    @property
    def where(self) -> str:
        """Host and port, as they are typed.

        >>> Sight(host="alpha", port=29500).where, Sight(host="fd00::1", port=29500).where
        ('alpha:29500', '[fd00::1]:29500')
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def is_loopback(address: str) -> bool:
    """Whether an address leads every machine to itself.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("alpha")
    (True, False, False)
    """
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_own(own: Addresses, address: str) -> bool:
    """Whether an address belongs to this machine."""
    return is_loopback(address) or interface_of(own, address) is not None


def interface_of(own: Addresses, address: str | None) -> str | None:
    """Return the name of the interface with an address, or None."""
    return next((each.name for each in own.interfaces if each.address == address), None)


def published(own: Addresses) -> str | None:
    """Return the address that gloo gives to other workers; None: it finds none, and fails.

    It takes the interface in GLOO_SOCKET_IFNAME. Without one it takes what the machine's own name
    resolves to, and the loopback address if that is not an address of the machine.

    >>> published(Addresses(host="alpha", resolved=("127.0.1.1",)))
    '127.0.1.1'
    """
    if own.chosen is not None:
        first = own.chosen.split(",")[0]
        return next((each.address for each in own.interfaces if each.name == first), None)
    usable = [address for address in own.resolved if is_own(own, address)]
    return usable[0] if usable else "127.0.0.1"


def publishing_problem(own: Addresses) -> str | None:
    """Say why others cannot use the address that a machine gives them, and what to set.

    >>> eth0 = Interface(name="eth0", address="10.0.0.2")
    >>> wrong = Addresses(host="beta", interfaces=(eth0,), chosen="eth1")
    >>> print(publishing_problem(wrong))
    GLOO_SOCKET_IFNAME=eth1 on beta is no interface with an address; set GLOO_SOCKET_IFNAME=eth0
    """
    address = published(own)
    if address is None:
        return (
            f"GLOO_SOCKET_IFNAME={own.chosen} on {own.host} is no interface with an address; "
            f"set {_interface_setting(own)}"
        )
    if not is_loopback(address):
        return None
    return (
        f"{own.host} gives the other workers {address} as its address, which leads each of them "
        f"to itself: {_why_loopback(own, address)}; set {_interface_setting(own)} on {own.host}"
    )


def other_interface(own: Addresses) -> str | None:
    """Return the interface that leads to the others, if the address given to them is another's.

    >>> eth0, eth1 = (Interface(name=f"eth{n}", address=f"10.0.{n}.2") for n in range(2))
    >>> own = Addresses(host="beta", interfaces=(eth0, eth1), chosen="eth1", source="10.0.0.2")
    >>> other_interface(own)
    'eth0'
    """
    given, way = published(own), interface_of(own, own.source)
    if given is None or own.source is None or is_loopback(given) or is_loopback(own.source):
        return None
    return way if interface_of(own, given) not in (None, way) else None


def sight_problem(own: Addresses, sight: Sight) -> str | None:
    """Say why worker 0 cannot be reached at an address, and what to do; None: it can.

    >>> print(sight_problem(Addresses(host="beta"), Sight(host="alpa", port=29500)))
    alpa cannot be resolved on beta; give worker 0's address instead, or add its name to /etc/hosts
    """
    here, where = own.host, sight.where
    if sight.outcome == UNRESOLVED:
        return (
            f"{sight.host} cannot be resolved on {here}; give worker 0's address instead, or add "
            "its name to /etc/hosts"
        )
    if misled := _misled(own, sight):
        return misled
    return {
        REFUSED: f"{where} refuses connections: nothing listens there, or a firewall rejects them; "
        "start worker 0 first, and check its address and port",
        SILENT: f"{where} does not answer: a firewall drops the packets, or the machine is off; "
        f"let {here} reach port {sight.port} there",
        NO_ROUTE: f"{here} has no route to {where}: no interface leads there, or nobody has that "
        "address; check the address and the network",
    }.get(sight.outcome)


def why_not_met(own: Addresses, sight: Sight, error: str, *, several_machines: bool) -> str | None:
    """Return the likely reason why a worker could not meet the others, with its cure, or None.

    Args:
        own: the addresses of the worker's machine.
        sight: what it sees of worker 0's address, after the error.
        error: what gloo or the store said.
        several_machines: whether some workers are on other machines.
    """
    if not several_machines:
        return None
    # After an error, nobody may listen any more who did before: that is said last.
    way = _misled(own, sight) if sight.outcome == REFUSED else sight_problem(own, sight)
    given = "; ".join(filter(None, (publishing_problem(own), _remote_problem(own, error))))
    return way or given or (_no_longer_there(sight) if sight.outcome == REFUSED else None)


def _remote_problem(own: Addresses, error: str) -> str | None:
    """Say why gloo could not connect to an address that another worker gave."""
    remote = _REMOTE.search(error)
    if remote is None:
        return None
    address, port = remote.groups()
    if is_loopback(address):
        return (
            f"another worker gives {address} as its address, which leads to {own.host} itself; "
            "on its machine, set GLOO_SOCKET_IFNAME to its interface on the network that joins the "
            "machines"
        )
    return (
        f"{own.host} cannot connect to port {port} of {address}; gloo listens on any free port, so "
        "have firewalls allow all ports between the workers' machines"
    )


def _no_longer_there(sight: Sight) -> str:
    return (
        f"nothing listens at {sight.where} now: worker 0 has not started, or has "
        "failed and says why, or the port is another one"
    )


def _misled(own: Addresses, sight: Sight) -> str | None:
    """Say when a name leads to this machine and means another one."""
    stated_so = sight.host in ("localhost", own.host) or is_loopback(sight.host)
    if stated_so or not sight.addresses or not all(map(is_loopback, sight.addresses)):
        return None
    return (
        f"{sight.host} resolves to {sight.addresses[0]} on {own.host}, which leads to {own.host} "
        f"itself; correct the line of {sight.host} in its /etc/hosts, or give worker 0's address "
        "instead of its name"
    )


def _why_loopback(own: Addresses, address: str) -> str:
    if own.chosen is not None:
        return f"GLOO_SOCKET_IFNAME={own.chosen} is its loopback interface"
    if address in own.resolved:
        return "its own name resolves to that, as a line in its /etc/hosts says"
    return "its own name does not resolve to an address of its own"


def _interface_setting(own: Addresses) -> str:
    """Name the interface that leads to the others, or all that may."""
    if own.source is not None and not is_loopback(own.source):
        name = interface_of(own, own.source)
        if name is not None:
            return f"GLOO_SOCKET_IFNAME={name}"
    return f"GLOO_SOCKET_IFNAME={_any_of(own.interfaces)}"


def _any_of(interfaces: Sequence[Interface]) -> str:
    """Name the interfaces that are not loopback, each with its address if there are several.

    >>> _any_of([Interface(name="lo", address="127.0.0.1")])
    'the interface that leads to the others'
    """
    outward = [each for each in interfaces if not is_loopback(each.address)]
    if len({each.name for each in outward}) == 1:
        return outward[0].name
    listed = [f"{each.name} ({each.address})" for each in outward]
    return " or ".join(listed) or "the interface that leads to the others"

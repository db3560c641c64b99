"""What two machines tell of each other before they train together, and what to change: pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from poise.cli.doctor_facts import CLOCKS_S, is_same_release
from poise.core.reachability import (
    NO_ROUTE,
    OPEN,
    REFUSED,
    SILENT,
    Addresses,
    Sight,
    interface_of,
    is_loopback,
    other_interface,
    published,
    publishing_problem,
    sight_problem,
)

BUCKET_BYTES = 25_000_000
"""What DistributedDataParallel reduces at once."""
STRANGER = "stranger"
"""Somebody else answered than the machine that was called."""
_SLOW_BUCKET_S = 2.5
"""How long a bucket may take on its way before a link counts as slow."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one machine says of itself."""

    versions: Mapping[str, str]
    addresses: Addresses

    @property
    def host(self) -> str:
        """Its name."""
        return self.addresses.host


@dataclass(frozen=True, kw_only=True)
class Link:
    """What two machines measured between them."""

    latency_s: float
    """Median time from a question to its answer."""
    clock_s: float
    """By how much the first machine's clock is ahead of the second's."""
    clock_error_s: float
    to_first: float
    """Bytes per second from the second machine to the first."""
    to_second: float
    call_first: str | None = None
    """How the second machine's call to the address that the first gives to gloo ended; None: both
    are one machine, and there was no call."""
    call_second: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.latency_s, self.clock_s, self.clock_error_s, self.to_first, self.to_second)
        if not all(map(math.isfinite, numbers)) or min(self.to_first, self.to_second) <= 0:
            raise ValueError(f"{numbers} are no measurements of a link")


@dataclass(frozen=True)
class Finding:
    """Something to change; with a problem, training does not start."""

    text: str
    is_problem: bool = False


def findings_alone(own: Addresses, sight: Sight, refusal: Finding | None) -> list[Finding]:
    """Return what one machine finds without a doctor at the other end.

    Args:
        own: its addresses.
        sight: what it sees of the other.
        refusal: why whoever listens there did not answer as a doctor, if somebody listens.
    """
    found = [_problem(sight_problem(own, sight))]
    if not is_here(own, sight):
        found += [_problem(publishing_problem(own)), _warning(_other_network(own, sight.host))]
    found.append(refusal)
    if sight.outcome in (REFUSED, SILENT):
        found.append(_warning(_invitation(sight)))
    return [each for each in found if each is not None]


def findings_together(first: Machine, second: Machine, link: Link) -> list[Finding]:
    """Return what two machines find; the first is the one where worker 0 is to listen."""
    found: list[Finding | None] = []
    if link.call_first is not None and link.call_second is not None:
        ends = ((first, second, link.call_first), (second, first, link.call_second))
        for own, other, call in ends:
            found += _call_findings(own, other, call)
    found += [_warning(text) for text in _version_warnings(first, second)]
    found += [_warning(_clock_warning(first, second, link)), _warning(_rate_warning(link))]
    return [each for each in found if each is not None]


def is_here(own: Addresses, sight: Sight) -> bool:
    """Whether the address is one of this machine's own."""
    if sight.host in ("localhost", own.host) or is_loopback(sight.host):
        return True
    mine = {each.address for each in own.interfaces if not is_loopback(each.address)}
    return not mine.isdisjoint(sight.addresses)


def bucket_s(link: Link) -> float:
    """Return how long a bucket takes between two workers, each of which sends as much."""
    return BUCKET_BYTES / min(link.to_first, link.to_second)


def _call_findings(own: Machine, other: Machine, call: str) -> Iterator[Finding | None]:
    """Say whether a machine can be called at the address that it gives."""
    given, addresses = published(own.addresses), own.addresses
    ending = _ENDINGS.get(call, call)
    if problem := publishing_problem(addresses):
        yield _problem(problem)
    elif call == OPEN:
        return
    elif way := other_interface(addresses):
        yield _problem(
            f"{own.host} gives the other workers {given} ({interface_of(addresses, given)}) as its "
            f"address, which {other.host} cannot reach ({ending}); set GLOO_SOCKET_IFNAME={way} on "
            f"{own.host}, the interface that leads to {other.host}"
        )
    else:
        yield _problem(
            f"{other.host} cannot connect to {given} on a port that {own.host} opened for it "
            f"({ending}); gloo listens on any free port, so have the firewall of {own.host} allow "
            f"all ports from {other.host}"
        )


_ENDINGS = {
    REFUSED: "it was refused",
    SILENT: "there was no answer",
    NO_ROUTE: "there is no route",
    STRANGER: "somebody else answered",
}


def _other_network(own: Addresses, toward: str) -> str | None:
    way, given = other_interface(own), published(own)
    if way is None:
        return None
    return (
        f"{own.host} gives the other workers {given} ({interface_of(own, given)}) as its address, "
        f"but reaches {toward} through {way}; if they cannot reach {given}, set "
        f"GLOO_SOCKET_IFNAME={way} on {own.host}"
    )


def _version_warnings(first: Machine, second: Machine) -> Iterator[str]:
    for name, version in second.versions.items():
        known = first.versions.get(name)
        if not is_same_release(version, known):
            yield (
                f"{name} is {version} on {second.host} and {known} on {first.host}; install the "
                "same version on both"
            )


def _clock_warning(first: Machine, second: Machine, link: Link) -> str | None:
    if abs(link.clock_s) - link.clock_error_s <= CLOCKS_S:
        return None
    ahead, behind = (first, second) if link.clock_s > 0 else (second, first)
    return (
        f"the clock of {ahead.host} is {abs(link.clock_s):.1f} s ahead of that of {behind.host}; "
        "set both by NTP (timedatectl set-ntp true): torchrun's c10d rendezvous takes a machine "
        "whose clock is 15 s behind for dead"
    )


def _rate_warning(link: Link) -> str | None:
    took_s = bucket_s(link)
    if took_s <= _SLOW_BUCKET_S:
        return None
    return (
        f"the link is slow: {BUCKET_BYTES // 1_000_000} MB of gradients take {took_s:.1f} s; use a "
        'faster one, send half with comm_hook=fp16_compress_hook, or train with mode="async"'
    )


def _invitation(sight: Sight) -> str:
    return (
        "versions, clocks and the link were not compared, since no doctor answers there; run "
        f"`poise doctor --listen {sight.where}` on that machine first"
    )


def _problem(text: str | None) -> Finding | None:
    return None if text is None else Finding(text, is_problem=True)


def _warning(text: str | None) -> Finding | None:
    return None if text is None else Finding(text)

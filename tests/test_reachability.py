"""What is wrong between two machines, from what they say of themselves."""

from dataclasses import replace

import pytest

from poise.cli.doctor_machines import (
    STRANGER,
    Finding,
    Link,
    Machine,
    findings_alone,
    findings_together,
)
from poise.core.reachability import (
    NO_ROUTE,
    OPEN,
    REFUSED,
    SILENT,
    Addresses,
    Interface,
    Sight,
    published,
    publishing_problem,
    sight_problem,
    why_not_met,
)

LO = Interface(name="lo", address="127.0.0.1")
ETH0 = Interface(name="eth0", address="10.0.0.2")
WLAN0 = Interface(name="wlan0", address="192.168.7.5")
GOOD = Addresses(host="beta", resolved=("10.0.0.2",), interfaces=(LO, ETH0), source="10.0.0.2")
DEBIAN = replace(GOOD, resolved=("127.0.1.1",))
TWO_NETWORKS = replace(GOOD, resolved=("192.168.7.5",), interfaces=(LO, WLAN0, ETH0))
SEEN = Sight(host="alpha", port=29500, addresses=("10.0.0.1",), outcome=OPEN)
LINK = Link(
    latency_s=1e-4,
    clock_s=0.0,
    clock_error_s=1e-4,
    to_first=1e8,
    to_second=1e8,
    call_first=OPEN,
    call_second=OPEN,
)
VERSIONS = {"Python": "3.11.7", "torch": "2.13.0"}
FIRST = Machine(
    versions=VERSIONS, addresses=replace(GOOD, host="alpha", interfaces=(LO, ETH0, WLAN0))
)
SECOND = Machine(versions=VERSIONS, addresses=GOOD)
REFUSED_BY_LOOPBACK = "timed out connecting: Connection refused, remote=[127.0.1.1]:36761$0"


@pytest.mark.parametrize(
    ("own", "address"),
    [
        (GOOD, "10.0.0.2"),
        (DEBIAN, "127.0.1.1"),
        (replace(DEBIAN, chosen="eth0"), "10.0.0.2"),
        (replace(DEBIAN, chosen="eth0,wlan0"), "10.0.0.2"),
        (replace(DEBIAN, chosen="eth7"), None),
        (replace(GOOD, resolved=()), "127.0.0.1"),
        (replace(GOOD, resolved=("10.9.9.9",)), "127.0.0.1"),
        (replace(GOOD, resolved=("10.9.9.9", "10.0.0.2")), "10.0.0.2"),
    ],
)
def test_the_address_is_the_one_that_gloo_gives(own: Addresses, address: str | None) -> None:
    assert published(own) == address


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (DEBIAN, "its own name resolves to that, as a line in its /etc/hosts says"),
        (replace(GOOD, resolved=()), "its own name does not resolve to an address of its own"),
        (replace(GOOD, chosen="lo"), "GLOO_SOCKET_IFNAME=lo is its loopback interface"),
        (replace(GOOD, chosen="eth7"), "GLOO_SOCKET_IFNAME=eth7 on beta is no interface"),
    ],
)
def test_an_address_of_no_use_to_others_names_cause_and_cure(own: Addresses, said: str) -> None:
    text = publishing_problem(own)
    assert text is not None
    assert said in text
    assert "set GLOO_SOCKET_IFNAME=eth0" in text
    assert publishing_problem(GOOD) is None


def test_interfaces_are_listed_where_none_is_known_to_lead_to_the_others() -> None:
    lost = replace(DEBIAN, interfaces=(LO, ETH0, WLAN0), source=None)
    text = publishing_problem(lost)
    assert text is not None
    assert "set GLOO_SOCKET_IFNAME=eth0 (10.0.0.2) or wlan0 (192.168.7.5) on beta" in text


@pytest.mark.parametrize(
    ("sight", "said"),
    [
        (Sight(host="alpha", port=29500), "alpha cannot be resolved on beta"),
        (replace(SEEN, outcome=REFUSED), "refuses connections: nothing listens there"),
        (replace(SEEN, outcome=SILENT), "does not answer: a firewall drops the packets"),
        (replace(SEEN, outcome=NO_ROUTE), "beta has no route to alpha:29500"),
        (replace(SEEN, addresses=("127.0.1.1",)), "alpha resolves to 127.0.1.1 on beta"),
    ],
)
def test_what_is_wrong_with_the_way_is_said(sight: Sight, said: str) -> None:
    text = sight_problem(GOOD, sight)
    assert text is not None
    assert said in text
    assert sight_problem(GOOD, SEEN) is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "beta"])
def test_a_machine_may_mean_itself(host: str) -> None:
    sight = replace(SEEN, host=host, addresses=("127.0.1.1",))
    assert sight_problem(DEBIAN, sight) is None
    assert findings_alone(DEBIAN, sight, None) == []


@pytest.mark.parametrize(
    ("own", "sight", "error", "said"),
    [
        (DEBIAN, SEEN, "timeout", "set GLOO_SOCKET_IFNAME=eth0 on beta"),
        (DEBIAN, replace(SEEN, outcome=REFUSED), "", "set GLOO_SOCKET_IFNAME=eth0 on beta"),
        (GOOD, SEEN, REFUSED_BY_LOOPBACK, "another worker gives 127.0.1.1 as its address"),
        (DEBIAN, SEEN, REFUSED_BY_LOOPBACK, "on beta; another worker gives 127.0.1.1"),
        (GOOD, SEEN, "timed out, remote=[10.0.0.7]:36761$0", "connect to port 36761 of 10.0.0.7"),
        (DEBIAN, replace(SEEN, outcome=SILENT), "", "alpha:29500 does not answer"),
        (GOOD, replace(SEEN, outcome=REFUSED), "", "nothing listens at alpha:29500 now"),
        (GOOD, Sight(host="alpha", port=29500), "", "alpha cannot be resolved on beta"),
    ],
)
def test_who_could_not_meet_the_others_is_told_why(
    own: Addresses, sight: Sight, error: str, said: str
) -> None:
    text = why_not_met(own, sight, error, several_machines=True)
    assert text is not None
    assert said in text


def test_nothing_is_made_up_where_all_looks_well() -> None:
    assert why_not_met(GOOD, SEEN, "a worker died", several_machines=True) is None
    assert why_not_met(DEBIAN, SEEN, REFUSED_BY_LOOPBACK, several_machines=False) is None


def texts(findings: list[Finding], *, problems: bool) -> list[str]:
    return [each.text for each in findings if each.is_problem is problems]


def test_two_machines_that_are_alike_are_well() -> None:
    assert findings_together(FIRST, SECOND, LINK) == []


@pytest.mark.parametrize(
    ("second", "link", "said"),
    [
        (replace(SECOND, versions={**VERSIONS, "torch": "2.15.0"}), LINK, "torch is 2.15.0 on"),
        (replace(SECOND, versions={**VERSIONS, "torch": "not installed"}), LINK, "not installed"),
        (SECOND, replace(LINK, clock_s=-20.0), "clock of beta is 20.0 s ahead of that of alpha"),
        (SECOND, replace(LINK, to_second=8_000.0), "25 MB of gradients take 3125.0 s"),
    ],
)
def test_a_difference_between_machines_is_warned_of(second: Machine, link: Link, said: str) -> None:
    found = findings_together(FIRST, second, link)
    assert texts(found, problems=True) == []
    (text,) = texts(found, problems=False)
    assert said in text


def test_builds_of_torch_may_differ() -> None:
    first = replace(FIRST, versions={**VERSIONS, "torch": "2.13.0+cu130"})
    second = replace(SECOND, versions={**VERSIONS, "torch": "2.13.0+cpu"})
    assert findings_together(first, second, LINK) == []


def test_a_clock_is_not_blamed_for_a_slow_answer() -> None:
    slow = replace(LINK, clock_s=1.5, clock_error_s=1.0)
    assert findings_together(FIRST, SECOND, slow) == []


@pytest.mark.parametrize("call", [REFUSED, SILENT, STRANGER])
def test_a_call_that_does_not_arrive_is_a_problem(call: str) -> None:
    found = findings_together(FIRST, SECOND, replace(LINK, call_second=call))
    (text,) = texts(found, problems=True)
    assert "alpha cannot connect to 10.0.0.2" in text
    assert "firewall of beta allow all ports from alpha" in text


def test_a_call_to_the_wrong_network_names_the_interface() -> None:
    second = replace(SECOND, addresses=TWO_NETWORKS)
    (text,) = texts(
        findings_together(FIRST, second, replace(LINK, call_second=SILENT)), problems=True
    )
    assert "192.168.7.5 (wlan0) as its address, which alpha cannot reach" in text
    assert "set GLOO_SOCKET_IFNAME=eth0 on beta" in text
    assert findings_together(FIRST, second, LINK) == [], "the call arrived"
    (alone,) = findings_alone(TWO_NETWORKS, SEEN, None)
    assert "if they cannot reach 192.168.7.5" in alone.text
    assert not alone.is_problem


def test_both_machines_are_told_when_both_give_a_loopback_address() -> None:
    first = replace(FIRST, addresses=replace(DEBIAN, host="alpha"))
    second = replace(SECOND, addresses=DEBIAN)
    link = replace(LINK, call_first=REFUSED, call_second=REFUSED)
    found = texts(findings_together(first, second, link), problems=True)
    assert [text.rpartition("; ")[2] for text in found] == [
        "set GLOO_SOCKET_IFNAME=eth0 on alpha",
        "set GLOO_SOCKET_IFNAME=eth0 on beta",
    ]


def test_one_machine_alone_says_what_it_did_not_compare() -> None:
    refused = findings_alone(GOOD, replace(SEEN, outcome=REFUSED), None)
    assert [each.is_problem for each in refused] == [True, False]
    assert "poise doctor --listen alpha:29500" in refused[1].text
    refusal = Finding("alpha:29500 is open, but no doctor answers there")
    assert findings_alone(GOOD, SEEN, refusal) == [refusal]

"""`poise doctor HOST:PORT` and `--listen`: what lies between two machines that are to train."""

import socket
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from poise.cli.doctor_machines import (
    BUCKET_BYTES,
    Finding,
    Link,
    Machine,
    bucket_s,
    findings_alone,
    findings_together,
)
from poise.cli.doctor_meeting import Listener, Meeting, this_machine, visit
from poise.core.reachability import OPEN, Addresses, Sight, interface_of, is_loopback, published
from poise.environment import shared_secret
from poise.errors import Disagreement, ServerLost, StateMismatch
from poise.runtime.channel import GONE
from poise.runtime.door import check_secret
from poise.runtime.reaching import look_at, source_toward

_EVERYWHERE = ("0.0.0.0", "::")
_PROBLEMS = 1


def listen(host: str, port: int) -> int:
    """Wait for the doctor of another machine, and print what both found; 1 if training would fail.

    Args:
        host: the address to listen on, where worker 0 is going to.
        port: the port.
    """
    console = Console(highlight=False)
    secret = shared_secret()
    check_secret(host, secret)
    listener = Listener(host, port, secret)
    try:
        _say_where(console, host, listener.address)
        while isinstance(visited := listener.next_visit(), str):
            console.print(f"[bold yellow]warning[/] {escape(visited)}", soft_wrap=True)
    finally:
        listener.close()
    return _print_meeting(console, visited)


def examine(host: str, port: int) -> int:
    """Print what lies between this machine and HOST:PORT; 1 if training would fail."""
    console = Console(highlight=False)
    with console.status(f"Looking at port {port} of {escape(host)} ..."):
        sight, end = look_at(host, port)
        found = None if end is None else _visit(end, sight.where)
    if isinstance(found, Meeting):
        return _print_meeting(console, found)
    source = source_toward(sight.addresses[0]) if sight.addresses else None
    return _print_alone(console, this_machine(source), sight, found)


def _visit(end: socket.socket, where: str) -> Meeting | Finding:
    """Return what this machine finds together with a doctor at the other end, or why it cannot."""
    try:
        return visit(end, shared_secret())
    except (Disagreement, StateMismatch) as error:
        text = f"{where} is open, but its doctor could not be asked: {error}"
        return Finding(text, is_problem=True)
    except (*GONE, ServerLost):
        return Finding(
            f"{where} is open, but no doctor answers there, perhaps since a training runs; "
            "versions, clocks and the link were not compared: stop what listens, and run "
            f"`poise doctor --listen {where}` there"
        )
    finally:
        end.close()


def _say_where(console: Console, host: str, address: str) -> None:
    bound, _, port = address.rpartition(":")
    reached = f"ADDRESS-OF-THIS-MACHINE:{port}" if bound in _EVERYWHERE else address
    console.print(
        f"listening at {address}; on the other machine, run: poise doctor {reached}",
        soft_wrap=True,
    )
    if is_loopback(bound):
        why = "" if host == bound else f", since {host} resolves to it here"
        console.print(
            f"[bold yellow]warning[/] only this machine reaches {bound}{why}; for others, give "
            "--listen ADDRESS:PORT with its address on their network",
            soft_wrap=True,
        )


def _print_meeting(console: Console, meeting: Meeting) -> int:
    first, second, link = meeting.first, meeting.second, meeting.link
    table = Table("", "first machine", "second machine", title="Machines", title_justify="left")
    columns = [_facts(machine) for machine in (first, second)]
    for name in columns[0]:
        table.add_row(name, *(escape(column.get(name, "not known")) for column in columns))
    console.print(table)
    console.print(_link_table(first, second, link))
    return _print_verdict(console, findings_together(first, second, link))


def _print_alone(console: Console, own: Machine, sight: Sight, refusal: Finding | None) -> int:
    table = Table("", "this machine", title="Machine", title_justify="left")
    for name, value in _facts(own).items():
        table.add_row(name, escape(value))
    console.print(table)
    table = Table("", escape(sight.where), title="The other", title_justify="left")
    table.add_row("resolves to", escape(", ".join(sight.addresses) or "nothing"))
    table.add_row("connection", "open" if sight.outcome == OPEN else sight.outcome)
    console.print(table)
    return _print_verdict(console, findings_alone(own.addresses, sight, refusal))


def _facts(machine: Machine) -> dict[str, str]:
    own = machine.addresses
    return {
        "host": machine.host,
        **machine.versions,
        "its name resolves to": ", ".join(own.resolved) or "nothing",
        "GLOO_SOCKET_IFNAME": own.chosen or "not set",
        "address it gives to workers": _with_interface(own, published(own)),
        "its way to the other": _with_interface(own, own.source),
    }


def _with_interface(own: Addresses, address: str | None) -> str:
    name = interface_of(own, address)
    return "none" if address is None else f"{address} ({name})" if name else address


def _link_table(first: Machine, second: Machine, link: Link) -> Table:
    table = Table("", "measured", title="Between them", title_justify="left")
    table.add_row("latency, there and back", f"{link.latency_s * 1e3:.3g} ms")
    table.add_row("first clock minus second", f"{link.clock_s * 1e3:+.3g} ms")
    table.add_row("second to first", f"{link.to_first / 1e6:,.3g} MB/s")
    table.add_row("first to second", f"{link.to_second / 1e6:,.3g} MB/s")
    size = f"{BUCKET_BYTES // 1_000_000} MB of gradients"
    table.add_row(size, f"{bucket_s(link) * 1e3:,.3g} ms")
    if link.call_first is not None and link.call_second is not None:
        table.add_row(f"call from {second.host} to {first.host}", escape(link.call_first))
        table.add_row(f"call from {first.host} to {second.host}", escape(link.call_second))
    return table


def _print_verdict(console: Console, findings: Sequence[Finding]) -> int:
    for each in sorted(findings, key=lambda finding: not finding.is_problem):
        label = "[bold red]problem[/]" if each.is_problem else "[bold yellow]warning[/]"
        console.print(f"{label} {escape(each.text)}", soft_wrap=True)
    problems = sum(each.is_problem for each in findings)
    if problems:
        noun = "problem" if problems == 1 else "problems"
        console.print(f"[bold red]{problems} {noun}[/]: training between these machines would fail")
        return _PROBLEMS
    console.print("[bold green]all well[/]" if not findings else "[bold]no problem[/]; see above")
    return 0

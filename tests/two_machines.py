"""Two machines for tests: linked network namespaces with host names and /etc/hosts of their own.

As on Debian, the name of each machine resolves to 127.0.1.1 on itself, and to its address on the
other one.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from poise.lab.leftovers import lab_name
from tests.machine import namespaces_work

ADDRESSES = {"alpha": "10.0.0.1", "beta": "10.0.0.2"}
INTERFACE = "eth0"
LIMIT_S = 120.0
_INSIDE = 'hostname "$0" && mount --bind hosts /etc/hosts && exec bash -c "$1"'
_NUMBER = 97
"""Not that of a lab in the same process; a lab removes what a test that was ended left behind."""

needs_two_machines = pytest.mark.skipif(
    not namespaces_work() or shutil.which("unshare") is None,
    reason="needs root, iproute2 and unshare",
)


@dataclass
class TwoMachines:
    """Alpha and beta, each with a directory of its own."""

    directory: Path
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def home(self, host: str) -> Path:
        return self.directory / host

    def namespace(self, host: str) -> str:
        return f"{lab_name(_NUMBER)}-{host}"

    def start(
        self, host: str, script: str, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Run lines of bash on a machine, in its directory."""
        beside = str(Path(sys.executable).parent)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("POISE_", "GLOO_"))}
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.namespace(host)),
                *("unshare", "--uts", "--mount", "sh", "-c", _INSIDE, host, f"set -e\n{script}"),
            ],
            cwd=self.home(host),
            env={
                **inherited,
                "PATH": f"{beside}:{inherited['PATH']}",
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "120",
                **(environment or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(self, command: str) -> None:
        """Run a command of this machine that concerns the two; {alpha} is a namespace."""
        names = {host: self.namespace(host) for host in ADDRESSES}
        subprocess.run(command.format(**names).split(), check=True, capture_output=True, timeout=20)

    def build(self) -> None:
        for host in ADDRESSES:
            self.run(f"ip netns add {{{host}}}")
        self.run(
            f"ip -n {{alpha}} link add {INTERFACE} type veth peer name {INTERFACE} netns {{beta}}"
        )
        for host, address in ADDRESSES.items():
            self.run(f"ip -n {{{host}}} addr add {address}/24 dev {INTERFACE}")
            self.run(f"ip -n {{{host}}} link set {INTERFACE} up")
            self.run(f"ip -n {{{host}}} link set lo up")
            others = [f"{ADDRESSES[other]} {other}" for other in ADDRESSES if other != host]
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {host}", *others]
            self.home(host).mkdir()
            (self.home(host) / "hosts").write_text("\n".join(lines) + "\n")

    def remove(self) -> None:
        """End all that was started, and take the machines down."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for host in ADDRESSES:
            name = self.namespace(host)
            if not (Path("/run/netns") / name).exists():
                continue
            inside = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
            )
            for pid in inside.stdout.split():  # in sessions of their own; nobody else is in there
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=True, capture_output=True)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Return exit code and output."""
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"a machine took longer than {LIMIT_S:.0f} s:\n{output}")
    return process.returncode, output


@contextmanager
def two_machines(directory: Path) -> Iterator[TwoMachines]:
    """Two machines, which are gone afterwards, with all that was started on them."""
    machines = TwoMachines(directory)
    try:
        machines.build()
        yield machines
    finally:
        machines.remove()

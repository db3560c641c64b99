"""One training in which something goes wrong, and what came of it."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fault_script import SILENT_S
from workers import free_port

from poise.lab.network import Network

KINDS = (
    "kill",
    "stop",
    "raise",
    "exit",
    "segfault",
    "out of memory",
    "cut link",
    "store host",
    "brief stop",
)
SILENT = ("stop", "cut link", "store host", "launcher")
"""Kinds after which nobody is told anything, and silence has to tell."""
SAID = {
    "kill": "died at step",
    "segfault": "died at step",
    "raise": "ValueError: injected fault",
    "exit": "ended after step",
    "out of memory": "can't allocate memory",
    "stop": "no sign of life",
    "store host": "no sign of life",
    "launcher": "no sign of life",
    "cut link": "",
}
"""What everybody has to be told, beside the number of the worker."""
_START_LIMIT_S = 120.0
_END_LIMIT_S = 30.0
_MARK = "POISE_FAULT_RUN"
_SCRIPT = Path(__file__).with_name("fault_script.py")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where and when."""

    kind: str
    workers: int
    victim: int
    step: int
    loaders: int
    torchrun: bool

    def is_named_in(self, line: str) -> bool:
        """Whether this is what a line says, and who it happened to."""
        culprit = "worker 0's launcher" if self.kind == "launcher" else f"worker {self.victim}"
        return f": {culprit} " in line and SAID[self.kind] in line

    def __str__(self) -> str:
        launcher = "torchrun" if self.torchrun else "plain"
        return (
            f"{self.kind} of worker {self.victim} of {self.workers} at step {self.step}, "
            f"{launcher}, {self.loaders} loader processes"
        )


@dataclass
class Outcome:
    """What came of it."""

    fault: Fault
    message_s: float = float("nan")
    """From the fault until the last survivor has named the culprit."""
    end_s: float = float("nan")
    """And until the last of them has ended."""
    problems: list[str] = field(default_factory=list)
    named: bool = True
    ended: bool = True
    clean: bool = True
    load: float = 0.0
    """Processes that wanted to run on this machine in the last minute."""


def faults(number: int, seed: int) -> list[Fault]:
    """Draw faults, each kind about as often as the others."""
    draw = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < number:
        kinds += draw.sample(KINDS, len(KINDS))
    return [_drawn(kind, draw) for kind in kinds[:number]]


def _drawn(kind: str, draw: random.Random) -> Fault:
    workers, torchrun = draw.choice((3, 4)), draw.random() < 0.4  # noqa: PLR2004
    victim, step, loaders = draw.randrange(workers), draw.randrange(2, 40), draw.choice((0, 2))
    if kind == "cut link":
        torchrun = False  # each worker has a network of its own
    if kind == "store host":
        victim = 0
        kind = "launcher" if torchrun else kind
    return Fault(kind, workers, victim, step, loaders, torchrun)


def run(fault: Fault, number: int) -> Outcome:
    """Train, let it happen, and look at everything that is left."""
    mark = f"{os.getpid()}-{number}"
    with tempfile.TemporaryDirectory() as folder, _network(fault, mark) as network:
        trial = Trial(fault, mark, Path(folder), network)
        try:
            trial.watch()
        finally:
            trial.end()
    outcome = trial.outcome
    if network is not None and any(
        Path("/run/netns", each).exists() for each in network.namespaces
    ):
        outcome.clean = False
        outcome.problems.append("a namespace is left")
    return outcome


class Trial:
    """A training under way, in which something goes wrong."""

    def __init__(self, fault: Fault, mark: str, folder: Path, network: Network | None) -> None:
        """Start it."""
        self.outcome = Outcome(fault, load=os.getloadavg()[0])
        self._fault = fault
        self._mark = mark
        self._network = network
        self._ears = [Ear(folder / str(worker)) for worker in range(fault.workers)]
        self._processes = _launched(fault, str(folder), mark, network)

    def watch(self) -> None:
        """Wait for the fault, do what is done from outside, and see what comes of it."""
        fault, outcome, victim = self._fault, self.outcome, self._ears[self._fault.victim]
        if not _until(lambda: victim.struck_s is not None, _START_LIMIT_S):
            outcome.problems.append("the fault did not happen")
            outcome.ended = outcome.named = False
            return
        assert victim.pid is not None
        assert victim.struck_s is not None
        self._strike()
        if fault.kind == "brief stop":
            time.sleep(SILENT_S / 2)
            os.kill(victim.pid, signal.SIGCONT)
            self._see_it_go_on()
            return
        survivors = [each for each in self._ears if each is not victim or fault.kind == "launcher"]
        limit_s = _END_LIMIT_S + (SILENT_S if fault.kind in SILENT else 0.0)
        outcome.ended = _until(lambda: all(_over(ear.pid) for ear in survivors), limit_s)
        outcome.end_s = time.time() - victim.struck_s
        if not outcome.ended:
            outcome.problems.append("a survivor did not end")
        self._see_what_was_said(survivors, victim.struck_s)
        if fault.kind in ("stop", "store host"):  # nobody promised to end what is stopped
            _kill(victim.pid)
        if fault.kind == "launcher":
            _kill(self._processes[0].pid)
        self._see_nothing_left()

    def end(self) -> None:
        """End whatever is left, and hear no more."""
        for pid in _marked(self._mark):
            _kill(pid)
        for process in self._processes:
            process.wait()
        for ear in self._ears:
            ear.close()

    def _strike(self) -> None:
        if self._fault.kind == "launcher":
            os.kill(self._processes[0].pid, signal.SIGSTOP)
        if self._network is not None:
            hub, port = self._network.namespaces[0], f"w{self._fault.victim}"
            subprocess.run(["ip", "-n", hub, "link", "set", port, "down"], check=True)

    def _see_it_go_on(self) -> None:
        outcome = self.outcome
        outcome.ended = _until(lambda: all(_over(ear.pid) for ear in self._ears), _END_LIMIT_S)
        finished = [any("finished" in line for _, line in ear.lines) for ear in self._ears]
        if not all(finished) or any(ear.said() for ear in self._ears):
            outcome.ended = False
            outcome.problems.append("the training did not go on")
        self._see_nothing_left()

    def _see_what_was_said(self, survivors: "Sequence[Ear]", struck_s: float) -> None:
        fault, outcome, moments = self._fault, self.outcome, []
        for ear in survivors:
            said = ear.said()
            wrong = [line for _, line in said if not fault.is_named_in(line)]
            if not said or wrong:
                outcome.named = False
                last = [line for _, line in ear.lines][-1:]
                outcome.problems.append(f"process {ear.pid} says {wrong or last or 'nothing'}")
            else:
                moments.append(said[0][0] - struck_s)
        if moments:
            outcome.message_s = max(moments)

    def _see_nothing_left(self) -> None:
        """All that was started has ended, loader processes and the launcher included."""

        def over() -> bool:
            for process in self._processes:
                process.poll()
            return not _marked(self._mark)

        if not _until(over, _END_LIMIT_S):
            self.outcome.clean = False
            self.outcome.problems.append(f"processes are left: {_marked(self._mark)}")


class Ear:
    """Hears what one worker says, and when."""

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self.lines: list[tuple[float, str]] = []
        self.pid: int | None = None
        self.struck_s: float | None = None
        # Open for writing, too, so that the end of a writer is not the end of the pipe.
        self._file = os.fdopen(os.open(pipe, os.O_RDWR), "r", errors="replace")
        self._writer = os.open(pipe, os.O_WRONLY)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear no more."""
        os.write(self._writer, b"over\n")
        self._thread.join()
        self._file.close()
        os.close(self._writer)

    def said(self) -> list[tuple[float, str]]:
        """What Poise said, and when."""
        return [(at_s, line) for at_s, line in self.lines if line.startswith("poise: worker ")]

    def _listen(self) -> None:
        for line in self._file:
            words = line.split()
            if line == "over\n":
                return
            if words[:1] == ["pid"]:
                self.pid = int(words[1])
            elif words[:1] == ["fault"]:
                self.struck_s = float(words[1])
            else:
                self.lines.append((time.time(), line))


@contextmanager
def _network(fault: Fault, mark: str) -> Iterator[Network | None]:
    """Give each worker a network of its own, if its link is to be cut."""
    if fault.kind != "cut link":
        yield None
        return
    network = Network(f"pf{mark.replace('-', 'x')}", ["10gbit"] * fault.workers, has_server=False)
    try:
        network.build()
        yield network
    finally:
        for name in network.namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _launched(
    fault: Fault, folder: str, mark: str, network: Network | None
) -> list[subprocess.Popen[bytes]]:
    """Start the workers; with torchrun, the one process that starts them."""
    words = [str(_SCRIPT), folder, fault.kind]
    words += [str(each) for each in (fault.victim, fault.step, fault.loaders)]
    common = {**os.environ, _MARK: mark, "OMP_NUM_THREADS": "1"}
    if fault.torchrun:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        command += [str(fault.workers), "--master-port", str(free_port()), *words]
        return [_started(command, common)]
    port, processes = free_port(), []
    for worker in range(fault.workers):
        placed = {"RANK": str(worker), "WORLD_SIZE": str(fault.workers)}
        placed |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        inside: Sequence[str] = ()
        if network is not None:
            placed |= network.environment()
            inside = network.inside(worker)
        processes.append(_started([*inside, sys.executable, *words], {**common, **placed}))
    return processes


def _started(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)


def _over(pid: int | None) -> bool:
    """Whether a process has ended; one that was never heard of has."""
    if pid is None:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _marked(mark: str) -> list[int]:
    """Return the processes that carry a mark in their environment, and run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            pid = int(status.parent.name)
            if f"{_MARK}={mark}\0".encode() in status.read_bytes() and not _over(pid):
                found.append(pid)
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _until(happened: Callable[[], bool], limit_s: float) -> bool:
    """Wait until something has happened; False: it has not, in time."""
    deadline_s = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True

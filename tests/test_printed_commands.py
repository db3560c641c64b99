"""Every command that README and docs print is run, or listed with the reason why it is not.

Those with a machine's name before the prompt are run in tests/test_two_machines.py.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.machine import namespaces_work

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAPERS = ROOT / "benchmarks/papers/README.md"
LIMIT_S = 60.0
SHELLS = ("console", "shell", "bash", "sh")

NOT_RUN = {
    "make demo": "takes a minute; tests/test_cli.py runs it in a short form",
    "make test": "these are the tests",
    'pip install "poise[torch]"': "installs over a network",
    "poise lab --speeds 1x4,0.5x4,0.25x8 --pace 2ms+5ms -- train.py": (
        "sixteen processes start for longer than a minute; tests/test_lab.py paces fewer"
    ),
}
"""Commands that cannot be run here, and why."""
ENDS_WITH = {
    ("docs/how-to/simulate.md", "poise simulate wrong.toml"): 2,
    ("docs/how-to/verify.md, 2", "poise verify train.py --workers 3"): 1,
}
"""Exit codes other than 0 that a page is about."""

PLAIN_DDP = """
import argparse
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
steps = 12 * parser.parse_args().epochs
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(steps):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
time.sleep(0.3)  # torch aborts at times if a group goes while a thread ends its last work
dist.destroy_process_group()
"""
AROUND_THE_QUICKSTART = """
import torch
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(1500, 8)
dataset = test_set = TensorDataset(inputs, (inputs.sum(1) > 0).long())
loss_fn = torch.nn.CrossEntropyLoss()

def Net():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 2)
"""


@dataclass(frozen=True)
class Block:
    """The commands of one fenced block."""

    page: str
    number: int
    """Among the blocks of the page, from 1."""
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}, {self.number}"

    def code_of(self, command: str) -> int:
        """Return the exit code that the page is about."""
        return ENDS_WITH.get((self.page, command), ENDS_WITH.get((str(self), command), 0))


def blocks_of(path: Path) -> Iterator[Block]:
    page, number = str(path.relative_to(ROOT)), 0
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.M | re.S):
        if language in SHELLS:
            number += 1
            yield Block(page, number, tuple(commands_in(language, text)))


def commands_in(language: str, text: str) -> Iterator[str]:
    """Yield the commands without their comments; what follows in a console is output."""
    for line in text.replace("\\\n", " ").splitlines():
        if language == "console" and not line.startswith("$ "):
            continue
        command = re.sub(r"\s+# .*", "", line.removeprefix("$ ")).strip()
        if command:
            yield command


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
RUN = [block for block in BLOCKS if not set(block.commands) <= set(NOT_RUN)]
"""A block of commands on two machines has none in this sense."""


def python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def toml_of(page: str) -> str:
    return "".join(re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL))


def script_of(block: Block) -> str:
    """Return the training script that a page's commands are about."""
    match block.page:
        case "README.md" | "docs/how-to/watch.md":
            return PLAIN_DDP
        case "docs/quickstart.md":
            *blocks, loading, evaluating = python_of(block.page)
            saved = "balancer.mean(0.0, 1)  # all wait for worker 0: the later run is this one"
            script = "\n".join([*blocks, saved, loading, evaluating, "balancer.close()"])
            return AROUND_THE_QUICKSTART + script
        case "docs/how-to/verify.md":
            script = python_of(block.page)[0]
            return script if block.number == 1 else script.replace(", count=tokens", "")
        case "docs/how-to/asynchronous.md":
            return python_of(block.page)[0]
        case _:
            return python_of("docs/how-to/lab.md")[0] + "\nbalancer.close()"


def stage(block: Block, directory: Path) -> None:
    """Put there what a page takes for granted."""
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "train.py").write_text(script_of(block))
    if block.page == "docs/how-to/plan.md":
        (directory / "cluster.toml").write_text(toml_of(block.page))
    if block.page == "docs/how-to/simulate.md":
        scenario = toml_of(block.page)
        (directory / "scenario.toml").write_text(scenario)
        (directory / "wrong.toml").write_text(scenario.replace("slower = 2.0", "slwer = 2.0"))
        run("poise simulate scenario.toml --policy auto --record .", directory)
        (directory / "auto.jsonl").rename(directory / "run.jsonl")


def started(command: str, directory: Path) -> "subprocess.Popen[str]":
    beside = str(Path(sys.executable).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PATH"] = f"{beside}:{environment['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Return exit code and output; what takes too long is ended, with all that it started."""
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{process.args!r} took longer than {LIMIT_S:.0f} s:\n{output}")
    return process.returncode, output


def run(command: str, directory: Path, code: int = 0) -> None:
    found, output = ended(started(command, directory))
    assert found == code, f"{command} ended with exit code {found}:\n{output}"


def serve(command: str, directory: Path) -> None:
    """Run a server, on a port that is free, and as many workers as it waits for."""
    server = started(command.replace("poise serve", "poise serve --port 0"), directory)
    workers: list[subprocess.Popen[str]] = []
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        (join,) = re.findall(r"workers join with (.*)", said)
        words = shlex.split(command)
        waits_for = int(words[words.index("--workers") + 1])
        workers += [started(join, directory) for _ in range(waits_for)]
        for each in workers:
            code, output = ended(each)
            assert code == 0, output
        code, output = ended(server)
        assert code == 0, said + output
    finally:
        for each in (server, *workers):
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
            each.communicate()


def runner_of(command: str) -> Callable[[str, Path], None] | None:
    """Return what runs a command in a way of its own; None: a shell does."""
    return serve if command.startswith("poise serve") else None


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=str)
def test_what_a_page_prints_can_be_typed(block: Block, tmp_path: Path) -> None:
    if any("--link" in command for command in block.commands) and not namespaces_work():
        pytest.skip("slow links need root and iproute2")
    stage(block, tmp_path)
    for command in block.commands:
        if command in NOT_RUN:
            continue
        special = runner_of(command)
        if special is None:
            run(command, tmp_path, block.code_of(command))
        else:
            special(command, tmp_path)


def test_only_printed_commands_are_listed() -> None:
    printed = {command for block in BLOCKS for command in block.commands}
    assert set(NOT_RUN) <= printed
    assert {command for _, command in ENDS_WITH} <= printed
    assert len(RUN) > 10


def benchmark_commands() -> list[tuple[str, str]]:
    """Return the name and the options of each benchmark that a page names."""
    found = set()
    for path in (*PAGES, PAPERS):
        for name, options in re.findall(
            r"make bench NAME=([\w/]+)(?: ARGS=\"([^\"]*)\")?", path.read_text()
        ):
            found.add((name, options.replace("...", "").strip()))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), benchmark_commands())
def test_a_benchmark_beside_numbers_knows_its_options(name: str, options: str) -> None:
    """It is started with one option more that it cannot know, so that it runs no further."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *shlex.split(options), "--no-such-option"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith("error: unrecognized arguments: --no-such-option")

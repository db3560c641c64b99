"""Every benchmark that `make bench` lists starts, runs to its end, and prints its figures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = sorted(
    str(path.relative_to(ROOT / "benchmarks").with_suffix(""))
    for path in (ROOT / "benchmarks").rglob("*.py")
    if re.search("^Run: ", path.read_text(), flags=re.MULTILINE)
)
"""What says how to run it; other files are parts of these."""
LIMIT_S = 180.0
"""Much longer than a smoke run takes, since the machine may be busy."""


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_make_lists_the_benchmarks_and_nothing_else() -> None:
    done = subprocess.run(
        ["make", "bench", "READY="], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    (listed,) = re.findall(r"one of: (.*)", done.stderr)
    assert sorted(listed.split()) == BENCHMARKS
    assert {"overhead", "async", "papers/cannikin"} <= set(BENCHMARKS)


def test_every_command_line_is_one_of_a_benchmark() -> None:
    """Whoever reads the shared options says how it is run."""
    for path in (ROOT / "benchmarks").rglob("*.py"):
        if "import argparse" in path.read_text():
            assert path.stem in {"options", "simulator", "asynchronous_report"}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_to_its_end(name: str) -> None:
    done = python(f"benchmarks/{name}.py", "--smoke", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["benchmark"] == name
    assert found["figures"]
    assert all(each["bar"] is each["ok"] is None for each in found["figures"])


@pytest.mark.slow
def test_the_overhead_of_code_that_is_entered_elsewhere_is_no_zero() -> None:
    """A border that is not crossed any more fails: nothing goes uncounted in silence."""
    code = (
        "import threading\n"
        "from own_code import Stopwatch, measured\n"
        "stop = threading.Event()\n"
        "beating = threading.Thread(target=stop.wait, name='{name}')\n"
        "beating.start()\n"
        "try: measured(Stopwatch(), lambda steps: None, 1)\n"
        "finally: stop.set()\n"
    )
    crossed_nothing = python("-c", code.format(name="poise-heartbeat"))
    assert "AssertionError: our code was not entered through: ['call of" in crossed_nothing.stderr
    no_heartbeat = python("-c", code.format(name="another"))
    assert "AssertionError: no thread is called poise-" in no_heartbeat.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda p: p.stem)
def test_benchmarks_use_nothing_private_of_ours(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"from poise\S* import .*\b_[a-z]", text)
    assert not re.search(r"\b(balancer|loader|shares|shared|server|lab|policy|engine)\._\w", text)

"""The test machinery notices what it is there to notice."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from tests.cluster import Workers


def leak_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="leaked").start()


def leak_a_process() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])


def leak_a_variable() -> None:
    os.environ["LEAKED"] = "1"


def leak_a_group() -> None:
    dist.init_process_group("gloo")


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        (leak_a_thread, "thread leaked"),
        (leak_a_process, "process python"),
        pytest.param(leak_a_variable, "environment variable LEAKED=1", marks=pytest.mark.slow),
        pytest.param(leak_a_group, "process group default", marks=pytest.mark.slow),
    ],
)
def test_a_leak_fails_the_test(workers: Workers, leak: object, words: str) -> None:
    with pytest.raises(AssertionError, match=f"worker 0 leaks .*{words}"):
        workers.run(leak, workers=1)  # type: ignore[arg-type]


def fail_on_worker_1() -> int:
    if os.environ["RANK"] == "1":
        raise LookupError("here")
    return 7


def test_an_error_on_any_worker_fails_the_test(workers: Workers) -> None:
    with pytest.raises(AssertionError, match="worker 1: LookupError: here"):
        workers.run(fail_on_worker_1, workers=2)
    outcomes = workers.attempt(fail_on_worker_1, workers=2)
    assert (outcomes[0].value, outcomes[1].error) == (7, "LookupError: here")


def test_importing_the_decision_core_imports_no_framework() -> None:
    assert frameworks_after("import poise, poise.core.order, poise.policy, poise.engine.bsp") == []


def test_the_look_for_frameworks_finds_one() -> None:
    assert frameworks_after("import poise.torch") == ["torch"]


def test_importing_changes_nothing() -> None:
    code = (
        "import os, threading, warnings, logging\n"
        "before = dict(os.environ)\n"
        "import poise, poise.cli.main, poise.lab.processes\n"
        "assert dict(os.environ) == before\n"
        "assert threading.active_count() == 1\n"
        "assert not logging.getLogger().handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def frameworks_after(code: str) -> list[str]:
    """Run code in a new process; return the frameworks it loaded."""
    look = f"{code}\nimport sys\nprint([f for f in {FRAMEWORKS} if f in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    return [name for name in FRAMEWORKS if f"'{name}'" in done.stdout]


FRAMEWORKS = ["torch", "tensorflow", "keras", "jax", "sklearn", "rich"]


def test_the_runtime_and_all_below_work_where_torch_cannot_be_imported() -> None:
    """Every module is imported, and three threads train, in an environment without torch."""
    code = (
        "import importlib, pkgutil, sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {FRAMEWORKS}:\n"
        "            raise ImportError(f'{name} is not here')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "import poise\n"
        "below = ['errors', 'core', 'policy', 'engine', 'records', 'runtime', 'sim']\n"
        "for room in below:\n"
        "    package = importlib.import_module(f'poise.{room}')\n"
        "    path = getattr(package, '__path__', [])\n"
        "    for each in pkgutil.walk_packages(path, f'poise.{room}.'):\n"
        "        importlib.import_module(each.name)\n"
        "from tests.numpy_check import train\n"
        "print(train())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "exact\n", done.stderr

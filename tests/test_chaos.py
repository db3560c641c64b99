"""Workers of a server that are killed and join at random, in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def endure(mode: str, events: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run `tests.chaos`, which ends by itself if anything hangs."""
    command = [sys.executable, "-m", "tests.chaos", mode, str(events), str(seed), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], events: int) -> None:
    """Every sample was pushed once in every epoch, and the model has learned."""
    assert found["code"] == 0
    assert found["wrong"] == {}
    assert found["epochs"] >= 2
    assert found["killed"] + found["joined"] == events
    assert min(found["killed"], found["joined"]) > events // 4
    assert found["loss"] < 0.4  # it begins at about 0.8


@pytest.mark.parametrize("mode", ["async", pytest.param("stale:2", marks=pytest.mark.slow)])
def test_a_dozen_kills_and_joins(mode: str, tmp_path: Path) -> None:
    check(endure(mode, 12, 1, tmp_path), 12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "stale:2"])
@pytest.mark.parametrize("seed", [2, 3])
def test_a_hundred_kills_and_joins(mode: str, seed: int, tmp_path: Path) -> None:
    check(endure(mode, 100, seed, tmp_path), 100)

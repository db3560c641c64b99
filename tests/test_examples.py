"""The examples train, and train the same on unequal workers as alone."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest

from tests.cluster import Workers

CHARACTERS = str(Path(__file__).parent.parent / "examples" / "characters.py")
SHORT = ["--epochs", "2", "--steps", "5"]


def characters(arguments: list[str]) -> tuple[list[float], str]:
    """Return the losses, and what is printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = runpy.run_path(CHARACTERS)["main"](arguments)
    return losses, printed.getvalue()


def test_the_characters_are_learned_alike_on_any_workers(workers: Workers) -> None:
    alone, told = workers.run(characters, SHORT, workers=1)[0]
    *steps, new_text = alone
    assert len(steps) == 2 * 5
    assert steps[-1] < 0.85 * steps[0]
    assert new_text < 0.85 * steps[0]
    assert f"loss {steps[0]:.4f}" in told
    assert f"not seen: {new_text:.4f}" in told
    for worker, (losses, printed) in enumerate(
        workers.run(characters, [*SHORT, "--shares", "20,0,12"], workers=3)
    ):
        assert losses == pytest.approx(alone, rel=1e-5)
        assert bool(printed) == (worker == 0)

"""What one worker concludes and says, with the words of the others left for it to find."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from poise.core.liveness import Blame, Limits, Sign
from poise.runtime.clocks import Waits
from poise.runtime.collectives import Disconnected
from poise.runtime.events import Events
from poise.runtime.liveness import Liveness
from poise.runtime.neighbors import this_place
from poise.runtime.threads import ThreadRendezvous
from tests.numpy_adapter import Team


@contextmanager
def on_duty(
    rendezvous: ThreadRendezvous, workers: int, silent_s: float = 10.0
) -> Iterator[Liveness]:
    """Worker 0 of so many, of which the others are what they left at the rendezvous."""
    generation = Team(workers).generation(0)
    liveness = Liveness(generation, rendezvous, Waits(), Events(), Limits(silent_s=silent_s))
    try:
        yield liveness
    finally:
        liveness.end()


def leave_sign(rendezvous: ThreadRendezvous, worker: int, pid: int, why: str = "") -> None:
    sign = Sign(worker=worker, host="a", pid=pid, place=this_place())
    if why:
        sign = replace(sign, state="left", why=why)
    rendezvous.set(f"sign/0/{worker}", sign.to_json())


def cause_at(rendezvous: ThreadRendezvous) -> Blame:
    """Return who is to blame by what everybody reads."""
    return Blame.from_json(rendezvous.get(["sign/0/cause"])["sign/0/cause"])


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_an_error_that_comes_of_anothers_death_does_not_hide_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Torchrun ends the loader processes of the others, too, and torch raises an error for each."""
    rendezvous = ThreadRendezvous()
    leave_sign(rendezvous, 1, ended_process())
    leave_sign(rendezvous, 2, os.getppid())
    with on_duty(rendezvous, 3) as liveness:
        liveness.fail("RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated")
        assert cause_at(rendezvous).worker == 1
    assert "poise: worker 0: worker 1 " in capsys.readouterr().err


def test_what_is_said_is_not_kept_by_torchs_hook_for_uncaught_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts a buffer in the place of sys.stderr, with which a process that is ended is lost."""
    rendezvous = ThreadRendezvous()
    leave_sign(rendezvous, 1, ended_process())
    with on_duty(rendezvous, 2) as liveness:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        liveness.lost("a sum", Disconnected("connection reset"))
        monkeypatch.undo()
    assert "poise: worker 0: worker 1 " in capsys.readouterr().err


def test_an_error_of_this_worker_alone_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    rendezvous = ThreadRendezvous()
    leave_sign(rendezvous, 1, os.getppid())
    with on_duty(rendezvous, 2) as liveness:
        liveness.fail("ValueError: bad sample")
        assert cause_at(rendezvous).worker == 0
        assert "ValueError: bad sample" in cause_at(rendezvous).reason
    assert capsys.readouterr().err == ""


def test_a_mistake_that_all_workers_make_is_said_once_by_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The traceback says it; that another worker made it, too, explains nothing."""
    rendezvous = ThreadRendezvous()
    leave_sign(rendezvous, 1, os.getppid(), why="NameError: name 'lr' is not defined")
    with on_duty(rendezvous, 2) as liveness:
        liveness.fail("NameError: name 'lr' is not defined")
    assert capsys.readouterr().err == ""


def test_a_worker_that_met_the_others_and_never_gave_a_sign_is_lost() -> None:
    rendezvous = ThreadRendezvous()
    leave_sign(rendezvous, 1, os.getppid())
    with on_duty(rendezvous, 3, silent_s=0.5) as liveness:
        error = liveness.lost("prepare", Disconnected("connection reset"))
    assert "worker 2 has given no sign of life since all workers met" in str(error)

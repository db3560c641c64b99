"""One worker fails: the others stop within seconds and say who and where."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from poise.lab.processes import free_port, local_workers
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Fault, Outcome, Workers
from tests.processes import running_from, wait_for
from tests.training import Log, Recipe, train_balanced

RECIPE = Recipe(samples=200, global_batch=10, epochs=1)


def training_with_fault(fault: Fault, hang_s: float | None = None) -> Log:
    return train_balanced(RECIPE, Fixed([2, 3, 5]), fault=fault, hang_s=hang_s)


def check_named(outcome: Outcome, *words: str) -> None:
    """The error and stderr both name the worker and the step."""
    for text in (outcome.error, outcome.stderr):
        for word in ("worker 1", *words):
            assert word in text, (word, text)


def test_a_worker_that_raises_is_named_with_its_error(workers: Workers) -> None:
    fault = Fault(worker=1, step=4, kind="raise")
    outcomes = workers.attempt(training_with_fault, fault, workers=3)
    assert outcomes[1].error == "ValueError: injected fault"
    for worker in (0, 2):
        check_named(outcomes[worker], "step 4", "ValueError: injected fault")


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param("kill", 6, marks=pytest.mark.slow),
        pytest.param("exit", 0, marks=pytest.mark.slow),
        ("kill", 1),
    ],
)
def test_a_worker_that_dies_is_named(workers: Workers, kind: Any, step: int) -> None:
    """In step 1 the others wait in forward, where buckets are agreed on."""
    fault = Fault(worker=1, step=step, kind=kind)
    outcomes = workers.attempt(training_with_fault, fault, workers=3)
    assert "process ended" in outcomes[1].error
    for worker in (0, 2):
        check_named(outcomes[worker], f"died at step {step}")


def test_a_worker_that_hangs_is_named_after_the_limit(workers: Workers) -> None:
    fault = Fault(worker=1, step=3, kind="hang")
    outcomes = workers.attempt(training_with_fault, fault, 4.0, workers=3, hanging=1)
    for worker in (0, 2):
        check_named(outcomes[worker], "hangs at step 3", "alive")
        assert outcomes[worker].seconds > 4


def death_in_a_mean() -> None:
    with Balancer(3) as balancer:
        if balancer.worker == 1:
            os._exit(1)
        balancer.mean(1.0, 1)


def test_a_death_outside_of_training_is_named(workers: Workers) -> None:
    outcomes = workers.attempt(death_in_a_mean, workers=3)
    for worker in (0, 2):
        check_named(outcomes[worker], "died", "mean")
        assert "WorkerLost" in outcomes[worker].error


def slow_evaluation(pause_s: float) -> Log:
    """Worker 0 evaluates alone, much longer than silence would be tolerated."""

    def evaluate(balancer: Balancer, step: int) -> None:
        if balancer.worker == 0 and step == 5:
            time.sleep(pause_s)

    return train_balanced(RECIPE, after_step=evaluate)


@pytest.mark.slow
def test_a_long_evaluation_on_worker_0_is_not_taken_for_death(workers: Workers) -> None:
    outcomes = workers.attempt(slow_evaluation, 5.0, workers=3)
    assert [outcome.error for outcome in outcomes] == [""] * 3
    assert [outcome.stderr for outcome in outcomes] == [""] * 3


def leave_a_step_early() -> str:
    """Worker 1 leaves the loop before the others do, and reaches the end of its script."""

    def leave(balancer: Balancer, step: int) -> None:
        if balancer.worker == 1 and step == 2:
            raise StopIteration

    try:
        train_balanced(RECIPE, after_step=leave)
    except StopIteration:
        return "left"
    return "done"


def test_a_worker_that_takes_fewer_steps_is_named(workers: Workers) -> None:
    outcomes = workers.attempt(leave_a_step_early, workers=2)
    check_named(outcomes[0], "left at step 2", "StopIteration")


def join_without_worker_1() -> None:
    if os.environ["RANK"] != "1":
        Balancer(3, hang_s=3.0)


@pytest.mark.slow
def test_a_worker_that_never_joins_is_reported_after_the_limit(workers: Workers) -> None:
    outcomes = workers.attempt(join_without_worker_1, workers=3)
    for worker in (0, 2):
        assert f"WorkerLost: worker {worker} could not meet all 3" in outcomes[worker].error


SCRIPT = """
    import multiprocessing, os, re, signal, subprocess, sys, time
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from poise.torch import Balancer

    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
    {before}
    balancer = Balancer(6, silent_s=2)
    loader = DataLoader(data, 6, shuffle=True, num_workers={loaders})
    model, optimizer, loader = balancer.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        if balancer.worker == {victim} and step == 4:
            {fault}
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("finished", balancer.worker)
"""


def script_with(fault: str, victim: int, loaders: int, before: str = "") -> str:
    """Return SCRIPT in which something goes wrong, in step 4 or before its Balancer is made."""
    return textwrap.dedent(SCRIPT).format(
        fault=fault, victim=victim, loaders=loaders, before=before
    )


def run_script(
    tmp_path: Path,
    fault: str,
    workers: int = 3,
    *,
    victim: int = 1,
    loaders: int = 0,
    before: str = "",
) -> list[tuple[int, str, str]]:
    """Run SCRIPT in processes of its own; return (exit code, stdout, stderr) of each.

    A victim that stops itself is ended when all others have.
    """
    script = tmp_path / "train.py"
    script.write_text(script_with(fault, victim, loaders, before))
    with local_workers([sys.executable, str(script)], workers, stderr=subprocess.PIPE) as processes:
        results = {}
        for worker in sorted(range(workers), key=lambda each: each == victim):
            if worker == victim and "SIGSTOP" in fault:
                processes[worker].kill()
            out, err = processes[worker].communicate(timeout=60)
            results[worker] = (processes[worker].returncode, out, err)
        return [results[worker] for worker in range(workers)]


def test_a_script_ends_cleanly(tmp_path: Path) -> None:
    for worker, (code, out, err) in enumerate(run_script(tmp_path, "pass")):
        assert (code, out) == (0, f"finished {worker}\n"), err
        assert err == ""


def check_script_named(results: list[tuple[int, str, str]], victim: int, words: str) -> None:
    """Everybody else ends with an error, and says one thing: who, and why."""
    for worker, (code, out, err) in enumerate(results):
        if worker == victim:
            continue
        said = [line for line in err.splitlines() if line.startswith("poise: ")]
        assert len(said) == 1, err
        assert said[0].startswith(f"poise: worker {worker}: worker {victim} "), said
        assert words in said[0]
        assert (code, out) == (1, ""), err


STOP = "os.kill(os.getpid(), 19)  # SIGSTOP"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_is_stopped_is_lost_also_if_it_hosts_the_store(
    tmp_path: Path, victim: int
) -> None:
    results = run_script(tmp_path, STOP, victim=victim)
    check_script_named(results, victim, "has given no sign of life for 2 s at step 4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise KeyError('no such column')", "left at step 4: KeyError: 'no such column'"),
        ("sys.exit(3)", "ended after step 4 without an error of its own"),
    ],
)
def test_the_reason_of_the_worker_that_hosts_the_store_reaches_the_others(
    tmp_path: Path, fault: str, words: str
) -> None:
    check_script_named(run_script(tmp_path, fault, victim=0), 0, words)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_killed_while_it_has_loader_processes_is_named(
    tmp_path: Path, victim: int
) -> None:
    """They are forked from it, and would keep its connections open."""
    results = run_script(tmp_path, "os.kill(os.getpid(), 9)", victim=victim, loaders=2)
    check_script_named(results, victim, "died at step 4")


@pytest.mark.slow
def test_a_worker_that_notices_late_names_the_same_one(tmp_path: Path) -> None:
    """Worker 2 computes for long; worker 0, which hosts the store, has to wait for it."""
    fault = "os._exit(1)\n    if balancer.worker == 2 and step == 4: time.sleep(1.5)"
    check_script_named(run_script(tmp_path, fault), 1, "died at step 4")


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 2])
def test_under_torchrun_every_survivor_names_the_dead_one(tmp_path: Path, loaders: int) -> None:
    """It ends the others within a tenth of a second, by SIGTERM."""
    said = said_under_torchrun(tmp_path, "os.kill(os.getpid(), 9)", loaders)
    for worker in (0, 2):
        assert len(said[worker]) == 1, said
        assert f"worker {worker}: worker 1 " in said[worker][0]
        assert "died at step 4" in said[worker][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal", "words"),
    [(19, "has given no sign of life for 2 s at step "), (9, "ended at step ")],
)
def test_torchrun_itself_is_named_by_all_workers(tmp_path: Path, signal: int, words: str) -> None:
    """It hosts the store. If it was stopped, it goes on when all of them have ended."""
    waking = "subprocess.Popen(['sh', '-c', f'sleep 9; kill -18 {os.getppid()} 2> /dev/null'])"
    fault = f"{waking}; os.kill(os.getppid(), {signal}); time.sleep(6)"
    said = said_under_torchrun(tmp_path, fault)
    for worker, lines in said.items():
        assert len(lines) == 1, said
        assert lines[0].startswith(f"poise: worker {worker}: worker 0's launcher at "), said
        assert words in lines[0], said


def said_under_torchrun(tmp_path: Path, fault: str, loaders: int = 0) -> dict[int, list[str]]:
    """Run SCRIPT on 3 workers; return what Poise said on each, once all of them have ended."""
    script = tmp_path / "train.py"
    script.write_text(script_with(fault, victim=1, loaders=loaders))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command += ["--master-port", str(free_port()), "--redirects", "3"]
    command += ["--log-dir", str(tmp_path), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        launcher.communicate(timeout=120)
    wait_for(lambda: not running_from(script))
    logs = {worker: next(tmp_path.rglob(f"{worker}/stderr.log")) for worker in range(3)}
    return {
        worker: [line for line in log.read_text().splitlines() if line.startswith("poise: ")]
        for worker, log in logs.items()
    }


@pytest.mark.slow
def test_a_worker_that_is_stopped_for_a_moment_disturbs_nobody(tmp_path: Path) -> None:
    """Nor does it blame the others, of which it has not heard while it was stopped."""
    waking = "subprocess.Popen(['sh', '-c', f'sleep 1; kill -18 {os.getpid()}'])"
    results = run_script(tmp_path, f"{waking}; os.kill(os.getpid(), 19)  # for a moment")
    assert [(code, out) for code, out, _ in results] == [
        (0, f"finished {worker}\n") for worker in range(3)
    ]
    assert all(not err for _, _, err in results)


@pytest.mark.slow
def test_a_worker_whose_interpreter_is_locked_for_long_is_not_lost(tmp_path: Path) -> None:
    """Its process computes: that is life, though its threads give no sign of it."""
    locked = "re.match('(a+)+$', 'a' * 26 + 'b')"
    results = run_script(tmp_path, f"[{locked} for _ in range(2)]")
    assert [code for code, _, _ in results] == [0, 0, 0], results


@pytest.mark.slow
def test_a_signal_to_a_child_that_the_script_forks_is_the_childs(tmp_path: Path) -> None:
    """It inherits the handler, and the socket by which the parent hears of signals."""
    child = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))"
    fault = f"child = {child}; child.start(); child.terminate(); child.join()"
    results = run_script(tmp_path, fault)
    assert [(code, err) for code, _, err in results] == [(0, "")] * 3


@pytest.mark.slow
def test_a_handler_that_the_script_installs_later_counts(tmp_path: Path) -> None:
    handler = "signal.signal(15, lambda *_: None)"
    results = run_script(tmp_path, f"{handler}; os.kill(os.getpid(), 15); time.sleep(1)")
    assert [code for code, _, _ in results] == [0, 0, 0], results


@pytest.mark.slow
def test_survivors_end_also_if_nothing_can_be_said(tmp_path: Path) -> None:
    fault = f"{STOP}\n    if step == 4: sys.stderr = open('/dev/full', 'w')"
    results = run_script(tmp_path, fault)
    for worker in (0, 2):  # 120: the interpreter could not say anything either
        assert results[worker][0] in (1, 120)


@pytest.mark.slow
def test_an_error_of_the_scripts_own_collective_is_not_its_fault(tmp_path: Path) -> None:
    """Worker 0 sees it first, in a call that Poise does not make."""
    fault = (
        "os._exit(1)\n    if step == 4: "
        "torch.distributed.all_reduce(torch.zeros(1)) if balancer.worker == 0 else time.sleep(1)"
    )
    check_script_named(run_script(tmp_path, fault), 1, "died at step 4")


@pytest.mark.slow
def test_an_uncaught_error_in_a_script_reaches_the_others(tmp_path: Path) -> None:
    results = run_script(tmp_path, "raise KeyError('no such column')")
    check_script_named(results, 1, "left at step 4: KeyError: 'no such column'")


@pytest.mark.slow
def test_the_death_of_the_worker_that_hosts_the_store_is_named(tmp_path: Path) -> None:
    check_script_named(run_script(tmp_path, "os._exit(1)", victim=0), 0, "died at step 4")


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "signal"), [(0, 19), (1, 19), (1, 9)])
def test_a_worker_that_is_lost_while_its_balancer_is_made_is_named(
    tmp_path: Path, victim: int, signal: int
) -> None:
    """All have met, and it has not given a sign of life yet: its host's name is to be in it."""
    strike = f"os.kill(os.getpid(), {signal}) if os.environ['RANK'] == '{victim}' else 'a'"
    inject = f"import socket; socket.gethostname = lambda: {strike}"
    results = run_script(tmp_path, STOP, victim=victim, before=inject)
    check_script_named(results, victim, "has given no sign of life")


@pytest.mark.slow
def test_a_worker_that_dies_when_the_others_are_done_is_named(tmp_path: Path) -> None:
    """It is killed after its last step, in work of its own at the end of the script."""
    dies = "lambda: (time.sleep(1), os.kill(os.getpid(), 9))"
    results = run_script(tmp_path, f"import atexit; atexit.register({dies})")
    for worker in (0, 2):
        code, out, err = results[worker]
        assert (code, out) == (0, f"finished {worker}\n"), err
        assert err.count("poise: ") == 1
        assert f"poise: worker {worker}: worker 1 " in err
        assert "died at step" in err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_terminated_is_named_with_the_reason(tmp_path: Path, victim: int) -> None:
    """Worker 0, which hosts the store, goes when the others have read it there."""
    results = run_script(tmp_path, "os.kill(os.getpid(), 15); time.sleep(9)", victim=victim)
    assert results[victim][0] == -15
    check_script_named(results, victim, "was terminated by SIGTERM at step 4")


@pytest.mark.slow
def test_a_script_that_ends_early_is_named(tmp_path: Path) -> None:
    results = run_script(tmp_path, "break")
    assert results[1][0] == 0
    for worker in (0, 2):
        code, _, err = results[worker]
        assert code == 1
        assert "ended after step 4 without an error" in err

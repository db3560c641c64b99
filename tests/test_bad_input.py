"""Bad input is refused with one clear message, or behaves; nothing ends in a traceback.

What is damaged, and what each kind must do if it is accepted, is in `tests.bad_input`; the damage
itself in `tests.mutations`. Every case has a number, which a failure prints.
"""

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poise import Worker
from poise.cli.main import main
from poise.errors import InvalidSetting, PoiseError, StateMismatch
from poise.torch import Balancer
from tests.bad_input import KINDS, engine_state, failure, fresh, numbers, record_lines
from tests.cluster import Workers
from tests.inside import session_of
from tests.mutations import Damage, damaged

Capture = pytest.CaptureFixture[str]
SOME, REST = range(500), range(500, 10_000)
"""Cases of `make test`, and the others of `make test-all`."""
CASES = [pytest.param(SOME, id="some"), pytest.param(REST, marks=pytest.mark.slow, id="rest")]


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_or_behaves(kind: str, cases: range) -> None:
    failures = [found for number in numbers(kind, cases) if (found := failure(kind, number))]
    assert failures == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_number_is_the_same_damage(kind: str) -> None:
    number = numbers(kind, SOME)[3]
    first, again = (KINDS[kind].damage(Random(number)) for _ in range(2))
    assert first.what == again.what


def test_every_kind_sees_damage_that_is_accepted_and_damage_that_is_refused() -> None:
    """Or else one of the two is never tried."""
    for kind in ("walk", "engine", "server", "call", "settings"):
        outcomes = set()
        for number in numbers(kind, SOME):
            try:
                KINDS[kind].accepts(KINDS[kind].damage(Random(number)).value)
                outcomes.add("accepted")
            except PoiseError:
                outcomes.add("refused")
        assert outcomes == {"accepted", "refused"}, kind


def prepared(balancer: Balancer) -> tuple[Any, Any, Any]:
    model = nn.Linear(3, 1)
    data = TensorDataset(torch.randn(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return balancer.prepare(model, optimizer, DataLoader(data, 8, shuffle=True))


def train(parts: tuple[Any, Any, Any], steps: int) -> None:
    model, optimizer, loader = parts
    for (x,) in islice(loader, steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_worker_0(balancer: Balancer) -> Any:
    """Return the state that worker 0 would save, on every worker."""
    text = json.dumps(balancer.state_dict(), allow_nan=False)
    return json.loads(session_of(balancer).peers.control.texts(text, "the test")[0])


def load_damaged(cases: range, settings: dict[str, Any]) -> list[tuple[int, str, str]]:
    """Load one damaged state after another; train on from each that is accepted."""
    outcomes, unnamed = [], []
    with Balancer(8, **settings) as balancer:
        parts = prepared(balancer)
        train(parts, 7)
        good = of_worker_0(balancer)
        for number in cases:
            case = damaged(good, Random(number))
            try:
                balancer.load_state_dict(case.value)
            except PoiseError as error:
                outcomes.append((number, case.what, str(error)))
                unnamed += [outcomes[-1]] if not named(case, str(error)) else []
                continue
            try:
                train(parts, 3)
                predicted(balancer)
                balancer.load_state_dict(of_worker_0(balancer))
            except Exception as error:
                raise AssertionError(f"case {number} ({case.what}): {error!r}") from error
            outcomes.append((number, case.what, ""))
        balancer.load_state_dict(good)
        train(parts, 1)
    assert not unnamed, unnamed[:5]  # other processes print no values
    return outcomes


def named(case: Damage, message: str) -> bool:
    """Whether a refusal names something of what was changed."""
    return not case.places or any(place in message for place in case.places)


def predicted(balancer: Balancer) -> None:
    plan = balancer.plan
    assert sum(plan.split) == plan.global_batch > 0
    assert 0 < plan.gain < 1e12
    if plan.forecast is not None:
        assert 0 < plan.step_s < 1e12


@pytest.mark.parametrize("settings", [{}, {"adapt": (4, 32)}], ids=["auto", "adapting"])
@pytest.mark.parametrize("cases", CASES)
def test_a_damaged_state_is_refused_by_all_workers_or_trains_on(
    workers: Workers, cases: range, settings: dict[str, Any]
) -> None:
    one, other = workers.run(load_damaged, numbers("state", cases), settings, workers=2)
    assert one == other
    assert {bool(error) for _, _, error in one} == {True, False}


# --- What was found once, by name -----------------------------------------------------------


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: Capture, *words: str) -> str:
    """Run a command that must fail with one line."""
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    return said.err


LINE = "forward_s = [0.001, 0.01]\nbackward_s = [0.002, 0.02]\n"


@pytest.mark.parametrize("key", ["memory_bytes", "fixed_bytes", "bytes_per_sample"])
def test_more_memory_than_there_can_be_is_refused(capsys: Capture, key: str) -> None:
    Path("c.toml").write_text(f"[[worker]]\n{LINE}{key} = 1e20\n")
    said = refused(capsys, "plan", "c.toml", "--global-batch", "8")
    assert f"c.toml, line 4: [[worker]] 1: a worker has {key}=1e+20; give a number" in said


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ready_s", 2, "observation.ready_s: 2 is of another type"),
        ("wait_s", 0.5, "observation.wait_s: 0.5 is of another type"),
        ("wait_s", [0.0], "wait_s of 1 workers and a split over 4"),
        ("ready_s", [[1e308]] * 4, "ready_s=1e+308 on worker 0; give a number from 0 to 1e+09"),
        ("ready_s", [["inf"]] * 4, "ready_s=inf on worker 0"),
        ("memory_bytes", [-1.0] * 4, "memory_bytes=-1.0 on worker 0"),
        ("compiling", [9], "compiling=[9] are not all among the workers"),
    ],
)
def test_a_damaged_record_is_not_calibrated(
    capsys: Capture, field: str, value: Any, message: str
) -> None:
    lines = list(record_lines(0))
    row = json.loads(lines[5])
    row["observation"][field] = value
    lines[5] = json.dumps(row)
    Path("r.jsonl").write_text("\n".join(lines) + "\n")
    said = refused(capsys, "calibrate", "r.jsonl")
    assert said.startswith("poise: line 6 of r.jsonl: this is not a saved Row: ")
    assert message in said


@pytest.mark.parametrize("file", ["none.jsonl", "directory"])
def test_a_record_that_is_not_there_is_said_to_be(capsys: Capture, file: str) -> None:
    Path("directory").mkdir()
    said = refused(capsys, "calibrate", file)
    assert file in said
    assert "Errno" not in said


def test_a_name_that_is_too_long_is_refused_in_one_line(capsys: Capture) -> None:
    assert "there is no script xxx" in refused(capsys, "watch", "x" * 300)
    assert "File name too long" in refused(capsys, "serve", "--save", "x" * 300, __file__)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ddp": -1}, "ddp=-1 are no options of DistributedDataParallel"),
        ({"ddp": {1: 2}}, "ddp={1: 2} are no options"),
        ({"record": 0}, "record=0 is no path"),
        ({"record": b"run.jsonl"}, "record=b'run.jsonl' is no path"),
        ({"record": "a\0b"}, "is no path; give the name of a file as text"),
        ({"record": "\ud800"}, "is no path"),
        ({"record": ""}, "record='' is no path"),
        ({"adapt": (1, 2**50)}, "is no range of global batches"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Balancer(4, **settings)
    assert message in str(caught.value)


def options_that_torch_refuses() -> list[str]:
    messages = []
    for options in ({"bucket_cap_mb": "x"}, {"bucket_cap_mb": 1e308}, {"mixed_precision": 3}):
        with Balancer(8, ddp=options) as balancer, pytest.raises(InvalidSetting) as caught:
            prepared(balancer)
        messages.append(str(caught.value))
    return messages


def test_options_that_torch_refuses_are_named(workers: Workers) -> None:
    for message in workers.run(options_that_torch_refuses, workers=1)[0]:
        assert message.startswith("ddp={'")
        assert "is refused by DistributedDataParallel (" in message


def load_no_state() -> list[str]:
    messages = []
    with Balancer(8) as balancer:
        prepared(balancer)
        nothing: tuple[Any, ...] = (None, [], "state", 3, {})
        for state in nothing:
            with pytest.raises(StateMismatch) as caught:
                balancer.load_state_dict(state)
            messages.append(str(caught.value))
    return messages


def test_what_is_no_state_is_not_loaded(workers: Workers) -> None:
    none, *_, empty = workers.run(load_no_state, workers=1)[0]
    assert none == "the state to load is a NoneType; give what state_dict returned"
    assert "version=None" in empty


@pytest.mark.parametrize(
    ("number", "path", "value"),
    [
        (2, "adapted.least_local", ["inf"] * 4),
        (2, "adapted.quiet", 2**40),
        (2, "adapted.tried", [10**400, 10**400]),
        (2, "adapted.noise.trace", 1e200),
        (0, "policy.fit.first_s", [[1e308]] * 4),
        (0, "policy.fit.pool", [[0.0, 5.0, 0.0]] * 4),
        (0, "policy.fit.seen", [1.0, 1.0, 1.0]),
        (0, "policy.memory.count", [None] * 4),
        (0, "policy.pace.failures", -1),
        (0, "policy.caps", [None] * 4),
        (0, "policy.split", [60, 60, 60, 61]),
        (3, "policy.window.mean_s", [0.0] * 4),
        (5, "policy.last_s", [[0.0] * 4] * 3),
        (0, "split", [1, 2, 3]),
        (0, "workers", 5),
        (0, "global_batch", 0),
    ],
)
def test_a_state_that_no_training_has_is_refused(number: int, path: str, value: Any) -> None:
    state = json.loads(json.dumps(engine_state(number)))
    *way, last = path.split(".")
    inner = state
    for step in way:
        inner = inner[step]
    inner[last] = value
    _, start = fresh(number).start()
    with pytest.raises(StateMismatch) as caught:
        start.load_state_dict(state)
    assert last in str(caught.value)


def test_a_name_on_two_lines_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="give text on one line"):
        Worker(name="a\nb", forward_s=(0.001, 0.01), backward_s=(0.002, 0.02))

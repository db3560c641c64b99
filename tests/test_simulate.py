"""The commands `poise simulate` and `poise calibrate`: files, tables, errors, and parity."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poise.cli.main import main
from poise.core.split import optimal_split
from poise.policy import Auto, Even, Fixed
from poise.records import read_record, replay
from poise.sim.calibration import calibrated
from poise.sim.calibration_text import scenario_text
from poise.sim.outcome import outcome_of
from poise.sim.recorded import followed
from poise.sim.scenario_file import read_scenario

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples" / "scenarios").glob("*.toml"))
Capture = pytest.CaptureFixture[str]

FAST = "forward_s = [0.001, 0.01]\nbackward_s = [0.002, 0.02]"
WORKERS = f'[[worker]]\nname = "a"\ncount = 2\n{FAST}\n[[worker]]\nname = "b"\n{FAST}\n'
HEAD = "global_batch = 64\nsteps = 40\n"
SCENARIO = f"{HEAD}{WORKERS}"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: Capture, text: str, *options: str) -> str:
    Path("s.toml").write_text(text)
    assert main(["simulate", "s.toml", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("poise: ")
    assert said.err.count("\n") == 1
    return said.err.removeprefix("poise: ").strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("global_batch = 8\n", "s.toml declares no workers; add a table [[worker]]"),
        (WORKERS, "s.toml has no global_batch; give the samples of a step"),
        (
            f"{HEAD}stpes = 3\n{WORKERS}",
            "s.toml, line 3 has unknown key stpes; did you mean steps?",
        ),
        (f"global_batch = 0\n{WORKERS}", "s.toml, line 1 has global_batch=0; give a whole number"),
        (f"global_batch = 2\n{WORKERS}", "s.toml: global_batch=2 is less than all min_batch"),
        (f"{HEAD}seed = -1\n{WORKERS}", "s.toml, line 3 has seed=-1; give a whole number from 0"),
        (f'{HEAD}mode = "bsp"\n{WORKERS}', "s.toml, line 3: mode='bsp' is unknown; use"),
        (
            f'{HEAD}policies = ["even", "autos"]\n{WORKERS}',
            "s.toml, line 3 has policy 'autos'; did you mean auto?",
        ),
        (f'{HEAD}policies = ["even", "even"]\n{WORKERS}', "line 3 has policies=.* different names"),
        (f'{HEAD}policies = ["fixed"]\n{WORKERS}', "line 3 has the policy fixed; give its split"),
        (f'{HEAD}policies = ["static"]\n{WORKERS}', "line 3 has the policy static; .* a resource"),
        (f"{HEAD}split = [1, 2, 3]\n{WORKERS}", "line 3 has split=.* add up to global_batch=64"),
        (
            f"{HEAD}[[worker]]\nforward_s = [-0.001, 0.01]\nbackward_s = [0.1, 0.1]\n",
            "s.toml, line 4: [[worker]] 1: a worker has forward_s=[-0.001, 0.01]; give two numbers",
        ),
        (
            f"{SCENARIO}pice_per_hour = 3\n",
            "s.toml, line 12: [[worker]] 2 has unknown key pice_per_hour; did you mean "
            "price_per_hour?",
        ),
        (f"{SCENARIO}tile = 0\n", "line 12: [[worker]] 2 has tile=0; give a number of samples"),
        (f"{SCENARIO}knee = [4, 0.5]\n", "line 12: .* has knee=[4, 0.5]; give a pair"),
        (f"{SCENARIO}power = 2\n", "line 12: .* has power=2; give a pair above 0"),
        (f"{SCENARIO}[noise]\ncvv = 1\n", "line 13: [noise] has unknown key cvv; did you mean cv?"),
        (f"{SCENARIO}[noise]\ncv = 3\n", "line 13: [noise] has cv=3; give a number from 0 to 2"),
        (f"{SCENARIO}[noise]\ncv = nan\n", "line 13: [noise] has cv=nan; give a number"),
        (f"{SCENARIO}[drift]\nper_step = -1\n", "line 13: [drift] has per_step=-1; give a number"),
        (f"noise = 3\n{SCENARIO}", "s.toml, line 1 has noise=3; write one table [noise]"),
        (
            f"{SCENARIO}[[event]]\nat_step = 3\nslower = 2.0\nworker = 'c'\n",
            "line 15: [[event]] 1 has worker='c', who is not there; known are a, b, a-0, a-1",
        ),
        (
            f"{SCENARIO}[[event]]\nat_step = 3\nslower = 2.0\nworker = 'a-2'\n",
            "line 15: [[event]] 1 has worker='a-2', who is not there; did you mean a-",
        ),
        (f"{SCENARIO}[[event]]\nat_step = 3\n", "line 12: [[event]] 1 needs one of slower,"),
        (
            f"{SCENARIO}[[event]]\nslower = 3\n",
            "line 12: [[event]] 1 needs one of at_step and at_s",
        ),
        (
            f"{SCENARIO}[[event]]\nat_step = 40\nslower = 3\n",
            "line 13: [[event]] 1 has at_step=40, beyond the end: there are 40 steps; give an",
        ),
        (
            f"{SCENARIO}[[event]]\nat_step = 4\nslower = 0\n",
            "line 14: [[event]] 1 has slower=0; give a number from 1e-06",
        ),
        (
            f"{SCENARIO}[[event]]\nat_step = 4\nfails = false\n",
            "line 14: [[event]] 1 has fails=False; give true, or leave it out",
        ),
        (
            f"{SCENARIO}[[event]]\nat_step = 4\nslower_link = 2\n",
            "s.toml, line 14: [[event]] 1 has slower_link, and links are those of a ring; give",
        ),
        (
            f"{SCENARIO}[[walk]]\nat_step = 4\nspeeds = [1, 2]\n",
            "line 14: [[walk]] 1 has speeds=[1, 2]; give 3 numbers above 0",
        ),
        (
            f"{SCENARIO}[[walk]]\nat_step = 400\nspeeds = [1, 2, 3]\n",
            "line 13: [[walk]] 1 has at_step=400, beyond the end: there are 40 steps",
        ),
        (f"{SCENARIO}[walk]\nat_step = 4\n", "line 12: [walk] is one table; write [[walk]]"),
        (
            f"{SCENARIO}[network]\nbucket_bytes = [1e6]\n",
            "line 3: [[worker]] 1 has no link_bytes_per_s, which a ring needs",
        ),
        (f"{SCENARIO}[network]\nlatency_s = 1\n", "line 13: [network]: latency_s=1 needs bucket"),
        (
            f"{SCENARIO}[training]\nnoise_scale = [[0.5, 1], [0.2, 3]]\ntarget_samples = 9\n",
            "line 13: [training] has noise_scale=.* pairs of the part of the goal",
        ),
        (
            f"{SCENARIO}[training]\nnoise_scale = [[0.0, 1], [1, 3]]\n",
            "line 13: [training] changes on the way to a goal; give target_samples",
        ),
        (
            f"{SCENARIO}[training]\nadapt = [1, 9]\n",
            "line 13: [training] has adapt and no noise_scale; give both",
        ),
        (
            f"{SCENARIO}[training]\nnoise_scale = 5\nadapt = [1, 9]\n",
            "line 14: [training]: global_batch=64, for which .* start inside of it",
        ),
        (
            f"{SCENARIO}[training]\nepoch_samples = 63\n",
            "line 13: [training] has epoch_samples=63; give at least global_batch=64 samples",
        ),
        (
            f"{SCENARIO}[training]\nstride = 5\n[drift]\nper_step = 0.1\n",
            "line 13: [training] lets a step stand for several, and events, drift",
        ),
        (
            f'{HEAD}mode = "async"\n{WORKERS}[network]\ndrag = 0.1\n',
            "line 3 has a server, which knows no ring, drag or stride",
        ),
        (
            f'{HEAD}mode = "async"\n{WORKERS}[training]\nnoise_scale = 5\nadapt = [32, 99]\n',
            "line 15: [training] lets the global batch move, and with a server it stays",
        ),
        (
            f"{SCENARIO}max_batch = 9\n[failures]\nmean_steps = 50\n",
            "s.toml: workers come and go, and have different min_batch, max_batch or multiple_of",
        ),
        (f"{SCENARIO}[nosie]\ncv = 0.1\n", "s.toml, line 12 has unknown key nosie; did you mean"),
        (f"policies = [['a']]\n{SCENARIO}", "s.toml, line 1 has policy ['a']; known are"),
        (f"split = 0\n{SCENARIO}", "s.toml, line 1 has split=0; give local batches"),
        (f"restart_s = 1{'0' * 400}\n{SCENARIO}", "s.toml, line 1 has restart_s=1000"),
        (f"restart_s = inf\n{SCENARIO}", "s.toml, line 1 has restart_s=inf; give a number"),
        (f"{SCENARIO}price_per_hour = inf\n", "line 12: [[worker]] 2 has price_per_hour=inf; give"),
        (f"{SCENARIO}knee = [1, inf]\n", "line 12: [[worker]] 2 has knee=[1, inf]; give a pair"),
        (f"{SCENARIO}micro_batch = 1{'0' * 400}\n", "line 12: [[worker]] 2: worker b has micro_b"),
        (f'mode = "stale:{"9" * 5000}"\n{SCENARIO}', "s.toml, line 1: mode='stale:999"),
        (
            f"{SCENARIO}[[event]]\nat_step = 3\nslower = 2\nworker = [['a']]\n",
            "line 15: [[event]] 1 has worker=[['a']]; give a name, or a list of names",
        ),
        (
            f"{SCENARIO}[[event]]\nat_step = 3\nslower = 2\nworker = []\n",
            "line 15: [[event]] 1 has worker=[]; give a name, or leave it out for all",
        ),
        (f"{SCENARIO}[network]\nbucket_bytes = 5\n", "line 13: [network]: bucket_bytes=5; give a"),
        (f"{SCENARIO}[server]\nupdate_s = 1\n", "line 12: [server] means nothing with mode"),
        (
            f"{SCENARIO}[[event]]\nat_step = 3\nslower_loader = 2\n",
            "line 14: [[event]] 1 has slower_loader, and no loader is a limit; give input_s",
        ),
        (
            f"{SCENARIO}[[event]]\nat_step = 3\nworker = 'a-0'\nleaves = true\n"
            "[[event]]\nat_s = 3\nworker = 'a-0'\njoins = true\n",
            "s.toml moves a-0 by at_step and by at_s, so that it is unclear what comes first",
        ),
        (
            f"{SCENARIO}[[event]]\nat_step = 3\nleaves = true\n",
            "s.toml: at step 3 the last worker is gone; let one stay, or another join before",
        ),
        (
            f"{HEAD}[[worker]]\nready_s = [[0.1, 0.1], [0.1, 0.2]]\n",
            "s.toml: worker worker-0 has 2 lines in ready_s, but the network has 1 buckets",
        ),
        (f"{SCENARIO}[failures]\nmean_steps = 0\n", "line 13: [failures] has mean_steps=0; give"),
    ],
)
def test_a_bad_scenario_is_refused_with_the_line_and_the_nearest_name(
    capsys: Capture, text: str, message: str
) -> None:
    said = refused(capsys, text)
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    assert re.search(pattern, said), said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "atuo"], "--policy atuo is unknown; did you mean auto?"),
        (["--policy", "static"], "--policy static needs a resource of each worker in s.toml"),
        (["--more", "c"], "--more c: s.toml has no [[worker]] of that name; known are a, b"),
        (["--record", "s.toml/x"], "--record s.toml/x cannot be made: Not a directory"),
    ],
)
def test_a_bad_option_is_refused(capsys: Capture, options: list[str], message: str) -> None:
    assert message in refused(capsys, SCENARIO, *options)


@pytest.mark.parametrize("option", [["--seed", "x"], ["--network", "0"], ["--more", "a=0"]])
def test_a_number_that_cannot_be_is_refused(capsys: Capture, option: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "s.toml", *option])
    assert "is not" in capsys.readouterr().err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(path: Path) -> None:
    scenario = read_scenario(path)
    policy = scenario.policies[-1]
    steps = min(scenario.steps, 60)
    early = tuple(e for e in scenario.events if e.at_step is None or e.at_step < steps)
    short = replace(scenario, steps=steps, events=early)
    found = outcome_of(short, policy, short.policy(policy))
    assert not found.refused
    assert found.steps > 0


def test_policies_stand_side_by_side(capsys: Capture) -> None:
    text = SCENARIO + "[[event]]\nat_step = 10\nworker = 'b'\nslower = 4.0\n"
    Path("s.toml").write_text(text.replace("steps = 40", "steps = 400"))
    assert main(["simulate", "s.toml"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {words[0]: words[1:] for line in lines if len(words := line.split()) > 4}
    assert {"even", "proportional", "auto"} <= set(rows)
    assert re.search(r"^auto makes steps \d\.\d\d times as fast as even$", said.out, re.MULTILINE)


def test_json_holds_what_the_table_says(capsys: Capture) -> None:
    Path("s.toml").write_text(SCENARIO + "price_per_hour = 2.0\n")
    assert main(["simulate", "s.toml", "--json", "--seed", "3", "--steps", "30"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seed"] == 3
    assert [each["policy"] for each in found["outcomes"]] == ["even", "proportional", "auto"]
    even = found["outcomes"][0]
    assert even["steps"] == 30
    assert math.isclose(even["worker_hours"], 3 * even["seconds"] / 3600)
    assert math.isclose(even["cost"], 2 * even["seconds"] / 3600)
    assert even["last_split"] == [21, 21, 22]
    assert found["ceiling"] >= 1
    assert found["ceiling_unknown"] is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("[[event]]\nat_step = 10\nworker = 'b'\nslower = 4.0\n", "the cluster changes"),
        ("[[event]]\nat_step = 10\nworker = 'b'\nleaves = true\n", "the cluster changes"),
        ("[drift]\nper_step = 0.01\n", "the cluster changes"),
        ("[failures]\nmean_steps = 1000\ndown_steps = 5\n", "the cluster changes"),
    ],
)
def test_no_ceiling_is_stated_where_the_best_split_changes(
    change: str, why: str, capsys: Capture
) -> None:
    """The speeds of the start say nothing of later steps; table and page say so, too."""
    Path("s.toml").write_text(SCENARIO + change)
    assert main(["simulate", "s.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ceiling"] is None
    assert found["ceiling_unknown"].startswith(why)
    assert main(["simulate", "s.toml", "--out", "pictures"]) == 0
    said = f"no ceiling is known: {found['ceiling_unknown']}"
    assert said in capsys.readouterr().out.splitlines()
    assert said in Path("pictures/index.html").read_text()


def test_a_ceiling_is_above_what_every_policy_reaches(capsys: Capture) -> None:
    Path("s.toml").write_text(SCENARIO)
    assert main(["simulate", "s.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    even, *others = (each["step_s"] for each in found["outcomes"])
    assert all(even / step_s <= found["ceiling"] * (1 + 1e-9) for step_s in others)
    assert main(["simulate", "s.toml"]) == 0
    assert f"more than {found['ceiling']:.2f} times as fast as even" in capsys.readouterr().out


def test_one_more_worker_and_a_faster_network_are_compared(capsys: Capture) -> None:
    network = "[network]\nbucket_s = [0.1]\n"
    Path("s.toml").write_text(SCENARIO + network)
    assert main(["simulate", "s.toml", "--policy", "even", "--network", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (was,), (now,) = found["before"], found["outcomes"]
    assert math.isclose(was["step_s"] - now["step_s"], 0.075, rel_tol=1e-6)
    assert main(["simulate", "s.toml", "--policy", "even", "--more", "b=2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"with 2 more b, even makes steps \d\.\d\d times as fast, for \d", said)


def test_a_worker_that_is_added_is_one_of_its_kind(capsys: Capture) -> None:
    """What happens to the others happens to it, too."""
    event = "[[event]]\nat_step = 0\nworker = 'b'\nslower = 10.0\n"
    Path("s.toml").write_text(SCENARIO + event)
    options = ["--policy", "even", "--more", "b", "--more", "b", "--json"]
    assert main(["simulate", "s.toml", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    (was,), (now,) = found["before"], found["outcomes"]
    assert len(now["last_split"]) == 5
    assert math.isclose(was["step_s"], 10 * (0.003 * 22 + 0.030))
    assert math.isclose(now["step_s"], 10 * (0.003 * 13 + 0.030))


def test_a_faster_network_shortens_an_exchange_with_a_server(capsys: Capture) -> None:
    server = "[server]\nexchange_s = 2.0\n"
    Path("s.toml").write_text('mode = "async"\n' + SCENARIO + server)
    options = ["--policy", "even", "--network", "4", "--json"]
    assert main(["simulate", "s.toml", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcomes"][0]["step_s"] < 0.5 * found["before"][0]["step_s"]


def test_records_are_written_and_never_overwritten(capsys: Capture) -> None:
    Path("s.toml").write_text(SCENARIO)
    assert main(["simulate", "s.toml", "--record", "runs"]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "auto.jsonl",
        "even.jsonl",
        "proportional.jsonl",
    ]
    assert replay(read_record("runs/auto.jsonl")) is None
    assert main(["simulate", "s.toml", "--record", "runs"]) == 2
    assert "records are not overwritten" in capsys.readouterr().err


def test_pictures_and_a_page_are_written(capsys: Capture) -> None:
    Path("s.toml").write_text(SCENARIO)
    assert main(["simulate", "s.toml", "--out", "pictures", "--policy", "even"]) == 0
    said = capsys.readouterr().out
    names = {path.name for path in Path("pictures").iterdir()}
    assert {"index.html", "throughput.png", "timeline-even.png", "batches-even.png"} <= names
    assert "written: pictures/index.html" in said


def test_the_page_prints_what_it_says(capsys: Capture) -> None:
    """Its scenario, its commands, a mistake, and the lines of Python."""
    text = (ROOT / "docs/how-to/simulate.md").read_text()
    (scenario,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    Path("scenario.toml").write_text(scenario)
    Path("wrong.toml").write_text(scenario.replace("slower = 2.0", "slwer = 2.0"))
    commands = re.findall(r"```console\n\$ poise (.*?)\n(.*?)```", text, flags=re.DOTALL)
    assert len(commands) == 3
    for command, expected in commands:
        main(command.split())
        said = capsys.readouterr()
        lines = (said.out + said.err).rstrip().splitlines()
        assert [line.rstrip() for line in lines] == expected.splitlines()
    ((code, expected),) = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL
    )
    exec(compile(code, "simulate.md", "exec"), {})
    assert capsys.readouterr().out == expected


def test_the_table_in_the_readme_is_what_its_command_prints(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = Path("README.md").read_text()
    ((command, expected),) = re.findall(
        r"```console\n\$ poise (simulate .*?)\n(.*?)```", text, flags=re.DOTALL
    )
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert [line.rstrip() for line in lines] == expected.splitlines()


NOISY = """
seed = 5
steps = 400
global_batch = 96
policies = ["auto"]
[noise]
cv = 0.04
[network]
ready = [0.3, 1.0]
bucket_s = [0.02, 0.004]
[[worker]]
count = 2
forward_s = [0.0004, 0.004]
backward_s = [0.0008, 0.006]
[[worker]]
forward_s = [0.0012, 0.004]
backward_s = [0.0024, 0.006]
"""


def record_of(text: str, name: str = "auto") -> Path:
    Path("truth.toml").write_text(text)
    assert main(["simulate", "truth.toml", "--record", "truth"]) == 0
    return Path("truth") / f"{name}.jsonl"


def test_a_calibrated_cluster_behaves_as_the_one_it_was_measured_on(capsys: Capture) -> None:
    """Other splits included: the even one, which the record hardly saw."""
    run = record_of(NOISY)
    capsys.readouterr()
    assert main(["calibrate", str(run), "--out", "mine.toml"]) == 0
    said = capsys.readouterr().out
    assert "3 workers" in said
    assert "written: mine.toml" in said
    truth, mine = read_scenario("truth.toml"), read_scenario("mine.toml")
    assert mine.error is not None
    assert mine.error < 0.1
    assert abs(mine.noise.cv / 0.04 - 1) < 0.4
    bar = max(2 * mine.error, 0.05)
    for policy in (Even(), Auto(), Fixed([30, 30, 36])):
        real, found = (outcome_of(each, "x", policy).step_s for each in (truth, mine))
        assert abs(found / real - 1) < bar, (type(policy).__name__, found, real)


def test_a_calibration_says_what_it_had_to_guess(capsys: Capture) -> None:
    even = record_of(NOISY.replace('["auto"]', '["even"]'), "even")
    capsys.readouterr()
    assert main(["calibrate", str(even)]) == 0
    said = capsys.readouterr()
    assert "every worker had one local batch only" in said.err
    Path("printed.toml").write_text(said.out)
    assert read_scenario("printed.toml").workers == 3
    assert read_scenario("printed.toml").error is None
    assert main(["simulate", "printed.toml", "--steps", "40"]) == 0
    assert "note: every worker had one local batch only" in capsys.readouterr().out


def test_only_what_follows_a_change_of_speed_counts() -> None:
    event = "[[event]]\nat_step = 200\nworker = 'worker-2'\nslower = 3.0\n"
    found = calibrated(read_record(record_of(NOISY + event)))
    assert any("worker 2 changed at about step 20" in each for each in found.guessed)
    slopes = found.model.ready_s(np.full(3, 30.0))[:, -1]
    assert abs(slopes[2] / (3 * (30 * 0.0036 + 0.010)) - 1) < 0.1


def test_a_change_of_speed_at_the_very_end_is_borne_and_said() -> None:
    run = record_of(NOISY.replace("steps = 400", "steps = 151"))
    rows = [json.loads(line) for line in run.read_text().splitlines()]
    for row in rows[-6:]:
        ready = row["observation"]["ready_s"]
        row["observation"]["ready_s"] = [[5 * each for each in worker] for worker in ready]
    Path("late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = calibrated(read_record("late.jsonl"))
    assert any("mixture of before and after" in each for each in found.guessed)
    assert math.isnan(found.error)


def test_bounds_of_the_training_are_kept() -> None:
    text = NOISY.replace("count = 2", "count = 2\nmax_batch = 35\nmin_batch = 5")
    found = calibrated(read_record(record_of(text)))
    Path("mine.toml").write_text(scenario_text(found, "auto.jsonl"))
    mine = read_scenario("mine.toml")
    assert [worker.max_batch for worker in mine.cluster.workers][:2] == [35, 35]
    assert mine.cluster.workers[0].min_batch == 5


def test_a_record_with_a_server_is_calibrated_without_an_error() -> None:
    text = 'mode = "async"' + NOISY.replace("[network]\nready = [0.3, 1.0]\n", "").replace(
        "bucket_s = [0.02, 0.004]\n", ""
    )
    found = calibrated(read_record(record_of(text)))
    assert found.global_batch == 96
    assert math.isnan(found.error)
    assert any("travel is not recorded" in each for each in found.guessed)
    Path("mine.toml").write_text(scenario_text(found, "auto.jsonl"))
    assert str(read_scenario("mine.toml").mode) == "async"


def test_a_worker_that_never_measured_is_named(capsys: Capture) -> None:
    run = record_of(NOISY)
    rows = [json.loads(line) for line in run.read_text().splitlines()]
    for row in rows[1:]:
        row["observation"]["ready_s"][1] = [None, None]
    Path("quiet.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["calibrate", "quiet.jsonl"]) == 2
    assert "worker 1 never measured any" in capsys.readouterr().err


def test_a_calibration_is_not_overwritten_and_needs_enough_steps(capsys: Capture) -> None:
    run = record_of(NOISY)
    Path("mine.toml").write_text("mine")
    assert main(["calibrate", str(run), "--out", "mine.toml"]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == "mine"
    lines = run.read_text().splitlines(keepends=True)
    Path("short.jsonl").write_text("".join(lines[:12]))
    assert main(["calibrate", "short.jsonl"]) == 2
    assert "the record has 11 steps that all of its last 3 workers" in capsys.readouterr().err
    assert main(["calibrate", "none.jsonl"]) == 2
    assert "there is no file none.jsonl; give the path of a record" in capsys.readouterr().err


def test_a_calibration_as_json_holds_the_scenario(capsys: Capture) -> None:
    run = record_of(NOISY)
    capsys.readouterr()
    assert main(["calibrate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"] == 3
    assert found["scenario"] == scenario_text(calibrated(read_record(run)), "auto.jsonl")


TRAIN = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from poise.torch import Balancer

torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(1200, 16), torch.randint(0, 4, (1200,)))
model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Balancer(48, record="run.jsonl") as balancer:
    model, optimizer, loader = balancer.prepare(model, optimizer, DataLoader(data, batch_size=48))
    for _ in balancer.epochs(8):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_lab_and_the_simulator_agree() -> None:
    """The same decisions row by row, and step times within the prediction error."""
    Path("train.py").write_text(TRAIN)
    speeds, pace = (1.0, 0.5, 0.25), "4ms+20ms"
    command = [sys.executable, "-m", "poise", "lab", "--speeds", ",".join(map(str, speeds))]
    subprocess.run([*command, "--pace", pace, "--", "train.py"], check=True, timeout=300)
    record = read_record("run.jsonl")
    assert any(row.decision for row in record.rows)
    assert replay(record) is None
    difference = followed(record, lead=0)
    assert difference is None, str(difference)

    found = calibrated(record)
    Path("mine.toml").write_text(scenario_text(found, "run.jsonl"))
    mine = replace(read_scenario("mine.toml"), steps=200)
    simulated = outcome_of(mine, "fixed", Fixed(found.last_split)).step_s
    bar = max(2 * found.error, 0.05)
    assert abs(simulated / found.measured_s - 1) < bar

    declared: dict[str, Any] = {
        f"worker-{number}": (0.004 / speed, 0.020 / speed) for number, speed in enumerate(speeds)
    }
    tables = "".join(
        f'[[worker]]\nname = "{name}"\nready_s = [[{slope}, {fixed}]]\n'
        for name, (slope, fixed) in declared.items()
    )
    bucket_s = float(found.model.bucket_s.sum())
    Path("declared.toml").write_text(
        f"global_batch = 48\nsteps = 200\n{tables}[network]\nbucket_s = [{bucket_s}]\n"
    )
    auto = outcome_of(read_scenario("declared.toml"), "auto", Auto())
    measured = found.measured_s
    settled = optimal_split(read_scenario("declared.toml").model, 48).step_s
    assert abs(settled / measured - 1) < max(bar, 0.1)
    assert auto.settled_step is not None

"""`poise plan`: cluster files, what is printed, pictures, and everything that can be wrong."""

import json
import re
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from poise import Network, Worker
from poise.cli.main import main
from poise.cli.plan_findings import find
from poise.cli.plan_sweep import figure, sweep
from poise.cluster_file import read_cluster
from poise.core.split import even_split
from poise.errors import InvalidSetting

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.toml"))
FAST = "forward_s = [0.001, 0.01]\nbackward_s = [0.002, 0.02]"
SLOW = "forward_s = [0.003, 0.01]\nbackward_s = [0.006, 0.02]"
NETWORK = "[network]\nready = [0.3, 1.0]\nbucket_s = [0.02, 0.01]\n"
CLUSTER = f'{NETWORK}[[worker]]\nname = "fast"\n{FAST}\n[[worker]]\nname = "slow"\n{SLOW}\n'
CEILINGS = {"omnilearn-hl2": 1 / 3, "omnilearn-hl4": 1 / 2, "omnilearn-hl8": 2 / 3}
"""1 - min(cores) / mean(cores): what any split can save of the even one's step."""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster of two workers, in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(CLUSTER)
    return Path("cluster.toml")


def printed(capsys: Capture, *arguments: object) -> str:
    """Return what a plan prints; it must succeed."""
    code = main(["plan", *map(str, arguments)])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    return said.out


def found(capsys: Capture, *arguments: object) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json"))
    return answer


def refused(capsys: Capture, *arguments: object) -> str:
    """Return the one line on stderr of a plan that is refused."""
    assert main(["plan", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("poise: ")
    assert said.err.count("\n") == 1
    return said.err.removeprefix("poise: ").strip()


def cells(text: str) -> list[list[str]]:
    """Return the rows of the table."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_table_shows_who_gets_what(capsys: Capture, file: Path) -> None:
    out = printed(capsys, file, "--global-batch", 64)
    assert cells(out) == [
        ["fast", "48", "75.0 %", "184.0 ms", "compute", "-"],
        ["slow", "16", "25.0 %", "184.0 ms", "compute", "-"],
    ]
    assert "step: 184.0 ms, 348 samples/s" in out
    assert "even split: 328.0 ms, 195 samples/s; the split above is 1.78 times as fast" in out
    assert "all workers are worth having, slow least: without it a step takes 222.0 ms" in out
    assert "best global batch" not in out


def test_json_holds_all_of_it(capsys: Capture, file: Path) -> None:
    answer = found(capsys, file, "--global-batch", 64, "--noise-scale", 500)
    assert answer["global_batch"] == 64
    assert [worker["name"] for worker in answer["workers"]] == ["fast", "slow"]
    assert sum(worker["local_batch"] for worker in answer["workers"]) == 64
    assert sum(worker["share"] for worker in answer["workers"]) == pytest.approx(1)
    assert max(worker["predicted_s"] for worker in answer["workers"]) == answer["step_s"]
    assert answer["samples_per_s"] == pytest.approx(64 / 0.184)
    assert answer["gain"] == pytest.approx(answer["even_step_s"] / answer["step_s"])
    assert answer["even_split"] == list(even_split(2, 64))
    first, second = answer["worth"]
    assert (first["kind"], second["kind"]) == ("fast", "slow")
    assert first["without_s"] > second["without_s"] > second["with_s"]
    assert second["with_s"] <= answer["step_s"]
    goodput = answer["goodput"]
    assert goodput["start_batch"] == 64
    assert goodput["gain"] == pytest.approx(goodput["best_goodput"] / goodput["goodput"])
    assert goodput["gain"] >= 1


def test_a_noise_scale_of_the_file_is_overruled_by_the_command_line(
    capsys: Capture, file: Path
) -> None:
    file.write_text("[training]\nnoise_scale = 500\nstart_batch = 32\n" + CLUSTER)
    stated = found(capsys, file, "--global-batch", 64)["goodput"]
    assert (stated["noise_scale"], stated["start_batch"]) == (500.0, 32)
    options = ["--noise-scale", "9000", "--start-batch", "16"]
    overruled = found(capsys, file, "--global-batch", 64, *options)["goodput"]
    assert (overruled["noise_scale"], overruled["start_batch"]) == (9000.0, 16)
    assert overruled["best_global_batch"] > stated["best_global_batch"]
    out = printed(capsys, file, "--global-batch", 64, *options)
    assert f"best global batch: {overruled['best_global_batch']:,}, which learns" in out


def test_equal_workers_are_shown_in_one_line(capsys: Capture, file: Path) -> None:
    file.write_text(CLUSTER.replace('"fast"', '"fast"\ncount = 4'))
    rows = cells(printed(capsys, file, "--global-batch", 104))
    assert [row[:2] for row in rows] == [["fast x4", "24"], ["slow", "8"]]
    rows = cells(printed(capsys, file, "--global-batch", 106))
    assert [row[:2] for row in rows] == [
        ["fast x2 of 4", "25"],
        ["fast x2 of 4", "24"],
        ["slow", "8"],
    ]
    names = [worker["name"] for worker in found(capsys, file, "--global-batch", 106)["workers"]]
    assert names == ["fast-0", "fast-1", "fast-2", "fast-3", "slow"]


def test_a_worker_that_costs_more_than_it_brings_is_named(capsys: Capture, file: Path) -> None:
    """Its few samples save less than its part in the all-reduce takes."""
    hopeless = '[[worker]]\nname = "hopeless"\nforward_s = [0.5, 0.01]\nbackward_s = [1, 0.02]\n'
    file.write_text(CLUSTER + hopeless + "min_batch = 0\n")
    answer = found(capsys, file, "--global-batch", 64)
    assert [each["worth_having"] for each in answer["worth"]] == [True, True, False]
    out = printed(capsys, file, "--global-batch", 64)
    match = re.search(r"not worth having: hopeless; without it a step takes (.*) ms, (.*) ms", out)
    assert match
    with_s, without_s = (answer["worth"][2][key] for key in ("with_s", "without_s"))
    assert float(match[1]) == pytest.approx(1e3 * without_s, abs=0.1)
    assert float(match[2]) == pytest.approx(1e3 * (with_s - without_s), abs=0.1)
    assert "all workers are worth having" not in out


def test_a_worker_without_a_sample_is_not_worth_having(capsys: Capture, file: Path) -> None:
    """Also where its part in the all-reduce costs nothing."""
    idle = '[[worker]]\nname = "idle"\nmin_batch = 0\nforward_s = [9, 0]\nbackward_s = [9, 0]\n'
    file.write_text(CLUSTER.removeprefix(NETWORK) + idle)
    out = printed(capsys, file, "--global-batch", 64)
    assert "not worth having: idle; without it a step takes as long" in out


def test_several_useless_kinds_are_each_named_once(capsys: Capture, file: Path) -> None:
    many = '[[worker]]\nname = "many"\ncount = 3\nforward_s = [0.5, 0.2]\nbackward_s = [1, 0.3]\n'
    one = '[[worker]]\nname = "one"\nforward_s = [0.5, 0.3]\nbackward_s = [1, 0.5]\n'
    file.write_text(CLUSTER.replace("[0.02, 0.01]", "[0.02, 0.2]") + many + one)
    out = printed(capsys, file, "--global-batch", 64)
    assert out.count("not worth having: one; without it") == 1
    assert out.count("not worth having: each of the 3 many; without one of them") == 1
    assert out.index("having: one") < out.index("having: each of the 3 many")
    assert "leave the first out and plan again" in out


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("max_batch = 8", "slow takes at most 8 samples and would get 32"),
        ("min_batch = 40", "slow takes at least 40 samples and would get 32"),
        ("multiple_of = 6", "slow takes multiples of 6 samples and would get 32"),
    ],
)
def test_an_even_split_that_does_not_fit_is_said_to(
    capsys: Capture, file: Path, limit: str, why: str
) -> None:
    file.write_text(f"{CLUSTER}{limit}\n")
    out = printed(capsys, file, "--global-batch", 64)
    assert f"an even split would not fit: {why}" in out
    answer = found(capsys, file, "--global-batch", 64)
    assert answer["even_split"] is answer["even_step_s"] is answer["gain"] is None


def test_fewer_samples_than_workers_cannot_be_split_evenly(capsys: Capture, file: Path) -> None:
    file.write_text(CLUSTER + "min_batch = 0\n")
    out = printed(capsys, file, "--global-batch", 1)
    assert "an even split would not fit: there are more workers than samples" in out


def test_memory_is_shown_as_planned_of_declared(capsys: Capture, file: Path) -> None:
    memory = "memory_bytes = 4e9\nfixed_bytes = 1e9\nbytes_per_sample = 0.2e9\n"
    file.write_text(CLUSTER + memory)
    (_, _, _, _, _, nothing), slow = cells(printed(capsys, file, "--global-batch", 64))
    assert nothing == "-"
    assert slow[1:2] + slow[4:] == ["13", "memory", "3.6 of 4 GB"]
    file.write_text(CLUSTER + memory + "micro_batch = 5\n")
    workers = found(capsys, file, "--global-batch", 64)["workers"]
    assert workers[1]["local_batch"] > 5
    assert workers[1]["memory_bytes"] == 2e9


def test_one_worker_alone_is_planned(capsys: Capture, file: Path) -> None:
    file.write_text(f"[[worker]]\n{FAST}\n")
    out = printed(capsys, file, "--global-batch", 10)
    assert cells(out)[0][:3] == ["worker-0", "10", "100.0 %"]
    assert "the split above is as fast" in out
    assert "worth having" not in out


def test_a_thousand_workers_are_planned_within_two_seconds(capsys: Capture, file: Path) -> None:
    kinds = "".join(
        f'[[worker]]\nname = "w{number}"\nforward_s = [{1e-4 * number}, 0.01]\n'
        f"backward_s = [{2e-4 * number}, 0.02]\n"
        for number in range(1, 1001)
    )
    file.write_text(f"[training]\nnoise_scale = 9000\n{NETWORK}{kinds}")
    start = time.perf_counter()
    out = printed(capsys, file, "--global-batch", 20000)
    assert time.perf_counter() - start < 2
    assert len(cells(out)) == 40
    assert "960 more workers are not shown; --json lists all" in out
    file.write_text(
        CLUSTER.replace('"fast"', '"fast"\ncount = 500').replace('w"', 'w"\ncount = 500')
    )
    start = time.perf_counter()
    assert len(cells(printed(capsys, file, "--global-batch", 20000))) <= 4
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_planned(capsys: Capture, example: Path) -> None:
    cluster = read_cluster(example)
    assert cluster.title
    assert "assumed" in example.read_text()
    answer = found(capsys, example, "--global-batch", 128)
    assert sum(worker["local_batch"] for worker in answer["workers"]) == 128
    assert answer["gain"] >= 1
    assert answer["goodput"]["best_global_batch"] >= 1
    saved = 1 - 1 / answer["gain"]
    assert saved <= CEILINGS.get(example.stem, 1.0)


def test_the_examples_are_those_of_the_papers() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "cannikin-3gpu",
        "cannikin-16gpu",
        *(f"omnilearn-hl{level}" for level in (1, 2, 4, 8)),
        "two-home-pcs",
    }
    kinds = read_cluster(ROOT / "examples/clusters/cannikin-16gpu.toml").kinds
    assert [(kind.name, kind.count) for kind in kinds] == [("a100", 4), ("v100", 4), ("rtx6000", 8)]


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("limits", ["", "max_batch = 20\n", "multiple_of = 8\nmin_batch = 0\n"])
def test_a_sweep_is_drawn(
    capsys: Capture, file: Path, name: str, begins: bytes, limits: str
) -> None:
    file.write_text('title = "$5 each$"\n' + CLUSTER + limits)
    out = printed(capsys, file, "--global-batch", 64, "--noise-scale", 900, "--sweep", name)
    assert out.endswith(f"picture: {name}\n")
    picture = Path(name).read_bytes()
    assert picture.startswith(begins)
    assert len(picture) > 10_000


def test_a_picture_names_its_axes_and_marks_the_batches(file: Path) -> None:
    file.write_text('title = "Two of them"\n' + CLUSTER + "max_batch = 40\n")
    findings = find(read_cluster(file), 64, 900.0, None)
    points = sweep(findings)
    assert 60 <= len(points) <= 100
    assert (points[0].global_batch, points[-1].global_batch) == (2, 16 * 64)
    assert all(point.best >= point.even * (1 - 1e-12) for point in points if point.even)
    assert all((point.even is None) == (point.global_batch > 80) for point in points)
    (axes,) = figure(findings, points).axes
    assert axes.get_xlabel() == "global batch (samples)"
    assert axes.get_ylabel() == "samples per second"
    assert axes.get_title(loc="left") == "Two of them"
    assert findings.learning is not None
    legend = axes.get_legend_handles_labels()[1]
    assert "asked for: 64" in legend
    assert f"highest goodput: {findings.learning.best_global_batch}" in legend


def test_drawing_needs_no_state_of_matplotlib(file: Path) -> None:
    before = "matplotlib.pyplot" in sys.modules
    assert main(["plan", str(file), "--global-batch", "64", "--sweep", "a.png"]) == 0
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--global-batch", "0"], "--global-batch 0 is not a number of samples; give a whole"),
        (["--global-batch", "abc"], "--global-batch abc is not a number of samples; give a whole"),
        (["--global-batch", "9" * 13], "--global-batch 9999999999999 is not a number of samples"),
        (
            ["--global-batch", "1"],
            "cluster.toml: global_batch=1 is less than all",
        ),
        (["--global-batch", "8", "--sweep", "a.pdf"], "--sweep a.pdf is not a picture"),
        (["--global-batch", "8", "--sweep", "no/a.png"], "no/a.png cannot be written: No such"),
        (["--global-batch", "8", "--noise-scale", "-1"], "--noise-scale -1 is not a noise scale"),
        (["--global-batch", "8", "--noise-scale", "nan"], "--noise-scale nan is not a noise scale"),
        (["--global-batch", "8", "--start-batch", "8"], "--start-batch means nothing without"),
        (
            ["--global-batch", "8", "--noise-scale", "8", "--start-batch", "x"],
            "--start-batch x is not a number of samples; give a whole number from 1 up",
        ),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    capsys: Capture, file: Path, options: list[str], message: str
) -> None:
    assert refused(capsys, file, *options).startswith(message)


def test_more_than_the_workers_can_take_is_refused(capsys: Capture, file: Path) -> None:
    file.write_text(CLUSTER.replace("[[worker]]", "[[worker]]\nmax_batch = 9"))
    message = refused(capsys, file, "--global-batch", 19)
    assert message.startswith("cluster.toml: global_batch=19 is more than all workers may ")


WORKER = f"[[worker]]\n{FAST}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cluster.toml declares no workers; add a table [[worker]] for each kind"),
        (
            "[worker]\n",
            "line 1: [worker] is one table; write [[worker]], once for each",
        ),
        ("worker = 3\n", "line 1 has worker=3; write tables [[worker]]"),
        ("\nready 3\n", "cluster.toml is not TOML: expected '=' after a key .*line 2, column 7"),
        ("wroker = 3\n", "line 1 has unknown key wroker; did you mean worker?"),
        ("title = 3\n" + WORKER, "line 1 has title=3; give text in quotation marks"),
        ("network = 3\n" + WORKER, "line 1 has network=3; write one table [network]"),
        (
            "[network]\nbucket = [1]\n" + WORKER,
            "line 2: [network] has unknown key bucket; did you mean bucket_s?",
        ),
        (
            "[network]\nready = [0.5]\nbucket_s = [1]\n" + WORKER,
            "line .*: [network]: the network has ready=[0.5]; give parts of backward",
        ),
        (
            "[training]\nphi = 3\n" + WORKER,
            "line .*: [training] has unknown key phi; known are noise_scale, start_batch",
        ),
        (
            '[training]\nnoise_scale = "x"\n' + WORKER,
            "line .*: [training] has noise_scale='x'; give samples from 0 up",
        ),
        (
            "[training]\nstart_batch = 0\n" + WORKER,
            "line .*: [training] has start_batch=0; give a whole number from 1 up",
        ),
        (
            f'{WORKER}[[worker]]\nname = "a100"\nmax_bacth = 3\n{FAST}',
            "line .*: [[worker]] 2 has unknown key max_bacth; did you mean max_batch?",
        ),
        (
            WORKER + "zebra = 3",
            "line .*: [[worker]] 1 has unknown key zebra; known are name, forward_s",
        ),
        (
            f'[[worker]]\nname = "a"\nmax_batch = "3"\n{FAST}',
            "line .*: [[worker]] 1: worker a has max_batch='3'; give a whole number from 0",
        ),
        (
            "[[worker]]\nforward_s = [1, 2]",
            "line .*: [[worker]] 1: a worker needs forward_s and backward_s, or ready_s",
        ),
        (
            "[[worker]]\nforward_s = 3\nbackward_s = [1, 2]",
            "line .*: [[worker]] 1: a worker has forward_s=3; give two numbers",
        ),
        (
            "[[worker]]\nready_s = 3",
            "line .*: [[worker]] 1 has ready_s=3; give a list with a pair per bucket",
        ),
        (
            WORKER + "count = 0",
            "line .*: [[worker]] 1 has count=0; give a whole number",
        ),
        (
            WORKER + "count = 1.5",
            "line .*: [[worker]] 1 has count=1.5; give a whole number",
        ),
        (
            WORKER + "count = 1000000000",
            "line .*: [[worker]] 1 makes it 1000000000 workers; give at most 100000 in all",
        ),
        (
            WORKER + "name = 3",
            "line .*: [[worker]] 1 has name=3; give text, or leave it out",
        ),
        (WORKER + 'name = ""', "line .*: [[worker]] 1 has name=''; give text"),
        (
            f'{WORKER}name = "a"\ncount = 2\n{WORKER}name = "a-1"\n',
            "line 9: [[worker]] 2 has a worker a-1, and so has [[worker]] 1; name one other",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    capsys: Capture, file: Path, text: str, message: str
) -> None:
    file.write_text(text)
    said = refused(capsys, file, "--global-batch", 8).removeprefix("cluster.toml, ")
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    assert re.match(pattern, said), said


def test_a_file_that_cannot_be_read_is_refused(capsys: Capture, file: Path) -> None:
    options = ("--global-batch", 8)
    assert refused(capsys, "no.toml", *options).startswith("there is no file no.toml; give the")
    assert refused(capsys, ".", *options).startswith(". is a directory; give the path of a TOML")
    file.write_bytes(b"\xff\xfe\x00")
    assert refused(capsys, file, *options).startswith("cluster.toml is not text in UTF-8")


def test_workers_without_a_name_are_numbered(file: Path) -> None:
    file.write_text(f"{WORKER}{WORKER}count = 2\n")
    cluster = read_cluster(file)
    assert [worker.name for worker in cluster.workers] == ["worker-0", "worker-1", "worker-2"]
    assert [kind.name for kind in cluster.kinds] == ["worker-0", "worker-1..2"]


def test_every_field_of_a_worker_can_be_declared(file: Path) -> None:
    file.write_text(
        'title = "t"\nnote = "n"\n[[worker]]\nready_s = [[1, 2]]\ninput_s = 3\nmin_batch = 4\n'
        "max_batch = 50\nmultiple_of = 2\nmicro_batch = 7\nmemory_bytes = 9e9\nfixed_bytes = 1e9\n"
        "bytes_per_sample = 1e6\n"
    )
    cluster = read_cluster(file)
    (worker,) = cluster.workers
    assert (cluster.title, cluster.note) == ("t", "n")
    assert worker.ready_s == ((1.0, 2.0),)
    assert (worker.min_batch, worker.max_batch, worker.multiple_of) == (4, 50, 2)
    assert (worker.memory_bytes, worker.bytes_per_sample) == (9e9, 1e6)


def test_read_cluster_raises_what_the_command_prints() -> None:
    with pytest.raises(InvalidSetting, match=r"there is no file no\.toml"):
        read_cluster("no.toml")


def console_blocks(page: str) -> list[tuple[list[str], str]]:
    """Return the arguments and the output of each plan in a page."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    parted = [block.removeprefix("$ ").split("\n", 1) for block in blocks]
    return [
        (shlex.split(command)[1:], output)
        for command, output in parted
        if command.startswith("poise plan")
    ]


@pytest.mark.parametrize(("page", "plans"), [("README.md", 1), ("docs/how-to/plan.md", 2)])
def test_plans_in_the_docs_are_real(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, plans: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    tables = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    Path("cluster.toml").write_text("".join(tables))
    blocks = console_blocks(page)
    assert len(blocks) == plans
    for arguments, output in blocks:
        out = printed(capsys, *arguments[1:])
        if output.startswith("...\n"):
            assert out.endswith(output.removeprefix("...\n"))
        else:
            assert out == output


def test_the_page_draws_the_line_that_it_says() -> None:
    text = (ROOT / "docs/how-to/plan.md").read_text()
    names: dict[str, Any] = {}
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(block, names)
    assert names["forward_s"] == pytest.approx((0.0007, 0.008))
    assert "forward_s = [0.0007, 0.008]" in text


def test_the_page_names_every_key(capsys: Capture, file: Path) -> None:
    page = (ROOT / "docs/how-to/plan.md").read_text()
    answer = found(capsys, file, "--global-batch", 64, "--noise-scale", 500)
    keys = [*answer, *answer["workers"][0], *answer["worth"][0], *answer["goodput"]]
    keys += [field.name for declared in (Worker, Network) for field in fields(declared)]
    for key in [*keys, "count", "noise_scale", "start_batch", "title", "note"]:
        assert f"`{key}`" in page, f"docs/how-to/plan.md does not name {key}"

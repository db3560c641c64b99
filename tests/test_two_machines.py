"""Two machines: what pages say to type on each of them, and what is said when they do not meet."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.two_machines import ADDRESSES, TwoMachines, ended, needs_two_machines, two_machines

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "two-machines"
PAGE = ROOT / "docs" / "how-to" / "two-machines.md"
ASYNCHRONOUS = ROOT / "docs" / "how-to" / "asynchronous.md"
_PROMPT = re.compile(r"^(alpha|beta)\$ (.*)$")
_LISTENS = re.compile(r"\b(serving|listening) at ")

Lines = dict[str, list[str]]
"""What is typed on each machine."""


def blocks_of(page: Path) -> list[Lines]:
    """Return what each block of a page has typed, with what was exported before."""
    found: list[Lines] = []
    exported: Lines = {host: [] for host in ADDRESSES}
    for text in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
        typed: Lines = {}
        for match in filter(None, map(_PROMPT.match, text.splitlines())):
            typed.setdefault(match[1], []).append(match[2])
        if any(not line.startswith("export ") for lines in typed.values() for line in lines):
            found.append({host: [*exported[host], *lines] for host, lines in typed.items()})
        for host, lines in typed.items():
            exported[host] += [line for line in lines if line.startswith("export ")]
    return found


def texts_of(page: Path) -> list[str]:
    return re.findall(r"^```text\n(.*?)^```", page.read_text(), re.M | re.S)


def script_of(page: Path) -> str:
    return page.read_text().split("```python\n")[1].split("```")[0]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    with two_machines(tmp_path) as found:
        yield found


def typed(machines: TwoMachines, lines: Lines) -> dict[str, tuple[int, str]]:
    """Type lines on the machines, on alpha first; return exit codes and outputs."""
    running, said = {}, ""
    for host, script in lines.items():
        running[host] = machines.start(host, "\n".join(script))
        if any("--listen" in line or "poise serve" in line for line in script):
            said = until_it_listens(running[host])
    results = {host: ended(process) for host, process in running.items()}
    return {host: (code, said + output) for host, (code, output) in results.items()}


def until_it_listens(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if _LISTENS.search(line):
            return said
    pytest.fail(f"it ended before it listened:\n{said}")


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
@needs_two_machines
def test_the_page_about_two_machines_can_be_typed(machines: TwoMachines) -> None:
    ill, well, *trainings = blocks_of(PAGE)
    problems, all_well = texts_of(PAGE)
    for host in ADDRESSES:
        (machines.home(host) / "train.py").write_text(script_of(PAGE))
    for code, output in typed(machines, ill).values():
        assert code == 1, output
        assert one_line(problems) in one_line(output)
    for code, output in typed(machines, well).values():
        assert code == 0, output
        assert output.endswith(all_well)
    assert len(trainings) == 4
    for lines in trainings:
        for host, (code, output) in typed(machines, lines).items():
            assert code == 0, output
            if host == "alpha":
                done = (
                    "All-reduce between 2 workers"
                    if "doctor" in lines[host][-1]
                    else "epoch 2 done, the split is"
                )
                assert done in output, output


@pytest.mark.slow
@needs_two_machines
def test_the_page_about_servers_can_be_typed_on_two_machines(machines: TwoMachines) -> None:
    (lines,) = blocks_of(ASYNCHRONOUS)
    for host in ADDRESSES:
        (machines.home(host) / "train.py").write_text(script_of(ASYNCHRONOUS))
    results = typed(machines, lines)
    assert {host: code for host, (code, _) in results.items()} == {"alpha": 0, "beta": 0}, results
    (stated,) = re.findall(r"^poise: serving at .*$", ASYNCHRONOUS.read_text(), re.M)
    assert stated in results["alpha"][1]
    assert "epoch 2: loss" in results["alpha"][1]


MEET = """
from poise.torch import Balancer
Balancer(global_batch=8, hang_s=4).close()
"""


def placed(worker: int, master: str, port: int = 29500, workers: int = 2) -> dict[str, str]:
    return {
        "RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
    }


def meet(machines: TwoMachines, master: dict[str, str], **more: str) -> dict[str, str]:
    """Have a worker on each machine look for the other; return the errors of those that fail."""
    (machines.directory / "meet.py").write_text(MEET)
    script = f"python {machines.directory / 'meet.py'}"
    running = {
        host: machines.start(host, script, {**placed(worker, master[host]), **more})
        for worker, host in enumerate(ADDRESSES)
        if host in master
    }
    found = {}
    for host, process in running.items():
        code, output = ended(process)
        # One that waits in gloo is told by the other, and ends without an exception.
        errors = re.findall(r"^(?:poise\.errors\.WorkerLost|poise): (.*)$", output, re.M)
        assert code == bool(errors), output
        found[host] = errors[-1] if errors else ""
    return found


@pytest.mark.slow
@needs_two_machines
def test_a_training_that_cannot_meet_says_which_interface_to_set(machines: TwoMachines) -> None:
    by_address = dict.fromkeys(ADDRESSES, ADDRESSES["alpha"])
    errors = meet(machines, by_address)
    for host in ADDRESSES:
        assert f"{host} gives the other workers 127.0.1.1 as its address" in errors[host]
        assert f"set GLOO_SOCKET_IFNAME=eth0 on {host}" in errors[host]
    assert meet(machines, by_address, GLOO_SOCKET_IFNAME="eth0") == {"alpha": "", "beta": ""}


@pytest.mark.slow
@needs_two_machines
@pytest.mark.parametrize(
    ("master", "said"),
    [
        ("alpa", "alpa cannot be resolved on beta"),
        ("10.0.0.1", "nothing listens at 10.0.0.1:29500 now"),
        ("10.0.0.77", "10.0.0.77:29500 does not answer"),
        ("10.9.9.9", "beta has no route to 10.9.9.9:29500"),
    ],
)
def test_a_worker_without_worker_0_says_what_is_wrong_with_the_way(
    machines: TwoMachines, master: str, said: str
) -> None:
    errors = meet(machines, {"beta": master}, GLOO_SOCKET_IFNAME="eth0")
    assert said in errors["beta"]
    assert "failed before its Balancer" not in errors["beta"]


@pytest.mark.slow
@needs_two_machines
def test_a_name_copied_with_etc_hosts_leads_nowhere(machines: TwoMachines) -> None:
    (machines.home("beta") / "hosts").write_text((machines.home("alpha") / "hosts").read_text())
    errors = meet(machines, {"beta": "alpha"}, GLOO_SOCKET_IFNAME="eth0")
    assert "alpha resolves to 127.0.1.1 on beta, which leads to beta itself" in errors["beta"]
    code, output = ended(machines.start("beta", "poise doctor alpha:29500"))
    assert code == 1
    assert "alpha resolves to 127.0.1.1 on beta" in one_line(output)


@pytest.mark.slow
@needs_two_machines
def test_a_doctor_tells_no_answer_from_a_refusal(machines: TwoMachines) -> None:
    code, output = ended(machines.start("beta", "poise doctor 10.0.0.1:29500"))
    assert code == 1
    assert "10.0.0.1:29500 refuses connections" in one_line(output)
    machines.run("ip -n {alpha} route add blackhole 10.0.0.2/32")  # as a firewall that drops
    code, output = ended(machines.start("beta", "poise doctor 10.0.0.1:29500"))
    assert code == 1
    assert "10.0.0.1:29500 does not answer: a firewall drops the packets" in one_line(output)
    assert "set GLOO_SOCKET_IFNAME=eth0 on beta" in one_line(output)


def two_doctors(machines: TwoMachines, *exports: str) -> tuple[int, str]:
    """Have a doctor on beta visit one on alpha, which print the same; return beta's."""
    lines = ["export POISE_SECRET=s", *exports]
    results = typed(
        machines,
        {
            "alpha": [*lines, "poise doctor --listen 10.0.0.1:29500"],
            "beta": [*lines, "poise doctor 10.0.0.1:29500"],
        },
    )
    (code, output), (theirs, said) = results["beta"], results["alpha"]
    assert code == theirs, said
    assert output.splitlines()[-1] == said.splitlines()[-1]
    return code, output


@pytest.mark.slow
@needs_two_machines
def test_a_doctor_finds_a_firewall_that_lets_one_port_through(machines: TwoMachines) -> None:
    """Answers of alpha and beta to each other from free ports to free ports are dropped."""
    for host in ADDRESSES:
        ports = "sport 32768-60999 dport 32768-60999"
        machines.run(f"ip -n {{{host}}} rule add pref 10 ipproto tcp {ports} blackhole")
    code, output = two_doctors(machines, "export GLOO_SOCKET_IFNAME=eth0")
    assert code == 1, output
    assert "have the firewall of beta allow all ports from alpha" in one_line(output)
    assert "have the firewall of alpha allow all ports from beta" in one_line(output)


@pytest.mark.slow
@needs_two_machines
def test_a_doctor_names_the_interface_of_the_right_network(machines: TwoMachines) -> None:
    """Beta's name resolves to an address of its own in a network that alpha is not in."""
    machines.run("ip -n {beta} link add far0 type veth peer name far1")
    machines.run("ip -n {beta} addr add 172.16.0.9/24 dev far0")
    for end in ("far0", "far1"):
        machines.run(f"ip -n {{beta}} link set {end} up")
    hosts = machines.home("beta") / "hosts"
    hosts.write_text(hosts.read_text().replace("127.0.1.1 beta", "172.16.0.9 beta"))
    code, output = two_doctors(machines)
    assert code == 1, output
    assert "172.16.0.9 (far0) as its address, which alpha cannot reach" in one_line(output)
    assert "set GLOO_SOCKET_IFNAME=eth0 on beta" in one_line(output)


@pytest.mark.slow
@needs_two_machines
def test_a_doctor_measures_a_slow_link(machines: TwoMachines) -> None:
    machines.run("tc -n {beta} qdisc add dev eth0 root tbf rate 8mbit burst 16kb latency 400ms")
    code, output = two_doctors(machines, "export GLOO_SOCKET_IFNAME=eth0")
    assert code == 0, output
    assert "the link is slow: 25 MB of gradients take" in one_line(output)
    (rate,) = re.findall(r"second to first +│ ([\d.]+) MB/s", output)
    assert 0.5 < float(rate) < 2.0


def test_no_machine_is_left_out_of_the_pages() -> None:
    for page in (PAGE, ASYNCHRONOUS):
        assert all(set(lines) == set(ADDRESSES) for lines in blocks_of(page))


def torchrun_options(words: list[str]) -> dict[str, str]:
    options = vars(get_args_parser().parse_args(words))
    return {name: str(value) for name, value in options.items()}


SLURM = {
    "scontrol": "echo alpha; for node in {1..20000}; do echo beta$node; done",
    "srun": 'shift; exec "$@"',
    "torchrun": r"""printf '%s\n' "$@" """,
}
"""What the batch script calls, as far as it matters to it; nodes are more than a pipe holds."""


def test_the_batch_script_of_slurm_states_where_workers_meet(tmp_path: Path) -> None:
    script = EXAMPLES / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    done = subprocess.run(
        ["bash", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "[alpha,beta]", **job},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    options = torchrun_options(done.stdout.splitlines())
    assert (options["master_addr"], options["master_port"]) == ("alpha", "22345")
    assert (options["nnodes"], options["node_rank"], options["nproc_per_node"]) == ("2", "1", "1")
    assert options["training_script"] == "train.py"


def test_the_job_of_kubernetes_is_one() -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "job.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    options = torchrun_options(
        [word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in container["args"]]
    )
    name = job["metadata"]["name"]
    assert container["command"] == ["torchrun"]
    assert options["nnodes"] == str(spec["completions"]) == str(spec["parallelism"])
    assert options["master_addr"] == f"{name}-0.{service['metadata']['name']}"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}

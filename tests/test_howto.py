"""Every page of docs/how-to runs as it stands, alone and on two unequal workers."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import poise.torch
from poise.core.split import apportion
from poise.environment import launched_as
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Workers
from tests.training import Weights, distance, weights

HOW_TO = Path(__file__).parent.parent / "docs" / "how-to"
SHARES = (5, 2)
PAGES = sorted(page.stem for page in HOW_TO.glob("*.md"))
SAME = sorted(
    set(PAGES)
    - {
        "streams",
        "plan",
        "policies",
        "records",
        "balance",
        "watch",
        "adaptive",
        "asynchronous",
        "simulate",
    }
)
"""Pages whose training does not depend on the number of workers; some train nothing."""
ROUNDED = {"ddp-options": 2e-2, "mixed-precision": 2e-2}
"""How far weights may be apart where something has 16 bits; elsewhere 1e-10."""

Found = dict[str, Any]
"""What a page leaves behind: its numbers, and the weights of its models."""


def blocks(page: str) -> list[str]:
    text = (HOW_TO / f"{page}.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run_page(page: str, replaced: str = "", by: str = "") -> Found:
    """Run the blocks of a page as one script, with unequal shares where there are two workers."""
    script = "\n".join(blocks(page))
    assert replaced in script
    made: list[Balancer] = []

    def balancer(global_batch: int, **settings: Any) -> Balancer:
        made.append(Balancer(global_batch, policy=Fixed(_split(global_batch)), **settings))
        return made[-1]

    names: dict[str, Any] = {"__name__": page}
    eager = mock.patch("torch.compile", _without_a_compiler(torch.compile))
    usual = torch.get_default_dtype()
    if page not in ROUNDED:
        torch.set_default_dtype(torch.float64)  # how float32 rounds depends on the CPU
    with mock.patch.object(poise.torch, "Balancer", balancer), eager:
        try:
            exec(compile(script.replace(replaced, by), f"{page}.md", "exec"), names)
            found: Found = {n: v for n, v in names.items() if isinstance(v, int | float)}
            found["samples"] = made[-1].samples
            found["weights"] = _all_weights(names)
        finally:
            torch.set_default_dtype(usual)
            for each in made:
                each.close()
    return found


def _split(global_batch: int) -> tuple[int, ...]:
    launch = launched_as()
    return apportion(SHARES if launch and launch.workers > 1 else (1,), global_batch)


def _without_a_compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compile as a page says, but run the graphs as they are: a compiler takes long."""
    return lambda model: original(model, backend="eager")


def _all_weights(names: dict[str, Any]) -> Weights:
    return {
        f"{model}.{name}": tensor
        for model, value in names.items()
        if isinstance(value, nn.Module)
        for name, tensor in weights(value).items()
    }


class Results:
    """Runs each page once for each number of workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._kept: dict[tuple[str, int], list[Found]] = {}

    def of(self, page: str, workers: int) -> list[Found]:
        """Return what each worker found."""
        if (page, workers) not in self._kept:
            self._kept[page, workers] = self._workers.run(run_page, page, workers=workers)
        return self._kept[page, workers]


@pytest.fixture(scope="module")
def results(workers: Workers) -> Results:
    return Results(workers)


@pytest.mark.parametrize("page", SAME)
def test_a_page_trains_alike_on_unequal_workers(results: Results, page: str) -> None:
    (alone,) = results.of(page, 1)
    two = results.of(page, 2)
    assert alone["weights"]
    assert all(bool(tensor.isfinite().all()) for tensor in alone["weights"].values())
    assert distance(two[0]["weights"], two[1]["weights"]) == 0
    assert distance(alone["weights"], two[0]["weights"]) < ROUNDED.get(page, 1e-10)
    assert alone["samples"] == two[0]["samples"] == two[1]["samples"] > 0


def test_a_stream_is_read_once_in_each_epoch(results: Results) -> None:
    for number in (1, 2):
        found = results.of("streams", number)
        assert [each["samples"] for each in found] == [2 * 505] * number
        assert distance(found[0]["weights"], found[-1]["weights"]) == 0


def test_workers_divide_what_a_sampler_draws(results: Results) -> None:
    assert [each["seen"] for each in results.of("loaders", 1)] == [2000]
    assert [each["seen"] for each in results.of("loaders", 2)] == [1420, 580]


def test_workers_take_as_many_parts_as_their_share_needs(results: Results) -> None:
    assert [each["parts"] for each in results.of("micro-batches", 1)] == [4 * 5 * 8]
    assert [each["parts"] for each in results.of("micro-batches", 2)] == [4 * 5 * 6, 4 * 5 * 3]


def test_all_workers_skip_the_same_steps(workers: Workers) -> None:
    """They skip a few more than one process, since their means are over fewer samples."""
    too_large = ("mixed-precision", "2.0**12", "2.0**40")
    (alone,) = workers.run(run_page, *too_large, workers=1)
    first, second = workers.run(run_page, *too_large, workers=2)
    assert first["skipped"] == second["skipped"]
    assert distance(first["weights"], second["weights"]) == 0
    assert 0 < alone["skipped"] <= first["skipped"] <= alone["skipped"] + 2


def test_the_schedule_comes_to_its_end(results: Results) -> None:
    for each in (*results.of("schedules", 1), *results.of("schedules", 2)):
        assert each["last"] == pytest.approx(0, abs=1e-6)
        assert each["samples"] == each["total"]


def test_the_loss_over_tokens_is_that_of_the_global_batch(results: Results) -> None:
    (alone,) = results.of("tokens", 1)
    assert alone["mean_loss"] < 0.5
    for each in results.of("tokens", 2):
        assert each["mean_loss"] == pytest.approx(alone["mean_loss"], rel=1e-5)


def test_the_mistake_that_a_page_makes_on_purpose_is_one(
    results: Results, workers: Workers
) -> None:
    (alone,) = results.of("verify", 1)
    wrong = workers.run(run_page, "verify", ", count=tokens", "", workers=2)[0]
    assert distance(alone["weights"], wrong["weights"]) > 1e-3


def adapted() -> tuple[Weights, Any, float]:
    """Run the page on the policy that it uses, since others cannot predict."""
    names: dict[str, Any] = {}
    exec("\n".join(blocks("adaptive")), names)
    balancer = names["balancer"]
    found = weights(names["model"]), balancer.noise, balancer.effective_samples
    assert balancer.samples == 5 * 4000
    balancer.close()
    return found


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_global_batch_of_a_page_follows_its_noise(workers: Workers, number: int) -> None:
    found = workers.run(adapted, workers=number)
    assert distance(found[0][0], found[-1][0]) == 0
    assert all(bool(tensor.isfinite().all()) for tensor in found[0][0].values())
    assert found[0][1].estimates > 0
    assert all(noise is None for _, noise, _ in found[1:])
    assert len({effective for _, _, effective in found}) == 1


def served() -> Weights:
    """Run the page's script; worker 0 is the server."""
    names: dict[str, Any] = {}
    exec(blocks("asynchronous")[0], names)
    names["balancer"].close()
    return {**weights(names["model"]), "loss": torch.tensor(names.get("loss", 0.0))}


@pytest.mark.filterwarnings("ignore:mode=.*trains alone")
def test_the_page_about_servers_trains_with_one(workers: Workers) -> None:
    server, *_ = workers.run(served, workers=3)
    (alone,) = workers.run(served, workers=1)
    assert server["loss"] < 2 * alone["loss"] < 0.4


def compressed_with_state() -> Weights:
    """Train with the settings that a page makes for a hook with a state."""
    names: dict[str, Any] = {}
    exec(blocks("ddp-options")[1], names)
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with Balancer(**names["settings"], policy=Fixed(_split(40))) as balancer:
        loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), 40)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for _ in balancer.epochs(5):
            for x, y in shares:
                cross_entropy(shared(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return weights(shared)


def test_a_hook_with_a_state_trains(workers: Workers) -> None:
    (alone,) = workers.run(compressed_with_state, workers=1)
    two = workers.run(compressed_with_state, workers=2)
    assert distance(two[0], two[1]) == 0
    assert distance(alone, two[0]) < 1e-4

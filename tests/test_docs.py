"""What the docs say is run, and what exists is in the docs."""

import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import poise.torch
from poise import errors
from poise.policy import Fixed
from poise.torch import Balancer
from tests.cluster import Workers

ROOT = Path(__file__).parent.parent


def python_blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run_quickstart(directory: str, blocks: list[str]) -> tuple[float, int]:
    """Run all blocks of the page, one after the other, as one script."""
    inputs = torch.randn(1500, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    names: dict[str, Any] = {
        "torch": torch,
        "DataLoader": DataLoader,
        "Net": lambda: torch.nn.Linear(8, 2),
        "dataset": data,
        "test_set": data,
        "loss_fn": torch.nn.CrossEntropyLoss(),
    }
    script = "\n".join(blocks).replace('"checkpoint.pt"', f'r"{directory}/checkpoint.pt"')
    try:
        exec(compile(script, "quickstart.md", "exec"), names)
        return names["accuracy"], names["saved"]["balancer"]["epoch"]
    finally:
        names["balancer"].close()


def test_the_quickstart_runs_from_top_to_bottom(workers: Workers, tmp_path: Path) -> None:
    blocks = python_blocks("docs/quickstart.md")
    accuracy, epoch = workers.run(run_quickstart, str(tmp_path), blocks, workers=1)[0]
    assert epoch == 10
    assert accuracy > 0.9


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_splits_in_the_docs_fit_their_global_batch(page: str) -> None:
    stated = re.findall(r"Fixed\((?:\[[\d, ]+\]|\{.*?\})\)", (ROOT / page).read_text())
    assert stated
    for text in stated:
        eval(text, {"Fixed": Fixed}).init(workers=3, global_batch=512)


def test_everything_names_all_that_is_public() -> None:
    page = (ROOT / "docs/everything.md").read_text()
    members = [name for name, _ in inspect.getmembers(Balancer) if not name.startswith("_")]
    arguments = [name for name in inspect.signature(Balancer.__init__).parameters if name != "self"]
    for name in [*members, *arguments, *poise.torch.__all__, "PoiseError", "WorkerLost"]:
        assert re.search(rf"\b{name}\b", page), f"docs/everything.md does not mention {name}"


def test_the_tree_of_errors_is_drawn_in_full() -> None:
    drawn = errors.__doc__ or ""
    for name, member in vars(errors).items():
        if inspect.isclass(member):
            assert name in drawn


def test_names_and_files_that_pages_speak_of_exist() -> None:
    """Decisions are left out: they tell of what was."""
    above = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for page in [*above, *ROOT.glob("docs/*.md"), *ROOT.glob("docs/how-to/*.md")]:
        text = page.read_text()
        for name in re.findall(r"`(poise(?:\.\w+)+)`", text):
            assert pkgutil.resolve_name(name) is not None, f"{page.name} speaks of {name}"
        for file in re.findall(r"`(\w+/[\w/]+\.py)`", text):
            roots = (ROOT, ROOT / "src", ROOT / "src" / "poise")
            assert any((each / file).exists() for each in roots), f"{page.name} speaks of {file}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

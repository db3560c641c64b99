"""The pages on policies and records run as they stand, and print what they say."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from poise.records import read_record, replay

HOW_TO = Path(__file__).parent.parent / "docs" / "how-to"
PAGES = ["policies", "records"]

Block = tuple[str, str | None]
"""A python block, and the text block right after it, if there is one."""


def blocks(page: str) -> list[Block]:
    text = (HOW_TO / f"{page}.md").read_text()
    pattern = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"
    return [(found[1], found[2]) for found in re.finditer(pattern, text, flags=re.DOTALL)]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    for number, (code, expected) in enumerate(blocks(page)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{page}.md, block {number}", "exec"), names)
        assert printed.getvalue() == (expected or ""), f"block {number}"


def test_the_record_on_the_page_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", (HOW_TO / "records.md").read_text(), re.DOTALL)
    (tmp_path / "run.jsonl").write_text(text)
    record = read_record(tmp_path / "run.jsonl")
    assert record.complete
    assert len(record.rows) == 4
    assert replay(record) is None

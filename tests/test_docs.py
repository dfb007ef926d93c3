"""What the README and the guides show runs as it stands there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent.parent
MARKDOWN = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
RST = re.compile(r"^\.\. code-block:: python\n((?:   .*\n|\n)+)", flags=re.MULTILINE)


def blocks(page: str) -> list[str]:
    found = (MARKDOWN if page.endswith(".md") else RST).findall((ROOT / page).read_text())
    return [textwrap.dedent(block).strip() for block in found]


README, PRACTICE, MIGRATING = "README.md", "docs/practice.rst", "docs/migrating.rst"
BLOCKS = [
    pytest.param(page, block, id=f"{page}: {block.splitlines()[-1]}")
    for page in (README, PRACTICE, MIGRATING)
    for block in blocks(page)
]


def test_the_pages_have_code() -> None:
    assert len(blocks(README)) >= 5
    assert len(blocks(PRACTICE)) == 4
    assert len(blocks(MIGRATING)) >= 5


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_code_of_the_pages(page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "safetensors" in block:
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", ["recipes"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
def test_code_of_a_page_that_goes_on(page: str) -> None:
    """From top to bottom: what a block has defined is there in the next one."""
    found = blocks(f"docs/{page}.rst")
    assert len(found) >= 5
    names = {"__name__": page}
    try:
        for block in found:
            exec(compile(block, page, "exec"), names)
    finally:
        torch.compiler.reset()

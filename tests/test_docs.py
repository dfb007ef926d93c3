"""What the README and the guide show runs as it stands there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent.parent
README = ROOT / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)
MIGRATING = [
    textwrap.dedent(block)
    for block in re.findall(
        r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)",
        (ROOT / "docs" / "migrating.rst").read_text(),
        flags=re.MULTILINE,
    )
]


def test_the_readme_has_code() -> None:
    assert len(BLOCKS) >= 5
    assert len(MIGRATING) >= 5


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1])
def test_code_of_the_readme(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("block", MIGRATING, ids=lambda block: block.strip().splitlines()[-1])
def test_code_of_the_guide_to_migrating(block: str) -> None:
    exec(compile(block, "migrating.rst", "exec"), {"__name__": "migrating"})


@pytest.mark.parametrize("page", ["recipes"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
def test_code_of_a_page(page: str) -> None:
    """From top to bottom: what a block has defined is there in the next one."""
    text = (ROOT / "docs" / f"{page}.rst").read_text()
    blocks = re.findall(r"^\.\. code-block:: python\n\n((?:(?: {3}.*)?\n)+)", text, flags=re.MULTILINE)
    assert len(blocks) >= 5
    names = {"__name__": page}
    try:
        for block in blocks:
            exec(compile(textwrap.dedent(block), page, "exec"), names)
    finally:
        torch.compiler.reset()

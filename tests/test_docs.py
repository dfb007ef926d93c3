"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchgpipe

README = Path(torchgpipe.__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_readme_has_code() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1])
def test_code_of_the_readme(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})

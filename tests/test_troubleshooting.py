"""The page "Troubleshooting" is looked up by the texts of errors, so its headings are texts that errors have."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import torchgpipe
import torchgpipe_balancing
from tests import snippets

DOCS = Path(torchgpipe.__file__).parent.parent / "docs"
PAGE = DOCS / "troubleshooting.rst"

#: Texts of Python's, accelerate's, and of the parts of PyTorch that are compiled.
OTHERS = [
    "CUDA out of memory. Tried to allocate ...",
    "Expected all tensors to be on the same device, but ...",
    "CUDA error: invalid device ordinal",
    "forward() missing 1 required positional argument",
    "Expected input batch_size (...) to match target batch_size (...)",
    "Expected to have finished reduction in the prior iteration",
    "'DistributedDataParallel' object has no attribute 'step'",
    "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode",
    "operator torchvision::nms does not exist",
    "Could not import module 'LlamaConfig'",
    "use of fork() may lead to deadlocks in the child",
]


def headings() -> list[str]:
    """Return the texts of errors in the headings of the page."""
    lines = PAGE.read_text().splitlines()
    titles = [line for line, below in pairwise(lines) if re.fullmatch("~{4,}", below)]
    return [text for title in titles for text in re.findall("``(.+?)``", title)]


def texts() -> Iterator[str]:
    """Yield what errors of this library may say, with a mark for each value, and what pages show, which is run."""
    for package in (torchgpipe, torchgpipe_balancing):
        for path in Path(package.__path__[0]).rglob("*.py"):
            yield from texts_of(path.read_text())
    for module in (torch.cuda, torch.nn.functional):
        yield from texts_of(inspect.getsource(module))
    for page in DOCS.rglob("*.rst"):
        yield from (snippet.code for snippet in snippets.in_rst(page.read_text()) if ">>>" in snippet.code)


def texts_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join([part.value if isinstance(part, ast.Constant) else "<value>" for part in node.values])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(" ".join(text.split()) for text in texts())


def test_there_are_headings() -> None:
    """A fault in the reader would make the other test pass."""
    assert len(headings()) > 40
    assert "a step needs a loss" in headings()


@pytest.mark.parametrize("heading", [heading for heading in headings() if heading not in OTHERS])
def test_a_heading_is_the_text_of_an_error(heading: str, said: str) -> None:
    """A page with an error that nobody raises any more cannot be found by it."""
    wanted = ".*".join(re.escape(part.strip()) for part in heading.split("...") if part.strip())
    assert re.search(wanted, said), heading

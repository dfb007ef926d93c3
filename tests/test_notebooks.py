"""The notebooks of the documentation run, and show what they give: `python docs/notebooks/run.py` writes it."""

from __future__ import annotations

import importlib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import torchgpipe
from tests.conftest import with_accelerators

DOCS = Path(torchgpipe.__file__).parent.parent / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
RUN = runpy.run_path(str(DOCS / "notebooks" / "run.py"))


def of(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return each notebook."""
    return of(request.param)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["fine-tuning", "quick-start"]


def test_outputs_are_those_of_the_code(notebook: dict[str, Any]) -> None:
    assert notebook["metadata"]["code"] == RUN["hash_of"](notebook), "the outputs are older than the code"
    counts = [cell["execution_count"] for cell in RUN["cells"](notebook)]
    assert counts == [*range(1, len(counts) + 1)]


def test_outputs_are_small_and_free_of_errors_and_paths(notebook: dict[str, Any]) -> None:
    assert len(json.dumps(notebook)) < 60_000
    outputs = [output for cell in RUN["cells"](notebook) for output in cell["outputs"]]
    assert {output.get("name", output["output_type"]) for output in outputs} <= {"stdout", "execute_result"}
    assert not [folder for folder in ("/root", "/home", "/tmp", "site-packages") if folder in json.dumps(outputs)]


def test_code_is_as_narrow_as_that_of_pages(notebook: dict[str, Any]) -> None:
    assert not [line for cell in RUN["cells"](notebook) for line in cell["source"] if len(line.rstrip()) > 75]


def rerun(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run a notebook without GPUs, and compare the outputs, but for numbers and pictures."""
    with_accelerators(monkeypatch, 0)
    monkeypatch.chdir(folder)
    notebook = of(DOCS / "notebooks" / f"{name}.ipynb")
    for cell, outputs in zip(RUN["cells"](notebook), RUN["run"](notebook), strict=True):
        assert RUN["without_numbers"](outputs) == RUN["without_numbers"](cell["outputs"]), cell["id"]
    assert not [*folder.iterdir()]


def test_quick_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rerun("quick-start", monkeypatch, tmp_path)


@pytest.mark.slow
def test_fine_tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("peft")
    rerun("fine-tuning", monkeypatch, tmp_path)


@pytest.mark.parametrize(("count", "devices"), [(0, "cpu:0 cpu:1"), (1, "cuda:0 cuda:0"), (8, "cuda:0 cuda:1")])
def test_two_devices_on_any_machine(count: int, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    first, *_ = RUN["cells"](of(DOCS / "notebooks" / "quick-start.ipynb"))
    names: dict[str, Any] = {}
    exec("".join(first["source"]), names)
    assert names["devices"] == devices.split()


def test_a_page_shows_code_outputs_and_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("matplotlib")  # for the tables
    monkeypatch.syspath_prepend(str(DOCS))
    picture = '<svg viewBox="0 0 600 9"><text font-size="12">1</text></svg>'
    outputs = [{"text": ["a\n", "b\n"]}, {"data": {"text/html": [f"<pre>c</pre>{picture}"], "text/plain": ["d"]}}]
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "and text"]},
        {"cell_type": "code", "source": ["print(x)\n", "y"], "outputs": outputs},
    ]
    page = importlib.import_module("house").page_of("name.ipynb", json.dumps({"cells": cells}))
    assert page.startswith("# A title\nand text\n\n{download}`Download this notebook <name.ipynb>`\n")
    assert "````{code-block} python\nprint(x)\ny\n````\n\n````{code-block} text\n:class: output\n\na\nb\n" in page
    assert f'<pre>c</pre><div class="drawing-frame" style="--least: 550px">{picture}</div>' in page

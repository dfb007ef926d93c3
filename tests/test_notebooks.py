"""The notebooks of the documentation run in Jupyter, and show what they give: `make notebooks` writes it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
# No GPU, modules from here, and all warnings but one of peft, as in pyproject.toml, and one of tqdm about Jupyter.
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(Path(__file__).parent.parent),
    "PYTHONWARNINGS": "default,ignore:`is_gradient_checkpointing` is deprecated,ignore:IProgress not found,"
    "ignore:`torch.jit.script_method` is deprecated",
}
# torchvision may not fit, as in conftest.py; and bitsandbytes tells which kernels this CPU could have.
START = "; ".join(
    [
        "import logging",
        "logging.getLogger('bitsandbytes').setLevel(logging.ERROR)",
        "from benchmarks.campaigns.architectures.operators import register_missing",
        "register_missing()",
    ]
)


def run(path: Path) -> Any:
    """Return a notebook with the outputs that it gives on a machine without GPUs."""
    notebook = nbformat.read(path, 4)
    options = {"record_timing": False, "coalesce_streams": True}
    client = nbclient.NotebookClient(notebook, extra_arguments=[f"--IPKernelApp.exec_lines={START}"], **options)
    client.execute(env=os.environ | SETTINGS)
    return notebook


def without_numbers(notebook: Any) -> str:
    """Return all but what may differ from run to run or from machine to machine: pictures and numbers."""
    return re.sub(r"(?s)<svg.*?</svg>| *-?\d[\d.,]*", "", nbformat.writes(notebook))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in path.read_text():
        pytest.importorskip("transformers", minversion="5")
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    assert without_numbers(run(path)) == without_numbers(nbformat.read(path, 4))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_small_and_free_of_warnings_errors_and_paths(path: Path) -> None:
    assert path.stat().st_size < 60_000
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.get("name", output.output_type) for output in outputs} <= {"stdout", "execute_result"}
    assert not [folder for folder in ("/root", "/home", "/tmp", "site-packages") if folder in str(outputs)]


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(run(path), path)

"""Run the notebooks of this folder, and write their outputs.

    python docs/notebooks/run.py                     # all notebooks
    python docs/notebooks/run.py fine-tuning.ipynb

Cells are plain Python without magics, so they run here, and in the tests, without Jupyter. An output is what a cell
prints, and the value of its last line. The hash of the code is kept with the outputs, so a test finds outputs that are
older than the code. As long as the code stays the same, outputs that differ only in their numbers and pictures stay.
"""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

Output = dict[str, Any]


def run(notebook: dict[str, Any]) -> Iterator[list[Output]]:
    """Run the cells of code in one namespace, and yield the outputs of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate(cells(notebook), 1):
        body = ast.parse("".join(cell["source"])).body
        last = body[-1]
        shown = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
        if shown:
            body.pop()
        with redirect_stdout(StringIO()) as printed:
            exec(compile(ast.Module(body, []), cell["id"], "exec"), names)
            value = shown and eval(compile(shown, cell["id"], "eval"), names)
        outputs: list[Output] = []
        if printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
        if value is not None:
            data = {"text/plain": lines(repr(value))}
            if hasattr(value, "_repr_html_"):
                data = {"text/html": lines(value._repr_html_()), **data}
            outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
        yield outputs


def cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that have code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def hash_of(notebook: dict[str, Any]) -> str:
    """Return the hash of the code."""
    return hashlib.sha256("\0".join(["".join(cell["source"]) for cell in cells(notebook)]).encode()).hexdigest()[:16]


def without_numbers(outputs: list[Output]) -> str:
    """Return outputs without what may differ from run to run or from machine to machine: pictures and numbers."""
    return re.sub(r" *-?\d[\d.,]*", " 0", re.sub(r"<svg.*?</svg>", "<svg>", json.dumps(outputs)))


def update(path: Path) -> None:
    """Run a notebook, and write the outputs that have changed."""
    notebook = json.loads(path.read_text())
    metadata = notebook["metadata"]
    same_code = metadata.get("code") == hash_of(notebook)
    for count, (cell, outputs) in enumerate(zip(cells(notebook), run(notebook)), 1):
        cell["execution_count"] = count
        if not same_code or without_numbers(outputs) != without_numbers(cell["outputs"]):
            cell["outputs"] = outputs
    metadata["code"] = hash_of(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    for path in [Path(name).resolve() for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        update(path)

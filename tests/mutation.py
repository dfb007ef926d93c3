"""Take waits, records, orders and locks out of the engine, one at a time, and check that a test fails each time.

    python tests/mutation.py             runs all
    python tests/mutation.py WORD ...    runs those with one of the words in their names

The table is mutations.md. A row names what is taken out, the function around it, in any file, what it is for, and the
test that notices. What is taken out is a call, as the syntax tree has it, so neither moving nor reformatting code makes
a row stale. A call that is

* a statement goes;
* entered by a ``with`` statement is not entered, and what was inside stays; so a lock is not held;
* used for its value has the value of its first argument, or of the last, if the row says so: ``wait[-1]``.

What other parts of the library do, tests of results show. The tests run on a copy of the sources, first as usual and
then on the accelerator of `tests.late`.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """A call to leave out.

    Attributes:
        part: what is called, or, without parentheses, the lock that is held; in all of its places in the function
        place: the qualified name of the function that contains the call
        name: what the call is for
        test: the test that notices, in a file of ``tests``
    """

    part: str
    place: str
    name: str
    test: str

    def apply(self, sources: dict[Path, str]) -> tuple[Path, str]:
        """Return the file that changes, and its mutated source.

        Raises:
            ValueError: there is no such call in such a function, or there are two such functions.
        """
        found: list[tuple[Path, str]] = []
        for path, source in sources.items():
            if f" {self.place.rpartition('.')[2]}(" not in source:
                continue
            tree = ast.parse(source)
            removal = _Removal(self.part)
            for name, definition in _functions(tree):
                if name == self.place:
                    removal.visit(definition)
            if removal.count:
                found.append((path, ast.unparse(ast.fix_missing_locations(tree))))
        if len(found) != 1:
            raise ValueError(f"'{self.name}' is stale: {self.part} is in {len(found)} functions {self.place}")
        return found[0]


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield functions and classes with their qualified names, as in ``Class.method.inner``."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            inner = f"{prefix}{node.name}."
        yield from _functions(node, inner)


class _Removal(ast.NodeTransformer):
    """Take out all calls of ``part``, and count them."""

    def __init__(self, part: str) -> None:
        self.count = 0
        self._part, self._keeps = (part.removesuffix("[-1]"), -1) if part.endswith("[-1]") else (part, 0)

    def _is_it(self, node: ast.expr) -> bool:
        it = ast.unparse(node.func if isinstance(node, ast.Call) else node) == self._part
        self.count += it
        return it

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call) and self._is_it(node.value):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST:
        node.items = [item for item in node.items if not self._is_it(item.context_expr)]
        self.generic_visit(node)
        return node if node.items else ast.If(ast.Constant(True), node.body, [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return node.args[self._keeps] if node.args and self._is_it(node) else node


def table() -> list[Mutation]:
    rows = (ROOT / "tests" / "mutations.md").read_text().partition("| --- | --- | --- | --- |\n")[2]
    return [Mutation(*[cell.strip("`") for cell in row.strip("| ").split(" | ")]) for row in rows.splitlines()]


def read(root: Path) -> dict[Path, str]:
    """Return the sources of the engine."""
    return {path: path.read_text() for path in sorted((root / "torchgpipe").rglob("*.py"))}


def fails(copy: Path, *tests: str) -> bool:
    """Return whether tests fail in a copy of the sources, as usual or on the accelerator."""
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--timeout", "60"]
    # Sources change within a second, which bytecode files do not notice.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    for late in ([], ["--late"]):
        command = [sys.executable, "-m", "pytest", *options, *late, *[f"tests/{test}" for test in tests]]
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=600, check=False)
        if result.returncode == 1:  # Others say that there is no such test on the accelerator, or without it.
            return True
    return False


def main() -> None:
    words = sys.argv[1:]
    chosen = [each for each in table() if not words or any(word in f"{each.name} {each.place}" for word in words)]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("torchgpipe", "torchgpipe_balancing", "tests", "benchmarks"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "build").symlink_to(ROOT / "build")  # where the accelerator is built
        if fails(copy, *{mutation.test for mutation in chosen}):
            sys.exit("tests fail without a mutation")
        sources = read(copy)
        for mutation in chosen:
            path, mutated = mutation.apply(sources)
            path.write_text(mutated)
            if not fails(copy, mutation.test):
                missed.append(f"{mutation.name} ({mutation.place})")
            path.write_text(sources[path])
    sys.exit(f"no test notices: {'; '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()

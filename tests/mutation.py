"""Take waits, records, orders and locks out of the engine, one at a time, and check that a test fails each time.

    python tests/mutation.py             runs all and writes the table again
    python tests/mutation.py WORD ...    runs those with one of the words in their names, and prints the outcome only
    python tests/mutation.py --check     only checks that all can be applied, and that their tests are there

The table is mutations.md. A row names what is taken out, the function around it, in any file, what it is for, and the
test that noticed; the file of this test is run. A new row may name a file alone. What is taken out is a call, as the
syntax tree has it, so neither moving nor reformatting code makes a row stale. A call that is

* a statement goes;
* entered by a ``with`` statement is not entered, and what was inside stays; so a lock is not held;
* used for its value has the value of its first argument, or of the last, if the row says so: ``wait[-1]``.

What other parts of the library do, tests of results show. The tests run on copies of the sources, first as usual and
then on the accelerator of `tests.late`.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutations.md"
COPIES = 2

#: The tests run as usual, and on the accelerator.
RUNS = ([], ["--late"])
NONE_COLLECTED = 5


class Mutation(NamedTuple):
    """A call to leave out.

    Attributes:
        part: what is called, or, without parentheses, the lock that is held; in all of its places in the function
        place: the qualified name of the function that contains the call
        name: what the call is for
        test: the file that should notice, and the test that did
    """

    part: str
    place: str
    name: str
    test: str

    @classmethod
    def of(cls, line: str) -> Mutation:
        """Read a row of the table."""
        part, place, name, test = line.strip("| ").split(" | ")
        return cls(part.strip("`"), place.strip("`"), name, test.strip("`"))

    def __str__(self) -> str:
        return f"| `{self.part}` | `{self.place}` | {self.name} | `{self.test}` |"

    def apply(self, sources: Mapping[Path, str]) -> tuple[Path, str]:
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

    def fault(self, sources: Mapping[Path, str]) -> str | None:
        """Return why the mutation cannot be applied, or noticed."""
        try:
            path, mutated = self.apply(sources)
            compile(mutated, path, "exec")
        except (SyntaxError, ValueError) as error:
            return str(error)
        file, _, function = self.test.partition("::")
        path = ROOT / "tests" / file
        if not path.exists() or f"def {function.split('::')[-1]}(" not in path.read_text():
            return f"'{self.name}' was noticed by {self.test}, which does not exist"
        return None


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


def table() -> tuple[str, list[Mutation]]:
    """Return the head of the table, and its rows."""
    head, rule, rows = TABLE.read_text().partition("| --- | --- | --- | --- |\n")
    return head + rule, [Mutation.of(line) for line in rows.splitlines()]


def main() -> None:
    words = sys.argv[1:]
    sources = read(ROOT)
    head, mutations = table()
    faults = [fault for each in mutations if (fault := each.fault(sources))]
    if words == ["--check"] or faults:
        sys.exit("\n".join(faults) or 0)
    chosen = [each for each in mutations if not words or any(word in f"{each.name} {each.place}" for word in words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(COPIES) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for k in range(COPIES):
            copies.put(make_copy(Path(folder) / str(k)))

        def outcome(mutation: Mutation) -> str | None:
            copy = copies.get()
            try:
                return noticed(mutation, copy)
            finally:
                copies.put(copy)

        tests = [*pool.map(outcome, chosen)]
        # A test that fails without mutations would notice every mutation.
        copy = copies.get()
        for options in RUNS:
            result = run_tests(copy, [*options, *sorted({test for test in tests if test})])
            if result.returncode not in (0, NONE_COLLECTED):
                sys.exit(f"tests fail without a mutation:\n{result.stdout}{result.stderr}")
    missed = [mutation.name for mutation, test in zip(chosen, tests) if test is None]
    if missed:
        sys.exit(f"no test notices: {'; '.join(missed)}")
    if not words:
        names = [str(test).removeprefix("tests/").partition("[")[0] for test in tests]
        rows = [f"{mutation._replace(test=name)}\n" for mutation, name in zip(chosen, names)]
        TABLE.write_text(head + "".join(rows))


def read(root: Path) -> dict[Path, str]:
    """Return the sources of the engine."""
    return {path: path.read_text() for path in sorted((root / "torchgpipe").rglob("*.py"))}


def make_copy(folder: Path) -> Path:
    for part in ("torchgpipe", "torchgpipe_balancing", "tests", "benchmarks"):
        if (ROOT / part).exists():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (ROOT / "build").mkdir(exist_ok=True)
    (folder / "build").symlink_to(ROOT / "build")  # where the accelerator is built
    for path, source in read(folder).items():
        path.write_text(ast.unparse(ast.parse(source)))  # the form in which mutated files are written
    return folder


def noticed(mutation: Mutation, copy: Path) -> str | None:
    """Return the first test that fails, or None."""
    sources = read(copy)
    file, mutated = mutation.apply(sources)
    file.write_text(mutated)
    try:
        for options in RUNS:
            result = run_tests(copy, [*options, f"tests/{mutation.test.partition('::')[0]}"])
            if result.returncode not in (0, NONE_COLLECTED):
                break
        else:
            print(f"MISSED: {mutation.name}", flush=True)
            return None
    finally:
        file.write_text(sources[file])
    # The name may contain spaces in its brackets. A race is an error after the test.
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", result.stdout, re.MULTILINE)
    if result.returncode != 1 or failed is None:
        sys.exit(f"'{mutation.name}' does not fail in a test:\n{result.stdout}{result.stderr}")
    print(f"{mutation.name}\n    {failed[0]}", flush=True)
    return failed[1]


def run_tests(copy: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--timeout", "60"]
    # Sources change within a second, which bytecode files do not notice.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


if __name__ == "__main__":
    main()

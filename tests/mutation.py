"""Take waits, records, orders and locks out of the engine, one at a time, and check that a test fails each time.

    python tests/mutation.py             runs all and writes the table, mutations.md
    python tests/mutation.py WORD ...    runs those with one of the words in their names, and prints the outcome only
    python tests/mutation.py --check     only checks that all can be applied, and that the table lists them

What is taken out is a call: named by the function around it, in any file, and by what is called, as the syntax tree has
it. So neither moving nor reformatting code makes a mutation stale. A call that is

* a statement goes;
* entered by a ``with`` statement is not entered, and what was inside stays; so a lock is not held;
* used for its value has the value of one of its arguments.

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

HEADER = """\
# Mutations

Waits, records, orders and locks of the engine whose removal the tests notice. Written by `python tests/mutation.py`;
the test is the first that fails in the files that were run.

| taken out | of | for | noticed by |
| --- | --- | --- | --- |
"""


class Mutation(NamedTuple):
    """A call to leave out.

    Attributes:
        name: what the call is for
        place: the qualified name of the function that contains the call
        part: what is called, or, without parentheses, the lock that is held; in all of its places in the function
        tests: the files that should notice, without ``test_`` and ``.py``, as in ``skip/portal``
        keeps: the position of the argument that takes the place of the value, where it is used
    """

    name: str
    place: str
    part: str
    tests: str = "engine/streams"
    keeps: int = 0

    def apply(self, sources: Mapping[Path, str]) -> tuple[Path, str]:
        """Return the file that changes, and its mutated source.

        Raises:
            ValueError: there is no such call in such a function, or there are two such functions.
        """
        found: list[tuple[Path, str]] = []
        for path, source in sources.items():
            if self.place.rpartition(".")[2] not in source:
                continue
            tree = ast.parse(source)
            removal = _Removal(self.part, self.keeps)
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

    def __init__(self, part: str, keeps: int) -> None:
        self.count = 0
        self._part, self._keeps = part, keeps

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


MUTATIONS = [
    # Waits of streams
    Mutation("a copy waits for what computes the output", "_copy", "route.leaving.wait", "engine/streams"),
    Mutation("the computation waits for the copy of its input", "_copy", "route.target.wait"),
    Mutation("the copy of a gradient waits for what computes it", "copy_back", "route.grads_leaving.wait"),
    Mutation("the computation waits for the copy of its gradient", "wait_back", "route.source.wait"),
    Mutation("... with a graph, in a node of its own", "Wait.backward", "wait_back"),
    Mutation("the end of a cell is marked, with a graph", "Wait.forward", "mark_ready"),
    Mutation("... without a graph", "wait", "mark_ready"),
    Mutation("... of a plain cell", "_pass_plain", "wait", keeps=-1),
    Mutation("... of a checkpointed cell", "_pass_checkpointed", "wait", keeps=-1),
    Mutation("... of a recorded cell", "_pass_kept", "wait", "engine/streams", keeps=-1),
    Mutation("... of a cell of a program", "Executor._run", "mark_ready", "step_transparency"),
    Mutation("a backward of a program waits for its gradient", "Executor._backward", "wait_back", "step_transparency"),
    Mutation(
        "anomaly mode looks at a gradient that has arrived",
        "copy_back",
        "route.grads_arriving.synchronize",
        "late/owners",
    ),
    Mutation(
        "a gradient that a parameter shares is added to when it is copied",
        "copy_back",
        "route.target.wait",
        "late/owners",
    ),
    Mutation("memory of the caller's is copied when the call ends", "release", "source.wait", "late/owners"),
    Mutation("... of a forward", "ForwardPass._run_in_workers", "release", "late/owners"),
    Mutation("... of a program", "Executor.run", "release", "late/owners"),
    # Records
    Mutation("memory is not used again before it was copied", "_move", "leaving.record"),
    Mutation("... nor before it was computed with", "_move", "target.record"),
    # Streams
    Mutation("copies run beside the computation of the source", "_move", "leaving.use", "engine/overlap"),
    Mutation("copies run beside the computation of the target", "_move", "arriving.use", "engine/overlap"),
    Mutation(
        "a recomputation is on its device",
        "Recomputation._recompute",
        "call.stream.use",
        "late/streams_of_the_caller",
    ),
    Mutation(
        "gradients of a pipelined model are ready for other streams",
        "MiniBatch.run_backward_half",
        "self._columns.streams.current(computing.device).wait",
        "late/streams_of_the_caller",
    ),
    Mutation("a worker is on the stream of its device", "_Crew._serve_tasks", "worker.stream.use"),
    Mutation("with one device, the caller is on its stream", "ForwardPass.run", "self._calls[0].stream.use"),
    Mutation("... also in a step", "Executor.run", "streams[0].use", "engine/streams"),
    Mutation(
        "a skip comes to the device of its pop", "_receive", "portal.receive", "skip/portal engine/streams", keeps=-1
    ),
    # Orders
    Mutation("a cell is differentiated after the next micro-batch", "_pass_plain", "tie", "engine/dependency"),
    Mutation("the last lanes end in the output", "ForwardPass._run_in_workers", "tie", "engine/dependency"),
    Mutation("Join takes the phonies", "tie", "join", "engine/dependency"),
    Mutation(
        "a recomputation does not wait for the gradient",
        "Recompute.backward",
        "ctx.checkpoint.recomputation.second_run",
        "engine/checkpoint engine/overlap",
    ),
    Mutation("a gradient on its way is not added to by the next", "Executor._backward", "unshare", "bugs"),
    Mutation(
        "a backward is differentiated in its worker's thread",
        "Executor._backward",
        "torch.autograd.set_multithreading_enabled",
        "step step_faults frames/hard_cases late/owners",
    ),
    Mutation("workers leave autocast together", "_Crew._serve_tasks", "self._leaving.wait", "replay/ambient"),
    Mutation(
        "numbers that were not noted are not those of a cell", "_pass_plain", "call.random.forget", "replay/random"
    ),
    Mutation("... nor those of a cell that keeps its graph", "_pass_kept", "call.random.forget", "replay/random"),
    Mutation(
        "a recomputation draws what the first run drew",
        "Recomputation._recompute",
        "call.random.replay",
        "replay/random",
    ),
    Mutation("random numbers follow a micro-batch", "MiniBatch.forward", "self.random_numbers.of", "frames/pipelined"),
    # Locks
    Mutation("steps of one model come one after the other", "run_step", "lock", "engine/threads"),
    Mutation("one thread at a time copies a generator's state", "state_of", "_copying", "replay/random"),
    Mutation("... or sets it", "go_on_from", "_copying", "replay/random"),
    Mutation(
        "a norm counts one run at a time",
        "exclusive",
        "stack.enter_context",
        "replay/statistics norms/deferred_batch_norm",
    ),
    Mutation(
        "... that is not a recomputation",
        "_run_exclusively",
        "exclusive",
        "replay/statistics norms/deferred_batch_norm",
    ),
    Mutation("cells that draw from one generator run one after the other", "borrowed", "sharing", "late/seeds"),
    # Threads
    Mutation("no thread is left when a call returns", "_Crew.work", "join", "engine/ends"),
    Mutation("no layer runs on after an interrupt", "_Crew._abandon", "worker.working", "engine/ends"),
    Mutation("no frame is unwound after a call has failed", "Frame.cancel", "self._working", "engine/ends"),
    # Host memory
    Mutation("the computation waits for its weights", "Residence.before", "computing.wait", "frames/offload"),
    Mutation("... in one piece", "OnDemand._need", "self._memory.streams.current(device).wait", "frames/offload"),
    Mutation("weights leave when the computation is through with them", "leave", "up.wait", "frames/offload"),
    Mutation("a gradient goes down when it is computed", "bring_down", "down.wait", "frames/offload"),
    Mutation("... and keeps its memory until then", "HostMemory.bring_down", "stream.record", "frames/offload"),
    Mutation(
        "weights are still until they have arrived",
        "Residence.end.work",
        "self._memory.up(device).synchronize",
        "frames/offload",
    ),
    Mutation(
        "gradients are there when a step returns",
        "Residence.end.work",
        "self._memory.down(device).synchronize",
        "frames/offload",
    ),
    Mutation("what rests goes down when it is computed", "Rested.__init__", "leaving.wait", "frames/offload"),
    Mutation("... and keeps its memory until then", "Rested.leave", "computing.wait", "frames/offload"),
    Mutation("... also that of another stream", "Rested.__init__", "leaving.record", "frames/offload"),
    Mutation("what rests comes to memory that is free", "Rested.come", "arriving.wait", "frames/offload"),
    Mutation(
        "the computation waits for what rests",
        "Rested.get",
        "self._memory.streams.current(self._device).wait",
        "frames/offload",
    ),
    Mutation(
        "what rests is through when a step returns",
        "Resting.end",
        "self._memory.side(device, f'activations {way}').synchronize",
        "frames/offload",
    ),
]


def main() -> None:
    words = sys.argv[1:]
    sources = read(ROOT)
    stale = faults(sources)
    if words == ["--check"]:
        sys.exit("\n".join([*stale, *faults_of_table()]) or 0)
    if stale:
        sys.exit("\n".join(stale))
    chosen = [each for each in MUTATIONS if not words or any(word in f"{each.name} {each.place}" for word in words)]
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

        outcomes = list(zip(chosen, pool.map(outcome, chosen), strict=True))
        # A test that fails without mutations would notice every mutation.
        copy, failed = copies.get(), {test for _, test in outcomes if test}
        for options in RUNS:
            result = run_tests(copy, [*options, *sorted(failed)])
            if result.returncode not in (0, NONE_COLLECTED):
                sys.exit(f"tests fail without a mutation:\n{result.stdout}{result.stderr}")
    if not words:
        TABLE.write_text(HEADER + "".join(row(mutation, test) for mutation, test in outcomes))
    missed = [mutation.name for mutation, test in outcomes if test is None]
    sys.exit(f"no test notices: {'; '.join(missed)}" if missed else 0)


#: The tests run as usual, and on the accelerator.
RUNS = ([], ["--late"])
NONE_COLLECTED = 5


def read(root: Path) -> dict[Path, str]:
    """Return the sources of the engine."""
    return {path: path.read_text() for path in sorted((root / "torchgpipe").rglob("*.py"))}


def faults(sources: Mapping[Path, str]) -> list[str]:
    """Return the errors of the mutations that cannot be applied."""
    result = []
    for mutation in MUTATIONS:
        try:
            path, mutated = mutation.apply(sources)
            compile(mutated, path, "exec")
        except (SyntaxError, ValueError) as error:
            result.append(str(error))
    return result


def faults_of_table() -> list[str]:
    """Return the faults of the table: other mutations, or tests that do not exist."""
    table = TABLE.read_text()
    if not table.startswith(HEADER):
        return ["mutations.md is of another kind: run all"]
    rows = [line.strip("| ").split(" | ") for line in table.removeprefix(HEADER).splitlines()]
    listed = [(place.strip("`"), part.strip("`")) for part, place, *_ in rows]
    if listed != [(each.place, each.part) for each in MUTATIONS]:
        return ["mutations.md lists other mutations: run all"]
    result = []
    for *_, name, test in rows:
        file, _, function = test.strip("`").partition("::")
        path = ROOT / "tests" / file
        if not path.exists() or f"def {function.split('::')[-1]}(" not in path.read_text():
            result.append(f"'{name}' was noticed by {file}::{function}, which does not exist")
    return result


def row(mutation: Mutation, test: str | None) -> str:
    name = "**no test**" if test is None else f"`{test.removeprefix('tests/').partition('[')[0]}`"
    return f"| `{mutation.part}` | `{mutation.place}` | {mutation.name} | {name} |\n"


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


def targets(mutation: Mutation) -> list[str]:
    paths = [Path("tests", name) for name in mutation.tests.split()]
    return [str(path.with_name(f"test_{path.name}.py")) for path in paths]


def noticed(mutation: Mutation, copy: Path) -> str | None:
    """Return the first test that fails, or None."""
    sources = read(copy)
    file, mutated = mutation.apply(sources)
    file.write_text(mutated)
    try:
        for options in RUNS:
            result = run_tests(copy, [*options, *targets(mutation)])
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

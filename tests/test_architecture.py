"""The house rules: a room imports only from lower rooms, imports have no cycle, and each file says why it exists and
lists its public names.

Read upward, the rooms are the journey of a mini-batch. A new file needs a room, which is a good moment to think about
where it belongs.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent.parent

#: The rooms, from the lowest; a room imports only from the rooms before it.
ROOMS = {
    "devices": "devices, streams, and every private name of PyTorch",
    "schedule": "the order of cells, as pure functions",
    "skip": "stashing and popping skips",
    "processes": "other processes: who has which column, messages, stand-ins for what they have",
    "replay": "making a second run repeat the first: settings, random numbers, phase, state of layers",
    "model": "from a Sequential to partitions on their devices; nested values; settings; tables that compare",
    "batch": "a mini-batch and its micro-batches: how arguments are split, outputs and losses joined and weighed",
    "norms": "deferred batch norms",
    "listener": "what a listener is told of the work, and the profiler",
    "graph": "graphs of autograd: doors to its engine, cuts, order, backward in two halves",
    "transport": "from device to device: routes of streams, portals of skips",
    "gradients": "of parameters: aliases, and their sums, delivered once",
    "offload": "weights and activations in host memory, around the actions of a program",
    "cell": "micro-batch i in column j: forward, again, and backward",
    "drive": "a program in its workers; autograd, by nodes in the caller's graph",
    "proof": "a pipeline beside the plain model: outputs, losses, buffers and gradients, compared",
    "gpipe": "the module around a Sequential",
    "spine": "any other module: its spine, found on a sample, divided, and put on devices",
    "run": "the model's own forward on one micro-batch: frames, columns here and in other processes",
    "pipeline": "the mini-batches of any module: calls, steps, and what processes do together",
    "front": "the module in place, proved on its sample",
    "timeline": "recording a mini-batch, and drawing it",
    "distributed": "the same pipeline over several processes",
    "compat": "the old Pipe of PyTorch",
    "integrations": "trainers of other libraries, for those who have the library",
    "command": "what `python -m torchgpipe` does",
}

#: Public paths with hardly any code: the places of names before the rooms existed, and in predecessors.
THIN = ["balance", "batchnorm", "checkpoint", "pipe"]

#: The most lines of code that each room may have; blanks, comments and docstrings are not counted. What a reader must
#: own is what each mechanism costs, so a number goes down with its room. One that must go up is paid for by another in
#: the same commit: the sum never rises.
CAPS = {
    "torchgpipe": {
        "devices": 677,
        "schedule": 872,
        "skip": 318,
        "processes": 761,
        "replay": 788,
        "model": 1024,
        "batch": 1185,
        "norms": 256,
        "listener": 65,
        "graph": 345,
        "transport": 152,
        "gradients": 579,
        "offload": 729,
        "cell": 613,
        "drive": 796,
        "proof": 301,
        "gpipe": 375,
        "spine": 1353,
        "run": 1624,
        "pipeline": 813,
        "front": 1351,
        "timeline": 479,
        "distributed": 456,
        "compat": 197,
        "integrations": 65,
        "command": 413,
        "public paths": 108,
    },
    "torchgpipe_balancing": {"balancing": 485, "planning": 1684},
}
#: The sum of all caps, to be lowered with them. It rose once, by the commands and what they count with.
TOTAL = 18864

#: The most lines of code of any room.
LARGEST = 1900

#: The tokens that do not make a line one of code.
SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def modules(package: str) -> dict[str, Path]:
    """Return the modules of a package by their names inside the package; packages end with ``__init__``."""
    folder = ROOT / package
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in sorted(folder.rglob("*.py"))}


OURS = modules("torchgpipe")
BALANCING = modules("torchgpipe_balancing")
ALL = [*OURS.values(), *BALANCING.values()]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(name: str) -> str:
    """Return the room of a module, given its name inside torchgpipe."""
    return name.partition(".")[0]


def imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    """Yield the full names of the modules that a file imports, also inside functions unless ``top_level_only``."""
    package = path.relative_to(ROOT).parent.parts
    for node in _statements(ast.parse(path.read_text()), top_level_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from torchgpipe import microbatch` imports a module, `from torchgpipe import GPipe` a name.
                full = f"{source}.{alias.name}"
                yield full if _is_module(full) else source


def _statements(tree: ast.AST, top_level_only: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if not (top_level_only and _runs_later(node)):
            yield from _statements(node, top_level_only)


def _runs_later(node: ast.AST) -> bool:
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return is_for_types or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def ours_imported_by(name: str) -> list[str]:
    """Return the modules of torchgpipe that a module imports, by their names inside torchgpipe."""
    found = [imported.partition(".") for imported in imports(OURS[name])]
    return [inner for package, _, inner in found if package == "torchgpipe"]


def test_these_are_the_rooms() -> None:
    assert {room_of(name) for name in OURS} == {*ROOMS, *THIN, "__init__", "__main__"}


def test_a_room_imports_only_from_those_below() -> None:
    order = [*ROOMS]
    for name in OURS:
        if room_of(name) not in ROOMS:
            continue
        for inner in ours_imported_by(name):
            assert inner, f"{name} imports from the package itself, which in turn imports {name}"
            below, here = room_of(inner), room_of(name)
            assert below in ROOMS, f"{name} imports {inner}, a public path for users only"
            assert order.index(below) <= order.index(here), f"{name} imports {inner}, which is in a room above"
        balancing = {each for each in imports(OURS[name]) if each.partition(".")[0] == "torchgpipe_balancing"}
        if room_of(name) == "command":  # Nobody imports it.
            continue
        assert balancing <= {"torchgpipe_balancing.partition"}, f"only arithmetic, inside a function, in {name}"
        assert "torchgpipe_balancing.partition" not in set(imports(OURS[name], top_level_only=True))


def code_lines(path: Path) -> int:
    """Return how many lines of a file have code: no blank lines, comments or docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in SILENT]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


@pytest.mark.parametrize("package", CAPS)
def test_a_room_has_at_most_its_lines(package: str) -> None:
    counts = dict.fromkeys(CAPS[package], 0)
    for name, path in modules(package).items():
        if package == "torchgpipe":
            room = room_of(name) if room_of(name) in ROOMS else "public paths"
        else:
            room = "planning" if room_of(name) == "planning" else "balancing"
        counts[room] += code_lines(path)
    over = {room: (count, CAPS[package][room]) for room, count in counts.items() if count > CAPS[package][room]}
    assert not over, f"rooms with more lines of code than their caps: {over}; take away, or pay with another room"
    assert max(counts.values()) <= LARGEST, "a room that nobody can read in an hour is several rooms"
    assert sum([sum(caps.values()) for caps in CAPS.values()]) <= TOTAL, "the sum of the caps never rises"


def test_no_import_leads_back() -> None:
    """Also within a room."""
    finished: set[str] = set()

    def follow(name: str, way: list[str]) -> None:
        assert name not in way, f"a cycle of imports: {' -> '.join([*way, name])}"
        if name in OURS and name not in finished:
            for inner in ours_imported_by(name):
                follow(inner, [*way, name])
            finished.add(name)

    for name in OURS:
        follow(name, [])


def test_balancing_imports_only_devices_and_skips() -> None:
    """These two rooms do not import balancing, so there is no cycle, whichever package is imported first.

    Planning records pipelines to measure them, so it imports more, and nothing of the engine imports it.
    """
    for name, path in BALANCING.items():
        inner = {imported.partition(".")[2] for imported in imports(path) if imported.partition(".")[0] == "torchgpipe"}
        if room_of(name) == "planning":
            assert {room_of(one) for one in inner} <= {*ROOMS} - {"distributed", "compat"}, name
        else:
            assert all(one.startswith(("devices.", "skip.", "proof.leaves")) for one in inner), name
            assert not any("planning" in imported for imported in imports(path, top_level_only=True)), name


def test_contributors_are_shown_the_rooms() -> None:
    table = ["| room | contents |", "| --- | --- |"]
    table += [f"| `{room}{'' if room == 'gpipe' else '/'}` | {contents} |" for room, contents in ROOMS.items()]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert "\n".join(table) in page, "the table of CONTRIBUTING.md should be:\n" + "\n".join(table)


def test_import_needs_torch_and_numpy_alone() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "torchgpipe", "torchgpipe_balancing"}
    for path in ALL:
        client = {path.stem} if path.parent.name == "integrations" else set()
        extras = {name.partition(".")[0] for name in imports(path, top_level_only=True)} - allowed - client
        assert not extras, f"import {extras} of {name_of(path)} where they are used, inside a function"
        metadata = "importlib.metadata" in set(imports(path, top_level_only=True))
        assert not metadata, "a bare checkout has no metadata"


def test_only_pipelines_over_several_processes_open_connections() -> None:
    """Nothing is sent to anybody else: the page about stability says so."""
    network = {"asyncio", "ftplib", "http", "requests", "smtplib", "socket", "socketserver", "ssl", "urllib", "xmlrpc"}
    those = {name_of(path) for path in ALL if network & {name.partition(".")[0] for name in imports(path)}}
    assert those == {"torchgpipe.processes.connections", "torchgpipe.processes.messages"}


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_both_packages_import_from_a_bare_checkout_in_any_order() -> None:
    """The import is isolated from the environment's paths, with the checkout in front and every extra missing.

    Balancing imports the engine, for its skips, but no front; the engine does not import balancing. The compiler, whose
    import takes longer than that of all the rest, is not imported unasked.
    """
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        for extra in ["matplotlib", "hypothesis", "pytest", "tqdm", "scipy", "PIL", "pandas"]:
            sys.modules[extra] = None  # so that importing it fails

        def forget():
            for name in [name for name in sys.modules if name.startswith("torchgpipe")]:
                del sys.modules[name]

        import torch
        before = set(sys.modules)
        import torchgpipe
        assert "torchgpipe_balancing" not in sys.modules
        import torchgpipe_balancing
        fronts = ("spine", "run", "pipeline", "front", "timeline", "distributed", "compat", "integrations", *{THIN!r})
        fronts = {{f"torchgpipe.{{room}}" for room in fronts}}
        costly = {{"html", "torchgpipe_balancing.planning", *fronts}}
        assert not costly & (set(sys.modules) - before), "an import takes longer than it needs to"
        assert {{"pipelined", "plan", "record"}} < set(dir(torchgpipe))
        forget()
        import torchgpipe_balancing
        assert "torchgpipe.balance" not in sys.modules
        import torchgpipe.balance
        forget()
        import torchgpipe.balance
        import torchgpipe_balancing, torchgpipe.pipe
        from torch import nn
        layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 2))
        model = torchgpipe.GPipe(layers, [2, 2], devices=["cpu:0", "cpu:1"], chunks=2, deferred_batch_norm=True)
        model(torch.rand(4, 2)).sum().backward()
        with torch.inference_mode():
            model.eval()(torch.rand(4, 2))
        assert "torch._dynamo" not in sys.modules, "a decorator of torch.compiler on our own code was enough"
        print(torchgpipe.__version__)
    """
    result = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == (f"{torchgpipe.__version__}\n", "")


def test_every_module_says_why_it_exists_and_lists_its_names() -> None:
    for path in ALL:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path.relative_to(ROOT)} has no docstring"
        assert docstring.strip().splitlines()[0].endswith((".", ":")), f"{path}: its first line is a sentence"
        name = name_of(path).removesuffix(".__init__")
        if name.startswith("torchgpipe.integrations.") and importlib.util.find_spec(path.stem) is None:
            continue
        module = importlib.import_module(name)
        assert len(set(module.__all__)) == len(module.__all__)
        for public in module.__all__:
            assert hasattr(module, public), f"{name}.__all__ has {public}, which is not there"


def test_names_that_other_modules_import_are_listed() -> None:
    """No other module imports a private name."""
    for path in OURS.values():
        if path.name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchgpipe"):
                source = importlib.import_module(str(node.module))
                for alias in node.names:
                    known = alias.name in source.__all__ or _is_module(f"{node.module}.{alias.name}")
                    assert known, f"{path.name} imports {alias.name}, which is not in {node.module}.__all__"

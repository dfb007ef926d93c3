"""The house rules: a file imports only from lower floors, says why it exists, and shows what is public in one list.

The floors are the journey of a mini-batch, read upward. A new file needs a floor here, which is a good moment to
think about where it belongs.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent.parent

FLOORS: list[list[str]] = [
    ["typing", "settings", "moments", "schedule", "phase", "skip.namespace", "backward_pass", "twin", "uncompiled"],
    ["device", "old_keys", "timeline.record"],
    ["timeline.label", "function", "hooks", "microbatch", "replicas", "stream", "skip.layout"],
    ["ambient", "arguments", "phony", "copy", "random", "statistics", "partition", "batchnorm"],
    ["worker", "dependency", "gradients", "skip.portal"],
    ["checkpoint", "skip.tracker"],
    ["cell", "skip.skippable"],
    ["recorded"],
    ["pipeline"],
    ["gpipe"],
    ["pipe", "distributed.*", "balance.*", "timeline.*"],
]


def modules(package: str) -> dict[str, Path]:
    """The modules of a package, by their names inside of it; packages end with ``__init__``."""
    folder = ROOT / package
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in sorted(folder.rglob("*.py"))}


OURS = modules("torchgpipe")
BALANCING = modules("torchgpipe_balancing")
ALL = [*OURS.values(), *BALANCING.values()]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def floor_of(name: str) -> int | None:
    """The floor of a module; None if it has none."""
    for wanted in [name, name.partition(".")[0] + ".*"]:
        for floor, names in enumerate(FLOORS):
            if wanted in names:
                return floor
    return None


def imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    """The full names of the modules that a file imports, also inside functions, unless ``top_level_only``."""
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


def test_the_reader_of_imports_reads() -> None:
    """Without this, a fault in the reader would let everything pass."""
    path = ROOT / "torchgpipe" / "gpipe.py"
    assert {"torch", "torchgpipe.microbatch", "torchgpipe.partition", "torchgpipe.pipeline"} <= set(imports(path))
    assert "torchgpipe" not in imports(path)


@pytest.mark.parametrize("name", [name for name in OURS if not name.endswith("__init__")])
def test_a_file_imports_only_from_lower_floors(name: str) -> None:
    floor = floor_of(name)
    assert floor is not None, f"torchgpipe/{name} has no floor; give it one in FLOORS"
    for imported in imports(OURS[name]):
        package, _, inner = imported.partition(".")
        assert package != "torchgpipe_balancing" or name.startswith("balance."), f"{name} imports {imported}"
        if package != "torchgpipe":
            continue
        assert inner, f"{name} imports from the package itself, which imports {name}"
        below = floor_of(inner)
        if below is None:  # a package: as high as the highest of its modules
            inside = [floor_of(other) for other in OURS if other.startswith(inner + ".") and "__init__" not in other]
            below = max((floor for floor in inside if floor is not None), default=len(FLOORS))
        same_front = floor == len(FLOORS) - 1 and name.partition(".")[0] == inner.partition(".")[0]
        assert below < floor or same_front, f"{name} (floor {floor}) imports {inner} (floor {below})"


@pytest.mark.parametrize("path", BALANCING.values(), ids=name_of)
def test_balancing_knows_of_the_pipeline_only_its_skips(path: Path) -> None:
    """Below are no fronts, and only a front imports balancing: whichever package is first, there is no cycle."""
    ours = [imported for imported in imports(path) if imported.partition(".")[0] == "torchgpipe"]
    assert not [imported for imported in ours if not imported.startswith("torchgpipe.skip.")]


def test_contributors_are_shown_the_floors() -> None:
    table = ["| floor | in `torchgpipe/` |", "| --- | --- |"]
    for floor, names in enumerate(FLOORS):
        paths = ", ".join(f"`{name.replace('.', '/')}`" for name in names)
        table.append(f"| {floor} | {paths} |")
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert "\n".join(table) in page, "the table of CONTRIBUTING.md should be:\n" + "\n".join(table)


def test_the_package_imports_no_front_that_is_not_asked_for() -> None:
    top = len(FLOORS) - 1
    for imported in imports(OURS["__init__"], top_level_only=True):
        package, _, inner = imported.partition(".")
        assert package != "torchgpipe_balancing"
        assert package != "torchgpipe" or floor_of(inner) != top, f"torchgpipe imports {inner}, a front"


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_import_needs_torch_and_numpy_alone(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "torchgpipe", "torchgpipe_balancing"}
    extras = {name.partition(".")[0] for name in imports(path, top_level_only=True)} - allowed
    assert not extras, f"import {extras} where they are used, inside a function"
    assert "importlib.metadata" not in set(imports(path)), "a bare checkout has no metadata"


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_both_packages_import_from_a_bare_checkout_in_any_order() -> None:
    """Isolated from the environment's own paths, with the checkout in front and every extra missing.

    Balancing brings in the engine, whose skips it knows, but no front; the engine does not bring in balancing.
    """
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        for extra in ["matplotlib", "hypothesis", "pytest", "tqdm", "scipy", "PIL", "pandas"]:
            sys.modules[extra] = None  # so that importing it fails

        def forget():
            for name in [name for name in sys.modules if name.startswith("torchgpipe")]:
                del sys.modules[name]

        import torchgpipe
        assert "torchgpipe_balancing" not in sys.modules
        import torchgpipe_balancing
        forget()
        import torchgpipe_balancing
        assert "torchgpipe.balance" not in sys.modules
        import torchgpipe.balance
        forget()
        import torchgpipe.balance
        import torchgpipe_balancing
        print(torchgpipe.__version__)
    """
    result = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == (f"{torchgpipe.__version__}\n", "")


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_every_module_says_why_it_exists(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path.relative_to(ROOT)} has no docstring"
    assert docstring.strip().splitlines()[0].endswith((".", ":")), "its first line is a sentence"


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_every_module_lists_its_names(path: Path) -> None:
    name = name_of(path).removesuffix(".__init__")
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.__all__ has {public}, which is not there"


@pytest.mark.parametrize("path", [path for path in OURS.values() if path.name != "__init__.py"], ids=name_of)
def test_what_others_take_from_a_module_is_in_its_list(path: Path) -> None:
    """What is private in a module is imported by nobody else."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchgpipe"):
            source = importlib.import_module(str(node.module))
            for alias in node.names:
                known = alias.name in source.__all__ or _is_module(f"{node.module}.{alias.name}")
                assert known, f"{path.name} imports {alias.name}, which {node.module}.__all__ has not"

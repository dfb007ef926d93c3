"""The wheel and the source distribution: what is in them, whether they install and run, and how long an import takes.

    python -m benchmarks.campaigns.packages --torch 2.13.0    # with this Python
    python -m benchmarks.campaigns.packages --torch 2.15.0 --python python3.13 --tests  # and all tests, half an hour

Each pair of Python and PyTorch gets an environment with nothing else in it, installed from the package index. There
the README's first two examples and its plan run, from the wheel and from the source distribution. Imports are timed in
fresh processes that have imported PyTorch, so what is timed is ours. The tests run from the unpacked source
distribution, with the extra `dev`. A pair's row replaces its former row, and the rows of other pairs stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.program import Part, Program, Progress
from benchmarks.records import KIB, environment, shown, spread, table

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = ("import torchgpipe", "from torchgpipe import GPipe", "import torchgpipe_balancing")
#: The rest is imported by those who ask for it.
ASKED_FOR = ("from torchgpipe import pipelined", "from torchgpipe import plan", "from torchgpipe import record")

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"
TIMED = """
import time, torch
wall, cpu = time.perf_counter(), time.process_time()
{}
print([time.perf_counter() - wall, time.process_time() - cpu])
"""
FACTS = """
import json, platform
from pathlib import Path
import torch, torchgpipe, torchgpipe_balancing
homes = [Path(package.__file__).parent for package in (torchgpipe, torchgpipe_balancing)]
facts = {"python": platform.python_version(), "torch": torch.__version__, "home": str(homes[0])}
print(json.dumps({**facts, "typed": all((home / "py.typed").exists() for home in homes)}))
"""


def call(*command: str | Path, folder: Path, check: bool = True, **variables: str) -> str:
    """Run a command and return what it prints; the variables of this process do not lead Python elsewhere."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env={**clean, **variables}, check=False, stdout=subprocess.PIPE, text=True
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))[:200]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def tracked() -> set[str]:
    """Return the files of this checkout, without those that git ignores."""
    return set(call("git", "ls-files", "-co", "--exclude-standard", folder=ROOT).split("\n")) - {""}


def build(folder: Path, python: str | Path = sys.executable) -> tuple[Path, Path, Path]:
    """Make both distributions of a copy of the checkout; return the wheel, the archive, and where it is unpacked."""
    for name in tracked():
        copy = folder / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    archive = folder / call(python, "-c", BUILD.format("sdist"), folder, folder=folder / "checkout").splitlines()[-1]
    with tarfile.open(archive) as opened:
        # Python has the filter since 3.11.4.
        how: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        opened.extractall(folder / "source", **how)
    (source,) = (folder / "source").iterdir()
    wheel = folder / call(python, "-c", BUILD.format("wheel"), folder, folder=source).splitlines()[-1]
    return wheel, archive, source


def contents(wheel: Path, archive: Path) -> dict[str, Any]:
    """Return what is in the distributions."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        description = opened.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    return {
        "wheel": {
            "bytes": wheel.stat().st_size,
            "modules": sum(name.endswith(".py") for name in names),
            "others": [name for name in names if not name.endswith(".py")],
            "relative links of the description": re.findall(r"\]\((?!https?:)(.+?)\)", description),
        },
        "sdist": {"bytes": archive.stat().st_size, "files": len(packed), "left out": sorted(tracked() - packed)},
    }


def smoke(python: str | Path, folder: Path, **variables: str) -> dict[str, Any]:
    """Run the README's examples, and return the versions and whether type checkers see types."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    said = call(python, "-W", "error", "-c", "\n".join([*blocks[:3], FACTS]), folder=folder, **variables)
    facts: dict[str, Any] = json.loads(said.splitlines()[-1])
    home = facts.pop("home")
    if Path(home).is_relative_to(ROOT) or not facts["typed"]:
        raise RuntimeError(f"{home} is not what was installed, or has no types")
    return facts


def imports(
    python: str | Path, folder: Path, statements: tuple[str, ...], turns: int, **variables: str
) -> dict[str, Any]:
    """Time imports, each in `turns` processes; in milliseconds."""
    times: dict[str, list[list[float]]] = {statement: [] for statement in statements}
    for _ in range(turns):
        for statement in statements:
            times[statement].append(json.loads(call(python, "-c", TIMED.format(statement), folder=folder, **variables)))
    return {
        statement: {name: spread(1e3 * turn[k] for turn in of_turns) for k, name in enumerate(("wall", "cpu"))}
        for statement, of_turns in times.items()
    }


def run_tests(python: Path, source: Path) -> dict[str, Any]:
    """Run the tests of the unpacked source distribution, and return how they have ended."""
    # What PyTorch has brought stays: an older one may not allow the versions of `constraints.txt`.
    installed = re.findall(r"^(\S+)==(\S+)$", call(python, "-m", "pip", "freeze", "--all", folder=source), re.MULTILINE)
    pinned = re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pins = {name: version for name, version in pinned if not name.startswith("torch")} | dict(installed)
    (source / "pins.txt").write_text("\n".join([f"{name}=={version}" for name, version in pins.items()]))
    call(python, "-m", "pip", "install", "-q", "--constraint", "pins.txt", f"{source}[dev]", folder=source)
    options = ["-q", "--numprocesses", "2", "--dist", "loadfile", "-p", "no:cacheprovider", "--show-capture=no"]
    # The tables are older than the result that is being made.
    options += ["--deselect", "tests/test_docs.py::test_tables_are_those_of_the_results"]
    said = call(python, "-m", "pytest", *options, folder=source, check=False)
    counts = {
        outcome: int(count)
        for count, outcome in re.findall(r"(\d+) ([a-z]+)", said.splitlines()[-1].partition(" in ")[0])
    }
    return {**counts, "not passed": re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the contents of the distributions, and the rows of all pairs of Python and PyTorch so far."""
    with tempfile.TemporaryDirectory() as folder:
        distributions, row = try_pair(args, Progress(6 if args.tests else 5), Path(folder))
    measured_on = environment()
    row |= {name: measured_on[name] for name in ("date", "commit", "load_average")}
    before = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    pair = row["torch"], row["python"]
    rows = [*(earlier for earlier in before if (earlier["torch"], earlier["python"]) != pair), row]
    rows.sort(key=lambda row: [*map(int, re.findall(r"\d+", f"{row['torch'].partition('+')[0]}.{row['python']}"))])
    return {"unit": "milliseconds", **distributions, "rows": rows}


def try_pair(args: argparse.Namespace, progress: Progress, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of the distributions, and the row of a pair of Python and PyTorch."""
    progress("build")
    call(args.python, "-m", "venv", folder / "builder", folder=folder)
    call(folder / "builder/bin/python", "-m", "pip", "install", "-q", "setuptools>=77", folder=folder)
    wheel, archive, source = build(folder, folder / "builder/bin/python")

    progress(f"install PyTorch {args.torch}")
    home = (args.keep or folder / "environment").resolve()
    call(args.python, "-m", "venv", home, folder=folder)
    python = home / "bin/python"
    install = (python, "-m", "pip", "install", "-q")
    row = {}
    for distribution in (archive, wheel):
        progress(f"install and run {distribution.name}")
        call(*install, "--force-reinstall", "--no-deps", distribution, folder=folder)
        call(*install, f"torch=={args.torch}", distribution, folder=folder)
        row = smoke(python, folder)
    progress("imports")
    row["imports"] = imports(python, folder, IMPORTS + ASKED_FOR, args.turns)
    if args.tests:
        progress("tests")
        row["tests"] = run_tests(python, source)
    return contents(wheel, archive), row


# ---- Tables of a result.


def packages(result: dict[str, Any]) -> str:
    """Return a table of the pairs: what the tests say, and the time of an import."""
    lines = []
    for row in result["rows"]:
        tests = row.get("tests")
        counts = ["-"] * 3
        if tests:
            counts = [str(tests.get(outcome, 0)) for outcome in ("passed", "skipped")]
            counts += [str(sum(tests.get(outcome, 0) for outcome in ("failed", "error", "errors")))]
        lines.append([row["torch"].partition("+")[0], row["python"], *counts])
        lines[-1].append(shown(row["imports"]["import torchgpipe"]["cpu"]))
    return table(lines, ["PyTorch", "Python", "tests passed", "skipped", "failed", "import torchgpipe, ms"])


def notes(result: dict[str, Any]) -> list[str]:
    sizes = {name: f"{result[name]['bytes'] / KIB:.0f} KiB" for name in ("wheel", "sdist")}
    return [f"the wheel has {sizes['wheel']}, the source distribution {sizes['sdist']}"]


PARTS = {"packages": Part("packages", measure, {"packages": packages}, notes)}


def main() -> None:
    program = Program("packages", __doc__, PARTS)
    program.add("--torch", default="2.13.0", help="the version of PyTorch")
    program.add("--python", default=sys.executable, help="the interpreter")
    program.add("--tests", action="store_true", help="also run all tests")
    program.add("--turns", type=int, default=11, help="processes for each import")
    program.add("--keep", type=Path, help="keep the environment in this folder")
    program.run()


if __name__ == "__main__":
    main()

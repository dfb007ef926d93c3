"""The tests marked `cuda`, each noted as it ends, so that a test that hangs or ends its process costs only itself.

This file is a program and a plugin of pytest. The program starts pytest with this file as a plugin. The plugin appends
a line to a file of notes when a test starts and when it has ended. A test that takes longer than `LIMIT` ends the
process, after the stacks of all threads have been printed, and so does a failure that leaves CUDA unusable. The program
then starts another process, which runs the tests that are not noted yet. It does the same after it was cut off itself.

Nothing is needed beside pytest: what `pyproject.toml` says to plugins that may be missing is left out, and plugins that
are there and not needed stay unused.

    python -m benchmarks.campaigns.cuda_tests --json PATH         # and PATH.jsonl, until all tests are through
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Seconds that a test may take.
LIMIT = 60

PLUGIN = "benchmarks.campaigns.cuda_tests"
#: Where the plugin finds its notes.
VARIABLE = "CUDA_TESTS_NOTES"

# ---- The plugin. pytest captures what goes to stderr: stacks go where that leads now.

STDERR = os.dup(2)


def _note(**line: Any) -> None:
    with Path(os.environ[VARIABLE]).open("a") as notes:
        notes.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A test that has only started was cut off with its process, and runs again.
    done = {test for test, last in outcomes(lines(Path(os.environ[VARIABLE]))).items() if last["outcome"] != "started"}
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _note(test=item.nodeid, outcome="started")
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.skipped or report.when == "call":
        told = {"told": report.longreprtext[-4000:]} if report.failed else {}
        _note(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), **told)
    if report.failed and "CUDA error" in report.longreprtext:
        # An error of a kernel persists: all further tests of this process would fail with it.
        os._exit(1)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(test=report.nodeid, outcome="failed", told=report.longreprtext[-4000:])


def pytest_sessionfinish() -> None:
    _note(through=True)


# ---- The program.


def lines(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.is_file() else []


def outcomes(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last note of each test; of a test that has failed, the note of the failure."""
    notes_of: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "test" in line and notes_of.get(line["test"], {}).get("outcome") != "failed":
            notes_of[line["test"]] = line
    return notes_of


def settings() -> str:
    """Return the settings of pytest without those of plugins, as an ini file."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        ours = tomllib.load(file)["tool"]["pytest"]["ini_options"]
    markers = [*ours["markers"], "timeout: is kept by a plugin that may be missing"]
    listed = {"filterwarnings": ours["filterwarnings"], "markers": markers, "testpaths": ours["testpaths"]}
    text = [f"{name} =\n" + "".join(f"    {value}\n" for value in values) for name, values in listed.items()]
    return "[pytest]\nxfail_strict = true\n" + "".join(text)


def run(paths: list[str], notes: Path, seconds: float) -> bool:
    """Run the tests that are not noted yet, in as many processes as it takes; return whether all are through."""
    from benchmarks.program import Budget

    budget = Budget(seconds)
    environment = {**os.environ, VARIABLE: str(notes), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        ini = Path(folder, "pytest.ini")
        ini.write_text(settings())
        options = ["-c", str(ini), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", PLUGIN, "-m", "cuda"]
        options += ["--strict-markers", "--continue-on-collection-errors", "--tb=short", "-rfE"]
        while not budget.spent():
            known = len(lines(notes))
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "pytest", *options, *paths],
                    cwd=ROOT,
                    env=environment,
                    timeout=budget.left() if math.isfinite(seconds) else None,
                )
            except subprocess.TimeoutExpired:
                return False
            added = lines(notes)[known:]
            if any("through" in line for line in added):
                return True
            for test, last in outcomes(added).items():
                if last["outcome"] == "started":
                    with notes.open("a") as file:
                        told = f"the process ended with {done.returncode}, by itself or after {LIMIT} s"
                        file.write(json.dumps({"test": test, "outcome": "failed", "told": told}) + "\n")
            if not added:
                return False  # Nothing was collected, and another process would not collect more.
    return False


def measure(args: argparse.Namespace) -> dict[str, Any]:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    notes = args.json.with_suffix(".jsonl")
    through = run(args.paths, notes, args.seconds)
    noted = outcomes(lines(notes))
    if through:
        notes.unlink()  # Started again, it runs all tests.
    counts = Counter(line["outcome"] for line in noted.values())
    slowest = sorted(noted.values(), key=lambda line: line.get("seconds", 0.0), reverse=True)[:10]
    return {
        "unit": "tests",
        "through": through,
        "counts": {name: counts[name] for name in ("passed", "failed", "skipped")},
        "failed": {test: line["told"] for test, line in noted.items() if line["outcome"] == "failed"},
        "slowest": {line["test"]: line.get("seconds") for line in slowest},
    }


def main() -> int:
    from benchmarks.program import Part, Program

    program = Program("cuda_tests", __doc__, {"tests": Part("gpu/tests", measure, {})})
    program.add("paths", nargs="*", help="tests, as pytest takes them; all, if none is given")
    program.add("--seconds", type=float, default=math.inf, help="what is not through by then waits")
    result = program.run()["tests"]
    return 0 if result["through"] and not result["failed"] and any(result["counts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

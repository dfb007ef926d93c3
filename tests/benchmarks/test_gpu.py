"""`benchmarks.gpu` runs every slice, and `benchmarks.campaigns.cuda_tests` every test. Nothing here needs a GPU."""

from __future__ import annotations

import fcntl
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.campaigns import cuda_tests

WRITES = "import json, sys; json.dump({'told': 'a figure'}, open(sys.argv[-1], 'w'))"
HANGS = """
import fcntl, os, sys, time
lock = open(sys.argv[-1] + ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
os.fork()
time.sleep(1000)
"""


def test_a_slice_that_fails_or_hangs_keeps_no_other_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hanging slice is killed with its children. Slices run again the next time unless they have passed."""
    scripts = {"hangs": HANGS, "fails": "raise SystemExit('no luck')", "silent": "", "passes": WRITES}
    slices = [gpu.Slice(name, "none", "", "", 5.0, lambda result: result["told"], peers=False) for name in scripts]
    slices[0] = slices[0]._replace(limit=1.0)
    needy = gpu.Slice("needs", "none", "", "", 5.0, str, needs=("no_such_package",), peers=False)
    monkeypatch.setattr(gpu, "SLICES", (*slices, needy))
    started = []

    def command(one: gpu.Slice, path: Path, *_: object) -> list[str]:
        started.append(one.name)
        return [sys.executable, "-c", scripts.get(one.name, ""), str(path)]

    monkeypatch.setattr(gpu, "command", command)
    args = Namespace(only=[one.name for one in gpu.SLICES], again=False, limit=60.0, dry_run=False)
    assert gpu.run_all(args, tmp_path) == 1
    outcomes = {one.name: (gpu.read(tmp_path, one.name) or {})["outcome"] for one in gpu.SLICES}
    assert outcomes == {
        "hangs": "killed after 1 s",
        "fails": "failed with 1",
        "silent": "failed, for there is no result",
        "passes": "passed",
        "needs": "failed, for it needs no_such_package",
    }
    with (tmp_path / "hangs.json.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The slice's child inherited this lock.
    told = capsys.readouterr().out
    assert "no luck" in told
    assert "a figure" in told

    scripts.update(hangs=WRITES, fails=WRITES, silent=WRITES)
    started.clear()
    args.only = ["passes", "fails", "hangs"]
    assert gpu.run_all(args, tmp_path) == 0
    assert started == ["hangs", "fails"]

    args.again, args.limit = True, 2.0
    assert gpu.run_all(args, tmp_path) == 1
    assert started == ["hangs", "fails", "hangs"], "for the others too little time is left"


def test_a_test_that_ends_its_process_costs_only_itself(tmp_path: Path) -> None:
    path, notes = tmp_path / "test_some.py", tmp_path / "tests.jsonl"
    # The notes of an earlier run that was cut off. Outside of pytest's root, test ids have no file.
    notes.write_text(json.dumps({"test": "::test_first", "outcome": "started"}) + "\n")
    path.write_text(
        "import os, pytest, warnings\n"
        "pytestmark = pytest.mark.cuda\n"
        "def test_first(): pass\n"
        "def test_dies(): os._exit(3)\n"
        "@pytest.mark.timeout(5)\n"
        "def test_warns(): warnings.warn('as an error')\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n"
        "def test_breaks_cuda(): raise RuntimeError('CUDA error: all that follows fails')\n"
        "def test_last(): pass\n"
    )
    assert cuda_tests.run([str(path)], notes, 60.0)
    found = {test.partition("::")[2]: line for test, line in cuda_tests.outcomes(cuda_tests.lines(notes)).items()}
    assert {test: line["outcome"] for test, line in found.items()} == {
        "test_first": "passed",
        "test_dies": "failed",
        "test_warns": "failed",
        "test_skipped": "skipped",
        "test_breaks_cuda": "failed",
        "test_last": "passed",
    }
    assert "the process ended with 3" in found["test_dies"]["told"]
    assert "UserWarning: as an error" in found["test_warns"]["told"]
    started = [line["test"] for line in cuda_tests.lines(notes) if line.get("outcome") == "started"]
    assert sorted(started) == sorted(["::test_first", *(f"::{test}" for test in found)])

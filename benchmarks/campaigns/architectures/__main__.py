"""Runs the architectures one after the other, each in a process of its own with a time limit.

The results so far are in the file of lines that `--out` names, so that a run that was stopped goes on where it was.
A run of the whole catalogue writes `results/architectures.json` and prints its tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.campaigns.architectures import CATALOGUE
from benchmarks.campaigns.architectures.report import architectures, supported_models, unsupported_models
from benchmarks.peers import CHECKOUT
from benchmarks.program import Progress
from benchmarks.records import RESULTS, environment, write

LIBRARIES = ("transformers", "timm", "diffusers", "torchvision")


def trial(name: str, options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run one architecture in a process of its own; return what it has found."""
    command = [sys.executable, "-m", "benchmarks.campaigns.architectures.trial", name, json.dumps(options)]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "PYTHONFAULTHANDLER": "1"}
    kind = CATALOGUE[name].kind
    try:
        done = subprocess.run(
            command, cwd=CHECKOUT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "kind": kind, "verdict": f"error: no end within {seconds:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {
            "name": name,
            "kind": kind,
            "verdict": f"error: the process ended with {done.returncode}",
            "trace": done.stderr[-3000:],
        }
    outcome: dict[str, Any] = json.loads(lines[-1])
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="all by default; a kind names all of its kind")
    parser.add_argument("--out", type=Path, help="a file of lines of JSON: read first, then added to")
    parser.add_argument("--seeds", type=int, default=2, help="each gives two random cuts")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each architecture")
    parser.add_argument("--json", type=Path, default=RESULTS / "architectures.json")
    args = parser.parse_args()
    before = environment()
    names = [
        name for name, architecture in CATALOGUE.items() if not args.names or {name, architecture.kind} & {*args.names}
    ]
    unknown = {*args.names} - {*CATALOGUE} - {architecture.kind for architecture in CATALOGUE.values()}
    if unknown:
        parser.error(f"no architectures or kinds: {sorted(unknown)}")
    known: dict[str, Any] = {}
    if args.out and args.out.exists():
        known = {row["name"]: row for row in map(json.loads, args.out.read_text().splitlines())}
    progress = Progress(len(names))
    for name in names:
        progress(name)
        if name in known:
            continue
        row = trial(name, {"seeds": args.seeds}, args.limit)
        known[name] = row
        print(f"    {row['verdict'][:300]}", flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [known[name] for name in names]
    result = {
        "environment": before,
        "libraries": {library: version(library) for library in LIBRARIES},
        "rows": [{k: v for k, v in row.items() if k not in ("details", "trace")} for row in rows],
    }
    print(f"\n{architectures(result)}\n\n{unsupported_models(result)}\n\n{supported_models(result)}")
    if not args.names:
        write(args.json, result)


if __name__ == "__main__":
    main()

"""How long the engine stays right: random models, random faults, and very many cells in one process.

The random ones are the properties that the tests state, with more examples than a run of the tests has time for: any
model, balance, chunks, checkpoint mode and batch gives what the plain model gives; any faults raise the first of them,
told where, and leave a model that works on. Each is tried inline and through workers.

The last part trains in one process, inline and at times through workers, with a fault every now and then, and looks at
what the process holds: memory, tensors, threads, open files.

    python -m benchmarks.robustness                                     # some hours on two cores
    python -m benchmarks.robustness --parts models                      # beside another part, in a process of its own
    python -m benchmarks.robustness --models 1000 --faults 100 --cells 10000   # some minutes
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.records import RESULTS, environment, table, write
from torchgpipe import GPipe

ROOT = Path(__file__).resolve().parent.parent
MODELS = [
    "tests/test_transparency.py::test_any_model_gives_what_the_plain_model_gives",
    "tests/test_transparency.py::test_any_model_with_shared_weights_gives_what_the_plain_model_gives",
    "tests/test_transparency.py::test_random_layers_draw_what_they_draw_without_checkpointing",
    "tests/skip/test_transparency.py::test_any_skips_give_what_the_plain_model_gives",
]
FAULTS = ["tests/test_faults.py::test_any_faults"]
PARTS = ["endurance", "faults", "models"]
PARTITIONS, CHUNKS = 8, 32
#: In steps. Every second fault comes to workers.
WORKERS_EVERY, FAULT_EVERY = 4, 10


def properties(tests: list[str], examples: int) -> dict[str, Any]:
    """Tries properties with about so many random examples in all."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=campaign"]

    def run(*options: str, each: int) -> str:
        variables = {"HYPOTHESIS_EXAMPLES": str(each), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            [*command, *options, *tests], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(done.stdout[-8000:] + done.stderr[-2000:])
        return done.stdout

    variants = sum("::" in line for line in run("--collect-only", each=100).splitlines())
    each = max(4, -(-examples // variants))  # some properties take a quarter of it
    start = perf_counter()
    # Hypothesis tells how many it has tried: fewer, where a property has no more.
    report = run("--timeout=0", "--hypothesis-show-statistics", "-n=auto", "--maxschedchunk=1", each=each)
    tried = [int(count) for count in re.findall(r"(\d+) passing\b", report)]
    return {"variants": variants, "examples": sum(tried), "failures": 0, "seconds": perf_counter() - start}


class Fault(nn.Module):
    """Raises where an input says so."""

    def forward(self, input: Tensor) -> Tensor:
        if bool((input > 1e6).any()):
            raise ArithmeticError("a fault that was asked for")
        return input


def held() -> dict[str, int]:
    """What this process holds by now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    files = len(os.listdir("/proc/self/fd"))
    return {"memory": resident, "tensors": tensors, "threads": len(os.listdir("/proc/self/task")), "files": files}


def endurance(cells: int, looks: int = 10) -> Iterator[dict[str, Any]]:
    """Trains, and looks at what is held at the start, when all is warm, and so many times on the way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh(), Fault()) for _ in range(PARTITIONS)]
    )
    inline, workers = (
        GPipe(layers, [1] * PARTITIONS, devices=[device(j) for j in range(PARTITIONS)], chunks=CHUNKS)
        for device in (lambda j: "cpu", lambda j: f"cpu:{j}")
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    steps = -(-cells // (PARTITIONS * CHUNKS))
    at = {round(step * steps / looks) for step in range(1, looks + 1)}
    warm = min(20, steps // 2)
    faults = 0
    for step in tqdm(range(1, warm + steps + 1), unit="step"):
        x = torch.randn(2 * CHUNKS, 4)
        model = workers if step % WORKERS_EVERY == 0 else inline
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % FAULT_EVERY == 0:
            x[step // FAULT_EVERY % CHUNKS * 2] = 1e7
            layers[0][2] = nn.Identity()  # lets it pass
            try:
                model(x)
            except ArithmeticError:
                faults += 1
            layers[0][2] = nn.Tanh()
        if step == warm or step - warm in at:
            yield {"cells": (step - warm) * PARTITIONS * CHUNKS, "faults": faults, **held()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="the others stay as they are in --json"
    )
    parser.add_argument("--models", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=RESULTS / "robustness.json")
    args = parser.parse_args()

    for part in args.parts:
        if part == "endurance":
            outcome: Any = list(endurance(args.cells))
            print("\n" + table([[f"{row[key]:,}" for key in row] for row in outcome], list(outcome[0])))
        else:
            tests, examples = (FAULTS, args.faults) if part == "faults" else (MODELS, args.models)
            outcome = {"tests": tests, **properties(tests, examples)}
            print(f"\n{part}: {outcome['examples']:,} random examples in {outcome['seconds']:.0f} s, all right")
        # Read only now: another process may have run another part meanwhile.
        result = json.loads(args.json.read_text()) if args.json.exists() else {}
        environments = {**result.get("environments", {}), part: environment()}
        write(args.json, {**result, "environments": environments, part: outcome})


if __name__ == "__main__":
    main()

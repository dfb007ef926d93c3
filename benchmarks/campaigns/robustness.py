"""Random models, random faults, random programs, and very many cells in one process: does the engine stay right?

The first three run the properties of the tests with more examples than a test run has time for, of the forward pass and
of `step`. Any model, balance, chunks, checkpoint mode, batch and program gives what the plain model gives. Any faults
raise the first of them, with its place, and leave a model that works. Each is tried inline and through workers. A
program is the forward of a model for `pipelined`, of the kinds that people write; it is right or refused, also on
devices that have a memory each.

The last part trains in one process, inline and at times through workers, with a fault every now and then, and looks at
what the process holds: memory, tensors, threads, open files.

    python -m benchmarks.campaigns.robustness                    # some hours on two cores
    python -m benchmarks.campaigns.robustness --only models      # beside another part, in a process of its own
    python -m benchmarks.campaigns.robustness --models 1000 --faults 100 --programs 100 --cells 10000   # some minutes
"""

from __future__ import annotations

import gc
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

from benchmarks.peers import CHECKOUT
from benchmarks.program import Part, Program, Progress
from benchmarks.records import MIB, table
from torchgpipe import GPipe

MODELS = [
    "tests/test_transparency.py::test_any_model_gives_what_the_plain_model_gives",
    "tests/test_transparency.py::test_any_model_with_shared_weights_gives_what_the_plain_model_gives",
    "tests/test_transparency.py::test_random_layers_draw_what_they_draw_without_checkpointing",
    "tests/test_transparency.py::test_autocast",
]
FAULTS = ["tests/test_faults.py::test_any_faults"]
PROGRAMS = ["tests/front/test_random_models.py::test_any_program"]
PARTITIONS, CHUNKS = 8, 32
#: In steps. Every second fault comes to workers.
WORKERS_EVERY, FAULT_EVERY = 4, 10


def properties(tests: list[str], examples: int) -> dict[str, Any]:
    """Try properties with about so many random examples in all."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=campaign"]

    def run(*options: str, count: int) -> str:
        variables = {"HYPOTHESIS_EXAMPLES": str(count), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            [*command, *options, *tests], cwd=CHECKOUT, env={**os.environ, **variables}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(done.stdout[-8000:] + done.stderr[-2000:])
        return done.stdout

    variants = sum("::" in line for line in run("--collect-only", count=100).splitlines())
    count = max(4, -(-examples // variants))  # some properties take a quarter of it
    start = perf_counter()
    # Hypothesis tells how many it has tried: fewer, where a property has no more.
    report = run("--timeout=0", "--hypothesis-show-statistics", "-n=auto", "--maxschedchunk=1", count=count)
    tried = [int(count) for count in re.findall(r"(\d+) passing\b", report)]
    outcome = {"variants": variants, "examples": sum(tried), "failures": 0, "seconds": perf_counter() - start}
    shares = re.findall(r"\* +([\d.]+)%, (right|refused)", report)  # of each variant; they have as many examples
    for kind in sorted({kind for _, kind in shares}):
        outcome[kind] = round(sum([float(share) for share, verdict in shares if verdict == kind]) / 100 / variants, 3)
    return outcome


class Fault(nn.Module):
    """Raises if the input asks for it, by a large number."""

    def forward(self, input: Tensor) -> Tensor:
        if bool((input > 1e6).any()):
            raise ArithmeticError("a fault that was asked for")
        return input


def held() -> dict[str, int]:
    """Return the amounts that this process holds now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    files = len(os.listdir("/proc/self/fd"))
    return {"memory": resident, "tensors": tensors, "threads": len(os.listdir("/proc/self/task")), "files": files}


def train_long(cells: int, looks: int = 10) -> Iterator[dict[str, Any]]:
    """Train, and yield what is held after the warm-up and `looks` times on the way."""
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
    progress = Progress(looks + 1)
    for step in range(1, warm + steps + 1):
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
            progress(f"after {step} steps")
            yield {"cells": (step - warm) * PARTITIONS * CHUNKS, "faults": faults, **held()}


def robustness(result: dict[str, Any]) -> str:
    tried = [(name, part) for name, part in result["parts"].items() if "examples" in part]
    refused = [f"{part['refused']:.0%}" if "refused" in part else "" for _, part in tried]
    return table(
        [[name, f"{part['examples']:,}", part["failures"], share] for (name, part), share in zip(tried, refused)],
        ["random", "tried", "failed", "refused"],
    )


def endurance(result: dict[str, Any]) -> str:
    """Return a table of what one process holds at the start of its cells, soon after, and at their end."""
    counted = ("faults", "tensors", "threads", "files")
    lines = [
        [f"{row['cells']:,}", f"{row['memory'] / MIB:.1f}", *(row[name] for name in counted)] for row in result["rows"]
    ]
    return table(lines[:2] + lines[-1:], ["cells", "memory, MiB", "faults", "tensors", "threads", "open files"])


def random_part(name: str, tests: list[str]) -> Part:
    """Return the part that tries these properties, as often as the option of its name says."""
    return Part(
        f"robustness:{name}",
        lambda args: {"tests": tests, **properties(tests, getattr(args, name))},
        {},
        lambda result: [f"{name}: {result['examples']:,} tried, {result['failures']} failed"],
    )


PARTS = {
    "models": random_part("models", MODELS),
    "faults": random_part("faults", FAULTS),
    "programs": random_part("programs", PROGRAMS),
    "endurance": Part(
        "robustness:endurance",
        lambda args: {"rows": list(train_long(args.cells))},
        {"what the process holds": endurance},
    ),
}


def main() -> None:
    program = Program("robustness", __doc__, PARTS)
    program.add("--models", type=int, default=100_000)
    program.add("--faults", type=int, default=10_000)
    program.add("--programs", type=int, default=100_000)
    program.add("--cells", type=int, default=1_000_000)
    program.run()


if __name__ == "__main__":
    main()

"""Does a training run over several processes survive harm to one of them?

Each trial is a run under torchrun in which one process, drawn at random, raises an exception, is killed, or hangs: in
forward or backward of a layer, while it saves a checkpoint, or between two steps. A Sequential is trained by
DistributedGPipe, and every second time a model that is none by `pipelined`. torchrun starts all processes again. Each
trial records:

- whether the run ends, with the losses of a run that was not interrupted, bit for bit;
- whether the other processes have ended by themselves, with errors that name them and the process they waited for;
- whether a process is left behind.

    python -m benchmarks.campaigns.faults             # -> results/faults.json; 24 trials, ten minutes
    python -m benchmarks.campaigns.faults --trials 200
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.campaigns.interrupted import STEPS, TIMEOUT, Harm
from benchmarks.peers import CHECKOUT
from benchmarks.program import Part, Program
from benchmarks.records import spread, table

__all__ = ["lines", "main", "tells", "trial"]

#: The last one gives every restart a store of its own: in a shared one gloo would find addresses of the run before.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

#: What is trained.
MODELS = ("sequential", "any")

COUNTED = ("ended", "same_losses", "others_that_told", "left_behind")

#: Seconds between two looks of torchrun: so rare that the processes can end by themselves before torchrun ends them.
LOOKS = 2.0


def trial(processes: int, harm: Harm) -> dict[str, Any]:
    """Run a training in which this harm happens.

    Returns:
        what has come of it; ``losses`` are those of the last run of each step
    """
    with TemporaryDirectory() as name:
        folder, begin = Path(name), perf_counter()
        done = subprocess.run(
            [
                *[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)],
                *["--max-restarts", "2", "--monitor-interval", str(LOOKS if harm.kind != "none" else 0.1)],
                *["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"],
                *["-m", "benchmarks.campaigns.interrupted", name, json.dumps(harm)],
            ],
            cwd=CHECKOUT,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        seconds = perf_counter() - begin
        steps = lines(folder / "steps")
        errors = {rank: lines(folder / f"errors-{rank}") for rank in range(processes) if rank != harm.rank}
        pids = [line["pid"] for rank in range(processes) for line in lines(folder / f"processes-{rank}")]
        begins = sorted({line["begin"] for line in steps})
    return {
        **harm._asdict(),
        "ended": done.returncode == 0,
        "runs": len(pids) // processes,
        "resumed_at": begins[-1],
        "others": processes - 1,
        "others_that_told": sum(
            any(map(tells, errors_of, [rank] * len(errors_of))) for rank, errors_of in errors.items()
        ),
        "left_behind": sum(alive(pid) for pid in pids),
        "seconds": round(seconds, 1),
        "losses": [loss for _, loss in sorted({line["step"]: line["loss"] for line in steps}.items())],
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the notes in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tells(error: dict[str, Any], rank: int) -> bool:
    """Return whether an error names its process, and the awaited process or the checkpoint that was not saved."""
    text = error["error"]
    names_itself = re.match(rf"rank {rank}, (stage|partition) {rank} of \d", text)
    waited = re.search(r"has waited in step \d+ for .+ from rank [\d, ]+, in vain", text)
    saving = re.search(r"could not save the checkpoint of step \d+ in .+ no process has saved it", text)
    return bool(names_itself and (waited or saving))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def random_harms(trials: int, processes: int) -> list[Harm]:
    """Return harms at random. A process that comes to harm while it saves does so at a step that saves."""
    random_ = random.Random(0)
    saves = [step for step in range(STEPS) if (step + 1) % 3 == 0]
    result = []
    for k in range(trials):
        kind = random_.choice(["kill", "kill", "raise", "hang"])
        place = random_.choice(["layer", "backward", "between", "save"])
        step = random_.choice(saves) if place == "save" else random_.randrange(STEPS)
        result.append(Harm(kind, place, random_.randrange(processes), step, MODELS[k % 2]))
    return result


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcomes of the trials so far."""
    return {
        "trials": len(rows),
        "by_kind": dict(Counter(row["kind"] for row in rows)),
        **{name: sum(row[name] for row in rows) for name in (*COUNTED, "others")},
        "seconds": spread(row["seconds"] for row in rows),
        "rows": rows,
    }


def faults(result: dict[str, Any]) -> str:
    """Return a table of outcomes by the model, and the kind and the place of the harm."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["model"], row["kind"], row["place"]), []).append(row)
    lines = [[*key, len(rows), *(sum(row[name] for row in rows) for name in COUNTED)] for key, rows in groups.items()]
    header = ["model", "harm", "where", "trials", "ended", "same losses", "others that told", "left behind"]
    return table(sorted(lines), header)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the outcomes of the trials so far."""
    about = {"steps": STEPS, "timeout": TIMEOUT, "trials_wanted": args.trials}
    expected = {model: trial(args.processes, Harm("none", model=model))["losses"] for model in MODELS}
    assert {*map(len, expected.values())} == {STEPS}
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.at_once) as pool:
        for row in pool.map(partial(trial, args.processes), random_harms(args.trials, args.processes)):
            row["same_losses"] = row.pop("losses") == expected[row["model"]]
            rows.append(row)
            print(row, flush=True)
            yield {**about, **summary(rows)}


PARTS = {"faults": Part("faults", measure, {"what has come of the trials": faults})}


def main() -> None:
    program = Program("faults", __doc__, PARTS)
    program.add("--trials", type=int, default=24)
    program.add("--processes", type=int, default=2)
    program.add("--at-once", type=int, default=2, help="trials that run side by side")
    program.run()


if __name__ == "__main__":
    main()

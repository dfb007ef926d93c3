"""All tests and benchmarks that need a GPU, on a machine with one large GPU, within a time limit.

First the tests marked `cuda`, and then the benchmarks at sizes for one GPU. Each is a slice: a process with a time
limit of its own, which writes its result and a log to `results/gpu/`. A slice that has passed is not run again, so the
run can be stopped and started again at any time. A slice that fails or hangs does not keep the others from running.

    make gpu                                    # with the interpreter that is there: PYTHON=..., ARGS='--limit 500'
    python -m benchmarks.gpu --list             # the slices and their outcomes
    python -m benchmarks.gpu --only tests speed
    python -m benchmarks.gpu --dry-run          # the same commands, tiny and on the CPU, into a temporary folder

Neither an installed library nor a network is needed: torchgpipe 0.0.7 is measured if it is in `.peers/`
(`python -m benchmarks.gpu --peers` puts it there) or can be installed, and left out otherwise. The GPU and the CPU are
two devices; a benchmark of several devices has them in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.peers import CHECKOUT, Peer, install
from benchmarks.program import Budget
from benchmarks.records import MIB, PASSES, RESULTS, environment, table, table_of, write

GPU = "cuda:0"
FOLDER = RESULTS / "gpu"

#: Seconds for all slices. One that would have to end before half of its own limit is not started.
LIMIT = 1500.0

#: The share of its limit after which a slice starts nothing further, so that it ends by itself.
SOFT = 0.7

#: Workspaces of 128 KiB for each thread. The libraries' default of 32 MiB would outweigh the tensors of small models.
SMALL_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}


class Slice(NamedTuple):
    """A part of the run.

    Attributes:
        name: of the slice, and of its files
        program: what is run, one of the benchmarks with its part
        arguments: of the program, on a GPU
        tiny: the same on a CPU, for the dry run
        limit: seconds after which the slice is killed
        shown: its key figures, of its result
        peers: whether it takes peers, the original among them
        environment: variables that it is given beside the usual ones
        needs: packages that it cannot do without
    """

    name: str
    program: str
    arguments: str
    tiny: str
    limit: float
    shown: Callable[[dict[str, Any]], str]
    peers: bool = True
    environment: Mapping[str, str] = MappingProxyType({})
    needs: tuple[str, ...] = ()


# ---- The figures that stand for a result.


def _tests(result: dict[str, Any]) -> str:
    cut = "" if result["through"] else ", and not through"
    return ", ".join(f"{count} {name}" for name, count in result["counts"].items()) + cut


def _overhead(result: dict[str, Any]) -> str:
    told = []
    for row in result["modes"]:
        if row["mode"] == "except_last":
            peers = [peer for peer in ("ours", "original", "plain") if peer in row["forward"]]
            times = [f"{peer} {sum(row[part][peer]['median'] for part in PASSES):.0f}" for peer in peers]
            told.append(f"{row['threads']}: {', '.join(times)} us")
    return "a cell, " + "; ".join(told)


def _memory(result: dict[str, Any]) -> str:
    if "ratio" not in result["rows"][0]:
        return f"{len(result['rows'])} peaks"
    modes = dict.fromkeys(row["mode"] for row in result["rows"])
    by_mode = {mode: [row["ratio"] for row in result["rows"] if row["mode"] == mode] for mode in modes}
    return "ours/original, " + "; ".join(
        f"{mode}: {min(of_mode):.2f} - {max(of_mode):.2f}" for mode, of_mode in by_mode.items()
    )


def _timeline(result: dict[str, Any]) -> str:
    from benchmarks.host_timeline import recording_share

    added = max(map(recording_share, result["rows"]))
    return f"recording adds at most {added:.1%} of runs of a millisecond"


def _ablation(result: dict[str, Any]) -> str:
    ways = [row for row in result["rows"] if "dependency" in row]
    return "over none, " + "; ".join(f"{row['experiment']}: {row['over none']['median']:.2f}" for row in ways[1:])


def _speed(result: dict[str, Any]) -> str:
    told = []
    for row in result["rows"]:
        ours = row.get("ours", {})
        if (row["experiment"], row["mode"]) == ("pipeline-1", "except_last") and "throughput" in ours:
            ratios = {"plain": "speed-up", "original": "over original"}
            speeds = [f"{ours[key]['median']:.2f} of {peer}" for peer, key in ratios.items() if key in ours]
            told.append(f"{row['model']}: {', '.join(speeds)} (ideal {row['ideal']:.2f})")
    return "; ".join(told)


def _step(result: dict[str, Any]) -> str:
    told = []
    for row in result["parts"]["speed"]["rows"]:
        names = [name for name in row["speed-up"] if name.startswith(("1F1B", "whole"))]
        speeds = [f"{name} {row['speed-up'][name]['median']:.2f}" for name in names]
        told.append(f"{row['model']} in {row['m']}: {', '.join(speeds)}")
    return "over micro-batches, " + "; ".join(told)


def _host(result: dict[str, Any]) -> str:
    told = []
    for threads in ("inline", "workers"):
        rows = result["parts"]["host"]["rows"]
        ratios = [row["step/call"]["median"] for row in rows if row["threads"] == threads]
        told.append(f"{threads} {min(ratios):.2f} - {max(ratios):.2f}")
    return "host time of a step over forward and backward, " + ", ".join(told)


def _capacity(result: dict[str, Any]) -> str:
    best: dict[str, float] = {}
    for row in result["largest"]:
        if row["fits"]:
            best[f"{row['model']} {row['experiment']} {row['peer']}"] = row["parameters"] / 1e6
    return "millions of parameters, " + "; ".join(f"{name}: {count:.3g}" for name, count in best.items())


def _growth(result: dict[str, Any]) -> str:
    rows = [row for row in result["growth"] if row["mode"] == "always" and row["axis"] == "m"]
    last = max(rows, key=lambda row: row["m"])
    peers = [peer for peer in ("ours", "original", "plain") if "activations" in last.get(peer, {})]
    sizes = [f"{peer} {max(last[peer]['activations']) / MIB:.0f}" for peer in peers]
    return f"activations in {last['m']} micro-batches, all checkpointed, {', '.join(sizes)} MiB"


ON = f"--device {GPU}"
AT = f"--size gpu --devices {GPU}"
BOTH = f"--size gpu --devices {GPU} cpu {GPU} --balance 3 1 4 --turns 5"
MODELS, AMOEBANET = "--models resnet101 unet gpt gpt-tiny mlp-tiny", "--models amoebanetd"
TESTS = " ".join(f"tests/{name}test_cuda.py" for name in ("", "front/", "balancing/planning/"))
SMALL, UNET = "--models mlp --chunks 2 --shrink 64", "--models unet"
CAPACITY, GROWTH, LARGEST = "memory --only capacity", "--questions growth", "--questions largest --partitions 1"
# A launch takes the host so long that fewer cells tell as much.
# 1F1B wants each device once.
HOST = "--shape 2 32 --steps 1"
BRIEF = "--shape 4 16 --steps 1 --repeat 1"
FEW, CPU = "--turns 1 --steps 1", "--devices cpu --partitions 1"
SLICES = (
    Slice("tests", "campaigns.cuda_tests", "", f"{TESTS} tests/timeline/test_recorder_cuda.py", 480, _tests, False),
    Slice("overhead", "host_time --only cells", f"{ON} --turns 3 {BRIEF}", f"{FEW} --repeat 1", 200, _overhead),
    Slice("memory", "memory --only peaks", f"{ON} --scale 64", "--steps 1 --models mlp", 200, _memory)._replace(
        environment=SMALL_WORKSPACES
    ),
    Slice("timeline", "host_time --only timeline", f"{ON} --turns 3", FEW, 120, _timeline, False),
    # The example that its model is from needs these packages.
    Slice("ablation", "mechanisms", BOTH, f"{FEW} --devices cpu --balance 2 2 2 2", 150, _ablation, False)._replace(
        needs=("matplotlib", "tqdm")
    ),
    Slice("speed", "training --only speed", f"{AT} {MODELS}", f"{FEW} {CPU} --models mlp-tiny", 560, _speed),
    Slice("step", "training --only step", f"{ON} --turns 3 --steps 5", f"{FEW} {SMALL}", 200, _step, False),
    Slice("host", "host_time --only step", f"{ON} --turns 3 {HOST}", f"{FEW} --shape 2 2", 120, _host, False),
    Slice("growth", CAPACITY, f"{AT} {GROWTH} --partitions 1 4", f"{CPU} {GROWTH} --chunks 2", 200, _growth),
    Slice("capacity", CAPACITY, f"{AT} {LARGEST} --limit 22.4", f"{CPU} {LARGEST} --limit 4.5 {UNET}", 400, _capacity),
    Slice("amoebanet", "training --only speed", f"{AT} {AMOEBANET}", f"{FEW} {CPU} {AMOEBANET}", 250, _speed),
)


# ---- Running them.


def command(slice_: Slice, path: Path, limit: float, dry: bool, original: bool) -> list[str]:
    options = f"{slice_.program} {slice_.tiny if dry else slice_.arguments}".split()
    line = [sys.executable, "-m", f"benchmarks.{options[0]}", *options[1:]]
    if slice_.peers:
        line += ["--peers", "plain", "ours", *(["original"] if original else [])]
    return [*line, "--seconds", f"{SOFT * limit:.0f}", "--json", str(path)]


def run(
    slice_: Slice, folder: Path, limit: float, *, dry: bool, original: bool, about: dict[str, Any]
) -> dict[str, Any]:
    """Run a slice; write and return its outcome."""
    path = folder / f"{slice_.name}.json"
    path.unlink(missing_ok=True)
    missing = [name for name in slice_.needs if find_spec(name) is None]
    clock = Budget()
    if missing:
        outcome = f"failed, for it needs {' and '.join(missing)}"
    else:
        outcome = watch(
            command(slice_, path, limit, dry, original), folder / f"{slice_.name}.log", limit, slice_.environment
        )
    result = json.loads(path.read_text()) if path.is_file() else None
    done = {
        "slice": slice_.name,
        "outcome": outcome if result is not None or outcome != "passed" else "failed, for there is no result",
        "seconds": round(clock.passed(), 1),
        "dry run": dry,
        "about": about,
        "variables": dict(slice_.environment),
        "result": result,
    }
    write(path, done)
    return done


def watch(line: list[str], log: Path, limit: float, environment: Mapping[str, str]) -> str:
    """Run a command for so many seconds at most, with its output in a file; return how it ended.

    The processes of its session have ended then, too.
    """
    paths = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    variables = {**os.environ, **environment, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "5"}
    with log.open("w") as file:
        process = subprocess.Popen(
            line,
            cwd=CHECKOUT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be killed with all that it has started
        )
        try:
            code = process.wait(limit)
            return "passed" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            return f"killed after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # Usually all have ended.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the outcome of a slice; None if it has not been run, or was cut off."""
    path = folder / f"{name}.json"
    done: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return done if "outcome" in done else None


def figures(slice_: Slice, done: dict[str, Any]) -> str:
    """Return the key figures of a slice, as far as there are any."""
    try:
        return slice_.shown(done["result"]) if done.get("result") else ""
    except (KeyError, IndexError, ValueError) as error:  # A result that was cut off lacks some figures.
        return f"no figures: {error!r}"


def gpu_table(folder: Path = FOLDER) -> str:
    """Return a table of all slices: outcome, seconds and key figures."""
    rows = []
    for slice_ in SLICES:
        done = read(folder, slice_.name)
        if done is None:
            rows.append([slice_.name, "not measured yet", "", "", ""])
        else:
            about = done["about"]
            on = f"{', '.join(about['gpus']) or 'CPU'}, PyTorch {about['torch']}"
            rows.append([slice_.name, done["outcome"], f"{done['seconds']:.0f}", on, figures(slice_, done)])
    return table(rows, ["slice", "outcome", "seconds", "on", "key figures"])


def gpu_speed(folder: Path = FOLDER) -> str:
    """Return a table of the speed of each model on one GPU: over the plain model, and over the original.

    Raises:
        FileNotFoundError: the slice has not been run.
    """
    done = read(folder, "speed")
    if done is None:
        raise FileNotFoundError(f"speed.json is not in {folder}")
    rows = done["result"]["rows"]
    split = {row["model"]: row["plain"]["speed-up"] for row in rows if row["experiment"] == "micro-batches"}

    def median(figures: dict[str, float] | None) -> str:
        return "-" if figures is None else f"{figures['median']:.2f}"

    columns = {
        **{"model": "model", "checkpoint": "mode", "micro-batches": "m", "recomputation allows": "ideal:.2f"},
        "over the plain model": lambda row: median(row["ours"]["speed-up"]),
        "the plain model in micro-batches": lambda row: median(split[row["model"]]),
        "over torchgpipe 0.0.7": lambda row: median(row["ours"].get("over original")),
    }
    return table_of([row for row in rows if row["experiment"] == "pipeline-1" and row["mode"] != "always"], columns)


# ---- What this machine has.


def versions() -> dict[str, Any]:
    """Return the environment of the measurements."""
    import numpy

    about = {**environment(), "numpy": numpy.__version__}
    if torch.cuda.is_available():
        about["memory of the GPU"] = torch.cuda.get_device_properties(GPU).total_memory
    return about


def has_original(dry: bool) -> bool:
    """Return whether torchgpipe 0.0.7 is there and trains on these devices."""
    if dry:
        return False
    # Without a network, pip would go on trying.
    os.environ.setdefault("PIP_RETRIES", "0")
    os.environ.setdefault("PIP_DEFAULT_TIMEOUT", "10")
    try:
        install("original")
        with Peer("original", "tiny_steps.py") as peer:
            for devices in ([GPU, GPU], [GPU, "cpu"]):
                shape = {"kind": "cells", "m": 2, "mode": "always", "balance": [1, 1], "steps": 1}
                peer.ask({**shape, "devices": devices})
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"torchgpipe 0.0.7 is left out, ours and the plain model are measured: {error}")
        return False
    return True


def main() -> int:
    names = [slice_.name for slice_ in SLICES]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help="these slices")
    parser.add_argument("--again", action="store_true", help="also slices that have passed")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all slices together")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of the results")
    parser.add_argument("--list", action="store_true", help="only list the slices")
    parser.add_argument("--peers", action="store_true", help="only install torchgpipe 0.0.7 into .peers/")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, into a temporary folder")
    args = parser.parse_args()

    if args.peers:
        install("original")
        return 0
    if args.list:
        print(gpu_table(args.out))
        return 0
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with tempfile.TemporaryDirectory() as folder:
            return run_all(args, Path(folder))
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here; --dry-run takes the CPU, to see whether everything runs")
    return run_all(args, args.out.resolve())


def run_all(args: argparse.Namespace, folder: Path) -> int:
    """Run the slices that are wanted and have not passed; return whether one has not passed, as an exit code."""
    budget = Budget(args.limit)
    about = versions()
    print(f"PyTorch {torch.__version__}, Python {about['python']}, {', '.join(about['gpus']) or about['cpu']}")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [slice_ for slice_ in SLICES if slice_.name in args.only]
    original = any(slice_.peers for slice_ in wanted) and has_original(args.dry_run)

    def attempt(slice_: Slice) -> str:
        before = read(folder, slice_.name)
        limit = min(slice_.limit, budget.left())
        if before is not None and before["outcome"] == "passed" and not args.again:
            outcome, key = "passed", "before"
        elif limit < slice_.limit / 2:
            outcome, key = "not started", f"{budget.left():.0f} s are left, and it may take {slice_.limit:.0f}"
        else:
            print(f"{slice_.name} ...", flush=True)
            done = run(slice_, folder, limit, dry=args.dry_run, original=original, about=about)
            outcome, key = done["outcome"], figures(slice_, done)
            if outcome != "passed":
                print(tail(folder / f"{slice_.name}.log"))
        print(f"{slice_.name}: {outcome}, {key}", flush=True)
        return outcome

    # Slices that failed before come after slices that were not tried.
    wanted.sort(key=lambda slice_: read(folder, slice_.name) is not None)
    with ThreadPoolExecutor(2) as pool:  # Nothing is measured in a dry run.
        outcomes = list((pool.map if args.dry_run else map)(attempt, wanted))
    print("\n" + gpu_table(folder))
    print("\nwritten to", "a temporary folder" if args.dry_run else folder)
    return 0 if all(outcome == "passed" for outcome in outcomes) else 1


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())

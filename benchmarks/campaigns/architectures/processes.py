"""Runs architectures over several processes, and compares each with the same partitions in one process, bit by bit.

    python -m benchmarks.campaigns.architectures.processes --processes 2 decoder t5     # all by default

A group of processes is kept for many architectures, and started again after an error. Each process runs the
architecture in one process, too, and compares what it has: its own gradients and buffers, and the loss.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.campaigns.architectures import CATALOGUE
from benchmarks.campaigns.architectures.catalogue import Architecture
from benchmarks.campaigns.architectures.precision import in_float64
from benchmarks.campaigns.architectures.reference import Run
from benchmarks.campaigns.architectures.trial import Way, draw, pipeline, prepare, run_pipelined
from torchgpipe.processes.stand_in import StandIn

__all__ = ["differences", "try_in_this_process"]

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["benchmarks.campaigns.architectures.trial", "transformers"])


def differences(ours: Run, reference: Run) -> list[str]:
    """Return what of a run in this process is not equal, bit by bit, to a run of all columns."""
    given = {"the loss": ours.loss, **ours.gradients, **ours.buffers}
    expected = {"the loss": reference.loss, **reference.gradients, **reference.buffers}
    return [name for name, tensor in given.items() if not _equal(tensor, expected[name])]


def _equal(ours: Tensor | None, expected: Tensor | None) -> bool:
    if ours is None or expected is None:
        return ours is expected
    alike = ours.shape == expected.shape and ours.dtype == expected.dtype
    return alike and torch.equal(ours.nan_to_num(nan=1e300), expected.nan_to_num(nan=1e300))


def _run(architecture: Architecture, way: Way, options: dict[str, Any]) -> Run:
    """Pipeline an architecture and run a mini-batch; return what this process has of it."""
    if "mesh" in options:
        way = Way(way.step, ("cpu",), way.schedule, way.balance, way.chunks, way.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = draw(architecture, architecture.rows, way.chunks, way.seed)
        model = pipeline(architecture, architecture.build(), way, **{"verify": False, **options})
        torch.manual_seed(way.seed)
        run = run_pipelined(architecture, model, way, batch)
    stand_ins = {name for name, parameter in model.named_parameters() if isinstance(parameter, StandIn)}
    run.gradients = {name: grad for name, grad in run.gradients.items() if name not in stand_ins}
    run.buffers = {name: buffer for name, buffer in run.buffers.items() if not isinstance(buffer, StandIn)}
    if isinstance(run.loss, StandIn):
        run.loss = torch.tensor(torch.nan)
    return run


def try_in_this_process(name: str, way: Way, options: dict[str, Any]) -> tuple[str, str]:
    """Compare an architecture over processes with one process; return the verdict, and a traceback."""
    architecture, mesh = CATALOGUE[name], dist.init_device_mesh("cpu", (dist.get_world_size(),))
    results: list[Any] = []
    with in_float64():
        for more in ({}, {"mesh": mesh}):
            torch.manual_seed(way.seed)
            try:
                results.append(_run(architecture, way, {**options, "partitions": len(way.devices), **more}))
            except Exception as error:
                results.append((f"{type(error).__name__}: {error}", traceback.format_exc()))
    reference, ours = results
    if isinstance(reference, tuple):
        alike = isinstance(ours, tuple) and ours[0] == reference[0]
        return f"{'refused alike' if alike else 'differs: one process says'} {reference[0][:300]}", ""
    if isinstance(ours, tuple):
        return f"error: {ours[0][:2000]}", ours[1]
    if ours.loss.isnan():
        ours.loss = reference.loss  # Another process has it.
    faults = differences(ours, reference)
    return (f"differs: {faults[:4]} ({len(faults)} of {len(ours.gradients)})" if faults else "equal"), ""


def _serve(rank: int, n: int, folder: str, seconds: float, connection: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    prepare()
    store = dist.FileStore(str(Path(folder) / "store"), n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=seconds))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send(try_in_this_process(*task))


class Group:
    """Processes that try one architecture after the other.

    Args:
        n: how many
        seconds: the time limit for each architecture
    """

    def __init__(self, n: int, seconds: float) -> None:
        self._n, self._seconds = n, seconds
        self._folder: TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def _start(self) -> None:
        self._folder = TemporaryDirectory()
        pipes = [_SERVER.Pipe() for _ in range(self._n)]
        for rank, (_, there) in enumerate(pipes):
            args = rank, self._n, self._folder.name, self._seconds / 2, there
            self._processes.append(_SERVER.Process(target=_serve, args=args, daemon=True))
            self._processes[-1].start()
            there.close()
        self._connections = [here for here, _ in pipes]

    def stop(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []

    def ask(self, *task: Any) -> list[tuple[str, str]]:
        """Return the verdict of each process."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send(task)
        end = monotonic() + self._seconds
        replies = []
        for connection in self._connections:
            try:
                arrived = connection.poll(max(0.0, end - monotonic()))
                replies.append(connection.recv() if arrived else ("hangs", ""))
            except EOFError:
                replies.append(("error: the process has ended", ""))
        if any([verdict == "hangs" or "has ended" in verdict for verdict, _ in replies]):
            self.stop()
        return replies


def _row(name: str, way: str, replies: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the verdict of all processes: equal if all say so, or the first error that has no other as its cause."""
    order = ("hangs", "differs", "error", "refused", "equal")

    def rank(reply: tuple[str, str]) -> Any:
        kind = next(k for k, word in enumerate(order) if reply[0].startswith(word))
        return kind, "in vain" in reply[0] or "could not prepare" in reply[0]

    verdict, trace = min(replies, key=rank)
    return {"name": name, "way": way, "verdict": verdict, "trace": trace}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="all by default; a kind names all of its kind")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--columns", type=int, default=1, help="partitions in each process")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--options", type=json.loads, default={}, help="of pipelined, as JSON")
    parser.add_argument("--ways", default="step,backward")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each architecture")
    parser.add_argument("--out", type=Path, help="a file of lines of JSON, added to")
    args = parser.parse_args()
    wanted = {*args.names}
    names = [name for name, one in CATALOGUE.items() if not wanted or {name, one.kind} & wanted]
    group, kinds = Group(args.processes, args.limit), Counter[str]()
    devices = tuple([f"cpu:{j}" for j in range(args.processes * args.columns)])
    for name in names:
        for word in args.ways.split(","):
            begin = monotonic()
            way = Way(word == "step", devices, args.schedule)
            row = _row(name, word, group.ask(name, way, args.options))
            kinds[row["verdict"].partition(":")[0].partition(" ")[0]] += 1
            print(f"{name} ({word}, {monotonic() - begin:.1f} s): {row['verdict'][:400]}", flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    group.stop()
    print(dict(kinds))


if __name__ == "__main__":
    main()

"""Checkpoints of a model and AdamW in one process: ours, beside the same tensors by torch.distributed.checkpoint (DCP).

Each way saves; saves asynchronously, where the caller is held until the call returns, and the rest is in the
background; and loads. DCP loads into the tensors that are there. All files are synchronised with the disk. Memory is
what no file backs, above what was there before.

    python -m benchmarks.checkpoints    # five minutes; Linux
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import perf_counter
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.memory_steps import resident
from benchmarks.peers import Answer, Request, serve
from benchmarks.program import Part, Program, ask_in_turn
from benchmarks.records import MIB, Row, spread, table_of
from torchgpipe.devices.memory import return_freed
from torchgpipe.distributed import Checkpoints
from torchgpipe.distributed.training_state import collect_optimizer

__all__ = ["CASES", "PARTS", "Others"]

#: The number of tensors, and of values in each.
CASES = {"50 M parameters, 500 tensors": (500, 100_000), "2000 small tensors": (2000, 100)}
ACTIONS = ("save", "held", "rest", "load")


class Others:
    """What is needed of `Checkpoints`, by DCP: each tensor is an entry, and so are all settings of the optimizer."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.flat = {"flatten_state_dict": False, "flatten_sharded_tensors": False}

    def content(self) -> dict[str, Any]:
        saved = collect_optimizer(self.model, self.optimizer)
        named = {f"optimizer.{name}.{key}": value for name in saved for key, value in saved[name]["state"].items()}
        return self.model.state_dict() | named | {"settings": {name: saved[name]["settings"] for name in saved}}

    def save(self, step: int, *, asynchronous: bool = False) -> None:
        how = {"planner": dcp.DefaultSavePlanner(**self.flat), "no_dist": True}
        save = dcp.async_save if asynchronous else dcp.save
        self.saving = save(self.content(), checkpoint_id=self.folder / str(step), **how)

    def wait(self) -> None:
        self.saving.result()

    def load(self, step: int) -> None:
        how = {"planner": dcp.DefaultLoadPlanner(**self.flat), "no_dist": True}
        dcp.load(self.content(), checkpoint_id=self.folder / str(step), **how)


def answer(peer: str, request: Request) -> Answer:
    """Return the bytes of a checkpoint, and the seconds and MiB of each action of a way."""
    n, size = request["case"]
    model = nn.ParameterDict({f"weight-{k}": nn.Parameter(torch.randn(size)) for k in range(n)})
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cat([*model.values()]).sum().backward()
    optimizer.step()
    before = [weight.detach().clone() for weight in model.parameters()]
    with TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):  # DCP warns of a single process.
        way = (Checkpoints if peer == "ours" else Others)(Path(folder), model, optimizer)
        result: Answer = {"save": measured(partial(way.save, 1))}
        result["bytes"] = sum([path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()])
        result["held"] = measured(partial(way.save, 2, asynchronous=True))
        result["rest"] = measured(way.wait)
        for weight in model.parameters():
            weight.data.zero_()
        result["load"] = measured(partial(way.load, 1))
        assert all([torch.equal(*both) for both in zip(model.parameters(), before)]), "something else was loaded"
    return result


def measured(action: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that a call takes, and the most memory that it takes meanwhile, in MiB."""
    return_freed()
    peaks, done = [resident("RssAnon")], Event()

    def watch() -> None:
        while not done.wait(0.001):
            peaks.append(resident("RssAnon"))

    (watching := Thread(target=watch)).start()
    start = perf_counter()
    action()
    seconds = perf_counter() - start
    done.set()
    watching.join()
    return {"seconds": seconds, "MiB": (max(peaks) - peaks[0]) / MIB}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each case and way."""
    cases = [{way: (way, {"case": case}) for way in ("ours", "DCP")} for case in CASES.values()]
    rows: list[Row] = []
    for name, ways in zip(CASES, ask_in_turn(cases, "checkpoints.py", args.turns, lambda: False, fresh=True)):
        for way, turns in ways.items():
            rows.append({"case": name, "way": way, "files, MiB": turns[0]["bytes"] / MIB})
            for what in ACTIONS:
                rows[-1] |= {f"{what}, {of}": spread([turn[what][of] for turn in turns]) for of in turns[0][what]}
    return {"rows": rows}


def checkpoints(result: dict[str, Any]) -> str:
    columns = {"tensors": "case", "way": "way", "files, MiB": "files, MiB:.1f"}
    columns |= {f"{what}, s": f"{what}, seconds:2" for what in ACTIONS}
    return table_of(result["rows"], columns | {f"{what}, MiB": f"{what}, MiB:0" for what in ACTIONS if what != "rest"})


PARTS = {"checkpoints": Part("checkpoints", measure, {"medians of turns (lowest-highest)": checkpoints})}


def main() -> None:
    program = Program("checkpoints", __doc__, PARTS)
    program.add("--turns", type=int, default=5)
    program.run()


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        torch.set_num_threads(1)
        serve(answer)
    else:
        main()

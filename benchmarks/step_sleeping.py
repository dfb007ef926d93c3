"""Steps of layers that sleep, so that cores do not matter: the simulated time of a schedule over the measured time.

The layers have one path to the input and one to the weight. Each path has an operation of PyTorch with a hook that
sleeps, so a backward that is split into I and W sleeps in two parts:

    input ──► * 1 ──┐            F sleeps in forward
                    + ──► output   I sleeps in a hook on the upper path
    weight ─► * 1 ──┘            W sleeps in a hook on the lower path; B in both

A function of Python could not be split. The simulation gets the seconds that the layers are told to sleep; waking up
late counts against the pipeline, and so does all time of the host.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.program import Progress
from benchmarks.records import spread
from torchgpipe import GPipe
from torchgpipe.schedule import NAMES, Simulation, program, simulate
from torchgpipe.schedule.programs import usual_places

__all__ = ["Sleeping", "beside", "overlap", "sleeping"]

#: The least of simulated / measured, by the number of devices.
AIMS = {8: 0.9}

Row = dict[str, Any]


class Sleeping(nn.Module):
    """A layer that sleeps as long in F as in I and in W, and twice as long in B.

    Args:
        seconds: of F
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, input: Tensor) -> Tensor:
        sleep(self.seconds)
        upper, lower = input * 1, self.weight * 1
        for path in (upper, lower):
            if path.requires_grad:  # Not so when a sample runs without a graph.
                path.register_hook(self._sleep)
        return upper + lower

    def _sleep(self, _grad: Tensor) -> None:
        sleep(self.seconds)


def sleeping(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every schedule on each number of devices. A device sleeps as long whatever the schedule."""
    rows = []
    progress = Progress(len(args.partitions) * len(NAMES))
    for n in args.partitions:
        for schedule in NAMES:
            progress(f"sleeping layers, {n} devices, {schedule}")
            rows.append(measured(schedule, n, args.micro_batches, args.sleep, args.turns))
    return {"seconds of F, I and W on a device": args.sleep, "rows": rows, "aims": overlap(rows, "schedule", AIMS)}


def overlap(rows: Sequence[Row], what: str, bounds: Mapping[int, float]) -> list[Row]:
    """Return the aims: for each number of devices, the lowest ratio of simulated to measured times.

    Args:
        rows: for each number of devices ``n`` and each ``what``, the ratio
        what: what there are rows of, in words
        bounds: for numbers of devices, the least ratio; 0.95 for others
    """
    aims = []
    for n in dict.fromkeys(row["n"] for row in rows):
        reached = min(row["simulated/measured"]["median"] for row in rows if row["n"] == n)
        bound = bounds.get(n, 0.95)
        aim = f"simulated / measured, {n} devices, lowest {what}"
        aims.append({"aim": aim, "at least": bound, "reached": reached, "met": reached >= bound})
    return aims


def measured(schedule: Any, n: int, m: int, seconds: float, turns: int) -> Row:
    """Return the row of a schedule."""
    at = usual_places(schedule, n)
    each = seconds * n / len(at)
    simulated = simulate(program(schedule, m, at), {"F": each, "B": 2 * each, "I": each, "W": each})
    model = GPipe(
        nn.Sequential(*[Sleeping(each) for _ in at]),
        [1] * len(at),
        devices=[f"cpu:{k}" for k in at],
        chunks=m,
        checkpoint="never",
        schedule=schedule,
        loss_fn=lambda output, _: output.mean(),
    )
    # With a gradient of the input, I takes time in the first partition as well.
    x = torch.zeros(m, 1, requires_grad=True)
    return {"schedule": schedule, "n": n, "m": m, **beside(simulated, lambda: model.step(x), turns)}


def beside(simulated: Simulation, step: Callable[[], object], turns: int) -> Row:
    """Return the seconds and the bubbles of a simulated step, and of steps that run; another one runs before them."""
    step()
    found = []
    for _ in range(turns):
        start = perf_counter()
        step()
        found.append(perf_counter() - start)
    return {
        "simulated": simulated.seconds,
        "bubble": simulated.bubble,
        "measured": spread(found),
        "measured bubble": 1 - statistics.fmean(simulated.busy) / statistics.median(found),
        "simulated/measured": spread(simulated.seconds / one for one in found),
    }

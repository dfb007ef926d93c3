"""Windows of micro-batches that are given, as where gradients are accumulated: simulated, and with layers that sleep.

    order     what the order of unequal micro-batches gains in simulated time
    unequal   the same, measured with layers that sleep as long as a micro-batch is long, beside the simulation
    given     micro-batches of one row that are given, beside the same rows as a mini-batch that is split, and beside
              one device at a time, as with device_map; layers that sleep
    host      the CPU time of the host for a micro-batch that is given, beside one that is split; tiny layers

**Lengths** are drawn from log-normal distributions, fitted to figures that people have published of their data:

    recipes        instructions: deciles of 192, 274 (the median) and 467 tokens, at most 3,285
                   https://huggingface.co/datasets/AdamCodd/recipe-nlg-alpaca
    conversations  instructions with a long tail: a median of 357 tokens, a mean of 688, cut at 8,192
                   https://huggingface.co/datasets/Efe2898/last/blob/main/reports/token_stats.csv
    web            documents: a mean of 1,004 tokens, a standard deviation of 1,424, at most 24,574
                   https://huggingface.co/datasets/BEE-spoke-data/TxT360-5M-sample-en

A micro-batch of one row takes time in proportion to its length, backward twice that of forward. Attention, whose time
grows with the square of the length, makes times more uneven than lengths. The memory of activations is taken to be in
proportion to the length, too.

    python -m benchmarks.windows            # order: half a minute, and the same figures on every machine
    python -m benchmarks.windows --all      # some minutes, in which the cores are hardly busy
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.program import Part, Program, Progress
from benchmarks.records import Row, aim, named_way, spread, table_of
from benchmarks.schedules import Sleeping, cpus, simulated_sleep
from benchmarks.tiny_steps import ROWS, WIDTH, Chain, mean, tiny_layers
from torchgpipe import GPipe, MicroBatches, pipelined
from torchgpipe.model.given import order_of
from torchgpipe.schedule import COSTS, ScheduleName, Simulation, program, simulate

__all__ = ["PARTS"]

SCHEDULES: tuple[ScheduleName, ...] = ("GPipe", "1F1B", "ZeroBubble")
SIZES = (4, 8, 16, 32, 64)


class Lengths(NamedTuple):
    """A log-normal distribution of lengths.

    Attributes:
        median: the median
        sigma: the standard deviation of the logarithms
        most: where lengths are cut
    """

    median: float
    sigma: float
    most: int

    def drawn(self, m: int, seed: int) -> list[int]:
        """Return the lengths of a window of ``m`` micro-batches."""
        rng = random.Random(f"{self} {m} {seed}")
        return [max(1, min(self.most, round(rng.lognormvariate(math.log(self.median), self.sigma)))) for _ in range(m)]


#: Of a normal distribution, 80% lie within 2 x 1.2816 standard deviations; exp(sigma^2 / 2) is a mean over its median.
LENGTHS = {
    "recipes": Lengths(274, math.log(467 / 192) / (2 * 1.2816), 3285),
    "conversations": Lengths(357, math.sqrt(2 * math.log(688 / 357)), 8192),
    "web": Lengths(1004 / math.sqrt(1 + (1424 / 1004) ** 2), math.sqrt(math.log(1 + (1424 / 1004) ** 2)), 24574),
}

# ---- The order, simulated.


def alternating(lengths: Sequence[int]) -> list[int]:
    """Return the longest, the shortest, the second longest, and so on."""
    ordered = sorted(lengths)
    return [ordered.pop(-1 if k % 2 == 0 else 0) for k in range(len(ordered))]


def longest_in_the_middle(lengths: Sequence[int]) -> list[int]:
    """Return the lengths in the order in which a step runs `MicroBatches` with ``order='longest'``."""
    window = MicroBatches([torch.empty(length, device="meta") for length in lengths], order="longest")
    return [lengths[i] for i in order_of(window) or ()]


ORDERS: dict[str, Callable[[Sequence[int]], list[int]]] = {
    "longest first": lambda lengths: sorted(lengths, reverse=True),
    "shortest first": sorted,
    "alternating": alternating,
    "longest in the middle": longest_in_the_middle,
}


def simulated(schedule: ScheduleName, n: int, lengths: Sequence[int], unit: float = 1.0) -> Simulation:
    """Return a simulated step, given the seconds of F for a length of 1."""
    return simulate(
        program(schedule, len(lengths), range(n)),
        lambda action: unit * COSTS[action.kind] * lengths[action.i],
        lambda action: lengths[action.i],
    )


def order(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate windows of all sizes in each order."""
    rows = []
    progress = Progress(len(LENGTHS) * len(args.partitions))
    for name, lengths in LENGTHS.items():
        for n in args.partitions:
            progress(f"lengths of {name}, {n} devices")
            for schedule in SCHEDULES:
                for m in args.micro_batches:
                    rows.append({"lengths": name, "schedule": schedule, "n": n, "m": m})
                    windows = [lengths.drawn(m, seed) for seed in range(args.windows)]
                    usual = best = [simulated(schedule, n, window) for window in windows]
                    for title, ordered in ORDERS.items():
                        best = [simulated(schedule, n, ordered(window)) for window in windows]
                        gains = [a.seconds / b.seconds - 1 for a, b in zip(usual, best)]
                        rows[-1][title] = statistics.median(gains)
                    rows[-1]["busy as they come"] = statistics.median([1 - step.bubble for step in usual])
                    rows[-1]["busy"] = statistics.median([1 - step.bubble for step in best])
                    held = [max(b.peaks) / max(a.peaks) for a, b in zip(usual, best)]
                    rows[-1]["memory"] = statistics.median(held)
    aims = [
        aim(
            f"gain of the longest in the middle, median of all windows, {schedule}",
            statistics.median([row["longest in the middle"] for row in rows if row["schedule"] == schedule]),
            least=0.05,
        )
        for schedule in SCHEDULES[1:]
    ]
    return {"windows": args.windows, "rows": rows, "aims": aims}


def _medians(rows: list[Row], *keys: str) -> list[Row]:
    """Return for each value of the keys the medians of what else the rows have."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple([row[key] for key in keys]), []).append(row)
    figures = [*ORDERS, "busy as they come", "busy", "memory"]
    return [
        dict(zip(keys, group)) | {figure: statistics.median([row[figure] for row in members]) for figure in figures}
        for group, members in groups.items()
    ]


def window_order(result: dict[str, Any]) -> str:
    """Return a table of what each order gains over micro-batches as they come, medians over the sizes of windows."""
    gains = {title: f"{title}:+.0%" for title in ORDERS}
    columns = {"lengths": "lengths", "schedule": "schedule", "devices": "n", **gains}
    busy = {
        "busy as they come": "busy as they come:.0%",
        "longest in the middle, busy": "busy:.0%",
        "memory": "memory:.2f",
    }
    return table_of(_medians(result["rows"], "lengths", "schedule", "n"), {**columns, **busy})


def window_sizes(result: dict[str, Any]) -> str:
    """Return a table of what the longest in the middle gain, by the size of the window."""
    rows = _medians(result["rows"], "schedule", "m")
    sizes = sorted({row["m"] for row in rows})
    gains = {(row["schedule"], row["m"]): row["longest in the middle"] for row in rows}
    made = [
        {"schedule": schedule} | {str(m): gains[schedule, m] for m in sizes}
        for schedule in dict.fromkeys([row["schedule"] for row in rows])
    ]
    return table_of(made, {"schedule": "schedule", **{f"{m} micro-batches": f"{m}:+.0%" for m in sizes}})


# ---- Steps of layers that sleep.


class SleepingByLength(nn.Module):
    """A layer that sleeps for each column of its input as long in F as in I and in W.

    Args:
        seconds: of F, for a column
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, input: Tensor) -> Tensor:
        seconds = self.seconds * input.shape[1]
        sleep(seconds)
        upper, lower = input * 1, self.weight * 1
        for path in (upper, lower):
            if path.requires_grad:
                path.register_hook(lambda _: sleep(seconds))
        return upper + lower


def timed(
    runs: dict[str, Callable[[], object]], turns: int, clock: Callable[[], float] = perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each run, which take turns; another one runs before them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in list(runs.items())[:: -1 if turn % 2 else 1]:
            start = clock()
            run()
            seconds[name] += [clock() - start] * bool(turn)
    return seconds


def unequal(args: argparse.Namespace) -> dict[str, Any]:
    """Measure windows of 16 as they come, and with the longest in the middle, on four devices."""
    rows, n, m = [], 4, 16
    progress = Progress(len(LENGTHS) * len(SCHEDULES))
    for name, lengths in LENGTHS.items():
        drawn = lengths.drawn(m, seed=0)
        unit = args.sleep * m / sum(drawn)
        xs = [torch.zeros(1, length, requires_grad=True) for length in drawn]
        for schedule in SCHEDULES:
            progress(f"layers that sleep, lengths of {name}, {schedule}")
            layers = nn.Sequential(*[SleepingByLength(unit) for _ in range(n)])
            how: dict[str, Any] = {"devices": cpus(range(n)), "schedule": schedule, "checkpoint": "never"}
            model = GPipe(layers, [1] * n, loss_fn=mean, **how)
            runs: dict[str, Callable[[], object]] = {
                "as they come": lambda model=model, xs=xs: model.step(MicroBatches(xs)),
                "longest": lambda model=model, xs=xs: model.step(MicroBatches(xs, order="longest")),
            }
            seconds = timed(runs, args.turns)
            row: Row = {"lengths": name, "schedule": schedule, "n": n, "m": m}
            for way, window in (("as they come", drawn), ("longest", longest_in_the_middle(drawn))):
                expected = simulated(schedule, n, window, unit).seconds
                row |= {f"{way}, simulated": expected, way: spread(seconds[way])}
                row[f"{way}, simulated/measured"] = expected / statistics.median(seconds[way])
            row["gain"] = spread(a / b for a, b in zip(*seconds.values()))
            rows.append(row)
    ratios = [row[f"{way}, simulated/measured"] for row in rows for way in ("as they come", "longest")]
    return {"rows": rows, "aims": [aim("simulated / measured of unequal windows, lowest", min(ratios), least=0.9)]}


def window_unequal(result: dict[str, Any]) -> str:
    """Return a table of windows as they come, and with the longest in the middle."""
    columns = {"lengths": "lengths", "schedule": "schedule"}
    for way, title in (("as they come", "as they come"), ("longest", "longest in the middle")):
        columns |= {
            f"{title}, simulated, s": f"{way}, simulated:.2f",
            "measured, s" + " " * (way == "longest"): f"{way}:2",
        }
    return table_of(result["rows"], {**columns, "gain, measured": "gain:2"})


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Measure windows of one row that are given, beside the same rows that are split."""
    rows = []
    wanted = [(front, n, m) for front in FRONTS for n in args.partitions for m in args.micro_batches]
    progress = Progress(len(wanted))
    for front, n, m in wanted:
        progress(f"layers that sleep, {front}, {n} devices, {m} micro-batches")
        x = torch.zeros(m, 1, requires_grad=True)
        blocks = [Sleeping(args.sleep) for _ in range(n)]
        how: dict[str, Any] = {"devices": cpus(range(n)), "chunks": m, "schedule": "1F1B", "loss_fn": mean}
        step = FRONTS[front](blocks, x, how).step
        seconds = timed({"split": partial(step, x), "given": partial(_step_on_rows, step, x)}, args.turns)
        ideal, naive = simulated_sleep("1F1B", m, range(n), args.sleep).seconds, 3 * args.sleep * n * m
        shares = {way: ideal / statistics.median(of_way) for way, of_way in seconds.items()}
        row = {"front": front, "n": n, "m": m, "simulated": ideal, **{way: spread(seconds[way]) for way in seconds}}
        row |= {"split, share": shares["split"], "given, share": shares["given"]}
        row |= {"split/given": spread(a / b for a, b in zip(seconds["split"], seconds["given"]))}
        rows.append(
            {**row, "naive/simulated": naive / ideal, "naive/given": naive / statistics.median(seconds["given"])}
        )
    aims = [aim("split / given, lowest median", min(row["split/given"]["median"] for row in rows), least=0.98)]
    return {"seconds of F, I and W on a device": args.sleep, "rows": rows, "aims": aims}


def _step_on_rows(step: Callable[[Any], object], x: Tensor) -> object:
    return step(MicroBatches(x.split(1)))


def _layers(blocks: list[nn.Module], _: Tensor, how: dict[str, Any]) -> Any:
    return GPipe(nn.Sequential(*blocks), [1] * len(blocks), checkpoint="never", **how)


def _any_module(blocks: list[nn.Module], x: Tensor, how: dict[str, Any]) -> Any:
    return pipelined(Chain(blocks), (x[:1],), balance=[1] * len(blocks), verify=False, **how)


FRONTS: dict[str, Callable[[list[nn.Module], Tensor, dict[str, Any]], Any]] = {
    "GPipe": _layers,
    "pipelined": _any_module,
}


def window_given(result: dict[str, Any]) -> str:
    """Return a table of windows that are given, beside mini-batches that are split, and one device at a time."""
    columns = {"front": "front", "devices": "n", "micro-batches": "m", "simulated, s": "simulated:.2f"}
    shares = {"share of it, split": "split, share:.1%", "given": "given, share:.1%", "split/given": "split/given:3"}
    naive = {"one device at a time / simulated": "naive/simulated:.2f", "/ given": "naive/given:.2f"}
    return table_of(result["rows"], {**columns, **shares, **naive})


# ---- Host time.


def host(args: argparse.Namespace) -> dict[str, Any]:
    """Measure 32 micro-batches of two rows on four devices; of a turn, the lowest CPU time of ten steps of each way."""
    torch.set_num_threads(1)
    rows, n, m = [], 4, 32
    x, grad = torch.randn(m * ROWS, WIDTH), torch.ones(m * ROWS, WIDTH)
    xs = x.split(ROWS)
    for front, threads in product(FRONTS, ("inline", "workers")):
        devices = ["cpu"] * n if threads == "inline" else cpus(range(n))
        model = FRONTS[front](list(tiny_layers(n)), x, {"devices": devices, "chunks": m, "loss_fn": mean})
        ways: dict[str, dict[str, Callable[[], object]]] = {
            "step": {"split": partial(model.step, x), "given": lambda model=model: model.step(MicroBatches(xs))},
            "call": {
                "split": lambda model=model: torch.autograd.backward(model(x), grad),
                # Joined, because PyTorch takes 2 us for each tensor that backward begins with.
                "given": lambda model=model: torch.autograd.backward(torch.cat(model(MicroBatches(xs))), grad),
            },
        }
        for way, runs in ways.items():
            turns = [timed(runs, 10, process_time) for _ in range(args.turns)]
            lowest = {name: [min(turn[name]) / m * 1e6 for turn in turns] for name in runs}
            row: Row = {"front": front, "threads": threads, "way": way}
            row |= {name: spread(values) for name, values in lowest.items()}
            rows.append({**row, "given/split": spread(b / a for a, b in zip(lowest["split"], lowest["given"]))})
    typical = statistics.median([row["given/split"]["median"] for row in rows])
    return {"rows": rows, "aims": [aim("given / split, CPU time, median of all ways", round(typical, 2), most=1.0)]}


def window_host(result: dict[str, Any]) -> str:
    """Return a table of the CPU time of a micro-batch, given and split."""
    columns = {"front": "front", "threads": "threads", "way": lambda row: named_way(row["way"])}
    return table_of(
        result["rows"], {**columns, "split, us": "split:0", "given, us": "given:0", "given/split": "given/split:2"}
    )


PARTS = {
    "host": Part("windows:host", host, {"CPU time of a micro-batch": window_host}),
    "order": Part(
        "windows:order",
        order,
        {"what an order gains, simulated": window_order, "the longest in the middle, by size": window_sizes},
    ),
    "unequal": Part("windows:unequal", unequal, {"unequal micro-batches that sleep": window_unequal}),
    "given": Part("windows:given", given, {"micro-batches that are given": window_given}),
}


def main() -> None:
    command = Program("windows", __doc__, PARTS, ("order",))
    command.add("--partitions", nargs="+", type=int, default=[2, 4, 8], help="n, the devices")
    command.add("--micro-batches", nargs="+", type=int, default=[*SIZES], help="m, of order and given")
    command.add("--windows", type=int, default=25, help="that are drawn of each kind, for order")
    command.add("--sleep", type=float, default=0.02, help="seconds that a device sleeps in F, in I and in W, mean")
    command.add("--turns", type=int, default=5)
    command.run()


if __name__ == "__main__":
    main()

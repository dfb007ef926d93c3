"""Windows of micro-batches that are given, as where gradients are accumulated: on paper, and on simulated GPUs.

    order     what the order of unequal micro-batches gains in simulated time
    unequal   the same on simulated GPUs, beside the step on paper
    given     micro-batches of one row that are given, beside the same rows as a mini-batch that is split, and beside
              one device at a time, as with device_map; simulated GPUs
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
proportion to the length, too. Simulated GPUs are those of `offload`: a partition is a block of GPT in bfloat16. On
paper, the two halves of its backward take as long as each other, which they do not.

    python -m benchmarks.windows            # order: half a minute, and the same figures on every machine
    python -m benchmarks.windows --all      # some minutes; needs a C++ compiler
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.offload import CARD, GPTBlock, inputs, kernels
from benchmarks.program import Part, Program, Progress
from benchmarks.records import Row, aim, named_way, shown, spread, table_of
from benchmarks.schedules import cpus
from benchmarks.tiny_steps import ROWS, WIDTH, Chain, mean, tiny_layers
from torchgpipe import GPipe, MicroBatches, pipelined
from torchgpipe.batch.given import order_of
from torchgpipe.devices.links import verify_links
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


def simulated(schedule: ScheduleName, n: int, lengths: Sequence[int]) -> Simulation:
    """Return a simulated step. F takes a second for a length of 1."""
    return simulate(
        program(schedule, len(lengths), range(n)),
        lambda action: COSTS[action.kind] * lengths[action.i],
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


# ---- Steps of blocks of GPT on simulated GPUs; see `offload`.


class Cluster:
    """Simulated GPUs on a clock: kernels and copies take their time, and the host what it computes.

    Args:
        n: the number of devices, each with a block
    """

    def __init__(self, n: int) -> None:
        os.environ.setdefault("LATE_DEVICES", "8")
        from tests import late

        late.load()
        self.n, self._late = n, late
        self._costs: dict[int, dict[str, float]] = {}

    @contextmanager
    def on_clock(self) -> Iterator[None]:
        torch.set_num_threads(1)
        # Before, as nothing is computed on the clock, and all links would seem broken.
        verify_links([torch.device("late", k) for k in range(self.n)], 2)
        with self._late.on_clock(self._late.Speed(**CARD)):
            yield

    def model(self, front: str, schedule: ScheduleName, chunks: int) -> Any:
        """Return a pipeline with a block on each device."""
        blocks = [GPTBlock().to(torch.bfloat16) for _ in range(self.n)]
        how = {"devices": [f"late:{k}" for k in range(self.n)], "chunks": chunks, "schedule": schedule, "loss_fn": mean}
        return FRONTS[front](blocks, inputs(1, "cpu"), how)

    def costs(self, tokens: int) -> dict[str, float]:
        """Return the time that a block takes for a row of so many tokens, by the kind of action."""
        if tokens not in self._costs:
            block, x = GPTBlock().to("late:0", torch.bfloat16), rows_of(1, tokens).to("late:0").requires_grad_()
            torch.autograd.backward(block(x).mean())
            forward, output = kernels(lambda: block(x)), block(x)
            backward = kernels(lambda: torch.autograd.backward(output, torch.empty_like(output)))
            self._costs[tokens] = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
        return self._costs[tokens]

    def simulated(self, schedule: ScheduleName, lengths: Sequence[int]) -> float:
        """Return the time of a step on paper."""
        actions = program(schedule, len(lengths), range(self.n))
        return simulate(actions, lambda action: self.costs(lengths[action.i])[action.kind]).seconds

    def timed(self, runs: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
        """Return the time of each run, which take turns; another one runs before them."""

        def seconds(run: Callable[[], object]) -> float:
            for k in range(self.n):
                torch.accelerator.synchronize(k)
            self._late.intervals()
            start = self._late.now()
            run()
            for k in range(self.n):
                torch.accelerator.synchronize(k)
            return float(max([interval.end for interval in self._late.intervals()]) - start)

        return {name: of_way[1:] for name, of_way in taken_in_turns(runs, turns + 1, seconds).items()}


def rows_of(m: int, tokens: int) -> Tensor:
    return torch.empty(m, tokens, GPTBlock.width, dtype=torch.bfloat16)


def taken_in_turns(
    runs: dict[str, Callable[[], object]], turns: int, measure: Callable[[Callable[[], object]], float]
) -> dict[str, list[float]]:
    """Return what is measured of each run, which take turns, every other turn in reverse."""
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name, run in list(runs.items())[:: -1 if turn % 2 else 1]:
            measured[name].append(measure(run))
    return measured


def unequal(args: argparse.Namespace) -> dict[str, Any]:
    """Measure windows of 16 as they come, and with the longest in the middle, on four devices."""
    cluster, rows, m = Cluster(4), [], 16
    progress = Progress(len(LENGTHS) * len(SCHEDULES))
    with cluster.on_clock():
        for name, lengths in LENGTHS.items():
            drawn = lengths.drawn(m, seed=0)
            drawn = [max(1, round(length * args.tokens * m / sum(drawn))) for length in drawn]
            xs = [rows_of(1, length) for length in drawn]
            for schedule in SCHEDULES:
                progress(f"simulated GPUs, lengths of {name}, {schedule}")
                step = cluster.model("GPipe", schedule, m).step
                ways = {"as they come": None, "longest": "longest"}
                runs = {way: partial(_step_on, step, xs, order) for way, order in ways.items()}
                seconds = cluster.timed(runs, args.turns)
                row: Row = {"lengths": name, "schedule": schedule, "n": cluster.n, "m": m}
                for way, window in (("as they come", drawn), ("longest", longest_in_the_middle(drawn))):
                    row |= {f"{way}, on paper": cluster.simulated(schedule, window), way: spread(seconds[way])}
                rows.append(
                    {**row, "gain": statistics.median(seconds["as they come"]) / statistics.median(seconds["longest"])}
                )
    whole = [row for row in rows if row["schedule"] != "ZeroBubble"]
    ratios = [row[f"{way}, on paper"] / row[way]["median"] for row in whole for way in ("as they come", "longest")]
    return {
        "unit": "seconds, simulated",
        "card": CARD,
        "tokens, mean": args.tokens,
        "rows": rows,
        "aims": [
            aim("simulated: on paper / measured, unequal windows, GPipe and 1F1B, lowest", min(ratios), least=0.9)
        ],
    }


def _step_on(step: Callable[[Any], object], xs: Sequence[Tensor], order: Any = None) -> object:
    return step(MicroBatches(xs, order=order))


def window_unequal(result: dict[str, Any]) -> str:
    """Return a table of windows as they come, and with the longest in the middle."""
    columns: dict[str, Any] = {"lengths": "lengths", "schedule": "schedule"}
    for way, title in (("as they come", "as they come"), ("longest", "longest in the middle")):
        columns[f"{title}, on paper, ms"] = lambda row, way=way: f"{row[f'{way}, on paper'] * 1e3:.0f}"
        columns[f"{title}, measured"] = lambda row, way=way: shown(row[way], 0, 1e3)
    return table_of(result["rows"], {**columns, "gain, measured": lambda row: f"{row['gain'] - 1:+.0%}"})


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Measure windows of one row that are given, beside the same rows that are split."""
    rows = []
    progress = Progress(len(FRONTS) * len(args.partitions) * len(args.micro_batches))
    for front, n, m in product(FRONTS, args.partitions, args.micro_batches):
        progress(f"simulated GPUs, {front}, {n} devices, {m} micro-batches")
        cluster, x = Cluster(n), rows_of(m, args.tokens)
        with cluster.on_clock():
            step = cluster.model(front, "1F1B", m).step
            seconds = cluster.timed(
                {"split": partial(step, x), "given": partial(_step_on, step, x.split(1))}, args.turns
            )
            ideal = cluster.simulated("1F1B", [args.tokens] * m)
            naive = n * m * sum(cluster.costs(args.tokens)[kind] for kind in "FB")
        shares = {way: spread(ideal / one for one in of_way) for way, of_way in seconds.items()}
        ratio = shares["given"]["median"] / shares["split"]["median"]
        row = {"front": front, "n": n, "m": m, "on paper": ideal, **shares, "given/split": ratio}
        rows.append({**row, "naive": naive / ideal, "naive/given": naive / statistics.median(seconds["given"])})
    lowest = min(row["given/split"] for row in rows)
    return {
        "unit": "seconds, simulated",
        "card": CARD,
        "tokens": args.tokens,
        "rows": rows,
        "aims": [aim("simulated: share of the step on paper, given / split, lowest", lowest, least=0.98)],
    }


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
    columns: dict[str, Any] = {"front": "front", "devices": "n", "micro-batches": "m"}
    columns["on paper, ms"] = lambda row: f"{row['on paper'] * 1e3:.0f}"
    columns |= {"share of it, split": "split:3", "given": "given:3", "given / split": "given/split:.3f"}
    naive = {"one device at a time / on paper": "naive:.2f", "/ given": "naive/given:.2f"}
    return table_of(result["rows"], {**columns, **naive})


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
            turns = [taken_in_turns(runs, 10, _cpu_seconds) for _ in range(args.turns)]
            lowest = {name: [min(turn[name]) / m * 1e6 for turn in turns] for name in runs}
            row: Row = {"front": front, "threads": threads, "way": way}
            row |= {name: spread(values) for name, values in lowest.items()}
            rows.append({**row, "given/split": spread(b / a for a, b in zip(lowest["split"], lowest["given"]))})
    typical = statistics.median([row["given/split"]["median"] for row in rows])
    return {"rows": rows, "aims": [aim("given / split, CPU time, median of all ways", round(typical, 2), most=1.0)]}


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = process_time()
    run()
    return process_time() - start


def window_host(result: dict[str, Any]) -> str:
    """Return a table of the CPU time of a micro-batch, given and split."""
    columns = {"front": "front", "threads": "threads", "way": lambda row: named_way(row["way"])}
    return table_of(
        result["rows"], {**columns, "split, us": "split:0", "given, us": "given:0", "given/split": "given/split:2"}
    )


PARTS = {
    # The devices of these have to be there before the first backward.
    "given": Part("windows:given", given, {"micro-batches that are given": window_given}),
    "unequal": Part("windows:unequal", unequal, {"unequal micro-batches on simulated GPUs": window_unequal}),
    "host": Part("windows:host", host, {"CPU time of a micro-batch": window_host}),
    "order": Part(
        "windows:order",
        order,
        {"what an order gains, simulated": window_order, "the longest in the middle, by size": window_sizes},
    ),
}


def main() -> None:
    command = Program("windows", __doc__, PARTS, ("order",))
    command.add("--partitions", nargs="+", type=int, default=[2, 4, 8], help="n, the devices")
    command.add("--micro-batches", nargs="+", type=int, default=[*SIZES], help="m, of order and given")
    command.add("--windows", type=int, default=25, help="that are drawn of each kind, for order")
    command.add("--tokens", type=int, default=8192, help="of a micro-batch on simulated GPUs, mean")
    command.add("--turns", type=int, default=3)
    command.run()


if __name__ == "__main__":
    main()

"""The largest model that can be trained on so many devices, and what its peak depends on: a part of memory.py.

Two questions, both about the memory of a training step of a whole model (`memory_footprint.py` says what is counted):

1. How large can a model be? Experiments are named as torchgpipe's own: `naive-1` is the plain model, `pipeline-n` a
   pipeline of n partitions, balanced by size, with all micro-batches checkpointed. Each climbs a ladder of ever larger
   models until one does not fit. On GPUs a model fits if it can be trained, on the CPU if its peak is within `--limit`
   a partition, all of them together, because they share one memory.
2. What does the peak depend on? The same model and mini-batch, in more micro-batches and over more partitions.

The models of the papers and their gigabytes are in `published_memory.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from benchmarks.cost import MODES
from benchmarks.peers import Answer, Peer, Request, running
from benchmarks.placement import even, placed
from benchmarks.program import Progress
from benchmarks.records import GIB, MIB, table, table_of
from benchmarks.tasks import TASKS

__all__ = ["LADDERS", "capacity", "capacity_growth", "measure", "notes"]

CHILD = "memory_footprint.py"
QUESTIONS = ("largest", "growth")


class Ladder(NamedTuple):
    """A kind of model that grows.

    Attributes:
        first: arguments of all its sizes, before those of the size
        sizes: from small to large
        sample: the shape of an image
        batch: the size of a mini-batch
        chunks: the micro-batches that a pipeline splits it into
    """

    first: tuple[int, ...]
    sizes: Sequence[tuple[int, int]]
    sample: tuple[int, ...]
    batch: int
    chunks: int

    def arguments(self, size: tuple[int, int]) -> list[int]:
        return [*self.first, *size]


#: Sizes are (L, D) of an AmoebaNet-D, and (B, C) of a U-Net. The paper's are among the large ones.
LARGE_AMOEBANETS = [(18, 208), (18, 416), (18, 544), (36, 544), (72, 512), (72, 768), (72, 1024), (144, 1024)]
LARGE_UNETS = [(6, 72), (11, 128), (24, 128), (24, 160), (48, 160), (48, 224), (96, 224)]
LADDERS: dict[str, dict[str, Ladder]] = {
    "small": {
        "amoebanetd": Ladder((10,), [(3, 8), (3, 16), (3, 24), (3, 32), (3, 40), (3, 48)], (3, 16, 16), 8, 4),
        "unet": Ladder((2,), [(1, 4), (1, 8), (2, 8), (2, 16), (2, 24), (3, 32), (3, 48)], (3, 32, 32), 8, 4),
    },
    "paper": {
        "amoebanetd": Ladder((1000,), [*LARGE_AMOEBANETS, (144, 1536)], (3, 224, 224), 128, 32),
        "unet": Ladder((5,), LARGE_UNETS, (3, 192, 192), 32, 32),
    },
}
LADDERS["gpu"] = LADDERS["paper"]  # On one large GPU it is climbed less far.


def largest(args: argparse.Namespace, limit: float | None) -> list[dict[str, Any]]:
    """Answer question 1 with a row for each size that was tried."""
    rows: list[dict[str, Any]] = []
    on_cpu = args.devices == ["cpu"]
    with Peer("ours", CHILD) as asked:

        @cache
        def balances(model: str, size: tuple[int, int]) -> dict[int, list[int]]:
            """Return the balance by size for each number of partitions, the same for all peers."""
            answer = asked.ask({**request_for(args, model, size), "kind": "balances", "partitions": args.partitions})
            return dict(zip(args.partitions, answer["balances"], strict=True))

        def climb(peer: Peer, name: str, n: int, model: str, start: int) -> Iterator[dict[str, Any]]:
            """Yield a row for each size, up to the first that does not fit."""
            for size in LADDERS[args.size][model].sizes[start:]:
                request = {"kind": "footprint", **request_for(args, model, size), "devices": placed(args.devices, n)}
                request["limit"] = None if on_cpu else limit
                if peer.name != "plain":
                    request["balance"] = balances(model, size)[n]
                answer = peer.ask(request)
                row = {"model": model, "experiment": name, "peer": peer.name, "n": n, "size": list(size), **answer}
                row["fits"] = "peak" in answer and (not on_cpu or limit is None or sum(answer["peak"]) <= limit * n)
                yield row
                if not row["fits"]:
                    return

        for model in LADDERS["small"]:
            for name in args.peers if model in args.models else ():
                start = 0
                for n in [1] if name == "plain" else args.partitions:
                    if args.seconds.spent():
                        return rows
                    experiment = f"{'naive' if name == 'plain' else 'pipeline'}-{n}"
                    print(f"the largest {model}: {experiment} {name}", flush=True)
                    # In a process of its own, which gives all memory back when it ends, also after memory has run out.
                    with Peer(name, CHILD) as peer:
                        tried = list(climb(peer, experiment, n, model, start))
                    # On more devices at least the same fits: the ladder need not be climbed from the ground again.
                    start += max(0, sum(row["fits"] for row in tried) - 1)
                    rows += tried
    return rows


def request_for(args: argparse.Namespace, model: str, size: tuple[int, int]) -> Request:
    ladder = LADDERS[args.size][model]
    about = {"model": model, "args": ladder.arguments(size), "sample": ladder.sample}
    return {**about, "batch": ladder.batch, "m": ladder.chunks, "mode": "always"}


def growth(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answer question 2 with a row for each number of micro-batches or partitions."""
    task = TASKS[args.size]["resnet101"]
    with torch.device("meta"):
        layers = len(task.make())
    rows: list[dict[str, Any]] = []
    most = max(args.partitions)
    planned = [
        case
        for mode in MODES
        for case in [
            *(("m", m, most, mode) for m in args.chunks),
            *(("n", max(args.chunks), n, mode) for n in args.partitions),
        ]
    ]
    progress = Progress(len(planned))
    with running(args.peers, CHILD) as peers:
        for axis, m, n, mode in planned:
            if args.seconds.spent():
                break
            progress(f"resnet101: {m} micro-batches, {n} partitions, {mode}")
            row: dict[str, Any] = {"axis": axis, "m": m, "n": n, "mode": mode, "batch": task.batch}
            shape = {"kind": "footprint", "size": args.size, "model": "resnet101", "batch": task.batch}
            for name, peer in peers.items():
                if name == "plain" and rows:
                    row[name] = rows[0][name]  # The plain model knows neither micro-batches nor partitions.
                    continue
                how = {"m": m, "mode": mode, "balance": even(layers, n)}
                row[name] = peer.ask({**shape, **how, "devices": placed(args.devices, 1 if name == "plain" else n)})
            rows.append(row)
    return rows


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.size == "full":
        raise SystemExit("capacity has the sizes small, gpu and paper")
    on_cpu = args.devices == ["cpu"]
    args.partitions = args.partitions or [n for n in (1, 2, 4, 8) if n <= (4 if on_cpu else len(args.devices))]
    limit = args.limit or (4.0 if on_cpu else None)
    in_bytes = None if limit is None else limit * (MIB if on_cpu else GIB)
    return {
        "unit": "bytes",
        "limit": limit,
        "largest": largest(args, in_bytes) if "largest" in args.questions else [],
        "growth": growth(args) if "growth" in args.questions else [],
    }


# ---- Tables of a result.


def capacity(result: dict[str, Any]) -> str:
    """Return a table of the largest model that fits, for each experiment."""
    name, unit = ("MiB", MIB) if result["size"] == "small" else ("GiB", GIB)
    largest_of: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in result["largest"]:
        key = row["model"], row["experiment"], row["peer"]
        if row["fits"] or key not in largest_of:
            largest_of[key] = row
    lines: list[list[str]] = []
    for (model, experiment, peer), row in sorted(
        largest_of.items(), key=lambda entry: (entry[0][0], entry[0][2] != "plain")
    ):
        lines.append([model, experiment, peer, *["none", "-", "-", "-", "-"]])
        if row["fits"]:
            sums = (f"{sum(row[part]) / unit:.2f}" for part in ("kept", "activations"))
            peaks = ", ".join(f"{peak / unit:.2f}" for peak in row["peak"])
            lines[-1][3:] = ["({}, {})".format(*row["size"]), f"{row['parameters'] / 1e6:.3g}", *sums, peaks]
    header = ["model", "experiment", "peer", "largest", "parameters, M", f"model, {name}", f"activations, {name}"]
    return table(lines, [*header, f"peak of each memory, {name}"])


def capacity_growth(result: dict[str, Any]) -> str:
    rows = result["growth"]
    most = max((row["n"] for row in rows), default=0)
    columns: dict[str, Any] = {"micro-batches": "m", "partitions": "n", "checkpoint": "mode"}
    columns |= {
        f"{name}, MiB": lambda row, name=name: peak_of(row[name])
        for name in ("ours", "original", "plain")
        if rows and name in rows[0]
    }
    return table_of([row for row in rows if row["axis"] == "m" or row["n"] != most], columns)


def peak_of(answer: Answer) -> str:
    """Return the activations at the peak of the fullest device, in MiB."""
    return f"{max(answer['activations']) / MIB:.2f}" if "peak" in answer else f"- {answer['none']}"


def notes(result: dict[str, Any]) -> Iterator[str]:
    if result["devices"] == ["cpu"]:
        limit = f"a model fits if its peak is within {result['limit']:g} MiB a partition, all together."
        yield f"The CPU has one memory for all partitions: {limit}"

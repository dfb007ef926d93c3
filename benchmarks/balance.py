"""Balancing: how good a split is, and whether measured times agree with the prediction.

Two questions:

1. Cost vectors, drawn at random: the largest load over the smallest possible one, which is found here in another
   way than by the solver; ours beside the original's.
2. A model with very uneven layers, really split: the time of each partition, run in a process of its own, beside
   what the profile has predicted; for balance by time, by an even number of layers, by parameters, and for the
   original's split of the same times.

    python -m benchmarks.balance               # a minute or two
    python -m benchmarks.balance --size full   # thousands of vectors; more rounds
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.cost import clocks
from benchmarks.peers import Answer, Peer, running
from benchmarks.placement import even
from benchmarks.program import Part, Program, Progress
from benchmarks.records import ratios, shown, spread, table_of

PEERS = ("ours", "original")


def random_costs(kind: str, rng: random.Random, layers: int) -> list[int]:
    """Return random costs in microseconds, as the original measures them."""
    if kind == "uniform":
        return [rng.randint(1, 1000) for _ in range(layers)]
    if kind == "lognormal":
        return [1 + round(rng.lognormvariate(5, 1.5)) for _ in range(layers)]
    if kind == "one heavy":
        costs = [rng.randint(1, 1000) for _ in range(layers)]
        costs[rng.randrange(layers)] = sum(costs) // 3
        return costs
    # Blocks that repeat, each with a cheap and a costly layer, measured with some noise.
    block = [rng.choice([5, 20, 300, 2000]) for _ in range(rng.randint(2, 5))]
    return [1 + round(block[i % len(block)] * rng.uniform(0.95, 1.05)) for i in range(layers)]


KINDS = ("uniform", "lognormal", "one heavy", "blocks")


def optimum(costs: Sequence[int], partitions: int) -> int:
    """Return the smallest possible largest load: the least bound within which partitions can be filled in turn."""

    def kept(bound: int) -> bool:
        used, load = 1, 0
        for cost in costs:
            load += cost
            if load > bound:
                used, load = used + 1, cost
        return used <= partitions

    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if kept(middle) else (middle + 1, high)
    return low


def loads(costs: Sequence[float], balance: Sequence[int]) -> list[float]:
    return [sum(costs[start:end]) for start, end in pairwise(accumulate(balance, initial=0))]


def compared(peers: dict[str, Peer], vectors: list[list[int]], partitions: int, limit: float) -> Answer:
    """Return for each peer each vector's largest load over the optimum, and seconds; None beyond the limit."""
    best = [optimum(costs, partitions) for costs in vectors]
    request = {"kind": "solve", "vectors": vectors, "partitions": partitions, "limit": limit}
    answers: Answer = {}
    for name, peer in peers.items():
        answer = peer.ask(request)
        answers[name] = {
            "ratios": [
                None if balance is None else max(loads(costs, balance)) / least
                for costs, balance, least in zip(vectors, answer["balances"], best, strict=True)
            ],
            "seconds": answer["seconds"],
        }
    return answers


def finished(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def quality(peers: dict[str, Peer], count: int, limit: float) -> list[dict[str, Any]]:
    """Answer question 1 with `count` vectors of each kind, of 4 to 64 layers, for 2 to 8 partitions."""
    rows = []
    progress = Progress(len(KINDS))
    for kind in KINDS:
        progress(f"vectors: {kind}")
        rng = random.Random(kind)
        ratios: dict[str, list[float]] = {name: [] for name in peers}
        seconds: dict[str, list[float]] = {name: [] for name in peers}
        for partitions in range(2, 9):
            vectors = [random_costs(kind, rng, rng.randint(partitions, 64)) for _ in range(count // 7)]
            for name, answer in compared(peers, vectors, partitions, limit).items():
                ratios[name] += finished(answer["ratios"])
                seconds[name] += finished(answer["seconds"])
        row: dict[str, Any] = {"costs": kind, "vectors": count // 7 * 7}
        for name in peers:
            row[name] = {
                "missed": sum(ratio > 1 for ratio in ratios[name]) / len(ratios[name]),
                "mean": statistics.mean(ratios[name]),
                "worst": max(ratios[name]),
                "seconds": spread(seconds[name]),
                "unfinished": row["vectors"] - len(ratios[name]),
            }
        rows.append(row)
    return rows


def times(rows: list[dict[str, Any]]) -> list[float]:
    return [row["forward"] + row["recompute"] + row["backward"] for row in rows]


def reality(peers: dict[str, Peer], partitions: int, chunks: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Answer question 2."""
    profile = peers["ours"].ask({"kind": "profile", "seconds": seconds})["rows"]
    balances = proposals(peers, profile, partitions)
    measured: dict[str, list[float]] = {way: [] for way in balances}  # the slowest partition of each round
    progress = Progress(rounds)
    names = [f"partition {j}" for j in range(partitions)]
    with running(names, "splits.py") as processes:
        for _ in range(rounds):
            progress("reality: round")
            for way, balance in balances.items():
                slowest = 0.0
                for process, (start, end) in zip(
                    processes.values(), pairwise(accumulate(balance, initial=0)), strict=True
                ):
                    request = {"kind": "run", "start": start, "end": end, "seconds": 0.5}
                    slowest = max(slowest, process.ask(request)["seconds"])
                measured[way].append(slowest)

    return [
        {
            "way": way,
            "balance": balance,
            "predicted": clocks(chunks, partitions) * max(loads(times(profile), balance)),
            "measured": spread(clocks(chunks, partitions) * slowest for slowest in measured[way]),
            "over by time": ratios(measured["by time"], measured[way]),
        }
        for way, balance in balances.items()
    ]


def proposals(peers: dict[str, Peer], profile: list[dict[str, Any]], partitions: int) -> dict[str, list[int]]:
    """Return the balance of each of four ways to split the model."""

    def split(peer: str, costs: list[int]) -> list[int]:
        request = {"kind": "solve", "vectors": [costs], "partitions": partitions, "limit": 60}
        balance: list[int] = peers[peer].ask(request)["balances"][0]
        return balance

    costs = [max(1, round(cost * 1e6)) for cost in times(profile)]
    return {
        "by time": split("ours", costs),
        "by time, original's solver": split("original", costs),
        "by parameters": split("ours", [row["parameters"] for row in profile]),
        "even": even(len(costs), partitions),
    }


# ---- Tables and the picture of a result.


def balance_vectors(result: dict[str, Any]) -> str:
    columns: dict[str, Any] = {"costs": "costs"}
    for peer, figure, how in (
        *(("ours", "missed", ".0%"), ("ours", "worst", ".3f")),
        *(("original", "missed", ".0%"), ("original", "mean", ".3f"), ("original", "worst", ".3f")),
    ):
        columns[f"{peer}: {figure}"] = lambda row, peer=peer, figure=figure, how=how: f"{row[peer][figure]:{how}}"
    return table_of(result["vectors"], columns)


def balance_reality(result: dict[str, Any]) -> str:
    columns = {
        "balance": "way",
        "layers": lambda row: " ".join(map(str, row["balance"])),
        "predicted, ms": lambda row: f"{1000 * row['predicted']:.0f}",
        "measured, ms": lambda row: shown(row["measured"], 0, 1000),
    }
    return table_of(result["reality"], columns)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    full = args.size == "full"
    with running(PEERS, "splits.py") as peers:
        return {
            "unit": "ratios: largest load over the smallest possible one; seconds",
            "vectors": quality(peers, 1400 if full else 140, args.limit),
            "reality": reality(
                peers, args.partitions, args.chunks, 20.0 if full else 5.0, args.rounds or (9 if full else 3)
            ),
        }


PARTS = {
    "balance": Part(
        "balance",
        measure,
        {
            "largest load over the smallest possible one": balance_vectors,
            "a step of the pipeline, each partition timed in a process of its own": balance_reality,
        },
    )
}


def main() -> None:
    program = Program("balance", __doc__, PARTS, sizes=("small", "full"))
    program.add("--rounds", type=int, help="of the model that is really split")
    program.add("--partitions", type=int, default=4, help="of the model that is really split")
    program.add("--chunks", type=int, default=8, help="of the model that is really split")
    program.add("--limit", type=float, default=20.0, help="seconds that a solver may take for one vector")
    program.run()


if __name__ == "__main__":
    main()

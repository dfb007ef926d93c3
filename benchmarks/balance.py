"""Balancing: how good a split is. Cost vectors are drawn at random; ours stands beside the original's.

Of each split counts the largest load over the smallest possible one, which is found here in another way than by the
solver.

    python -m benchmarks.balance               # some seconds
    python -m benchmarks.balance --size full   # thousands of vectors
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from typing import Any

import torch

from benchmarks.peers import Answer, Peer, Request, running, serve
from benchmarks.program import Part, Program, Progress
from benchmarks.records import table_of

__all__ = ["PARTS", "optimum"]

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


def compared(peers: dict[str, Peer], vectors: list[list[int]], partitions: int, limit: float) -> dict[str, list[float]]:
    """Return for each peer the largest load over the optimum of each vector that it has split in time."""
    best = [optimum(costs, partitions) for costs in vectors]
    request = {"vectors": vectors, "partitions": partitions, "limit": limit}
    answers: dict[str, list[float]] = {}
    for name, peer in peers.items():
        answer = peer.ask(request)
        answers[name] = [
            max(loads(costs, balance)) / least
            for costs, balance, least in zip(vectors, answer["balances"], best, strict=True)
            if balance is not None
        ]
    return answers


def quality(peers: dict[str, Peer], count: int, limit: float) -> list[dict[str, Any]]:
    """Split `count` vectors of each kind, of at most 64 layers, for 2 to 8 partitions."""
    rows = []
    progress = Progress(len(KINDS))
    for kind in KINDS:
        progress(f"vectors: {kind}")
        rng = random.Random(kind)
        ratios: dict[str, list[float]] = {name: [] for name in peers}
        for partitions in range(2, 9):
            vectors = [random_costs(kind, rng, rng.randint(partitions, 64)) for _ in range(count // 7)]
            for name, answer in compared(peers, vectors, partitions, limit).items():
                ratios[name] += answer
        row: dict[str, Any] = {"costs": kind, "vectors": count // 7 * 7}
        for name in peers:
            row[name] = {
                "missed": sum(ratio > 1 for ratio in ratios[name]) / len(ratios[name]),
                "mean": statistics.mean(ratios[name]),
                "worst": max(ratios[name]),
                "unfinished": row["vectors"] - len(ratios[name]),
            }
        rows.append(row)
    return rows


# ---- The child: a peer splits.


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def solver(peer: str) -> Callable[[list[int], int], list[int]]:
    """Return the function with which the peer splits costs."""
    if peer == "ours":
        from torchgpipe_balancing import partition

        return partition

    from torchgpipe.balance.blockpartition import solve

    return lambda costs, partitions: [len(block) for block in solve(costs, partitions)]


def answer(peer: str, request: Request) -> Answer:
    """Return the balance of each vector; None if it took too long."""
    split = solver(peer)
    balances: list[list[int] | None] = []
    for costs in request["vectors"]:
        balance = None
        with suppress(TimeoutError), limited(request["limit"]):
            balance = split(costs, request["partitions"])
        balances.append(balance)
    return {"balances": balances}


# ---- The table of a result.


def balance_vectors(result: dict[str, Any]) -> str:
    columns: dict[str, Any] = {"costs": "costs"}
    for peer, figure, how in (
        *(("ours", "missed", ".0%"), ("ours", "worst", ".3f")),
        *(("original", "missed", ".0%"), ("original", "mean", ".3f"), ("original", "worst", ".3f")),
    ):
        columns[f"{peer}: {figure}"] = lambda row, peer=peer, figure=figure, how=how: f"{row[peer][figure]:{how}}"
    return table_of(result["vectors"], columns)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with running(PEERS, "balance.py") as peers:
        vectors = quality(peers, 1400 if args.size == "full" else 140, args.limit)
    return {"unit": "ratios: largest load over the smallest possible one", "vectors": vectors}


PARTS = {"balance": Part("balance", measure, {"largest load over the smallest possible one": balance_vectors})}


def main() -> None:
    program = Program("balance", __doc__, PARTS, sizes=("small", "full"))
    program.add("--limit", type=float, default=20.0, help="seconds that a solver may take for one vector")
    program.run()


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        torch.set_num_threads(1)
        serve(answer)
    else:
        main()

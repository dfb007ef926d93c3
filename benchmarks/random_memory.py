"""Peak memory of a step of random models: ours over the original's.

`memory.py` has six models, and what is true of them need not be true of others. Here parameters are anything from
little to most of what a step takes (`random_models.py`). It is counted in the same way.

    python -m benchmarks.random_memory                # 200 models
    python -m benchmarks.random_memory --from 200     # 200 others
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.peers import running
from benchmarks.program import Command, Progress
from benchmarks.random_models import random_model
from benchmarks.records import table

PEERS = ("ours", "original")
#: Up to these ratios models are counted.
STEPS = (1.0, 1.001, 1.01, 1.1)


def measure(seeds: range) -> list[dict[str, Any]]:
    """Return a row for each model."""
    rows = []
    progress = Progress(len(seeds))
    with running(PEERS, "allocations.py") as peers:
        for seed in seeds:
            drawn = random_model(seed)
            progress(drawn.about)
            shared = {"seed": seed, "mode": drawn.mode, "balance": drawn.balance, "m": drawn.m}
            one_device = {"device": "cpu", "devices": ["cpu"] * len(drawn.balance)}
            request = {**shared, "accumulate": drawn.accumulate, **one_device, "steps": 1}
            peaks = {name: peer.ask(request)["peak"] for name, peer in peers.items()}
            about = {"about": drawn.about, "gradients": "present" if drawn.accumulate else "absent"}
            rows.append({**shared, **about, **peaks, "ratio": peaks["ours"] / peaks["original"]})
    return sorted(rows, key=lambda row: -row["ratio"])


def counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many models have at most which ratio, and the highest and the median ratio."""
    ratios = [row["ratio"] for row in rows]
    up_to = {str(step): sum(ratio <= step for ratio in ratios) for step in STEPS}
    return {"models": len(rows), "up to": up_to, "median": statistics.median(ratios), "highest": max(ratios)}


def random_memory(result: dict[str, Any]) -> str:
    found = result["counts"]
    line = [found["models"], *found["up to"].values(), f"{found['median']:.3f}", f"{found['highest']:.3f}"]
    return table([line], ["models", *(f"at most {step}" for step in found["up to"]), "median", "highest"])


def highest(result: dict[str, Any]) -> str:
    header = ["seed", "about", "balance", "m", "mode", "gradients", "ours", "original"]
    lines = [[*(row[key] for key in header), f"{row['ratio']:.4f}"] for row in result["rows"][:10]]
    return table(lines, [*header, "ratio"])


def show(result: dict[str, Any]) -> dict[str, str]:
    return {"the highest ratios, peaks in bytes": highest(result), "ours/original": random_memory(result)}


def main() -> None:
    command = Command("random_memory", __doc__, show=show)
    command.add("--from", type=int, default=0, dest="first", help="the first seed")
    command.add("--count", type=int, default=200, help="of models")
    args = command.parse()
    rows = measure(range(args.first, args.first + args.count))
    command.finish(unit="bytes", counts=counts(rows), rows=rows)


if __name__ == "__main__":
    main()

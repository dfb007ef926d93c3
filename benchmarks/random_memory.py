"""Peak memory of a step of random models: ours over the original's.

`memory.py` has six models, and what is true of them need not be true of others. Here parameters are anything from
little to most of what a step takes (`drawn.py`). It is counted in the same way.

    python -m benchmarks.random_memory                # 200 models
    python -m benchmarks.random_memory --from 200     # 200 others
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.drawn import draw
from benchmarks.peers import Peer
from benchmarks.records import RESULTS, environment, table, write

PEERS = ("ours", "original")
#: Up to these ratios models are counted.
STEPS = (1.0, 1.001, 1.01, 1.1)


def measure(seeds: range) -> list[dict[str, Any]]:
    """A row for each model."""
    rows = []
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(name, "allocations.py")) for name in PEERS}
        for seed in tqdm(seeds, unit="model"):
            drawn = draw(seed)
            request = {
                "seed": seed,
                "mode": drawn.mode,
                "balance": drawn.balance,
                "m": drawn.m,
                "accumulate": drawn.accumulate,
                "device": "cpu",
                "devices": ["cpu"] * len(drawn.balance),
                "steps": 1,
            }
            peaks = {name: peer.ask(request)["peak"] for name, peer in peers.items()}
            about = {"seed": seed, "about": drawn.about, "balance": drawn.balance, "m": drawn.m, "mode": drawn.mode}
            gradients = "present" if drawn.accumulate else "absent"
            rows.append({**about, "gradients": gradients, **peaks, "ratio": peaks["ours"] / peaks["original"]})
    return rows


def counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many models have at most which ratio, and the highest and the median one."""
    ratios = [row["ratio"] for row in rows]
    up_to = {str(step): sum(ratio <= step for ratio in ratios) for step in STEPS}
    return {"models": len(rows), "up to": up_to, "median": statistics.median(ratios), "highest": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="of models")
    parser.add_argument("--json", type=Path, default=RESULTS / "random_memory.json")
    args = parser.parse_args()

    rows = measure(range(args.first, args.first + args.count))
    rows.sort(key=lambda row: -row["ratio"])
    header = ["seed", "about", "balance", "m", "mode", "gradients", "ours", "original", "ratio"]
    lines = [[*(row[key] for key in header[:-1]), f"{row['ratio']:.4f}"] for row in rows[:10]]
    print("\nthe highest ratios, peaks in bytes\n\n" + table(lines, header))
    found = counts(rows)
    print(f"\n{found}")
    write(args.json, {"unit": "bytes", "environment": environment(), "counts": found, "rows": rows})


if __name__ == "__main__":
    main()

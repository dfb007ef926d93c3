"""Balancing: how good a split is, how long it takes to find, and whether it keeps in reality what it promises.

Three questions, each with a table:

1. Cost vectors, drawn at random: the largest load over the smallest possible one, which is found here in another
   way than by the solver, and solving time; ours beside the original's.
2. Models, profiled: the same, for their measured times.
3. A model with very uneven layers, really split: the time of each partition, run in a process of its own, beside
   what the profile has predicted; for balance by time, by an even number of layers, by parameters, and for the
   original's split of the same times.

    python -m benchmarks.balance               # a minute or two
    python -m benchmarks.balance --size full   # thousands of vectors, up to 2000 layers; more rounds
    python -m benchmarks.balance --draw        # only draws what was measured: results/balance.svg
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers import Answer, Peer
from benchmarks.pictures import save
from benchmarks.records import RESULTS, environment, ratios, shown, spread, table, write
from benchmarks.splits import MODELS

PEERS = ("ours", "original")


def drawn(kind: str, made: random.Random, layers: int) -> list[int]:
    """Costs in microseconds, as the original measures them."""
    if kind == "uniform":
        return [made.randint(1, 1000) for _ in range(layers)]
    if kind == "lognormal":
        return [1 + round(made.lognormvariate(5, 1.5)) for _ in range(layers)]
    if kind == "one heavy":
        costs = [made.randint(1, 1000) for _ in range(layers)]
        costs[made.randrange(layers)] = sum(costs) // 3
        return costs
    # Blocks that repeat, each with a cheap and a costly layer, measured with some noise.
    block = [made.choice([5, 20, 300, 2000]) for _ in range(made.randint(2, 5))]
    return [1 + round(block[i % len(block)] * made.uniform(0.95, 1.05)) for i in range(layers)]


KINDS = ("uniform", "lognormal", "one heavy", "blocks")


def optimum(costs: Sequence[int], partitions: int) -> int:
    """The smallest possible largest load: the least bound that partitions filled one after the other keep."""

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


def compared(peers: dict[str, Peer], vectors: list[list[int]], partitions: int, limit: float, turns: int) -> Answer:
    """By peer: each vector's largest load over the optimum, and seconds; null where it took longer than the limit."""
    best = [optimum(costs, partitions) for costs in vectors]
    request = {"kind": "solve", "vectors": vectors, "partitions": partitions, "limit": limit, "turns": turns}
    found: Answer = {}
    for name, peer in peers.items():
        answer = peer.ask(request)
        found[name] = {
            "ratios": [
                None if balance is None else max(loads(costs, balance)) / least
                for costs, balance, least in zip(vectors, answer["balances"], best, strict=True)
            ],
            "seconds": answer["seconds"],
        }
    return found


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def quality(peers: dict[str, Peer], count: int, limit: float) -> list[dict[str, Any]]:
    """Question 1: `count` vectors of each kind, of 4 to 64 layers, for 2 to 8 partitions."""
    rows = []
    for kind in KINDS:
        made = random.Random(kind)
        ratios: dict[str, list[float]] = {name: [] for name in peers}
        seconds: dict[str, list[float]] = {name: [] for name in peers}
        for partitions in range(2, 9):
            vectors = [drawn(kind, made, made.randint(partitions, 64)) for _ in range(count // 7)]
            for name, answer in compared(peers, vectors, partitions, limit, 1).items():
                ratios[name] += known(answer["ratios"])
                seconds[name] += known(answer["seconds"])
        row: dict[str, Any] = {"costs": kind, "vectors": count // 7 * 7}
        for name in peers:
            row[name] = {
                "missed": sum(ratio > 1 for ratio in ratios[name]) / len(ratios[name]),
                "mean": statistics.mean(ratios[name]),
                "worst": max(ratios[name]),
                "percentiles": percentiles(ratios[name]),
                "seconds": spread(seconds[name]),
                "unfinished": row["vectors"] - len(ratios[name]),
            }
        rows.append(row)
        print(f"vectors: {kind} done", flush=True)
    return rows


def percentiles(values: Sequence[float]) -> list[float]:
    """The 0th, 5th, 10th, ... 100th, each being one of the values."""
    ordered = sorted(values)
    return [ordered[round(percent / 100 * (len(ordered) - 1))] for percent in range(0, 101, 5)]


def growth(peers: dict[str, Peer], sizes: list[tuple[int, int]], limit: float) -> list[dict[str, Any]]:
    """Question 1: solving time as layers and partitions become many."""
    rows = []
    for layers, partitions in sizes:
        for kind in KINDS:
            vectors = [drawn(kind, random.Random(seed), layers) for seed in range(3)]
            answers = compared(peers, vectors, partitions, limit, 3)
            row: dict[str, Any] = {"layers": layers, "partitions": partitions, "costs": kind, "limit": limit}
            for name, answer in answers.items():
                finished = known(answer["seconds"])
                row[name] = {"seconds": spread(finished) if finished else None, "ratios": answer["ratios"]}
            rows.append(row)
        print(f"time: {layers} layers on {partitions} partitions done", flush=True)
    return rows


def models(peers: dict[str, Peer], seconds: float, limit: float) -> list[dict[str, Any]]:
    """Question 2."""
    rows = []
    for name in MODELS:
        profile = peers["ours"].ask({"kind": "profile", "model": name, "seconds": seconds})
        costs = [max(1, round(cost * 1e6)) for cost in times(profile["rows"])]
        for partitions in (2, 4, 8):
            answers = compared(peers, [costs], partitions, limit, 3)
            row: dict[str, Any] = {"model": name, "layers": len(costs), "partitions": partitions, "costs": costs}
            for peer, answer in answers.items():
                row[peer] = {"ratio": answer["ratios"][0], "seconds": answer["seconds"][0]}
            rows.append(row)
        print(f"models: {name} done", flush=True)
    return rows


def times(rows: list[dict[str, Any]]) -> list[float]:
    return [row["forward"] + row["recompute"] + row["backward"] for row in rows]


def reality(peers: dict[str, Peer], partitions: int, chunks: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Question 3."""
    profile = peers["ours"].ask({"kind": "profile", "model": "uneven", "seconds": seconds})["rows"]
    balances = proposals(peers, profile, partitions)
    measured: dict[str, list[float]] = {way: [] for way in balances}  # the slowest partition of each round
    with ExitStack() as stack:
        processes = [stack.enter_context(Peer("plain", "splits.py")) for _ in range(partitions)]
        for turn in range(rounds):
            for way, balance in balances.items():
                slowest = 0.0
                for process, (start, end) in zip(processes, pairwise(accumulate(balance, initial=0)), strict=True):
                    request = {"kind": "run", "model": "uneven", "start": start, "end": end, "seconds": 0.5}
                    slowest = max(slowest, process.ask(request)["seconds"])
                measured[way].append(slowest)
            print(f"reality: round {turn + 1} of {rounds} done", flush=True)

    clocks = chunks + partitions - 1  # each lasts as long as its slowest partition
    return [
        {
            "way": way,
            "balance": balance,
            "predicted": clocks * max(loads(times(profile), balance)),
            "measured": spread(clocks * slowest for slowest in measured[way]),
            "over by time": ratios(measured["by time"], measured[way]),
        }
        for way, balance in balances.items()
    ]


def proposals(peers: dict[str, Peer], profile: list[dict[str, Any]], partitions: int) -> dict[str, list[int]]:
    """Four ways to split the model."""

    def split(peer: str, costs: list[int]) -> list[int]:
        request = {"kind": "solve", "vectors": [costs], "partitions": partitions, "limit": 60, "turns": 1}
        balance: list[int] = peers[peer].ask(request)["balances"][0]
        return balance

    costs = [max(1, round(cost * 1e6)) for cost in times(profile)]
    layers = len(costs)
    return {
        "by time": split("ours", costs),
        "by time, original's solver": split("original", costs),
        "by parameters": split("ours", [row["parameters"] for row in profile]),
        "even": [layers * (j + 1) // partitions - layers * j // partitions for j in range(partitions)],
    }


def milliseconds(seconds: dict[str, float] | float | None, limit: float) -> str:
    if seconds is None:
        return f"> {limit * 1e3:.0f}"
    return f"{(seconds['median'] if isinstance(seconds, dict) else seconds) * 1e3:.2f}"


def show(result: dict[str, Any], limit: float) -> None:
    header = ["costs", "vectors"]
    for name in PEERS:
        header += [f"{name}: missed", "mean", "worst", "ms"]
    lines = []
    for row in result["vectors"]:
        lines.append([row["costs"], row["vectors"]])
        for name in PEERS:
            of = row[name]
            lines[-1] += [f"{of['missed']:.1%}", f"{of['mean']:.3f}", f"{of['worst']:.3f}"]
            lines[-1].append(milliseconds(of["seconds"], limit))
    print("\nlargest load over the smallest possible one\n\n" + table(lines, header))

    header = ["layers", "partitions", "costs", *(f"{name}: ms" for name in PEERS)]
    lines = [
        [row["layers"], row["partitions"], row["costs"], *(milliseconds(row[name]["seconds"], limit) for name in PEERS)]
        for row in result["time"]
    ]
    print("\nsolving time\n\n" + table(lines, header))

    header = ["model", "layers", "partitions", *(f"{name}: {what}" for name in PEERS for what in ("ratio", "ms"))]
    lines = []
    for row in result["models"]:
        lines.append([row["model"], row["layers"], row["partitions"]])
        for name in PEERS:
            ratio = row[name]["ratio"]
            lines[-1] += ["-" if ratio is None else f"{ratio:.3f}", milliseconds(row[name]["seconds"], limit)]
    print("\nlargest load over the smallest possible one, for measured times\n\n" + table(lines, header))

    header = ["balance", "layers", "predicted, ms", "measured, ms", "measured/predicted", "over 'by time'"]
    lines = [
        [
            row["way"],
            " ".join(map(str, row["balance"])),
            f"{row['predicted'] * 1e3:.0f}",
            shown({key: 1e3 * seconds for key, seconds in row["measured"].items()}, 0),
            f"{row['measured']['median'] / row['predicted']:.2f}",
            shown(row["over by time"], 2),
        ]
        for row in result["reality"]
    ]
    print("\na step of the pipeline, each partition timed in a process of its own\n\n" + table(lines, header))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws questions 1 and 3."""
    import matplotlib
    from matplotlib.figure import Figure

    ours, theirs, ink = "#1f6f8b", ["#e07a1f", "#c2407a", "#8a5fbf", "#7a8a1f"], "#404040"
    matplotlib.rcParams.update({"font.size": 10, "axes.titlesize": 11, "text.color": ink})
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=ink)

    top = 1.8
    for row, color in zip(result["vectors"], theirs, strict=True):
        ratios = row["original"]["percentiles"]
        label = f"{row['costs']}: {row['original']['missed']:.0%} not optimal, worst {ratios[-1]:.2f}"
        left.plot(range(0, 101, 5), ratios, color=color, linewidth=2, label=label)
    worst = max(ratio for row in result["vectors"] for ratio in row["ours"]["percentiles"])
    left.axhline(worst, color=ours, linewidth=3, label=f"ours: all of them {worst:.2f}")
    left.set(xlim=(0, 100), ylim=(0.98, top), xlabel="cost vectors, sorted (%)")
    left.set_ylabel("largest load / smallest possible")
    count = sum(row["vectors"] for row in result["vectors"])
    left.set_title(f"{count} splits by the original, and by ours", loc="left")
    left.legend(loc="upper left", frameon=False)
    left.grid(axis="y", alpha=0.3)

    rows = result["reality"][::-1]
    height = 0.36
    for y, row in enumerate(rows):
        low, middle, high = (row["measured"][key] * 1e3 for key in ("low", "median", "high"))
        first = {"label": "measured, median with lowest and highest"} if y == 0 else {}
        right.barh(y - height / 2, middle, height, color=ours, **first)
        right.errorbar(middle, y - height / 2, xerr=[[middle - low], [high - middle]], color=ink, capsize=3)
        first = {"label": "predicted"} if y == 0 else {}
        right.barh(y + height / 2, row["predicted"] * 1e3, height, color="#a9cdd8", **first)
    right.set_yticks(range(len(rows)), [f"{row['way']}\n{' '.join(map(str, row['balance']))}" for row in rows])
    right.set(xlabel="ms a step", xlim=(0, None), ylim=(-0.6, len(rows) + 0.3))
    right.set_title("A very uneven model on 4 partitions, by balance", loc="left")
    right.legend(*(items[::-1] for items in right.get_legend_handles_labels()), loc="upper right", frameon=False)
    right.grid(axis="x", alpha=0.3)
    right.set_axisbelow(True)

    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=["small", "full"], default="small")
    parser.add_argument("--rounds", type=int, default=None, help="of the model that is really split")
    parser.add_argument("--partitions", type=int, default=4, help="of the model that is really split")
    parser.add_argument("--chunks", type=int, default=8, help="of the model that is really split")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that a solver may take for one vector")
    parser.add_argument("--json", type=Path, default=RESULTS / "balance.json")
    parser.add_argument("--draw", action="store_true", help="only draw the JSON that is there")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.json.read_text()), args.json.with_suffix(".svg"))
        return
    full = args.size == "full"
    sizes = [(50, 4), (200, 8), (1000, 32), (2000, 64)] if full else [(50, 4), (200, 8)]
    rounds = args.rounds or (9 if full else 3)

    before = environment()
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(name, "splits.py")) for name in PEERS}
        result = {
            "unit": "ratios: largest load over the smallest possible one; seconds",
            "environment": before,
            "vectors": quality(peers, 1400 if full else 140, args.limit),
            "time": growth(peers, sizes, args.limit),
            "models": models(peers, 5.0 if full else 1.0, args.limit),
            "reality": reality(peers, args.partitions, args.chunks, 20.0 if full else 5.0, rounds),
        }
    show(result, args.limit)
    write(args.json, result)
    draw(result, args.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()

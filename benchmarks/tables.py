"""Writes the tables of both READMEs from the results, so that no figure is copied by hand.

The documentation asks for its tables when it is built.

    python -m benchmarks.tables    # after a benchmark has written its JSON
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation import ablation_table
from benchmarks.capacity import growth_table, largest_table
from benchmarks.distributed import distributed_table
from benchmarks.gpu import gpu_table
from benchmarks.records import RESULTS, shown, table
from benchmarks.speed import PIPELINES, SCHEDULES, published_table, targets_table
from benchmarks.timeline import timeline_table
from benchmarks.transparency import accuracy_table

README = Path(__file__).resolve().parent / "README.md"


def render(text: str) -> str:
    """A page with every table between its marks as the results have it now."""

    def fill(match: re.Match[str]) -> str:
        try:
            rows = PICTURES.get(match[2], "") + TABLES[match[2]]() + "\n"
        except FileNotFoundError:  # not measured yet
            rows = ""
        return f"{match[1]}\n{rows}{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", fill, text, flags=re.DOTALL)


def host_time() -> str:
    rows = []
    for row in _result("overhead")["modes"]:
        for part in ("forward", "backward"):
            figures = row[part]
            times = [f"{figures[peer]['median']:.1f}" for peer in ("ours", "original", "plain")]
            rows.append([row["threads"], row["mode"], part, *times, *(shown(figures[key], 2) for key in RATIOS)])
    return table(rows, ["threads", "mode", "part", "ours, us", "original, us", "plain, us", *RATIOS.values()])


RATIOS = {"ratio": "original/ours", "ratio_cpu": "of CPU time"}


def several() -> str:
    peers = ("ours", "original", "plain")
    rows = [
        [row["parameters"], row["mode"], part, *(f"{row[part][peer]['median']:.0f}" for peer in peers)]
        + [shown(row[part][key], 2) for key in RATIOS]
        for row in _result("overhead")["several"]
        for part in ("forward", "backward")
    ]
    return table(rows, ["parameters", "mode", "part", "ours, us", "original, us", "plain, us", *RATIOS.values()])


def growth() -> str:
    peers = ("ours", "original", "plain")
    sweeps = {"m": "m = 8 to 512, n = 8", "n": "n = 2 to 64, m = 32"}
    rows = [
        [sweeps[row["axis"]], row["mode"], row["part"], *(shown(row[peer], 2) for peer in peers)]
        for row in _result("overhead")["growth"]
    ]
    return table(rows, ["from, to", "mode", "part", *peers])


def deep() -> str:
    parts = ("construct", "forward", "backward")
    rows = [
        [peer, row["mode"], *(shown(row[part][peer]) for part in parts)]
        for row in _result("overhead")["deep"]
        for peer in ("ours", "original", "plain")
    ]
    return table(rows, ["", "mode", *parts])


def memory() -> str:
    result = _result("memory")
    adds = {(row["model"], row["gradients"], row["mode"]): row for row in result["growth"]}
    rows = []
    for key, more in adds.items():
        found = [row["ratio"] for row in result["rows"] if _key(row) == key and row["threads"] == "inline"]
        each = [f"{more[name] / 1024:.0f}" for name in ("ours", "original", "plain")]
        rows.append([*key, f"{min(found):.3f} - {max(found):.3f}", *each])
    return table(rows, ["model", "gradients", "mode", "ours/original", "ours, KiB", "original, KiB", "plain, KiB"])


def random_memory() -> str:
    counts = _result("random_memory")["counts"]
    header = ["models", *(f"at most {step}" for step in counts["up to"]), "median", "highest"]
    return table(
        [[counts["models"], *counts["up to"].values(), f"{counts['median']:.3f}", f"{counts['highest']:.3f}"]], header
    )


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["gradients"], row["mode"]


def parts() -> str:
    rows = [[row["group"], row["part"], f"{row['low']:.2f}"] for row in _result("profile_cell")["parts"]]
    return table(rows, ["", "part", "us"])


def nodes() -> str:
    rows = [
        [row["peer"], row["threads"], row["mode"], f"{row['all']:.2f}", f"{row['python']:.2f}"]
        for row in _result("profile_cell")["nodes"]
    ]
    return table(rows, ["", "threads", "mode", "nodes", "of them in Python"])


def speed() -> str:
    """Speed-ups; naive-1, which they are over, is left out."""
    lines = []
    for row in _result("speed")["rows"]:
        if row["experiment"] == "naive-1":
            continue
        ways = [f"{name} {_speed_up(row[name])}" for name in SCHEDULES if name in row]
        other = row.get("checkpoint_sequential", row.get("plain"))
        lines.append(
            [
                *(row[key] for key in ("model", "experiment", "mode")),
                f"{row['ideal']:.2f}" if "ideal" in row else "-",
                *(_speed_up(row.get(name)) for name in PIPELINES),
                _middle(row.get("ours", {}).get("over original")),
                ", ".join(ways) or (_speed_up(other) if other else "-"),
            ]
        )
    header = ["model", "experiment", "checkpoint", "ideal", *PIPELINES, "ours/original", "PyTorch's own"]
    return table(lines, header)


def _speed_up(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "-"
    return f"- {answer['none']}" if "none" in answer else _middle(answer.get("speed-up"))


def _middle(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['median']:.2f}"


def speed_targets() -> str:
    return targets_table(_result("speed")["targets"])


def speed_published() -> str:
    return published_table(_result("speed")["published"]["samples/s"])


def capacity() -> str:
    return largest_table(_result("capacity"))


def capacity_growth() -> str:
    return growth_table(_result("capacity"))


def transparency() -> str:
    return accuracy_table(_result("transparency"))


def ablation() -> str:
    return ablation_table(_result("ablation"))


def timeline() -> str:
    return timeline_table(_result("timeline"))


def memory_by_mode() -> str:
    """Peaks of the transformer on four partitions, which is what a guide needs."""
    modes = ("never", "except_last", "always")
    found = {
        (row["m"], row["mode"]): row
        for row in _result("memory")["rows"]
        if (row["model"], row["n"], row["threads"], row["gradients"]) == ("transformer", 4, "inline", "absent")
    }
    rows = []
    for m in sorted({m for m, _ in found}):
        peaks = [found[m, mode]["ours"]["peak"] for mode in modes]
        theirs = found[m, "always"]["original"]["peak"]
        rows.append([m, *map(_mebibytes, [found[m, "always"]["plain"]["peak"], *peaks, theirs])])
    header = ["micro-batches", "plain", *(f"`'{mode}'`" for mode in modes), "original, `'always'`"]
    return table(rows, header)


def host_time_by_mode() -> str:
    """Forward and backward together, without workers."""
    rows = []
    for row in _result("overhead")["modes"]:
        if row["threads"] == "inline":
            times = [sum(row[part][peer]["median"] for part in ("forward", "backward")) for peer in PEERS]
            rows.append([f"`'{row['mode']}'`", *(f"{time:.0f}" for time in times)])
    return table(rows, ["checkpoint", *PEERS])


def balance_vectors() -> str:
    rows = [
        [
            row["costs"],
            f"{row['ours']['missed']:.0%}",
            f"{row['ours']['worst']:.3f}",
            f"{row['original']['missed']:.0%}",
            f"{row['original']['mean']:.3f}",
            f"{row['original']['worst']:.3f}",
        ]
        for row in _result("balance")["vectors"]
    ]
    return table(
        rows, ["costs", "ours: missed", "ours: worst", "original: missed", "original: mean", "original: worst"]
    )


def balance_reality() -> str:
    rows = [
        [
            row["way"],
            " ".join(map(str, row["balance"])),
            f"{1000 * row['predicted']:.0f}",
            _milliseconds(row["measured"]),
        ]
        for row in _result("balance")["reality"]
    ]
    return table(rows, ["balance", "layers", "predicted, ms", "measured, ms"])


def skips() -> str:
    rows = []
    for row in _result("skips")["rows"]:
        ways = row["portals"], row["tuples"]
        figures = [f"{way[what] / 1e6:.2f}" for what in ("total", "busiest") for way in ways]
        rows.append([len(row["balance"]), *figures, f"{ways[1]['total'] / ways[0]['total']:.2f}"])
    return table(
        rows,
        [
            "partitions",
            "all, portals",
            "all, tuples",
            "busiest pair, portals",
            "busiest pair, tuples",
            "tuples / portals",
        ],
    )


def faults() -> str:
    """What has come of the processes that were brought to harm, by what happened to them and where."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in _result("faults")["rows"]:
        groups.setdefault((row["kind"], row["place"]), []).append(row)
    counted = ("ended", "same_losses", "others_that_told", "left_behind")
    rows = [
        [*key, len(found), *(sum(row[name] for row in found) for name in counted)]
        for key, found in sorted(groups.items())
    ]
    return table(rows, ["harm", "where", "trials", "ended", "same losses", "others that told", "left behind"])


def robustness() -> str:
    """Random examples, and what one process holds at the start of its cells and at their end."""
    result = _result("robustness")
    rows = [[part, f"{result[part]['examples']:,}", result[part]["failures"]] for part in ("models", "faults")]
    return table(rows, ["random", "tried", "failed"])


def endurance() -> str:
    counted = ("faults", "tensors", "threads", "files")
    rows = [
        [f"{row['cells']:,}", f"{row['memory'] / 2**20:.1f}", *(row[name] for name in counted)]
        for row in _result("robustness")["endurance"]
    ]
    return table(rows[:2] + rows[-1:], ["cells", "memory, MiB", "faults", "tensors", "threads", "open files"])


def batchnorm() -> str:
    rows = [
        [
            row["m"],
            "training" if row["grad"] else "no gradients",
            row["part"],
            *(shown(row[peer]["ratio"], 2) for peer in PEERS[:2]),
        ]
        for row in _result("batchnorm")["rows"]
    ]
    return table(rows, ["micro-batches", "mode", "part", "ours", "original"])


def distributed() -> str:
    return distributed_table(_result("distributed"))


def gpu() -> str:
    return gpu_table()


def summary() -> str:
    """What is new beside the original, in a few lines."""
    overhead = {(row["threads"], row["mode"]): row for row in _result("overhead")["modes"]}
    inline = overhead["inline", "except_last"]
    rows = []
    for part in ("forward", "backward"):
        figures = [f"{inline[part][peer]['median']:.0f} us" for peer in PEERS[:2]]
        rows.append([f"host time of a cell, {part}", *figures, _link("overhead")])
    peaks = [row for row in _result("memory")["rows"] if row["mode"] == "always"]
    for model in ("conv", "transformer"):
        row = next(
            r
            for r in peaks
            if (r["model"], r["n"], r["m"], r["threads"], r["gradients"]) == (model, 4, 8, "inline", "absent")
        )
        figures = [f"{_mebibytes(row[peer]['peak'])} MiB" for peer in PEERS[:2]]
        rows.append([f"peak memory of a step, {model}, all checkpointed", *figures, _link("memory")])
    splits = _result("balance")["vectors"]
    missed = {peer: [row[peer]["missed"] for row in splits] for peer in PEERS[:2]}
    rows.append(
        ["balances that are not the best", *(_span(missed[peer], "{:.0%}") for peer in PEERS[:2]), _link("balance")]
    )
    norms = [row for row in _result("batchnorm")["rows"] if row["part"] == "forward"]
    slower = {peer: [row[peer]["ratio"]["median"] for row in norms] for peer in PEERS[:2]}
    rows.append(
        [
            "deferred batch norm, forward, over a plain one",
            *(_span(slower[peer], "{:.2f}") for peer in PEERS[:2]),
            _link("batchnorm"),
        ]
    )
    copied = _result("skips")["rows"][-1]
    rows.append(
        [
            f"a U-Net's copies between {len(copied['balance'])} devices, portals / tuples",
            f"{copied['portals']['total'] / 1e6:.0f} / {copied['tuples']['total'] / 1e6:.0f} MB",
            "",
            _link("skips"),
        ]
    )
    return table(rows, ["measured", "ours", "torchgpipe 0.0.7", "result"])


PEERS = ("ours", "original", "plain")


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _milliseconds(figures: dict[str, float]) -> str:
    return shown({name: 1000 * seconds for name, seconds in figures.items()}, 0)


def _span(values: Sequence[float], how: str) -> str:
    low, high = how.format(min(values)), how.format(max(values))
    return low if low == high else f"{low} - {high}"


def _link(name: str) -> str:
    return f"[{name}.json](benchmarks/results/{name}.json)"


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        host_time,
        host_time_by_mode,
        growth,
        deep,
        several,
        memory,
        memory_by_mode,
        random_memory,
        balance_vectors,
        balance_reality,
        skips,
        faults,
        robustness,
        endurance,
        batchnorm,
        distributed,
        parts,
        nodes,
        speed,
        speed_targets,
        speed_published,
        capacity,
        capacity_growth,
        transparency,
        ablation,
        timeline,
        gpu,
        summary,
    )
}

#: What stands above a table as soon as it is measured.
PICTURES = {
    "speed": "![Speed-up over the number of partitions, for each model](results/speed.svg)\n\n",
    "capacity": "![The largest model that fits, and the peak of a step](results/capacity.svg)\n\n",
    "transparency": "![The accuracy of every run](results/transparency.svg)\n\n",
    "ablation": "![A step with none of the mechanisms, and with one after another](results/ablation.svg)\n\n",
}


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def pages() -> Iterable[Path]:
    """The pages that have tables."""
    return [README, README.parent.parent / "README.md"]


def main() -> None:
    for page in pages():
        page.write_text(render(page.read_text()))


if __name__ == "__main__":
    main()

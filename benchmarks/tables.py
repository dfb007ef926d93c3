"""Writes the tables of README.md from the results, so that no figure is copied by hand.

python -m benchmarks.tables    # after a benchmark has written its JSON
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.overhead import shown
from benchmarks.records import RESULTS, table

README = Path(__file__).resolve().parent / "README.md"


def render(text: str) -> str:
    """A page with every table between its marks as the results have it now."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

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


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (host_time, growth, deep, memory, parts, nodes)
}


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def pages() -> Iterable[Path]:
    """The pages that have tables."""
    return [README]


def main() -> None:
    for page in pages():
        page.write_text(render(page.read_text()))


if __name__ == "__main__":
    main()

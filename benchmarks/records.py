"""What a benchmark leaves behind: a JSON file that says on what it was measured, and a table of it.

Figures are medians over turns, with the lowest and the highest beside them. Ratios are taken within a
turn, and then their median: the load of a shared machine moves both sides of a ratio together.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "PASSES",
    "RESULTS",
    "Row",
    "aim",
    "aims_table",
    "environment",
    "named_way",
    "ratios",
    "shown",
    "spread",
    "spread_of_turns",
    "table",
    "table_of",
    "write",
]

#: A row of a result, or of its table.
Row = dict[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"

#: The passes of a step, as they are timed.
PASSES = ("forward", "backward")

KIB, MIB, GIB = 2**10, 2**20, 2**30


def named_way(way: str) -> str:
    """Return the name of a way to train in a table: that of a schedule is its own."""
    return {"call": "forward and backward"}.get(way, way)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median of several turns, with the lowest and the highest."""
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def spread_of_turns(values: Iterable[float]) -> dict[str, Any]:
    """Return the spread of several turns, and the turns themselves."""
    turns = list(values)
    return {**spread(turns), "turns": turns}


def ratios(small: Sequence[float], large: Sequence[float]) -> dict[str, float]:
    """Return how many times lower the first is than the second, turn by turn, as a spread."""
    return spread(b / a for a, b in zip(small, large, strict=True))


def shown(figures: dict[str, float] | None, digits: int = 1, scale: float = 1.0) -> str:
    """Return a spread, times a scale, as the cell of a table; a dash if there is none."""
    if figures is None:
        return "-"
    median, low, high = (f"{figures[end] * scale:.{digits}f}" for end in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def aim(name: str, reached: float, *, least: float = -math.inf, most: float = math.inf) -> dict[str, Any]:
    """Return what was aimed at, as a lowest or a highest value, and what was reached."""
    bound = {"at most": most} if math.isfinite(most) else {"at least": least}
    return {"aim": name, **bound, "reached": reached, "met": least <= reached <= most}


def aims_table(result: dict[str, Any]) -> str:
    """Return a table of what all parts of a result, or one of them, have aimed at and reached."""
    lines = []
    for part in result.get("parts", {"": result}).values():
        for aimed in part.get("aims", ()):
            bound = next(f"{words} {aimed[words]}" for words in ("at least", "at most") if words in aimed)
            lines.append([aimed["aim"], bound, f"{aimed['reached']:.2f}", "yes" if aimed["met"] else "no"])
    return table(lines, ["aim", "bound", "reached", "met"])


def environment() -> dict[str, Any]:
    """Return what the figures depend on, without names of users, hosts or folders."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _module() -> str:
    """Return the name of the module that was started, as `python -m` takes it."""
    path = Path(sys.argv[0]).resolve()
    folders = path.parent.relative_to(RESULTS.parent).parts if path.is_relative_to(RESULTS.parent) else ()
    return ".".join(["benchmarks", *folders, *([] if path.stem == "__main__" else [path.stem])])


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _commit() -> str | None:
    """Return the commit that was measured; with a `+` if the package differs from it."""

    def git(*args: str) -> str:
        checkout = RESULTS.parent.parent
        done = subprocess.run(["git", *args], cwd=checkout, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "torchgpipe") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a result as JSON: keys in the order of the result, one figure a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nwritten: {path.name}")


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Return a Markdown table with aligned columns: words left, figures right. Without rows it is empty."""
    if not rows:
        return ""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[c]) for row in [list(header), *cells]) for c in range(len(header))]
    numeric = [all(_is_figure(row[c]) for row in cells) for c in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            f" {cell.rjust(width) if right else cell.ljust(width)} "
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return f"|{'|'.join(padded)}|"

    rule = [f"{'-' * (width + 1)}{':' if right else '-'}" for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(header), f"|{'|'.join(rule)}|", *map(line, cells)])


Column = str | Callable[[Any], object]


def table_of(rows: Iterable[Any], columns: Mapping[str, Column]) -> str:
    """Return a table of rows of a result.

    Args:
        rows: the rows
        columns: by the words of the header what stands below, a function of a row or a key of it. After a colon the key
            has a format, of a spread the number of digits: ``"seconds:.3f"``, ``"ratio:2"``.
    """

    def cell(row: Any, column: Column) -> object:
        if callable(column):
            return column(row)
        key, _, how = column.partition(":")
        value = row.get(key)
        if value is None or isinstance(value, dict):
            return shown(value, int(how or 1))
        return f"{value:{how}}" if how else value

    return table([[cell(row, column) for column in columns.values()] for row in rows], list(columns))


def _is_figure(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in {"-", ""}

"""Writes the tables of the READMEs from the results, so that no figure is copied by hand.

Each benchmark makes the tables of its own result; here stands which table has which name on a page, and the summary of
all results. The documentation asks for its tables when it is built.

    python -m benchmarks.tables    # after a benchmark has written its JSON
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    balance,
    batch_norm,
    checkpoints,
    distributed,
    fits,
    host_time,
    mechanisms,
    memory,
    offload,
    plan,
    published,
    schedules,
    simulated_gpus,
    training,
    trl,
    volumes,
    windows,
)
from benchmarks.campaigns import diffusion_lora, faults, packages, robustness
from benchmarks.campaigns.architectures.report import architectures, supported_models, unsupported_models
from benchmarks.gpu import gpu_speed, gpu_table
from benchmarks.program import Part
from benchmarks.records import MIB, PASSES, RESULTS, aims_table, table

README = Path(__file__).resolve().parent / "README.md"
#: The page of all tables.
RESULTS_PAGE = RESULTS / "README.md"

#: Whose parts have tables.
BENCHMARKS = (
    *(balance, batch_norm, checkpoints, distributed, fits, host_time, mechanisms, memory, offload, plan, published),
    *(schedules, simulated_gpus, training, trl, volumes, windows, diffusion_lora, faults, packages, robustness),
)


def render(text: str) -> str:
    """Return a page with the tables of the current results between their marks."""

    def fill(match: re.Match[str]) -> str:
        try:
            rows = TABLES[match[2]]() + "\n"
        except FileNotFoundError:  # not measured yet
            rows = ""
        return f"{match[1]}\n{rows}{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", fill, text, flags=re.DOTALL)


def summary() -> str:
    """Return a table of the main figures beside the original's."""
    pair = ("ours", "original")
    rows = []
    cells = {(row["threads"], row["mode"]): row for row in _result("overhead")["modes"]}
    for part in PASSES:
        figures = [f"{cells['inline', 'except_last'][part][peer]['median']:.0f} us" for peer in pair]
        rows.append([f"host time of a cell, {part}", *figures, _link("overhead")])
    keys = ("mode", "n", "m", "threads", "gradients")
    for row in _result("memory")["rows"]:
        same = [row[key] for key in keys] == ["always", 4, 8, "inline", "absent"]
        if same and row["model"] in ("conv", "transformer"):
            figures = [f"{row[peer]['peak'] / MIB:.1f} MiB" for peer in pair]
            rows.append([f"peak memory of a step, {row['model']}, all checkpointed", *figures, _link("memory")])
    splits = _result("balance")["vectors"]
    missed = [_span([row[peer]["missed"] for row in splits], "{:.0%}") for peer in pair]
    rows.append(["balances that are not the best", *missed, _link("balance")])
    norms = [row for row in _result("batchnorm")["rows"] if row["part"] == "forward"]
    slower = [_span([row[peer]["ratio"]["median"] for row in norms], "{:.2f}") for peer in pair]
    rows.append(["deferred batch norm, forward, over a plain one", *slower, _link("batchnorm")])
    copied = _result("skips")["rows"][-1]
    portals, tuples = (copied[way]["total"] / 1e6 for way in ("portals", "tuples"))
    about = f"a U-Net's copies between {len(copied['balance'])} devices, portals / tuples"
    rows.append([about, f"{portals:.0f} / {tuples:.0f} MB", "", _link("skips")])
    return table(rows, ["measured", "ours", "torchgpipe 0.0.7", "result"])


def _span(values: Sequence[float], how: str) -> str:
    low, high = how.format(min(values)), how.format(max(values))
    return low if low == high else f"{low} - {high}"


def _link(name: str) -> str:
    return f"[{name}.json](benchmarks/results/{name}.json)"


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _of(part: Part, table_of_part: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    return lambda: table_of_part(part.read(part.path()))


def _whole(name: str, table_of_result: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    return lambda: table_of_result(_result(name))


#: By the name that a page calls a table by: that of the function which makes it.
TABLES: dict[str, Callable[[], str]] = {
    table_of_part.__name__: _of(part, table_of_part)
    for benchmark in BENCHMARKS
    for part in benchmark.PARTS.values()
    for table_of_part in part.tables.values()
}
TABLES |= {
    f"{name}_aims": _whole(result, aims_table)
    for name, result in (
        ("step", "step"),
        ("pipelined", "pipelined"),
        ("plan", "plan"),
        ("windows", "windows"),
        ("simulated_gpus", "simulated_gpus"),
    )
}
TABLES |= {
    table_of_models.__name__: _whole("architectures", table_of_models)
    for table_of_models in (architectures, supported_models, unsupported_models)
}
TABLES |= {"robustness": _whole("robustness", robustness.robustness), "gpu": gpu_table, "gpu_speed": gpu_speed}
TABLES |= {"summary": summary}


def pages() -> Iterable[Path]:
    """Return the pages that have tables."""
    return [README, RESULTS_PAGE, README.parent.parent / "README.md"]


def main() -> None:
    for page in pages():
        page.write_text(render(page.read_text()))


if __name__ == "__main__":
    main()

"""Writes the tables of both READMEs from the results, so that no figure is copied by hand.

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
    ablation,
    balance,
    batchnorm,
    capacity,
    distributed,
    faults,
    memory,
    overhead,
    packages,
    pipelined,
    plan,
    profile_cell,
    random_memory,
    robustness,
    simulated_gpus,
    skips,
    speed,
    step,
    timeline,
    transparency,
)
from benchmarks.architectures import report
from benchmarks.gpu import gpu_table
from benchmarks.records import MIB, PARTS, RESULTS, table

README = Path(__file__).resolve().parent / "README.md"


def render(text: str) -> str:
    """Return a page with the tables of the current results between their marks."""

    def fill(match: re.Match[str]) -> str:
        try:
            rows = PICTURES.get(match[2], "") + TABLES[match[2]]() + "\n"
        except FileNotFoundError:  # not measured yet
            rows = ""
        return f"{match[1]}\n{rows}{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", fill, text, flags=re.DOTALL)


def summary() -> str:
    """Return a table of the main figures beside the original's."""
    pair = ("ours", "original")
    rows = []
    cells = {(row["threads"], row["mode"]): row for row in _result("overhead")["modes"]}
    for part in PARTS:
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


def _of(name: str, make: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    return lambda: make(_result(name))


#: By the name that a page calls a table by.
TABLES: dict[str, Callable[[], str]] = {
    "host_time": _of("overhead", overhead.host_time),
    "host_time_by_mode": _of("overhead", overhead.host_time_by_mode),
    "several": _of("overhead", overhead.several),
    "growth": _of("overhead", overhead.growth),
    "deep": _of("overhead", overhead.deep),
    "memory": _of("memory", memory.memory),
    "memory_by_mode": _of("memory", memory.memory_by_mode),
    "random_memory": _of("random_memory", random_memory.random_memory),
    "balance_vectors": _of("balance", balance.balance_vectors),
    "balance_reality": _of("balance", balance.balance_reality),
    "skips": _of("skips", skips.skips),
    "faults": _of("faults", faults.faults),
    "robustness": _of("robustness", robustness.robustness),
    "endurance": _of("robustness", robustness.endurance_table),
    "batchnorm": _of("batchnorm", batchnorm.batchnorm),
    "distributed": _of("distributed", distributed.distributed),
    "parts": _of("profile_cell", profile_cell.parts),
    "nodes": _of("profile_cell", profile_cell.nodes),
    "speed": _of("speed", speed.speed_ups),
    "speed_targets": _of("speed", speed.speed_targets),
    "speed_published": _of("speed", speed.speed_published),
    "step_speed": _of("step", step.step_speed),
    "step_sleeping": _of("step", step.step_sleeping),
    "step_memory": _of("step", step.step_memory),
    "step_host": _of("step", step.step_host),
    "step_aims": _of("step", step.step_aims),
    "pipelined_host": _of("pipelined", pipelined.pipelined_host),
    "pipelined_times": _of("pipelined", pipelined.pipelined_times),
    "pipelined_speed": _of("pipelined", pipelined.pipelined_speed),
    "pipelined_sleeping": _of("pipelined", pipelined.pipelined_sleeping),
    "pipelined_memory": _of("pipelined", pipelined.pipelined_memory),
    "pipelined_splits": _of("pipelined", pipelined.pipelined_splits),
    "pipelined_proof": _of("pipelined", pipelined.pipelined_proof),
    "pipelined_aims": _of("pipelined", pipelined.pipelined_aims),
    "simulated_blocks": _of("simulated_gpus", simulated_gpus.simulated_blocks),
    "simulated_devices": _of("simulated_gpus", simulated_gpus.simulated_devices),
    "simulated_cards": _of("simulated_gpus", simulated_gpus.simulated_cards),
    "simulated_aims": _of("simulated_gpus", simulated_gpus.simulated_aims),
    "plan_prediction": _of("plan", plan.plan_prediction),
    "plan_memory": _of("plan", plan.plan_memory),
    "plan_choice": _of("plan", plan.plan_choice),
    "plan_optimal": _of("plan", plan.plan_optimal),
    "plan_splits": _of("plan", plan.plan_splits),
    "plan_search": _of("plan", plan.plan_search),
    "plan_search_single": _of("plan", plan.plan_search_single),
    "plan_aims": _of("plan", plan.plan_aims),
    "capacity": _of("capacity", capacity.capacity),
    "capacity_growth": _of("capacity", capacity.capacity_growth),
    "transparency": _of("transparency", transparency.transparency),
    "ablation": _of("ablation", ablation.ablation),
    "timeline": _of("timeline", timeline.timeline),
    "architectures": _of("architectures", report.counts),
    "supported_models": _of("architectures", report.supported_models),
    "unsupported_models": _of("architectures", report.unsupported_models),
    "packages": _of("packages", packages.packages),
    "import_times": _of("packages", packages.import_times),
    "gpu": gpu_table,
    "summary": summary,
}

#: What stands above a table as soon as it is measured.
PICTURES = {
    "speed": "![Speed-up over the number of partitions, for each model](results/speed.svg)\n\n",
    "step_speed": "![The speed-up of a step over the plain micro-batches](results/step.svg)\n\n",
    "capacity": "![The largest model that fits, and the peak of a step](results/capacity.svg)\n\n",
    "transparency": "![The accuracy of every run](results/transparency.svg)\n\n",
    "ablation": "![A step with none of the mechanisms, and with one after another](results/ablation.svg)\n\n",
}


def pages() -> Iterable[Path]:
    """Return the pages that have tables."""
    return [README, README.parent.parent / "README.md"]


def main() -> None:
    for page in pages():
        page.write_text(render(page.read_text()))


if __name__ == "__main__":
    main()

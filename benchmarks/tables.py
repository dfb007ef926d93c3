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
    distributed,
    host_proof,
    host_time,
    host_timeline,
    mechanisms,
    memory,
    memory_capacity,
    memory_copies,
    offload,
    plan_choice,
    plan_prediction,
    plan_search,
    plan_splits,
    schedules,
    simulated_gpus,
    training_accuracy,
    training_cores,
    training_speed,
)
from benchmarks.campaigns import faults, packages, robustness
from benchmarks.campaigns.architectures import report
from benchmarks.gpu import gpu_table
from benchmarks.records import MIB, PARTS, RESULTS, aims_table, table

README = Path(__file__).resolve().parent / "README.md"
#: The page of all tables.
RESULTS_PAGE = RESULTS / "README.md"


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


def figures() -> str:
    """Return a table of the ten figures that matter, also those that are no praise."""
    cells = {(row["threads"], row["mode"]): row for row in _result("overhead")["modes"]}

    def cell(threads: str) -> str:
        row = cells[threads, "except_last"]
        each = {peer: sum(row[part][peer]["median"] for part in PARTS) for peer in ("ours", "original", "plain")}
        return " / ".join(f"{microseconds:.0f}" for microseconds in each.values()) + " us"

    step, pipelined, plan_ = (_result(name)["parts"] for name in ("step", "pipelined", "plan"))
    calls = {
        threads: [row["step/call"]["median"] for row in step["host"]["rows"] if row["threads"] == threads]
        for threads in ("inline", "workers")
    }
    own = [
        row["micro-batch"]["median"]
        for threads in ("inline", "workers")
        for row in pipelined["host"]["costs"]
        if (row["threads"], row["way"]) == (threads, "step")
    ]
    random = _result("random_memory")["counts"]
    speed = step["speed"]["rows"]
    alike = [row["over the same"][name]["median"] for row in speed for name in ("GPipe", "1F1B")]
    whole = [row["speed-up"]["whole, 2 threads"]["median"] for row in speed]
    best = [max(row["speed-up"][name]["median"] for name in training_cores.PLACES) for row in speed]
    naive = [row["over naive"]["1F1B"]["median"] for row in pipelined["speed"]["rows"]]
    slept = [row["simulated/measured"]["median"] for row in step["sleeping"]["rows"]]
    chosen = [row["chosen/best"] for row in plan_["choice"]["rows"]]
    missed = _span([row["ours"]["missed"] for row in _result("balance")["vectors"]], "{:.0%}")
    theirs = _span([row["original"]["missed"] for row in _result("balance")["vectors"]], "{:.0%}")
    below, models = random["up to"]["1.0"], random["models"]
    rows = [
        ["host time of a cell in one thread, ours / 0.0.7 / the plain layers", cell("inline"), "overhead"],
        ["the same with eight workers that share one interpreter", cell("workers"), "overhead"],
        [
            "host time of `step` over forward and backward, one thread / workers",
            " / ".join(_span(own_ratios, "{:.2f}") for own_ratios in calls.values()),
            "step",
        ],
        [
            "host time of a micro-batch of a pipelined module, one thread / workers",
            " / ".join(f"{microseconds:.0f}" for microseconds in own) + " us",
            "pipelined",
        ],
        [
            "peak memory of random models at most that of 0.0.7; the highest ratio",
            f"{below} of {models}; {random['highest']:.3f}",
            "random_memory",
        ],
        ["a step on two cores, over PyTorch's own schedule of the same kind", _span(alike, "{:.2f}"), "step"],
        [
            "a step on two cores over micro-batches in one thread: best pipeline / no pipeline, all at once",
            f"{_span(best, '{:.2f}')} / {_span(whole, '{:.2f}')}",
            "step",
        ],
        ["language models on two cores, 1F1B over naive placement", _span(naive, "{:.2f}"), "pipelined"],
        ["layers that sleep on 2 to 8 devices, simulated over measured step", _span(slept, "{:.2f}"), "step"],
        [
            "splits that are not the best, ours / 0.0.7; a planned way over the best of all, measured",
            f"{missed} / {theirs}; {_span(chosen, '{:.2f}')}",
            "balance",
        ],
    ]
    lines = [[what, figure, f"[{name}.json](results/{name}.json)"] for what, figure, name in rows]
    return table(lines, ["measured", "figures", "result"])


def _span(values: Sequence[float], how: str) -> str:
    low, high = how.format(min(values)), how.format(max(values))
    return low if low == high else f"{low} - {high}"


def _link(name: str) -> str:
    return f"[{name}.json](benchmarks/results/{name}.json)"


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _of(name: str, make: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Return what makes a table of a result; ``"step/host"`` is the part `host` of `step.json`."""
    file, _, part = name.partition("/")

    def made() -> str:
        result = _result(file)
        return make(result["parts"].get(part, {"rows": [], "costs": []}) if part else result)

    return made


#: By the name that a page calls a table by.
TABLES: dict[str, Callable[[], str]] = {
    name: _of(result, make)
    for name, (result, make) in {
        "host_time": ("overhead", host_time.host_time),
        "host_time_by_mode": ("overhead", host_time.host_time_by_mode),
        "several": ("overhead", host_time.several),
        "growth": ("overhead", host_time.growth),
        "deep": ("overhead", host_time.deep),
        "step_host": ("step/host", host_time.step_host),
        "pipelined_host": ("pipelined/host", host_time.pipelined_host),
        "pipelined_times": ("pipelined/host", host_time.pipelined_times),
        "pipelined_proof": ("pipelined/proof", host_proof.pipelined_proof),
        "timeline": ("timeline", host_timeline.timeline),
        "memory": ("memory", memory.memory),
        "memory_by_mode": ("memory", memory.memory_by_mode),
        "random_memory": ("random_memory", memory.random_memory),
        "capacity": ("capacity", memory_capacity.capacity),
        "capacity_growth": ("capacity", memory_capacity.capacity_growth),
        "skips": ("skips", memory_copies.skips),
        "step_sleeping": ("step/sleeping", schedules.step_sleeping),
        "step_memory": ("step/memory", schedules.step_memory),
        "pipelined_sleeping": ("pipelined/sleeping", schedules.pipelined_sleeping),
        "pipelined_memory": ("pipelined/memory", schedules.pipelined_memory),
        "speed": ("speed", training_speed.speed_ups),
        "speed_targets": ("speed", training_speed.speed_targets),
        "speed_published": ("speed", training_speed.speed_published),
        "step_speed": ("step/speed", training_cores.step_speed),
        "step_aims": ("step", aims_table),
        "pipelined_speed": ("pipelined/speed", training_cores.pipelined_speed),
        "pipelined_splits": ("pipelined/splits", training_cores.pipelined_splits),
        "pipelined_aims": ("pipelined", aims_table),
        "transparency": ("transparency", training_accuracy.transparency),
        "ablation": ("ablation", mechanisms.ablation),
        "batchnorm": ("batchnorm", mechanisms.batchnorm),
        "balance_vectors": ("balance", balance.balance_vectors),
        "balance_reality": ("balance", balance.balance_reality),
        "distributed": ("distributed", distributed.distributed),
        "simulated_blocks": ("simulated_gpus/blocks", simulated_gpus.simulated_blocks),
        "simulated_devices": ("simulated_gpus/devices", simulated_gpus.simulated_devices),
        "simulated_cards": ("simulated_gpus/cards", simulated_gpus.simulated_cards),
        "simulated_aims": ("simulated_gpus", aims_table),
        "offload": ("offload", offload.offload),
        "plan_prediction": ("plan/prediction", plan_prediction.plan_prediction),
        "plan_memory": ("plan/prediction", plan_prediction.plan_memory),
        "plan_choice": ("plan/choice", plan_choice.plan_choice),
        "plan_optimal": ("plan/splits", plan_splits.plan_optimal),
        "plan_splits": ("plan/splits", plan_splits.plan_splits),
        "plan_search": ("plan/search", plan_search.plan_search),
        "plan_aims": ("plan", aims_table),
        "faults": ("faults", faults.faults),
        "robustness": ("robustness", robustness.robustness),
        "endurance": ("robustness", robustness.endurance_table),
        "architectures": ("architectures", report.counts),
        "supported_models": ("architectures", report.supported_models),
        "unsupported_models": ("architectures", report.unsupported_models),
        "packages": ("packages", packages.packages),
        "import_times": ("packages", packages.import_times),
    }.items()
}
TABLES |= {"gpu": gpu_table, "summary": summary, "figures": figures}

#: What stands above a table as soon as it is measured.
PICTURES = {
    "speed": "![Speed-up over the number of partitions, for each model](speed.svg)\n\n",
    "step_speed": "![The speed-up of a step over the plain micro-batches](step.svg)\n\n",
}


def pages() -> Iterable[Path]:
    """Return the pages that have tables."""
    return [README, RESULTS_PAGE, README.parent.parent / "README.md"]


def main() -> None:
    for page in pages():
        page.write_text(render(page.read_text()))


if __name__ == "__main__":
    main()

"""The aims for the speed of training, and what a result of `speed.py` has reached."""

from __future__ import annotations

from typing import Any

from benchmarks.records import ratios, shown, table
from benchmarks.training import TINY

#: The plain model, one micro-batch after the other: what splitting costs without a pipeline.
SPLIT = "micro-batches"

#: What is aimed at: a ratio of speeds, and of which.
AIMS = {
    "limit": (0.9, "of what recomputation allows on one device"),
    "split": (0.9, "of the same, the plain model being given micro-batches as well"),
    "checkpoint_sequential": (1.0, "times the speed of checkpoint_sequential, in equal memory"),
    "original": (1.0, "times the speed of torchgpipe 0.0.7"),
    "host": (1.3, "times the speed of torchgpipe 0.0.7, where the host is the limit"),
}

#: Up to this ratio memory is equal: a thousandth more is an output, or the gradients of some layers.
EQUAL = 1.001


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each aim with what was reached: medians of ratios, turn by turn."""
    reached = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        ours = [row for row in own if "throughput" in row.get("ours", {})]
        alone = [row for row in ours if row["experiment"] == "pipeline-1"]

        split = next((row["plain"] for row in own if row["experiment"] == SPLIT), {})
        for row in alone:
            if "speed-up" in row["ours"]:
                share = {key: value / row["ideal"] for key, value in row["ours"]["speed-up"].items()}
                reached.append(_target("limit", model, f"pipeline-1, {row['mode']}", share))
            if "seconds" in split:
                over = ratios(row["ours"]["seconds"], split["seconds"])
                share = {key: value / row["ideal"] for key, value in over.items()}
                reached.append(_target("split", model, f"pipeline-1, {row['mode']}", share))

        other = next((row["checkpoint_sequential"] for row in own if "checkpoint_sequential" in row), {})
        if "peak" in other:
            frugal = [row for row in ours if row["ours"].get("peak", float("inf")) <= EQUAL * other["peak"]]
            found = [(row, ratios(row["ours"]["seconds"], other["seconds"])) for row in frugal]
            if found:
                row, best = max(found, key=lambda one: one[1]["median"])
                where = f"{row['experiment']}, {row['mode']}"
                reached.append(_target("checkpoint_sequential", model, where, best))

        aim = "host" if model in TINY else "original"
        for row in ours:
            if "over original" in row["ours"]:
                where = f"{row['experiment']}, {row['mode']}"
                reached.append(_target(aim, model, where, row["ours"]["over original"]))
    return reached


def _target(aim: str, model: str, where: str, figures: dict[str, float]) -> dict[str, Any]:
    least, _ = AIMS[aim]
    met = figures["median"] >= least
    return {"aim": aim, "at least": least, "model": model, "where": where, "reached": figures, "met": met}


def targets_table(reached: list[dict[str, Any]]) -> str:
    """Return a table: for each aim and model how often it was met, and the lowest and the highest."""
    lines = []
    for aim, (least, words) in AIMS.items():
        for model in dict.fromkeys(one["model"] for one in reached):
            own = [one for one in reached if (one["aim"], one["model"]) == (aim, model)]
            if own:
                own.sort(key=lambda one: one["reached"]["median"])
                ends = [f"{shown(one['reached'], 2)}, {one['where']}" for one in (own[0], own[-1])]
                met = f"{sum(one['met'] for one in own)} of {len(own)}"
                lines.append([f"{least} {words}", model, met, *ends])
    return table(lines, ["aim, at least", "model", "met", "lowest", "highest"])

"""`GPipe.step`: its schedules beside PyTorch's own, their simulations, and forward and backward of the same pipeline.

    machine     what a second thread gains, and whether the halves of the models take the same time
    speed       a step of two partitions on two cores, in many ways (`step_speed.py`)
    sleeping    layers that sleep: simulated over measured time (`step_sleeping.py`)
    memory      the activations that each device keeps (`step_memory.py`)
    host        the host time of a cell (`step_host.py`)

Each part can be run by itself; parts that were measured before stay in the result. Figures are medians over turns, and
ratios are taken within a turn. `speed` means nothing where other processes take a core.

    python -m benchmarks.step                            # all parts, about 20 minutes on two idle cores
    python -m benchmarks.step --only sleeping memory
    python -m benchmarks.step --device cuda:0            # several partitions on a GPU, and on it and the CPU
    python -m benchmarks.step --draw                     # only the tables and the picture
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.pictures import COLORS, INK, new_figure, open_axes, shared_legend
from benchmarks.program import Command
from benchmarks.records import of_part, shown, table
from benchmarks.step_host import host, step_host
from benchmarks.step_memory import memory, step_memory
from benchmarks.step_sleeping import sleeping
from benchmarks.step_speed import ALIKE, machine, speed

__all__ = ["step_aims", "step_host", "step_memory", "step_sleeping", "step_speed"]

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "machine": machine,
    "speed": speed,
    "sleeping": sleeping,
    "memory": memory,
    "host": host,
}

#: What a GPU has nothing to do with: PyTorch's allocator on the CPU, cores, and layers that sleep.
ONLY_CPU = ("machine", "sleeping", "memory")


# ---- Tables and the picture of a result.


def step_machine(result: dict[str, Any]) -> str:
    """Return a table of the halves of the models."""
    rows = of_part(result, "machine")
    lines = [[row["model"], row["m"], shown(row["limit"], 2), shown(row["first/second"], 2)] for row in rows]
    header = ["model", "m", "two threads over one", "first half / second half"]
    return table(lines, header) if lines else ""


def step_speed(result: dict[str, Any]) -> str:
    """Return a table of all ways of a step: milliseconds, and the speed-up over the plain micro-batches."""
    lines = []
    for row in of_part(result, "speed"):
        for name, seconds in row["seconds"].items():
            figures = {key: seconds[key] * 1e3 for key in ("median", "low", "high")}
            over = shown(row.get("over the same", {}).get(name), 2)
            lines.append([row["model"], row["m"], name, shown(figures), shown(row["speed-up"].get(name), 2), over])
        if "limit" in row:
            allowed = {key: value * row["m"] / (row["m"] + 1) for key, value in row["limit"].items()}
            lines.append([row["model"], row["m"], "what two threads allow", "-", shown(allowed, 2), "-"])
    header = ["model", "m", "step", "ms", "over micro-batches", "over PyTorch's own"]
    return table(lines, header) if lines else ""


def step_sleeping(result: dict[str, Any]) -> str:
    """Return a table of simulated and measured times of layers that sleep."""
    lines = [
        [
            row["n"],
            row["schedule"],
            f"{row['simulated']:.3f}",
            shown(row["measured"], 3),
            shown(row["simulated/measured"], 3),
            f"{row['bubble']:.1%}",
            f"{row['measured bubble']:.1%}",
        ]
        for row in of_part(result, "sleeping")
    ]
    header = ["devices", "schedule", "simulated, s", "measured, s", "ratio", "bubble", "measured"]
    return table(lines, header) if lines else ""


def step_aims(result: dict[str, Any]) -> str:
    """Return a table of what was aimed at, and reached."""
    lines = []
    for part in result.get("parts", {}).values():
        for one in part.get("aims", ()):
            bound = next(f"{words} {one[words]}" for words in ("at least", "at most") if words in one)
            lines.append([one["aim"], bound, f"{one['reached']:.2f}", "yes" if one["met"] else "no"])
    return table(lines, ["aim", "bound", "reached", "met"]) if lines else ""


def show(result: dict[str, Any]) -> dict[str, str]:
    told = {
        "halves of the models": step_machine(result),
        "a step of two partitions": step_speed(result),
        "layers that sleep": step_sleeping(result),
        "activations": step_memory(result),
        "host time of a cell": step_host(result),
        "what was aimed at": step_aims(result),
    }
    return {title: text for title, text in told.items() if text}


def draw(result: dict[str, Any]) -> Any:
    """Draw the speed-up over the plain micro-batches for each model, and what two threads allow."""
    rows = [row for row in of_part(result, "speed") if "limit" in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        return None
    figure = new_figure(4.2 * len(models) + 2.4, 3.8)
    panels = list(figure.subplots(1, len(models), squeeze=False, sharey=True).flat)
    for axes, model in zip(panels, models):
        own = [row for row in rows if row["model"] == model]
        counts = [row["m"] for row in own]
        allowed = [row["limit"]["median"] * row["m"] / (row["m"] + 1) for row in own]
        axes.plot(counts, [row["ideal"] for row in own], ":", color=INK, linewidth=1, label="ideal")
        axes.plot(counts, allowed, "--", color=INK, linewidth=1, label="what two threads allow")
        names = [name for name in own[0]["speed-up"] if not name.startswith("whole")]
        colors = dict(zip([name for name in names if name not in ALIKE.values()], COLORS))
        colors |= {other: colors[name] for name, other in ALIKE.items()}
        for name in names:
            figures = [row["speed-up"][name] for row in own]
            middle = [one["median"] for one in figures]
            error = [[abs(one["median"] - one[end]) for one in figures] for end in ("low", "high")]
            style = {"linestyle": "--", "marker": "s"} if name in ALIKE.values() else {"marker": "o"}
            axes.errorbar(counts, middle, error, color=colors[name], markersize=4, capsize=3, label=name, **style)
        open_axes(axes, title=model, xlabel="micro-batches", xticks=counts, ylim=(0, None))
    panels[0].set_ylabel("speed-up over micro-batches in one thread")
    shared_legend(figure, panels)
    return figure


def main() -> None:
    command = Command("step", __doc__, show=show, draw=draw, device=True, seconds="turn")
    command.add("--only", nargs="+", choices=list(PARTS), help="these parts; all by default")
    command.add("--models", nargs="+", choices=("mlp", "gpt"), default=["mlp", "gpt"])
    command.add("--chunks", nargs="+", type=int, default=[4, 8, 16], help="m, of machine and speed")
    command.add(
        "--shrink", type=int, default=1, help="how many times smaller the mini-batches of machine and speed are"
    )
    command.add("--partitions", nargs="+", type=int, default=[2, 4, 8], help="n, the devices of layers that sleep")
    command.add("--micro-batches", type=int, default=16, help="m, of sleeping and memory")
    command.add("--sleep", type=float, default=0.04, help="seconds that a device sleeps in F, in I and in W")
    command.add("--tiny", nargs=2, type=int, default=[8, 32], metavar=("N", "M"), help="n and m, of host")
    command.add("--turns", type=int, default=5)
    command.add("--steps", type=int, default=5, help="in a turn")
    args = command.parse()
    wanted = args.only or [name for name in PARTS if args.device == "cpu" or name not in ONLY_CPU]
    if args.device != "cpu" and set(wanted) & set(ONLY_CPU):
        command.error(f"{', '.join(ONLY_CPU)} need no GPU; leave --device out for them")

    command.finish_parts(PARTS, wanted, args, device=args.device, turns=args.turns, steps=args.steps)


if __name__ == "__main__":
    main()

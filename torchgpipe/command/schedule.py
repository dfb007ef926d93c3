"""Draw a schedule in the terminal or a file, with the time in which devices idle and what they keep."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from torchgpipe.command.report import Report
from torchgpipe.schedule import NAMES, draw_svg, draw_text, program, simulate, verified
from torchgpipe.schedule.programs import usual_places

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("-n", type=int, default=4, metavar="N", help="the number of devices (default: 4)")
    parser.add_argument("-m", type=int, default=8, metavar="M", help="the number of micro-batches (default: 8)")
    parser.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,B,W",
        help="times of forward, and of the halves of backward: of a "
        "micro-batch on a device, for the input and for the weights (default: 1,1,1)",
    )
    parser.add_argument("--svg", metavar="FILE", help="write a picture")


def run(given: argparse.Namespace) -> Report:
    """Simulate the schedule, and draw it."""
    verified(given.name)
    if min(given.n, given.m) < 1:
        raise ValueError(f"-n and -m must be 1 or more, but got {given.n} and {given.m}")
    costs = _costs(given.costs)
    places = usual_places(given.name, given.n)
    parts = len(places) / given.n
    made = program(given.name, given.m, places)
    simulated = simulate(made, {kind: cost / parts for kind, cost in costs.items()}, [1 / parts] * len(places))
    if given.svg:
        Path(given.svg).write_text(draw_svg(simulated), encoding="utf-8")
    kept = ", ".join(f"{peak:g}" for peak in simulated.peaks)
    told = f"idle {simulated.bubble:.1%}; micro-batches whose activations devices keep at most: {kept}"
    data = {
        "name": given.name,
        "places": places,
        "seconds": simulated.seconds,
        "idle": simulated.bubble,
        "kept": simulated.peaks,
        "program": [[[*action] for action in row] for row in made],
    }
    return Report(f"{draw_text(simulated, max(40, shutil.get_terminal_size((100, 24)).columns))}\n{told}", data)


def _costs(text: str) -> Any:
    try:
        forward, inputs, weights = map(float, text.split(","))
        if not all(0 < cost < float("inf") for cost in (forward, inputs, weights)):
            raise ValueError
    except ValueError:
        raise ValueError(f"--costs must be three positive numbers, F,B,W, but got {text!r}") from None
    return {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}

"""Draw the figures of the documentation.

    python docs/figures.py    # writes docs/images/*.svg

They show programs as `torchgpipe.schedule` simulates them, a plan, and committed results; `figures_runs` adds what
happens inside of runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from math import log, log2
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import figures_first  # noqa: E402
import figures_runs  # noqa: E402
from figures_picture import BACKWARD, COPY, FAINT, FORWARD, Chart, Picture, Work, timetable  # noqa: E402

from torchgpipe.schedule import ScheduleName, Simulation, program, simulate  # noqa: E402
from torchgpipe.schedule.programs import RESIDENT  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
DEVICES = [0, 1, 2, 3]
PLACES: dict[ScheduleName, list[int]] = {
    "GPipe": DEVICES,
    "1F1B": DEVICES,
    "ZeroBubble": DEVICES,
    "Interleaved1F1B": DEVICES * 2,
    "V-Min": DEVICES + DEVICES[::-1],
    "V-Half": DEVICES + DEVICES[::-1],
    "ZB-V": DEVICES + DEVICES[::-1],
    "LayerMajor": DEVICES * 2,
}
FILES = ("gpipe", "1f1b", "zero-bubble", "interleaved", "v-min", "v-half", "zb-v", "layer-major")
KINDS = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}


def works(simulation: Simulation) -> list[Work]:
    """Return the actions of a simulated program."""
    return [
        Work(device, start, start + simulation.cost(action), KINDS[action.kind], action.i)
        for device, row in enumerate(simulation.starts)
        for action, start in row
    ]


def naive() -> Picture:
    """Draw GPipe with one micro-batch, which takes as long as the four of `pipeline`."""
    whole = simulate(program("GPipe", 1, DEVICES), {"F": 4.0, "B": 8.0})
    return timetable("Four devices, one mini-batch: one device works at a time", works(whole), width=646)


def pipeline() -> Picture:
    """Draw four micro-batches."""
    title = "Four devices, four micro-batches: the devices work side by side"
    return timetable(title, works(simulate(program("GPipe", 4, DEVICES))), width=646)


def schedule(name: ScheduleName) -> Picture:
    """Draw eight micro-batches under a schedule."""
    simulation = simulate(program(name, 8, PLACES[name]))
    return timetable(f"{name}: eight micro-batches on four devices", works(simulation), 574 / simulation.seconds)


def step() -> Picture:
    """Draw the step that `python -m benchmarks.schedules --only recorded` has recorded."""
    spans = json.loads((RESULTS / "side_by_side.json").read_text())["spans"]
    cells = [Work(j, start, end, KINDS[kind], i) for j, kind, i, start, end in spans]
    unit = 640 / max(cell.end for cell in cells)
    return timetable("A measured step: eight micro-batches on four devices", cells, unit)


def bubble() -> Picture:
    """Draw the bubble by the number of micro-batches."""
    picture = Picture("The bubble by the number of micro-batches, for 2, 4 and 8 partitions", 676, 312)
    counts = [2**k for k in range(7)]
    chart = Chart(picture, 46, 12, 560, 250, lambda m: log2(m) / 6, lambda share: share)
    chart.grid(counts, {k / 4: f"{k / 4:.0%}" for k in range(5)}, "micro-batches")
    for n, colour, raised in ((2, BACKWARD, -6), (4, FORWARD, 0), (8, COPY, 6)):
        points = [(m, simulate(program("GPipe", m, range(n))).bubble) for m in (*range(1, 16), *range(16, 65, 4))]
        chart.curve(points, counts, colour)
        x, y = chart.place(*points[-1])
        picture.text(x + 8, y - raised, f"n = {n}", size=13)
    return picture


def schedule_costs() -> Picture:
    """Draw the bubble and the live micro-batches of each schedule, by the number of micro-batches."""
    picture = Picture("Bubble and live micro-batches of each schedule on four devices", 646, 312)
    resident = {name: places for name, places in PLACES.items() if name in RESIDENT}
    colours = dict(zip(resident, ("#E69F00", BACKWARD, FORWARD, COPY, "#F0E442", "#D55E00", "#0072B2")))
    picture.legend(46, 12, [(colour, name) for name, colour in colours.items()])
    picture.text(46, 42, "bubble", size=13)
    picture.text(392, 42, "live micro-batches on a device", size=13)
    counts, lives = [4, 8, 16, 32, 64], [2, 4, 8, 16, 32, 64]

    def across(m: float) -> float:
        return log2(m / 4) / 4

    bubbles = Chart(picture, 46, 62, 240, 200, across, lambda share: share / 0.5)
    peaks = Chart(picture, 392, 62, 240, 200, across, lambda live: log2(max(live, 2) / 2) / 5)
    bubbles.grid(counts, {k / 10: f"{k / 10:.0%}" for k in range(6)}, "micro-batches in a step")
    peaks.grid(counts, {live: str(live) for live in lives}, "micro-batches in a step")
    for name, places in resident.items():
        memory = [4 / len(places)] * len(places)
        made = {m: simulate(program(name, m, places), memory=memory) for m in counts}
        # The next curve covers a wide one: 1F1B has the bubble of GPipe, and ZeroBubble the peak of 1F1B.
        wide = [7 if name == covered else 2.5 for covered in ("GPipe", "1F1B")]
        bubbles.curve([(m, one.bubble) for m, one in made.items()], counts, colours[name], wide[0])
        peaks.curve([(m, max(one.peaks)) for m, one in made.items()], counts, colours[name], wide[1])
    return picture


def plan() -> str:
    """Draw a plan for 24 equal blocks, an embedding and a head, on four devices with too little memory."""
    from torchgpipe_balancing.planning.candidates import PlanInput, candidates, problem_of
    from torchgpipe_balancing.planning.costs import Costs, LayerCosts
    from torchgpipe_balancing.planning.picture import draw
    from torchgpipe_balancing.planning.problem import CellCosts, Device, Layer

    def layer(name: str, seconds: float, kept: float, parameters: int) -> LayerCosts:
        took = Layer(seconds, 2 * seconds, seconds, seconds, kept=kept, input=2**24, crossing=2**24)
        return LayerCosts((name,), parameters, parameters, 0, (took,))

    layers = [layer("embed", 1e-4, 0.0, 2**27), *[layer(f"h.{k}", 5e-3, 2**29, 2**27) for k in range(24)]]
    layers.append(layer("head", 8e-3, 2**29, 2**27))
    costs = Costs(tuple(layers), (1,), (CellCosts(),), 0.0, 0.0, "", "")
    devices = tuple(Device(f"cuda:{k}", 12 * 2**30) for k in range(4))
    question = PlanInput(costs, devices, batch=8, states=3.0, schedules=("1F1B",), chunks=(8,))
    best = candidates(question)[0]
    return draw(question, problem_of(question, best).outcome(best.choice))


AIMS = {
    "limit": "Share of the recomputation limit on one device",
    "split": "The same, with the plain model in micro-batches",
    "original": "Speed-up over torchgpipe 0.0.7",
    "host": "The same where the host is the bottleneck",
}


def speed() -> Picture:
    """Draw the speed of training steps: a line for each target and model, and a mark for each experiment.

    The chart is as narrow as a phone, so that its letters are readable there.
    """
    reached: list[dict[str, Any]] = json.loads((RESULTS / "speed.json").read_text())["targets"]
    lowest = min(one["reached"]["low"] for one in reached)
    highest = max(one["reached"]["high"] for one in reached)
    left, width, pitch, top, title = 84.0, 308.0, 19.0, 44.0, 34.0
    lines = {(one["aim"], one["model"]): None for one in reached}
    height = top + title * len({aim for aim, _ in lines}) + pitch * len(lines)
    picture = Picture("Targets and results of training steps, by target and model", 400, height, 1.2)

    def place(value: float) -> float:
        return left + width * log(value / lowest) / log(highest / lowest)

    ticks = [tick for tick in (0.01, 0.03, 0.1, 0.3, 1, 3, 10) if lowest <= tick <= highest]
    picture.box(left, 8, 8, 8, BACKWARD, round=4)
    picture.text(left + 14, 12, "reached", size=12)
    picture.box(left + 76, 8, 8, 8, FORWARD)
    picture.text(left + 90, 12, "missed", size=12)
    picture.line([(left + 150, 4), (left + 150, 20)], COPY, 2)
    picture.text(left + 158, 12, "target", size=12)
    y = top
    for aim, words in AIMS.items():
        of_aim = [one for one in reached if one["aim"] == aim]
        models = dict.fromkeys(one["model"] for one in of_aim)
        if not models:
            continue
        picture.text(0, y - 6, words, size=13)
        y += 16
        above, below = y - 8, y + pitch * len(models) - 8
        for tick in ticks:
            picture.line([(place(tick), above), (place(tick), below)], FAINT, 0.5)
        for model in models:
            picture.text(left - 8, y, model, "end", size=12)
            own = [one for one in of_aim if one["model"] == model]
            first = place(min(one["reached"]["low"] for one in own))
            last = place(max(one["reached"]["high"] for one in own))
            picture.box(first, y - 1.5, last - first, 3, FAINT)
            for one in own:
                x = place(one["reached"]["median"]) - 4
                if one["met"]:
                    picture.box(x, y - 4, 8, 8, BACKWARD, round=4)
                else:
                    picture.box(x, y - 4, 8, 8, FORWARD)
            y += pitch
        picture.line([(place(of_aim[0]["at least"]), above), (place(of_aim[0]["at least"]), below)], COPY, 2)
        y += title - 16
    for tick in ticks:
        picture.text(place(tick), y - 16, f"{tick:g}", "middle", size=12)
    return picture


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name of each file and its contents."""
    yield "naive", str(naive())
    yield "pipeline", str(pipeline())
    yield "bubble", str(bubble())
    for file, name in zip(FILES, PLACES):
        yield f"schedule-{file}", str(schedule(name))
    yield "schedule-costs", str(schedule_costs())
    yield "step", str(step())
    yield "plan", plan()
    yield "speed", str(speed())
    yield from figures_first.pictures()
    yield from figures_runs.pictures()


def main() -> None:
    for name, svg in pictures():
        (IMAGES / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()

"""Draw the explanatory figures of the documentation, and the chart of measured speed.

    python docs/figures.py    # writes docs/images/*.svg

The pages embed the SVG in their HTML, so its text has the colour of the page, light or dark. A standalone file, as in
the README, falls back to a grey that is readable on both. The script needs only Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from math import log, log2
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from torchgpipe import schedule as schedules  # noqa: E402
from torchgpipe.schedule import clock_cycles  # noqa: E402

IMAGES = ROOT / "docs" / "images"

#: The colours of timelines.
FORWARD, RECOMPUTATION, BACKWARD, COPY = "#56B4E9", "#F5D76E", "#009E73", "#CC79A7"
OF_INPUT, OF_WEIGHTS = "#00604A", "#9BDCC4"
INK = {FORWARD: "#000", RECOMPUTATION: "#000", BACKWARD: "#fff", COPY: "#000", OF_INPUT: "#fff", OF_WEIGHTS: "#000"}
TEXT = "var(--color-foreground-primary, #808080)"
FAINT = "var(--color-foreground-border, #a0a0a0)"
ROW = "var(--color-background-secondary, rgba(128, 128, 128, 0.12))"


class Picture:
    """An SVG, composed of pieces."""

    def __init__(self, title: str, width: float, height: float) -> None:
        self._title = title
        self._size = width, height
        self._pieces: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, label: str = "", round: int = 2
    ) -> None:
        frame = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round}"'
        self._pieces.append(f'<rect {frame} style="fill:{colour}"/>')
        if label:
            ink = INK.get(colour, TEXT)
            self.text(x + width / 2, y + height / 2, label, "middle", ink, 13)

    def text(self, x: float, y: float, label: str, anchor: str = "start", colour: str = TEXT, size: float = 14) -> None:
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="central" font-size="{size:g}"'
        self._pieces.append(f'<text {place} style="fill:{colour}">{label}</text>')

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = TEXT, width: float = 1.5, dash: str = ""
    ) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._pieces.append(
            f'<polyline points="{path}" style="fill:none;stroke:{colour};stroke-width:{width}"{dashed}/>'
        )

    def arrow(
        self, points: Sequence[tuple[float, float]], colour: str = TEXT, width: float = 1.5, dash: str = ""
    ) -> None:
        """Draw a line with a head; its last piece is horizontal or vertical."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        self.line([*points[:-1], (x1 - 4 * dx, y1 - 4 * dy)], colour, width, dash)
        back, side = (x1 - 8 * dx, y1 - 8 * dy), (4 * dy, 4 * dx)
        corners = [(x1, y1), (back[0] - side[0], back[1] - side[1]), (back[0] + side[0], back[1] + side[1])]
        head = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self._pieces.append(f'<polygon points="{head}" style="fill:{colour}"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        for colour, label in entries:
            self.box(x, y - 7, 14, 14, colour)
            self.text(x + 20, y, label, size=13)
            x += 34 + 7.2 * len(label)

    def save(self, name: str, scale: float = 1.0) -> None:
        width, height = self._size
        box = f'viewBox="0 0 {width:g} {height:g}" width="{scale * width:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img"'
        font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
        lines = [f"{head} {font}>", f"<title>{self._title}</title>", *self._pieces, "</svg>"]
        (IMAGES / f"{name}.svg").write_text("\n".join(lines) + "\n")


class Work(NamedTuple):
    """Work of device ``j`` on micro-batch ``i``, from ``start`` to ``end``."""

    j: int
    start: float
    end: float
    colour: str
    i: int


def simulate(m: int, n: int, checkpointed: int = 0, forward: float = 1.0, backward: float = 2.0) -> Iterator[Work]:
    """Yield the work of a step on equal devices, with copies that take no time.

    Cells start in the order of the schedule, as soon as their device is free and their input is finished. Backward
    takes the cells in the reverse order. A recomputation needs no gradient, so it only waits for its device.

    Args:
        m: the number of micro-batches
        n: the number of partitions
        checkpointed: the number of micro-batches that are recomputed
        forward: the time of a cell
        backward: the time of a cell's backward
    """
    cells = [cell for clock in clock_cycles(m, n) for cell in clock]
    free = [0.0] * n
    ready: dict[tuple[int, int], float] = {}
    for i, j in cells:
        start = max(free[j], ready.get((i, j - 1), 0.0))
        ready[i, j] = free[j] = start + forward
        yield Work(j, start, free[j], FORWARD, i)
    loss = max(free)
    free = [loss] * n
    back: dict[tuple[int, int], float] = {}
    for i, j in reversed(cells):
        if i < checkpointed:
            yield Work(j, free[j], free[j] + forward, RECOMPUTATION, i)
            free[j] += forward
        start = max(free[j], back.get((i, j + 1), loss))
        back[i, j] = free[j] = start + backward
        yield Work(j, start, free[j], BACKWARD, i)


LEFT, UNIT, HEIGHT = 78.0, 11.6, 34.0


def timetable(name: str, title: str, works: Sequence[Work], unit: float = UNIT) -> None:
    """Draw a row for each device, and a box for each cell with the number of its micro-batch.

    All timetables have the same width and the same unit of time, unless ``unit`` is given.
    """
    n = max(work.j for work in works) + 1
    end = max(work.end for work in works)
    top = 34.0
    picture = Picture(title, 646.0 if unit == UNIT else LEFT + unit * end + 8, top + HEIGHT * n + 26)
    colours = {work.colour for work in works}
    names = [
        (FORWARD, "forward"),
        (RECOMPUTATION, "recomputation"),
        (BACKWARD, "backward"),
        (OF_INPUT, "backward of the input"),
        (OF_WEIGHTS, "backward of the weights"),
    ]
    picture.legend(LEFT, 14, [(colour, label) for colour, label in names if colour in colours])
    for j in range(n):
        y = top + HEIGHT * j
        picture.text(0, y + HEIGHT / 2, f"device {j}")
        picture.box(LEFT, y + 2, unit * end, HEIGHT - 4, ROW)
    for work in works:
        width = unit * (work.end - work.start)
        label = str(work.i) if unit * (work.end - work.start) >= 9 else ""
        picture.box(
            LEFT + unit * work.start + 0.5, top + HEIGHT * work.j + 2, width - 1, HEIGHT - 4, work.colour, label
        )
    y = top + HEIGHT * n + 8
    picture.arrow([(LEFT, y), (LEFT + unit * end, y)], FAINT)
    picture.text(LEFT + unit * end, y + 12, "time", "end", size=12)
    picture.save(name)


PLACES: dict[schedules.ScheduleName, list[int]] = {
    "GPipe": [0, 1, 2, 3],
    "1F1B": [0, 1, 2, 3],
    "ZeroBubble": [0, 1, 2, 3],
    "Interleaved1F1B": [0, 1, 2, 3] * 2,
    "V-Half": [0, 1, 2, 3, 3, 2, 1, 0],
}


def schedule(file: str, name: schedules.ScheduleName) -> None:
    """Draw eight micro-batches under a schedule."""
    colours = {"F": FORWARD, "B": BACKWARD, "I": OF_INPUT, "W": OF_WEIGHTS}
    simulation = schedules.simulate(schedules.program(name, 8, PLACES[name]))
    works = [
        Work(device, start, start + simulation.cost(action), colours[action.kind], action.i)
        for device, row in enumerate(simulation.starts)
        for action, start in row
    ]
    timetable(file, f"{name}: eight micro-batches on four devices", works, 574 / simulation.seconds)


def side_by_side() -> None:
    """Draw the step that `benchmarks/side_by_side.py` has recorded."""
    result = json.loads((ROOT / "benchmarks" / "results" / "side_by_side.json").read_text())
    colours = {"F": FORWARD, "B": BACKWARD}
    works = [Work(j, start, end, colours[kind], i) for j, kind, i, start, end in result["spans"]]
    timetable(
        "step", "A measured step: eight micro-batches on four devices", works, 640 / max(work.end for work in works)
    )


def schedule_costs() -> None:
    """Draw the bubble and the live micro-batches of each schedule, by the number of micro-batches."""
    width, height, top, lefts = 240.0, 200.0, 62.0, (46.0, 392.0)
    colours = dict(zip(PLACES, ("#E69F00", BACKWARD, FORWARD, COPY, "#D55E00")))
    picture = Picture("Bubble and live micro-batches of each schedule on four devices", 646, top + height + 50)
    picture.legend(lefts[0], 12, [(colour, name) for name, colour in colours.items()])
    picture.text(lefts[0], 42, "bubble", size=13)
    picture.text(lefts[1], 42, "live micro-batches on a device", size=13)
    counts, shares, lives = [4, 8, 16, 32, 64], [0, 0.1, 0.2, 0.3, 0.4, 0.5], [2, 4, 8, 16, 32, 64]

    def place(panel: int, m: float, height_share: float) -> tuple[float, float]:
        return lefts[panel] + width * log2(m / 4) / log2(counts[-1] / 4), top + height * (1 - height_share)

    marks = [[(share / 0.5, f"{share:.0%}") for share in shares], [(log2(live / 2) / 5, str(live)) for live in lives]]
    for panel in (0, 1):
        for at, label in marks[panel]:
            picture.line([place(panel, 4, at), place(panel, 64, at)], FAINT, 0.5)
            picture.text(lefts[panel] - 6, place(panel, 4, at)[1], label, "end", size=12)
        for m in counts:
            picture.text(place(panel, m, 0)[0], top + height + 14, str(m), "middle", size=12)
        picture.text(lefts[panel] + width / 2, top + height + 36, "micro-batches in a step", "middle", size=13)
    for name, places in PLACES.items():
        part = 4 / len(places)
        memory = [part] * len(places)
        made = [schedules.simulate(schedules.program(name, m, places), memory=memory) for m in counts]
        heights = [[one.bubble / 0.5 for one in made], [log2(max(one.peaks) / 2) / 5 for one in made]]
        for panel in (0, 1):
            points = [place(panel, m, at) for m, at in zip(counts, heights[panel])]
            # The next line covers these two: 1F1B has the bubble of GPipe, and ZeroBubble the peak of 1F1B.
            is_covered = (name, panel) in (("GPipe", 0), ("1F1B", 1))
            picture.line(points, colours[name], 7 if is_covered else 2.5)
            for x, y in points:
                picture.box(x - 3, y - 3, 6, 6, colours[name], round=3)
    picture.save("schedule-costs")


def plan() -> None:
    """Draw a plan for 24 equal blocks, an embedding and a head, on four devices with too little memory."""
    from torchgpipe_balancing.planning.alternatives import Question, alternatives, problem_of
    from torchgpipe_balancing.planning.costs import CellCosts, Costs, LayerCosts, Sample
    from torchgpipe_balancing.planning.picture import draw
    from torchgpipe_balancing.planning.problem import Device

    def layer(name: str, seconds: float, kept: float, parameters: int) -> LayerCosts:
        took = Sample(seconds, 2 * seconds, seconds, seconds, 0.0, kept, 0.0, 2**24, 0.0, 2**24)
        return LayerCosts((name,), parameters, parameters, 0, (took,))

    layers = [layer("embed", 1e-4, 0.0, 2**27), *[layer(f"h.{k}", 5e-3, 2**29, 2**27) for k in range(24)]]
    layers.append(layer("head", 8e-3, 2**29, 2**27))
    costs = Costs(tuple(layers), (1,), (CellCosts(),), 0.0, 0.0, "", "")
    devices = tuple(Device(f"cuda:{k}", 12 * 2**30) for k in range(4))
    question = Question(costs, devices, batch=8, states=3.0, schedules=("1F1B",), chunks=(8,))
    best = alternatives(question).fitting[0]
    problem = problem_of(question, best.schedule, best.chunks)
    assert problem is not None
    (IMAGES / "plan.svg").write_text(draw(question, best, problem.outcome(best.choice)))


def one_by_one(m: int, n: int) -> list[Work]:
    """Return the work of `simulate` without micro-batches: one device at a time works on the whole mini-batch."""
    works, now = [], 0.0
    for j in range(n):
        works.append(Work(j, now, now + m, FORWARD, 0))
        now += m
    for j in reversed(range(n)):
        works.append(Work(j, now, now + 2 * m, BACKWARD, 0))
        now += 2 * m
    return works


def bubble() -> None:
    """Draw the share of the devices' time that is idle, (n - 1) / (m + n - 1)."""
    width, height, left, top = 560.0, 250.0, 46.0, 12.0
    picture = Picture(
        "The bubble by the number of micro-batches, for 2, 4 and 8 partitions", left + width + 70, height + 62
    )
    counts = [1, 2, 4, 8, 16, 32, 64]

    def place(m: float, share: float) -> tuple[float, float]:
        return left + width * log2(m) / log2(counts[-1]), top + height * (1 - share)

    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        picture.line([place(1, share), place(counts[-1], share)], FAINT, 0.5)
        picture.text(left - 6, place(1, share)[1], f"{share:.0%}", "end", size=12)
    for m in counts:
        picture.text(place(m, 0)[0], top + height + 14, str(m), "middle", size=12)
    picture.text(left + width / 2, top + height + 38, "micro-batches", "middle")
    for n, colour in ((2, BACKWARD), (4, FORWARD), (8, COPY)):
        points = [place(m / 4, (n - 1) / (m / 4 + n - 1)) for m in range(4, 4 * counts[-1] + 1)]
        picture.line(points, colour, 2.5)
        for m in counts:
            x, y = place(m, (n - 1) / (m + n - 1))
            picture.box(x - 3, y - 3, 6, 6, colour, round=3)
        x, y = points[-1]
        picture.text(x + 8, y - (6 if n == 8 else 0) + (6 if n == 2 else 0), f"n = {n}", size=13)
    picture.save("bubble")


def order() -> None:
    """Draw the autograd graph of one partition, which orders the micro-batches at backward."""
    picture = Picture("Checkpoint and Recompute of three micro-batches on one partition, tied by phonies", 640, 216)
    for i in range(3):
        x = 20 + 210 * i
        picture.text(x + 58, 14, f"micro-batch {i}", "middle")
        picture.arrow([(x + 58, 28), (x + 58, 46)])
        picture.box(x, 48, 116, 34, FORWARD, "Checkpoint")
        picture.arrow([(x + 58, 82), (x + 58, 190)])
        picture.text(x + 66, 182, "output", size=12)
        picture.arrow([(x + 100, 82), (x + 100, 114)], COPY, 2, "4 3")
        picture.box(x + 70, 116, 106, 34, RECOMPUTATION, "Recompute")
        if i < 2:
            picture.arrow([(x + 176, 133), (x + 193, 133), (x + 193, 65), (x + 208, 65)], COPY, 2, "4 3")
    picture.line([(470, 206), (500, 206)], COPY, 2, "4 3")
    picture.text(508, 206, "a phony", size=12)
    picture.save("order")


def sums() -> None:
    """Draw how the gradients of a partition's parameters are summed over the micro-batches."""
    picture = Picture("Cells of three micro-batches add to .grad, or to sums that Deliver returns", 640, 232)
    picture.text(78, 14, "parameters", "middle")
    picture.arrow([(78, 84), (78, 26)], BACKWARD, 2)
    picture.text(86, 40, "once", size=12)
    picture.box(20, 84, 116, 34, BACKWARD, "Deliver")
    picture.box(210, 160, 416, 30, ROW, "sums, or .grad")
    picture.arrow([(210, 175), (78, 175), (78, 118)], BACKWARD, 2)
    for i in range(3):
        x = 210 + 150 * i
        start = [(136, 101), (172, 101), (172, 56)] if i == 0 else [(x - 92, 56)]
        picture.arrow([*start, (x + 58, 56), (x + 58, 82)], COPY, 2, "4 3")
        picture.text(x + 58, 36, f"micro-batch {i}", "middle")
        picture.box(x, 84, 116, 34, FORWARD, "cell")
        for k in range(3):
            picture.arrow([(x + 38 + 20 * k, 118), (x + 38 + 20 * k, 158)], BACKWARD, 2)
    picture.line([(210, 218), (240, 218)], COPY, 2, "4 3")
    picture.text(248, 218, "a phony", size=12)
    picture.line([(360, 218), (390, 218)], BACKWARD, 2)
    picture.text(398, 218, "a gradient, at backward", size=12)
    picture.save("sums")


def streams() -> None:
    """Draw copies beside the computation of two devices."""
    picture = Picture("Micro-batch 0 is copied while device 0 computes micro-batch 1", 640, 178)
    rows = ["device 0 computes", "leaving device 0", "arriving at device 1", "device 1 computes"]
    for k, label in enumerate(rows):
        picture.text(0, 22 + 40 * k, label, size=13)
        picture.box(150, 7 + 40 * k, 480, 30, ROW)
    for i in range(3):
        picture.box(152 + 130 * i, 9, 126, 26, FORWARD, str(i))
        picture.box(282 + 130 * i, 49, 60, 26, COPY, str(i))
        picture.box(282 + 130 * i, 89, 60, 26, COPY, str(i))
    for i in range(2):
        picture.box(346 + 130 * i, 129, 126, 26, FORWARD, str(i))
        picture.arrow([(344 + 130 * i, 115), (344 + 130 * i, 141)], TEXT)
        picture.arrow([(280 + 130 * i, 35), (280 + 130 * i, 61)], TEXT)
    picture.save("streams")


def portal() -> None:
    """Draw a skip from the first device to the last, in a tuple and through a portal."""
    picture = Picture("A skip in a tuple is copied to every device; through a portal it is copied once", 640, 250)
    for row, (label, y) in enumerate([("in tuples", 44.0), ("through a portal", 174.0)]):
        picture.text(0, y - 26, label, size=14)
        for j in range(4):
            x = 20 + 165 * j
            picture.box(x, y, 100, 44, FORWARD, f"device {j}", 4)
            if j < 3:
                picture.arrow([(x + 100, y + 14), (x + 165, y + 14)])
                if row == 0:
                    picture.arrow([(x + 100, y + 32), (x + 165, y + 32)], COPY, 3)
        if row == 1:
            picture.arrow([(70, y + 44), (70, y + 64), (565, y + 64), (565, y + 44)], COPY, 3)
    picture.line([(470, 14), (500, 14)], COPY, 3)
    picture.text(508, 14, "the skip is copied", size=12)
    picture.save("portal")


SPEED = ROOT / "benchmarks" / "results" / "speed.json"
AIMS = {
    "limit": "Share of the recomputation limit on one device",
    "split": "The same, with the plain model in micro-batches",
    "checkpoint_sequential": "Speed-up over checkpoint_sequential, equal memory",
    "original": "Speed-up over torchgpipe 0.0.7",
    "host": "The same where the host is the bottleneck",
}


def speed() -> None:
    """Draw the speed of training steps: a line for each target and model, and a mark for each experiment.

    The chart is as narrow as a phone, so that its letters are readable there.
    """
    reached: list[dict[str, Any]] = json.loads(SPEED.read_text())["targets"]
    lowest = min(one["reached"]["low"] for one in reached)
    highest = max(one["reached"]["high"] for one in reached)
    left, width, pitch, top, title = 84.0, 308.0, 19.0, 44.0, 34.0
    lines = {(one["aim"], one["model"]): None for one in reached}
    height = top + title * len({aim for aim, _ in lines}) + pitch * len(lines)
    picture = Picture("Targets and results of training steps, by target and model", 400, height)

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
    picture.save("speed", 1.2)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    timetable("naive", "Four devices, one mini-batch: one device works at a time", one_by_one(4, 4))
    timetable("overview", "Four devices, four micro-batches: the devices work side by side", list(simulate(4, 4)), 26.0)
    timetable("pipeline", "Four devices, four micro-batches: the devices work side by side", list(simulate(4, 4)))
    timetable(
        "checkpointing",
        "The same with checkpoint='except_last': all micro-batches but the last are recomputed",
        list(simulate(4, 4, checkpointed=3)),
    )
    schedule("schedule-gpipe", "GPipe")
    schedule("schedule-1f1b", "1F1B")
    schedule("schedule-zero-bubble", "ZeroBubble")
    schedule("schedule-interleaved", "Interleaved1F1B")
    schedule("schedule-v-half", "V-Half")
    side_by_side()
    schedule_costs()
    plan()
    bubble()
    order()
    sums()
    streams()
    portal()
    speed()


if __name__ == "__main__":
    main()

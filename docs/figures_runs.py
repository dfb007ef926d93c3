"""Draw what happens inside, from small runs on the CPU.

Most runs are on streams with clocks. They tell the stream of each operation, and which operations
of other streams are certain to be finished before. So these pictures show an order, and no measured time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import figures_clocks as clocks
import torch
from figures_clocks import clocked, listening
from figures_picture import BACKWARD, COPY, FAINT, FORWARD, RECOMPUTATION, ROW, Picture, Points, Work, timetable
from torch import Tensor, nn

import torchgpipe
from tests.layers import Apply
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe
from torchgpipe.spine.door import this_thread

PHONY = (COPY, 2.0, "4 3")


def pipeline(layers: list[nn.Module], chunks: int, checkpoint: Any) -> GPipe:
    """Return a pipeline with a device for each layer."""
    devices = [f"cpu:{j}" for j in range(len(layers))]
    return GPipe(nn.Sequential(*layers), [1] * len(layers), devices=devices, chunks=chunks, checkpoint=checkpoint)


# ---------------------------------------------------------------------------------------------------- what runs when


def launched(model: GPipe, costs: dict[str, float]) -> list[tuple[clocks.Work, Work]]:
    """Run layers of tanh, and return each cell and copy, which begins when all that it has to wait for has ended.

    Args:
        model: the pipeline
        costs: the time of each kind of work; backward runs if it has one
    """
    with listening(model) as all_work:
        output = model(torch.randn(model.chunks, 1, requires_grad=True))
        if "backward" in costs:
            output.sum().backward()
    pending = [one for one in all_work if one.kind in costs]
    done: list[tuple[clocks.Work, Work]] = []
    while pending:
        # What is certain to be finished before it is drawn before it.
        one = next(one for one in pending if not any(other.precedes(one) for other in pending))
        pending.remove(one)
        start = max([work.end for before, work in done if before.precedes(one)], default=0.0)
        done.append((one, Work(one.j, start, start + costs[one.kind], one.kind, one.i)))
    return sorted(done, key=lambda one: one[1])


def checkpointing() -> Picture:
    """Draw four micro-batches on four devices, with recomputation."""
    model = pipeline([nn.Tanh() for _ in range(4)], 4, "except_last")
    done = launched(model, {"forward": 1, "recomputation": 1, "backward": 2, "copy": 0})
    title = "The same with checkpoint='except_last': all micro-batches but the last are recomputed"
    return timetable(title, [work for _, work in done if work.kind != "copy"], width=646)


def streams() -> Picture:
    """Draw the streams of two devices in a forward pass, and what waits for what."""
    picture = Picture("Streams of two devices: micro-batches are copied while the devices compute others", 646, 172)
    done = launched(pipeline([nn.Tanh(), nn.Tanh()], 3, "never"), {"forward": 2, "copy": 1})
    rows = ["computing of cpu:0", "leaving of cpu:0", "arriving of cpu:1", "computing of cpu:1"]
    left, unit, pitch = 156, 490 / max(work.end for _, work in done), 45
    for k, row in enumerate(rows):
        picture.text(0, 19 + pitch * k, row.replace("cpu:", "device "), size=13)
        picture.box(left, 4 + pitch * k, 490, 30, ROW)
    for launch, work in done:
        x, y, is_copy = left + unit * work.start, 6 + pitch * rows.index(str(launch.stream)), work.kind == "copy"
        # A copy is on the streams of both of its devices.
        height, colour = (26 + pitch, COPY) if is_copy else (26, FORWARD)
        picture.box(x + 2, y, unit * (work.end - work.start) - 4, height, colour, str(work.i))
        before = [(other, end) for other, (_, _, end, _, _) in done if other.precedes(launch)]
        for other, end in before:
            is_last = not any(other.precedes(later) for later, _ in before)
            if is_last and other.stream is not launch.stream:
                x0 = left + unit * end - 10
                picture.arrow([(x0, y - 19), (x0, y - 13), (x + 12, y - 13), (x + 12, y)])
    return picture


def portal() -> Picture:
    """Draw the copies of a skip from the first device to the last, in a tuple and through a portal."""
    picture = Picture("A skip in a tuple is copied to every device; through a portal it is copied once", 640, 250)
    passing = [Apply(lambda pair: (pair[0].tanh(), pair[1])) for _ in range(2)]
    ways: dict[str, list[nn.Module]] = {
        "in tuples": [Apply(lambda x: (x.tanh(), x * 2)), *passing, Apply(sum)],
        "through a portal": [Stash(), nn.Tanh(), nn.Tanh(), Pop()],
    }
    for (label, layers), y in zip(ways.items(), (44, 174)):
        picture.text(0, y - 26, label)
        for j in range(4):
            picture.box(20 + 165 * j, y, 100, 44, FORWARD, f"device {j}", 4)
        model = pipeline(layers, 1, "never")
        with listening(model) as done:
            model(torch.randn(1, 1))
        ends = [(one.j, one.other) for one in done if one.kind == "copy" and one.other is not None]
        if label == "in tuples":  # Each copy is one of two tensors, the batch and the skip.
            ends = [way for way in ends for _ in range(2)]
        for k, (a, c) in enumerate(ends):
            x0, x1 = 20 + 165 * a, 20 + 165 * c
            if c > a + 1:
                picture.arrow([(x0 + 50, y + 44), (x0 + 50, y + 64), (x1 + 50, y + 64), (x1 + 50, y + 44)], COPY, 3)
            elif (a, c) in ends[:k]:
                picture.arrow([(x0 + 100, y + 32), (x1, y + 32)], COPY, 3)
            else:
                picture.arrow([(x0 + 100, y + 14), (x1, y + 14)])
    picture.line([(470, 14), (500, 14)], COPY, 3)
    picture.text(508, 14, "the skip is copied", size=12)
    return picture


# ------------------------------------------------------------------------------------------------- the autograd graph


def graph(output: Tensor) -> list[tuple[Any, Any, bool]]:
    """Return the edges behind a tensor: a node, one that takes its output, and whether that is a phony."""
    nodes: list[Any] = [output.grad_fn]
    edges = []
    for node in nodes:  # The list grows meanwhile.
        for source, k in node.next_functions:
            if source is not None:
                edges.append((source, node, tuple(source._input_metadata[k].shape) == (0,)))
                nodes += [] if source in nodes else [source]
    return edges


def kind_of(node: Any) -> str:
    name: str = node.name()  # such as torch::autograd::AccumulateGrad, CatBackward0 and CellNodeBackward
    return name.split("::")[-1].removesuffix("0").removesuffix("Backward")


def cell_of(node: Any) -> tuple[int, int]:
    """Return the micro-batch and the partition of a node, or of the node that its first input comes from."""
    if hasattr(node, "route"):
        return node.i, node.route.ends[1]
    cell = getattr(getattr(node, "node", node), "cell", None)
    return cell_of(node.next_functions[0][0]) if cell is None else (cell.i, cell.column.j)


def order() -> Picture:
    """Draw the graph of three micro-batches on two partitions, but for the gradients of parameters, as in `sums`."""
    model = pipeline([nn.Tanh(), nn.Tanh()], 3, "always")
    with clocked(model):
        edges = graph(model(torch.randn(3, 1, requires_grad=True)))
    places = {  # of a node in the column of its micro-batch
        ("CellNode", 0): (0, 26, 106, FORWARD),
        ("Wait", 0): (0, 80, 60, COPY),
        ("Recompute", 0): (86, 80, 100, RECOMPUTATION),
        ("Copy", 1): (0, 134, 60, COPY),
        ("CellNode", 1): (0, 188, 106, FORWARD),
        ("Recompute", 1): (86, 242, 100, RECOMPUTATION),
        ("Join", 1): (0, 242, 60, FAINT),
    }
    picture = Picture("The autograd graph of three micro-batches on two partitions, tied by phonies", 646, 338)
    for i in range(3):
        picture.text(222 * i, 12, f"micro-batch {i}")
    picture.text(116, 40, "partition 0", size=12)
    picture.text(116, 202, "partition 1", size=12)
    boxes: dict[Any, tuple[float, float, float]] = {}
    for node in dict.fromkeys([node for edge in edges for node in edge[:2]]):
        kind = kind_of(node)
        if kind == "Cat":
            boxes[node] = 0, 310, 636
            picture.box(0, 310, 636, 28, ROW, "output")
        elif kind not in ("Split", "Deliver", "AccumulateGrad"):
            i, j = cell_of(node)
            x, y, width, colour = places[kind, j]
            boxes[node] = 222 * i + x, y, width
            picture.box(*boxes[node], 28, colour, kind)
    for source, target, is_phony in edges:
        if source in boxes and target in boxes:
            style = PHONY if is_phony else ()
            picture.arrow(way(boxes[source], boxes[target], is_phony), *style)
    picture.line([(562, 12), (588, 12)], *PHONY)
    picture.text(594, 12, "phony", size=12)
    return picture


def way(source: tuple[float, float, float], target: tuple[float, float, float], is_phony: bool) -> Points:
    """Return the way of an arrow between two boxes: down, to the side, or around on the right."""
    (x0, y0, width0), (x1, y1, width1) = source, target
    left, right = max(x0, x1), min(x0 + width0, x1 + width1)
    if y0 < y1 and left < right:
        x = right - 10 if is_phony else left + 16
        return [(x, y0 + 28), (x, y1)]
    if y0 == y1:
        return [(x0 + width0, y0 + 14), (x1, y1 + 14)] if x0 < x1 else [(x0, y0 + 14), (x1 + width1, y1 + 14)]
    corner = x0 + width0 + 8
    end = [(corner, y1 + 14), (x1, y1 + 14)] if x0 < x1 else [(corner, y1 + 44), (x1 + 50, y1 + 44), (x1 + 50, y1 + 28)]
    return [(x0 + width0, y0 + 14), (corner, y0 + 14), *end]


def sums() -> Picture:
    """Draw the way of the gradients of parameters: nodes, and below them where cells add gradients by themselves."""
    edges = graph(pipeline([nn.Linear(1, 1)], 3, "except_last")(torch.randn(3, 1)))
    picture = Picture("Cells of three micro-batches add to .grad, or to sums that Deliver returns", 646, 224)
    picture.box(0, 86, 116, 30, BACKWARD, "Deliver")
    picture.box(210, 152, 436, 30, ROW, "sums, or .grad")
    picture.arrow([(210, 167), (58, 167), (58, 116)], BACKWARD, 2)
    parameters = [source for source, target, is_phony in edges if kind_of(target) == "Deliver" and not is_phony]
    for k in range(len(parameters)):
        x = 116 / len(parameters) * (k + 0.5)
        picture.arrow([(x, 86), (x, 26)], BACKWARD, 2)
    picture.text(58, 12, "parameters", "middle")
    for source, target, _ in edges:
        if kind_of(source) == "Deliver":
            i, _ = cell_of(target)
            x = 268 + 160 * i
            picture.text(x, 12, f"micro-batch {i}", "middle")
            picture.box(x - 58, 86, 116, 30, FORWARD, kind_of(target))
            picture.arrow([(116, 101), (160, 101), (160, 60), (x, 60), (x, 86)], *PHONY)
            picture.arrow([(x, 116), (x, 152)], BACKWARD, 2)
    picture.line([(210, 210), (240, 210)], *PHONY)
    picture.text(248, 210, "phony", size=12)
    picture.line([(360, 210), (390, 210)], BACKWARD, 2)
    picture.text(398, 210, "gradients, at backward", size=12)
    return picture


# ------------------------------------------------------------------------------------------------------------- frames


class Tagger(nn.Module):
    """The model of the page, with the smallest blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, words: Tensor) -> Any:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def frames() -> Picture:
    """Draw the modules that three frames call on two devices, each as soon as its frame and its device are free."""
    words = torch.randint(9, (6, 5))
    model: Any = torchgpipe.pipelined(Tagger(), (words[:2],), chunks=3, devices=["cpu:0", "cpu:1"], balance=[3, 3])
    calls: list[tuple[int, int, str]] = []

    def note(name: str) -> None:
        frame: Any = this_thread.visitor
        calls.append((frame.i, frame.column, name))

    for name in model.layout.spine:
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: note(name))
    model(words)
    left, unit, pitch = 66, 54, 80
    picture = Picture("Three frames on two devices: each goes on where its next module is", left + 12 * unit, 136)
    for j in range(2):
        picture.text(0, 39 + pitch * j, f"device {j}")
    placed: list[tuple[int, int, int, str]] = []
    for i, j, name in calls:
        start = max([end for of, on, end, _ in placed if of == i or on == j], default=0)
        placed.append((i, j, start + 1, name))
    for i, j, end, name in sorted(placed):
        x, y = left + unit * (end - 1), pitch * j
        picture.box(x + 1, y + 24, unit - 2, 30, FORWARD)
        picture.text(x + unit / 2, y + 39, name, "middle", "#000", 11)
        before = [(on, left + unit * stop) for of, on, stop, _ in placed if of == i and stop < end]
        if not before:
            picture.text(x + 2, y + 12, f"frame {i}", size=13)
        elif before[-1][0] != j:
            picture.text(x + 14, y + 12, f"frame {i}", size=13)
            x0, y0 = before[-1][1] - 8, pitch * before[-1][0] + 54
            picture.arrow([(x0, y0), (x0, y0 + 10), (x + 8, y0 + 10), (x + 8, y + 24)])
    return picture


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the contents of each picture."""
    for draw in (checkpointing, streams, portal, order, sums, frames):
        # A worker for each device, as accelerators have them.
        with patch("torchgpipe.drive.autograd.in_one_thread", lambda devices: len(set(devices)) == 1):
            picture = draw()
        yield draw.__name__, str(picture)

"""Draw what a newcomer asks first: which way to take, what is cut, what fills a device, and what a recording shows.

All are 400 pixels wide, so that a phone shows them whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import shown
import torch
from figures_picture import BACKWARD, COPY, FORWARD, LEFT, RECOMPUTATION, ROW, Picture, Work, timetable
from figures_runs import Tagger

import torchgpipe
from torchgpipe.schedule import program, simulate

WIDTH = 400
GIB = 2**30


def choose() -> Picture:
    """Draw which of the ways suits which model."""
    picture = Picture("Which way: DistributedDataParallel, GPipe, pipelined or DistributedGPipe", WIDTH, 368)
    questions = [
        ("Does training fit on one GPU?", "yes", ["DistributedDataParallel:", "a copy on each GPU"]),
        (
            "On the GPUs of one machine?",
            "no",
            ["in host memory: offload=True;", "on several machines:", "DistributedGPipe, FSDP2"],
        ),
        ("Is it an nn.Sequential?", "yes", ["GPipe(layers, balance)"]),
    ]
    downs = ["no", "yes", "no"]
    y = 0.0
    for (question, side, answer), down in zip(questions, downs):
        picture.box(0, y, 236, 32, ROW, round=4)
        picture.text(10, y + 16, question, size=14)
        height = 14 + 18 * len(answer)
        picture.box(110, y + 44, 290, height, BACKWARD if side == "yes" else COPY, round=4)
        for k, line in enumerate(answer):
            picture.text(120, y + 60 + 18 * k, line, colour="#fff" if side == "yes" else "#000", size=14)
        # To the answer, and on to the next question.
        picture.arrow([(70, y + 32), (70, y + 60), (110, y + 60)])
        picture.text(76, y + 50, side, size=13)
        picture.arrow([(24, y + 32), (24, y + 62 + height)])
        picture.text(30, y + 50 + height / 2, down, size=13)
        y += 62 + height
    picture.box(0, y, 290, 32, BACKWARD, round=4)
    picture.text(10, y + 16, "torchgpipe.pipelined(model, sample)", colour="#fff", size=14)
    return picture


def spine() -> Picture:
    """Draw the spine of the model of the page, as the pipeline has cut it."""
    words = torch.randint(9, (6, 5))
    how: Any = {"chunks": 3, "devices": ["cpu:0", "cpu:1"], "balance": [3, 3]}
    model: Any = torchgpipe.pipelined(Tagger(), (words[:2],), **how)
    picture = Picture("The spine of a model, cut into two partitions", WIDTH, 132)
    parts = [(j, part.name) for j, one in enumerate(model.layout.partitions) for part in one.parts]
    pitch, wide = WIDTH / len(parts), WIDTH / len(parts) - 12
    for j, colour in enumerate((FORWARD, RECOMPUTATION)):
        own = [k for k, (at, _) in enumerate(parts) if at == j]
        left, right = pitch * own[0], pitch * (own[-1] + 1)
        picture.box(left + 1, 0, right - left - 2, 92, ROW, round=4)
        picture.text((left + right) / 2, 14, f"partition {j}, device {j}", "middle", size=13)
        for k in own:
            picture.box(pitch * k + 6, 36, wide, 40, colour, round=4)
            picture.text(pitch * k + 6 + wide / 2, 56, parts[k][1], "middle", "#000", 11.5)
            if k + 1 < len(parts):
                picture.arrow([(pitch * k + 6 + wide, 56), (pitch * (k + 1) + 6, 56)])
    cut = pitch * sum(j == 0 for j, _ in parts)
    picture.line([(cut, 0), (cut, 102)], COPY, 2, "5 3")
    picture.text(cut, 116, "here each micro-batch moves to the next device", "middle", size=13)
    return picture


def memory() -> Picture:
    """Draw the memory of a device, of 24 equal blocks on one device and on four."""
    blocks, chunks, weights, kept = 24, 8, GIB / 8, GIB / 16
    peaks = {name: simulate(program(name, chunks, range(4)), memory=[1.0] * 4).peaks for name in ("GPipe", "1F1B")}
    bars = [
        ("one device", blocks, blocks * chunks * kept),
        ("four devices, GPipe, each", blocks / 4, blocks / 4 * peaks["GPipe"][0] * kept),
        ("four devices, 1F1B, the first", blocks / 4, blocks / 4 * peaks["1F1B"][0] * kept),
        ("four devices, 1F1B, the last", blocks / 4, blocks / 4 * peaks["1F1B"][3] * kept),
        # An input is a sixteenth of what its block keeps; one block is recomputed at a time.
        ("the first, every block recomputed", blocks / 4, (blocks / 4 * peaks["1F1B"][0] / 16 + 1) * kept),
    ]
    picture = Picture(
        "The memory of a device: weights, gradients, optimizer and activations", WIDTH, 40 + 50 * len(bars)
    )
    kinds = [(FORWARD, "weights"), (BACKWARD, "gradients"), (COPY, "optimizer"), (RECOMPUTATION, "activations")]
    picture.legend(0, 12, kinds)
    most = max(4 * weights * own + activations for _, own, activations in bars)
    for k, (name, own, activations) in enumerate(bars):
        x, y = 0.0, 42 + 50 * k
        total = 4 * weights * own + activations
        picture.text(0, y, name, size=13)
        for (colour, _), size in zip(kinds, (weights * own, weights * own, 2 * weights * own, activations)):
            picture.box(x, y + 10, WIDTH * size / most, 20, colour, round=0)
            x += WIDTH * size / most
        picture.text(WIDTH, y, f"{total / GIB:.1f} GiB", "end", size=13)
    return picture


def timeline() -> Picture:
    """Draw the recorded step of `shown`, three devices side by side."""
    works = [Work(span.partition, span.start, span.end, span.kind, span.micro_batch) for span in shown.timeline().spans]
    unit = (WIDTH - LEFT - 8) / max(work.end for work in works)
    return timetable("A recorded step: six micro-batches on three devices", works, unit, WIDTH)


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the contents of each picture."""
    for draw in (choose, spine, memory, timeline):
        yield draw.__name__, str(draw())

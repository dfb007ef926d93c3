"""What the papers have published, each row beside ours.

Each part is a table of a paper or of torchgpipe's documentation. It takes the published setting as it is, and says what
comes out of it here: counted or simulated where it needs more devices than there are.

    memory      parameters and memory of AmoebaNet-D and U-Net (`published_memory.py`)
    bubbles     idle shares of schedules, with the times of four language models (`published_bubbles.py`)
    schedules   idle shares and memory of schedules by their names (`published_bubbles.py`)
    speed       speed of AmoebaNet-D, ResNet-101 and U-Net (`published_speed.py`)

    python -m benchmarks.published    # two minutes, on any machine
"""

from __future__ import annotations

from benchmarks import published_bubbles, published_memory, published_speed
from benchmarks.program import Part, Program

PARTS = {
    "memory": Part(
        "published:memory",
        published_memory.measure,
        {"memory, counted on the meta device, and published": published_memory.published_memory},
        cpu=True,
    ),
    "bubbles": Part(
        "published:bubbles",
        published_bubbles.measure,
        {"idle shares, published and simulated": published_bubbles.published_bubbles},
        cpu=True,
    ),
    "schedules": Part(
        "published:schedules",
        published_bubbles.measure_named,
        {"schedules at equal times, ours and published": published_bubbles.published_schedules},
        cpu=True,
    ),
    "speed": Part(
        "published:speed",
        published_speed.measure,
        {"speed, simulated from counted operations, and published": published_speed.published_speed},
        cpu=True,
    ),
}


def main() -> None:
    Program("published", __doc__, PARTS).run()


if __name__ == "__main__":
    main()

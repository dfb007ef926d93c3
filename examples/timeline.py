"""Record training steps, and show one of them as a picture, and all as a report.

    python examples/timeline.py                                # writes timeline.svg
    python examples/timeline.py --picture step.png --trace step.json

The example uses all accelerators of the machine. If there are too few, the partitions share the CPU and take turns.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import torchgpipe
from torchgpipe import GPipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--checkpoint", default="except_last")
    parser.add_argument("--picture", type=Path, default=Path("timeline.svg"))
    parser.add_argument("--trace", type=Path, help="for https://ui.perfetto.dev")
    options = parser.parse_args()

    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(options.partitions)]
    balance = [1] * options.partitions
    devices = None if torch.accelerator.device_count() >= options.partitions else ["cpu"] * options.partitions
    model = GPipe(
        nn.Sequential(*layers), balance, devices=devices, chunks=options.chunks, checkpoint=options.checkpoint
    )
    input = torch.randn(128 * options.chunks, 512)

    model(input).sum().backward()  # Warm up: the first step of a process also loads kernels.
    with torchgpipe.record(model) as timeline:
        for _ in range(5):
            model(input).sum().backward()

    # The step that other processes have disturbed least.
    shortest = min(timeline.steps, key=lambda step: sum(span.seconds for span in timeline.of_step(step)))
    timeline.plot(options.picture, step=shortest)
    if options.trace:
        timeline.save(options.trace)
    print(timeline.report())


if __name__ == "__main__":
    main()

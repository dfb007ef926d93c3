"""Train the same model under each schedule of `GPipe.step`: the results are equal, time and memory differ.

    python examples/schedules.py
    python examples/schedules.py --devices 4 --chunks 8

For each schedule, the script prints the loss of the first step and of the last, what a simulation says about idle time
and live micro-batches, and the measured time of a step. Then it draws the simulated step. Losses of the first step are
equal to the last bit. Later losses may differ in the last bits, because 'GPipe' sums gradients in another order.

The example uses the accelerators of the machine. If there are too few, the CPU stands for several devices, which share
its cores; then the measured time depends more on the cores than on the schedule.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import GPipe
from torchgpipe.schedule import ScheduleName, draw_text, program, simulate


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    options = parser.parse_args(arguments)

    enough = torch.accelerator.device_count() >= options.devices
    kind = torch.accelerator.current_accelerator() if enough else torch.device("cpu")
    devices = [f"{kind}:{index}" for index in range(options.devices)]
    placements: dict[ScheduleName, list[str]] = {
        "GPipe": devices,
        "1F1B": devices,
        "ZeroBubble": devices,
        "Interleaved1F1B": devices * 2,
        "V-Min": devices + devices[::-1],
        "V-Half": devices + devices[::-1],
        "ZB-V": devices + devices[::-1],
        "LayerMajor": devices * 2,
    }
    for schedule, placement in placements.items():
        losses, milliseconds = train(schedule, placement, options.chunks)
        part = len(devices) / len(placement)  # of a device's layers in a partition
        simulation = simulate(
            program(schedule, options.chunks, [devices.index(device) for device in placement]),
            {"F": part, "B": 2 * part, "I": part, "W": part},
            [part] * len(placement),
        )
        print(f"{schedule}: loss {losses[0]!r}, then {losses[-1]:.6f}; measured {milliseconds:.1f} ms a step")
        print(f"simulated: idle {simulation.bubble:.0%}, {max(simulation.peaks):g} live micro-batches on a device")
        print(draw_text(simulation), end="\n\n")


def train(schedule: ScheduleName, devices: list[str], chunks: int) -> tuple[list[float], float]:
    """Return the losses of some steps, and the median time of a step in milliseconds."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4 * len(set(devices)))]
    model = GPipe(
        nn.Sequential(*blocks).double(),
        balance=[len(blocks) // len(devices)] * len(devices),
        devices=devices,
        chunks=chunks,
        checkpoint="never",
        schedule=schedule,
        loss_fn=F.mse_loss,
    )
    optimizer = torch.optim.Adam(model.parameters())
    input = torch.randn(32 * chunks, 128, dtype=torch.float64)
    target = input.relu()
    losses, times = [], []
    for _ in range(8):
        begin = time.perf_counter()
        losses.append(model.step(input, target).item())
        times.append(1000 * (time.perf_counter() - begin))
        optimizer.step()
        optimizer.zero_grad()
    return losses, statistics.median(times)


if __name__ == "__main__":
    main()

"""Run a plan, and set what is measured beside what was predicted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torchgpipe.devices.device import device_module
from torchgpipe_balancing.planning.peaks import activation_peaks
from torchgpipe_balancing.planning.recorded import synchronize
from torchgpipe_balancing.planning.subject import Subject, Way

__all__ = ["Check", "checked"]


@dataclass(frozen=True)
class Check:
    """What a plan has predicted, and what was measured.

    Attributes:
        predicted: seconds of a step
        measured: seconds of each step
        devices: the names of the devices
        predicted_bytes: for each device, the activations that it holds at most; on an accelerator all its memory
        measured_bytes: the same, as counted; on an accelerator as allocated, without the optimizer's states
    """

    predicted: float
    measured: tuple[float, ...]
    devices: tuple[str, ...]
    predicted_bytes: tuple[float, ...]
    measured_bytes: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the measured steps."""
        return statistics.median(self.measured)

    def __str__(self) -> str:
        lines = [("", "predicted", "measured", "predicted / measured")]
        if self.predicted:
            lines.append(("a step", *_cells(self.predicted * 1000, self.seconds * 1000, "{:.1f} ms")))
        else:
            lines.append(("a step", "-", f"{self.seconds * 1000:.1f} ms", "no times were known"))
        for name, predicted, measured in zip(self.devices, self.predicted_bytes, self.measured_bytes):
            lines.append((name, *_cells(predicted / 2**20, measured / 2**20, "{:.1f} MiB")))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _cells(predicted: float, measured: float, form: str) -> tuple[str, str, str]:
    ratio = f"{predicted / measured:.2f}" if measured else "-"
    return form.format(predicted), form.format(measured), ratio


def checked(
    subject: Subject,
    way: Way,
    places: Sequence[int],
    batch: int,
    steps: int,
    predicted: float,
    names: Sequence[str],
    activations: Sequence[float],
    memory: Sequence[float],
) -> Check:
    """Run steps, and return what they took.

    Args:
        subject: the model
        way: how to pipeline it
        places: the index of the device of each partition
        batch: the rows of a mini-batch
        steps: the number of steps that are measured; one more runs before them
        predicted: seconds of a step
        names: the names of the devices
        activations: for each device, the bytes of activations that are predicted
        memory: for each device, the bytes that are predicted, without the optimizer's states
    """
    model, step = subject.pipeline(way)
    run = partial(step, batch)
    accelerators = [device for device in map(torch.device, names) if device.type != "cpu"]
    step(batch)
    model.zero_grad()
    synchronize(accelerators)
    for device in accelerators:
        torch.accelerator.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        run()
        synchronize(accelerators)
        seconds.append(time.perf_counter() - begin)
        model.zero_grad()
    if accelerators:
        found = [float(device_module(device).max_memory_allocated(device)) for device in accelerators]
        return Check(predicted, tuple(seconds), tuple(map(str, accelerators)), tuple(memory), tuple(found))
    of_layers = [place for place, count in zip(places, way.balance) for _ in range(count)]
    counted = activation_peaks(subject, of_layers, way.recomputed, run)
    model.zero_grad()
    return Check(predicted, tuple(seconds), tuple(names), tuple(activations), tuple(map(float, counted)))

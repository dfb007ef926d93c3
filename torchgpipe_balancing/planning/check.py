"""Run a plan, and set what is measured beside what was predicted."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from torchgpipe.devices.device import device_module
from torchgpipe_balancing.planning.alternatives import Alternative, Question, problem_of
from torchgpipe_balancing.planning.peaks import activation_peaks
from torchgpipe_balancing.planning.problem import Outcome
from torchgpipe_balancing.planning.recorded import timed
from torchgpipe_balancing.planning.subject import Subject
from torchgpipe_balancing.planning.trials import way_of

__all__ = ["Check", "checked"]


@dataclass(frozen=True)
class Check:
    """What a plan has predicted, and what was measured.

    Attributes:
        predicted: seconds of a step
        measured: seconds of each step
        devices: the names of the devices
        predicted_bytes: for each device, the activations that it holds at most, without gradients that wait between
            the halves of backward; on an accelerator all its memory
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


def checked(subject: Subject, question: Question, one: Alternative, outcome: Outcome, steps: int) -> Check:
    """Run steps, and return what they took.

    Args:
        subject: the model
        question: what was planned for
        one: the alternative to run
        outcome: what it costs
        steps: the number of steps that are measured; another one runs before them
    """
    way, names = way_of(question, one), [device.name for device in question.devices]
    model, step = subject.pipeline(way)
    run = partial(step, question.batch)
    accelerators = [device for device in map(torch.device, names) if device.type != "cpu"]
    timed(model, run, way.devices, 1)
    for device in accelerators:
        torch.accelerator.reset_peak_memory_stats(device)
    predicted = one.seconds if question.costs.has_times else 0.0
    seconds = tuple(timed(model, run, way.devices, steps))
    of_layers = [place for place, count in zip(one.places, way.balance) for _ in range(count)]
    if accelerators:
        states = [0.0] * len(names)
        for layer, place in zip(question.costs.layers, of_layers):
            states[place] += layer.trained * (question.states - 1)
        needs = [need - own for device, need, own in zip(names, one.memory, states) if not device.startswith("cpu")]
        found = [float(device_module(device).max_memory_allocated(device)) for device in accelerators]
        return Check(predicted, seconds, tuple(map(str, accelerators)), tuple(needs), tuple(found))
    counted = activation_peaks(subject, of_layers, way.recomputed, run)
    model.zero_grad()
    return Check(predicted, seconds, tuple(names), tuple(_held(question, one, outcome)), tuple(map(float, counted)))


def _held(question: Question, one: Alternative, outcome: Outcome) -> list[float]:
    """Return for each device the most activations that hooks can see: without gradients between halves of backward."""
    problem = problem_of(question, one.schedule, one.chunks)
    assert problem is not None
    seen = problem.simulated([part._replace(waiting=0.0) for part in outcome.partitions]).peaks
    room = [
        max(part.room for part, place in zip(outcome.partitions, one.places) if place == device)
        for device in range(len(seen))
    ]
    return [peak + own for peak, own in zip(seen, room)]

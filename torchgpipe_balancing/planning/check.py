"""Run planned pipelines: the best alternatives, so that the quickest is chosen; and a plan, to check its predictions.

A prediction is some per cent off, ten in the median of small models on a shared machine. Where alternatives are as
close as that, only a run tells which one is quicker.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchgpipe.devices.device import device_module
from torchgpipe_balancing.planning.alternatives import Alternative, Question, problem_of
from torchgpipe_balancing.planning.counting import activation_peaks
from torchgpipe_balancing.planning.measure import timed
from torchgpipe_balancing.planning.subject import Subject, Way
from torchgpipe_balancing.table import table

__all__ = ["Check", "checked", "tried_out", "way_of"]

#: Alternatives that are predicted to take so much longer than the best are not run.
_FAR = 1.15

#: How often each alternative takes its turn, and the steps that are timed in each; another step runs before them.
_TURNS, _STEPS = 3, 2


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
        step = _row("a step", self.predicted * 1000, self.seconds * 1000, "{:.1f} ms")
        if not self.predicted:
            step = ["a step", "-", step[2], "no times were known"]
        sizes = zip(self.devices, self.predicted_bytes, self.measured_bytes)
        held = [_row(name, predicted / 2**20, measured / 2**20, "{:.1f} MiB") for name, predicted, measured in sizes]
        return "\n".join(table([["", "predicted", "measured", "predicted / measured"], step, *held], words=()))


def _row(name: str, predicted: float, measured: float, form: str) -> list[str]:
    ratio = f"{predicted / measured:.2f}" if measured else "-"
    return [name, form.format(predicted), form.format(measured), ratio]


def way_of(question: Question, alternative: Alternative) -> Way:
    """Return how to pipeline a model for an alternative."""
    devices = [torch.device(question.devices[place].name) for place in alternative.places]
    choice = alternative.choice
    return Way(choice.balance, devices, alternative.chunks, alternative.schedule, choice.recomputed)


def tried_out(subject: Subject, question: Question, fitting: Sequence[Alternative], count: int) -> list[Alternative]:
    """Return the alternatives, those that were run with their measured times and in front, the quickest first.

    Args:
        subject: the model
        question: what is planned for
        fitting: the alternatives, the best predicted ones first
        count: how many of them to run at most; one alone is not run
    """
    near = [candidate for candidate in fitting[:count] if candidate.seconds <= _FAR * fitting[0].seconds]
    if len(near) < 2:
        return list(fitting)
    seconds: dict[int, list[float]] = {k: [] for k in range(len(near))}
    for _ in range(_TURNS):
        for k in [*seconds]:
            try:
                way = way_of(question, near[k])
                model, step = subject.pipeline(way)
                seconds[k] += timed(partial(step, question.batch), way.devices, 1 + _STEPS, model)[1:]
            except torch.OutOfMemoryError:  # The margin was too small for it.
                del seconds[k]
    ran = [replace(near[k], measured=statistics.median(of_steps)) for k, of_steps in seconds.items()]
    return [*sorted(ran, key=lambda candidate: candidate.measured), *fitting[len(near) :]]


def checked(subject: Subject, question: Question, alternative: Alternative, steps: int) -> Check:
    """Run steps, and return what they took.

    Args:
        subject: the model
        question: what was planned for
        alternative: the alternative to run
        steps: the number of steps that are measured; another one runs before them
    """
    way, names = way_of(question, alternative), [device.name for device in question.devices]
    model, step = subject.pipeline(way)
    run = partial(step, question.batch)
    accelerators = [device for device in map(torch.device, names) if device.type != "cpu"]
    timed(run, way.devices, 1, model)
    for device in accelerators:
        torch.accelerator.reset_peak_memory_stats(device)
    predicted = alternative.seconds if question.costs.has_times else 0.0
    seconds = tuple(timed(run, way.devices, steps, model))
    of_layers = [place for place, count in zip(alternative.places, way.balance) for _ in range(count)]
    if accelerators:
        states = [0.0] * len(names)
        for layer, place in zip(question.costs.layers, of_layers):
            states[place] += layer.trained * (question.states - 1)
        needs = zip(names, alternative.memory, states)
        expected = [need - of_optimizer for name, need, of_optimizer in needs if not name.startswith("cpu")]
        allocated = [float(device_module(device).max_memory_allocated(device)) for device in accelerators]
        return Check(predicted, seconds, tuple(map(str, accelerators)), tuple(expected), tuple(allocated))
    counted = activation_peaks(subject, of_layers, way.recomputed, run)
    model.zero_grad()
    return Check(predicted, seconds, tuple(names), tuple(_held(question, alternative)), tuple(map(float, counted)))


def _held(question: Question, alternative: Alternative) -> list[float]:
    """Return for each device the most activations that hooks can see: without gradients between halves of backward."""
    problem = problem_of(question, alternative.schedule, alternative.chunks)
    layers = tuple([replace(layer, waiting=0.0, state=0.0) for layer in problem.layers])
    return replace(problem, layers=layers).outcome(alternative.choice).memory

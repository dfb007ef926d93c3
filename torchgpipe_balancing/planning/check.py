"""Run planned pipelines: the best candidates, so that the quickest is chosen; and a plan, to check its predictions.

A prediction is some per cent off, ten in the median of small models on a shared machine. Where candidates are as
close as that, only a run tells which one is quicker.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchgpipe.devices.device import device_module
from torchgpipe_balancing.planning.candidates import Candidate, PlanInput
from torchgpipe_balancing.planning.measure import time_steps
from torchgpipe_balancing.planning.model_under_test import Config, ModelUnderTest
from torchgpipe_balancing.table import table

__all__ = ["Check", "config_of", "run_check", "try_out"]

#: Alternatives that are predicted to take so much longer than the best are not run.
_FAR = 1.15

#: How often each candidate takes its turn, and the steps that are timed in each; another step runs before them.
_TURNS, _STEPS = 3, 2


@dataclass(frozen=True)
class Check:
    """What a plan has predicted, and what was measured.

    Attributes:
        predicted: seconds of a step
        measured: seconds of each step
        devices: the names of the accelerators
        predicted_bytes: for each accelerator, its memory, without the optimizer's states
        measured_bytes: the same, as PyTorch has allocated it
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


def config_of(given: PlanInput, candidate: Candidate) -> Config:
    """Return how to pipeline a model for a candidate."""
    devices = [torch.device(given.devices[place].name) for place in candidate.places]
    choice = candidate.choice
    schedule = candidate.fitted or candidate.schedule
    return Config(choice.balance, devices, candidate.chunks, schedule, choice.recomputed)


def try_out(tested: ModelUnderTest, given: PlanInput, fitting: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the candidates, those that were run with their measured times and in front, the quickest first.

    Args:
        tested: the model
        given: what is planned for
        fitting: the candidates, the best predicted ones first
        count: how many of them to run at most; one alone is not run
    """
    near = [each for each in fitting[:count] if each.seconds <= _FAR * fitting[0].seconds]
    if len(near) < 2:
        return list(fitting)
    seconds: dict[int, list[float]] = {k: [] for k in range(len(near))}
    for _ in range(_TURNS):
        for k in [*seconds]:
            try:
                config = config_of(given, near[k])
                model, step = tested.pipeline(config)
                seconds[k] += time_steps(partial(step, given.batch), config.devices, 1 + _STEPS, model)[1:]
            except torch.OutOfMemoryError:  # The margin was too small for it.
                del seconds[k]
    ran = [replace(near[k], measured=statistics.median(of_steps)) for k, of_steps in seconds.items()]
    return [*sorted(ran, key=lambda candidate: candidate.measured), *fitting[len(near) :]]


def run_check(tested: ModelUnderTest, given: PlanInput, candidate: Candidate, steps: int) -> Check:
    """Run steps, and return what they took.

    Args:
        tested: the model
        given: what was planned for
        candidate: the candidate to run
        steps: the number of steps that are measured; another one runs before them
    """
    config = config_of(given, candidate)
    model, step = tested.pipeline(config)
    run = partial(step, given.batch)
    accelerators = {k: torch.device(device.name) for k, device in enumerate(given.devices) if device.name[:3] != "cpu"}
    time_steps(run, config.devices, 1, model)
    for device in accelerators.values():
        torch.accelerator.reset_peak_memory_stats(device)
    seconds = tuple(time_steps(run, config.devices, steps, model))
    allocated = [float(device_module(device).max_memory_allocated(device)) for device in accelerators.values()]
    expected = dict(zip(accelerators, [candidate.memory[k] for k in accelerators]))
    of_layers = [place for place, count in zip(candidate.places, config.balance) for _ in range(count)]
    for layer, place in zip(given.costs.layers, of_layers):
        if place in expected:  # No optimizer runs here.
            expected[place] -= layer.trained * (given.states - 1)
    predicted = candidate.seconds if given.costs.has_times else 0.0
    names = tuple(map(str, accelerators.values()))
    return Check(predicted, seconds, names, tuple(expected.values()), tuple(allocated))

"""Run the best alternatives for a few steps, and put the quickest first.

A prediction is some per cent off, ten in the median of small models on a shared machine. Where alternatives are as
close as that, only a run tells which one is quicker.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from torchgpipe_balancing.planning.alternatives import Alternative, Question
from torchgpipe_balancing.planning.recorded import timed
from torchgpipe_balancing.planning.subject import Subject, Way

__all__ = ["tried_out", "way_of"]

#: Alternatives that are predicted to take so much longer than the best are not run.
_FAR = 1.15

#: How often each alternative takes its turn, and the steps that are timed in each; another step runs before them.
_TURNS, _STEPS = 3, 2


def way_of(question: Question, one: Alternative) -> Way:
    """Return how to pipeline a model for an alternative."""
    devices = [torch.device(question.devices[place].name) for place in one.places]
    return Way(one.choice.balance, devices, one.chunks, one.schedule, one.choice.recomputed)


def tried_out(subject: Subject, question: Question, fitting: Sequence[Alternative], count: int) -> list[Alternative]:
    """Return the alternatives, those that were run with their measured times and in front, the quickest first.

    Args:
        subject: the model
        question: what is planned for
        fitting: the alternatives, the best predicted ones first
        count: how many of them to run at most; one alone is not run
    """
    near = [one for one in fitting[:count] if one.seconds <= _FAR * fitting[0].seconds]
    if len(near) < 2:
        return list(fitting)
    seconds: list[list[float]] = [[] for _ in near]
    failed: set[int] = set()
    for _ in range(_TURNS):
        for k, one in enumerate(near):
            if k not in failed:
                try:
                    way = way_of(question, one)
                    model, step = subject.pipeline(way)
                    seconds[k] += timed(model, partial(step, question.batch), way.devices, 1 + _STEPS)[1:]
                except torch.OutOfMemoryError:  # The margin was too small for it.
                    failed.add(k)
    ran = [replace(one, measured=statistics.median(seconds[k])) for k, one in enumerate(near) if k not in failed]
    return [*sorted(ran, key=lambda one: one.measured), *fitting[len(near) :]]

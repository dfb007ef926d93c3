"""The activations that a plan predicts are those that a pipeline holds; with limits, no device holds more."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.balancing.planning.models import WIDTH, Attention, Residual, quick, wide
from tests.balancing.planning.peaks import activation_peaks
from tests.layers import Apply
from torchgpipe.schedule import NAMES, ScheduleName
from torchgpipe_balancing import DoesNotFit, Plan

#: The schedules that recompute: they run backward in one piece.
RECOMPUTING: list[ScheduleName] = ["GPipe", "1F1B", "Interleaved1F1B"]


class Case(NamedTuple):
    """A model, a sample, and further arguments."""

    model: nn.Module
    sample: Any
    options: dict[str, Any]

    def plan(self, **options: Any) -> Plan:
        """Return a plan. What needs no mask keeps the same on the meta device, where nothing is timed."""
        model = self.model if self.options else copy.deepcopy(self.model).to("meta")
        return quick(model, self.sample, batch=8, **options, **self.options)


class Scale(nn.Module):
    """Keeps what it owns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("constant", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.constant


def layer(kind: str) -> nn.Module:
    """Return a layer from ``WIDTH`` features to as many."""
    return {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "wide": lambda: wide(1)[0],
        "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
        "gelu": nn.GELU,
        "norm": lambda: nn.LayerNorm(WIDTH),
        "dropout": nn.Dropout,
        "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True),
        "silent": nn.Identity,
        # A view counts with all of its memory; parameters and buffers that are kept for backward are no activations.
        "view": lambda: Apply(lambda x: x * x[..., :1]),
        "owned": Scale,
    }[kind]()


KINDS = st.sampled_from(
    ["linear", "wide", "relu in place", "gelu", "norm", "dropout", "attention", "silent", "view", "owned"]
)


def masked() -> Case:
    """Return a model whose blocks share a mask."""
    return Case(Attention(4), (torch.randint(11, (2, 5)), torch.zeros(5, 5)), {"no_chunk": ("mask",)})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    if draw(st.booleans()):
        return Case(Residual(draw(st.integers(4, 7))), torch.randn(2, WIDTH), {})
    kinds = draw(st.lists(KINDS, min_size=4, max_size=7))
    return Case(nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(layer, kinds)), torch.randn(2, 3, WIDTH), {})


@settings(max_examples=15)
@given(case=cases(), schedule=st.sampled_from(NAMES), chunks=st.sampled_from([2, 4]))
@example(case=masked(), schedule="1F1B", chunks=4)
def test_what_is_predicted_is_held(case: Case, schedule: ScheduleName, chunks: int) -> None:
    plan = case.plan(schedule=schedule, chunks=chunks, checkpoint=False)
    predicted, held = activation_peaks(plan, case.model)
    if schedule == "V-Half":
        # The neighbours at the point of the V have one memory, and are counted as if they had two.
        assert all(a >= b for a, b in zip(predicted, held, strict=True))
    else:
        # A mask is counted for each micro-batch, and is there once.
        assert predicted == pytest.approx(held, rel=0.05 if case.options else 0.0)


@settings(max_examples=15)
@given(case=cases(), schedule=st.sampled_from(RECOMPUTING), share=st.sampled_from([0.4, 0.6, 0.8]))
@example(case=masked(), schedule="GPipe", share=0.6)
def test_with_limits_no_device_holds_more_than_is_predicted(case: Case, schedule: ScheduleName, share: float) -> None:
    free = case.plan(schedule=schedule, checkpoint=False)
    activations = free.outcome().simulation.peaks
    limits = [need - (1 - share) * held for need, held in zip(free.best.memory, activations, strict=True)]
    try:
        plan = case.plan(schedule=schedule, memory=limits, margin=0.0)
    except DoesNotFit:
        return
    assert all(need <= device.memory for need, device in zip(plan.best.memory, plan.input.devices, strict=True))
    assert all(held <= predicted for predicted, held in zip(*activation_peaks(plan, case.model), strict=True))

"""The activations that a plan predicts are those that a pipeline holds; with limits, no device holds more."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.balancing.planning.models import WIDTH, Attention, Residual, mlp, quick, wide
from torchgpipe.schedule import NAMES


class Case(NamedTuple):
    """A model, a sample, and further arguments."""

    model: nn.Module
    sample: Any
    options: dict[str, Any]


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
    }[kind]()


KINDS = st.sampled_from(
    ["linear", "wide", "relu in place", "gelu", "norm", "dropout", "attention", "silent"]
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    which = draw(st.sampled_from(["Sequential", "Sequential", "residual", "attention"]))
    if which == "attention":
        return Case(Attention(4), (torch.randint(11, (2, 5)), torch.zeros(5, 5)), {"no_chunk": ("mask",)})
    if which == "residual":
        return Case(Residual(draw(st.integers(4, 7))), torch.randn(2, WIDTH), {})
    kinds = draw(st.lists(KINDS, min_size=4, max_size=7))
    return Case(nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(layer, kinds)), torch.randn(2, 3, WIDTH), {})


@settings(max_examples=12)
@given(case=cases(), schedule=st.sampled_from(NAMES), chunks=st.sampled_from([2, 4]))
def test_without_recomputation_exactly_what_is_predicted_is_held(case: Case, schedule: Any, chunks: int) -> None:
    plan = quick(case.model, case.sample, batch=8, schedule=schedule, chunks=chunks, checkpoint=False, **case.options)
    check = plan.check(case.model, steps=1)
    for predicted, measured in zip(check.predicted_bytes, check.measured_bytes, strict=True):
        assert predicted == pytest.approx(measured, rel=0.05)


@settings(max_examples=8)
@given(case=cases(), schedule=st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]), share=st.sampled_from([0.5, 0.8]))
def test_with_limits_no_device_holds_more_than_is_predicted(case: Case, schedule: Any, share: float) -> None:
    options = {"batch": 8, "schedule": schedule, **case.options}
    free = quick(case.model, case.sample, checkpoint=False, **options)
    state = [need - held for need, held in zip(free.best.memory, free.best.activations)]
    limits = [own + share * held + 1 for own, held in zip(state, free.best.activations)]
    try:
        plan = quick(case.model, case.sample, memory=limits, margin=0.0, **options)
    except DoesNotFit:
        return
    assert all(need <= limit for need, limit in zip(plan.best.memory, limits, strict=True))
    check = plan.check(case.model, steps=1)
    assert all(a >= b for a, b in zip(check.predicted_bytes, check.measured_bytes, strict=True))

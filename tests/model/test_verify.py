"""Only a Sequential with a balance that fits it passes verification."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchgpipe.model.verify import verify_balance, verify_compiled, verify_module


def test_a_sequential_can_be_partitioned() -> None:
    verify_module(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    verify_module(nn.Sequential())


def test_equal_layers_are_no_duplicates() -> None:
    verify_module(nn.Sequential(nn.ReLU(), nn.ReLU()))


def test_any_other_module_cannot() -> None:
    with pytest.raises(TypeError, match="ModuleList"):
        verify_module(nn.ModuleList())


@given(counts=st.lists(st.integers(1, 4), max_size=5))
def test_a_balance_that_fits_is_returned_as_a_list(counts: list[int]) -> None:
    assert verify_balance(iter(counts), sum(counts)) == counts


@given(counts=st.lists(st.integers(-1, 4), max_size=5), layers=st.integers(0, 12))
def test_any_other_balance_is_refused(counts: list[int], layers: int) -> None:
    fits = sum(counts) == layers and all(count > 0 for count in counts)
    try:
        verify_balance(counts, layers)
    except ValueError as error:
        assert not fits
        assert str(layers) in str(error)
    else:
        assert fits


@pytest.mark.parametrize(
    "devices, refused", [(["cuda:0", "cuda:1"], True), (["cuda:0"], False), (["cpu:0", "cpu:1"], False)]
)
def test_cuda_graphs_are_refused_on_several_devices(devices: list[str], refused: bool) -> None:
    """PyTorch keeps them for each thread, and asserted in the workers' threads, which are new in each call."""
    layer: Any = nn.Linear(1, 1)
    # As after layer.compile(mode="reduce-overhead"); the compiler takes seconds to import.
    layer._compiled_call_impl = SimpleNamespace(get_compiler_config=lambda: {"triton.cudagraphs": True})
    with pytest.raises(ValueError, match="max-autotune-no-cudagraphs") if refused else nullcontext():
        verify_compiled([nn.Tanh(), layer], list(map(torch.device, devices)))

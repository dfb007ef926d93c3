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

from torchgpipe.model.verify import verify_balance, verify_compiled


@given(counts=st.lists(st.integers(-1, 4), max_size=5), layers=st.integers(0, 12))
def test_a_balance_that_fits_is_returned_as_a_list_and_any_other_is_refused(counts: list[int], layers: int) -> None:
    fits = sum(counts) == layers and all(count > 0 for count in counts)
    try:
        assert verify_balance(iter(counts), layers) == counts
    except ValueError as error:
        assert not fits
        first = str(error).splitlines()[0]
        assert str(layers) in first and (str(sum(counts)) in first or str(counts) in first)
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

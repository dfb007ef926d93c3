"""`save_on_cpu` around the call keeps activations in the host's memory until backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.conftest import Pipe
from tests.plain import assert_same, outcome, plain_outcome

LAYERS = [nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()]


@pytest.fixture
def module() -> nn.Sequential:
    return copy.deepcopy(nn.Sequential(*LAYERS)).double()


def test_backward_within_the_block(pipe: Pipe, module: nn.Sequential, checkpoint: str) -> None:
    """`replay/test_ambient.py` has the block around the call alone."""
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = plain_outcome(copy.deepcopy(module), x, chunks=3)
    model = pipe(module, [3, 2], chunks=3, checkpoint=checkpoint)
    with save_on_cpu():
        assert_same(outcome(model, x), expected)


def test_all_that_is_saved_goes_through_the_hooks(pipe: Pipe, module: nn.Sequential, checkpoint: str) -> None:
    """Forward saves the inputs of checkpointed cells; recomputation saves the same tensors as the plain model."""
    packed, unpacked = [], []
    now = "forward"

    def pack(tensor: Tensor) -> Tensor:
        packed.append(now)
        return tensor.to("cpu", copy=True)

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(now)
        return tensor

    model = pipe(module, [3, 2], chunks=3, checkpoint=checkpoint)
    with saved_tensors_hooks(pack, unpack):
        y = model(torch.randn(6, 4, dtype=torch.float64))
    now = "backward"
    y.sum().backward()
    checkpointed = {"always": 3, "except_last": 2, "never": 0}[checkpoint]
    all_of_a_micro_batch = 11
    assert packed.count("forward") == 2 * checkpointed + all_of_a_micro_batch * (3 - checkpointed)
    assert packed.count("backward") == all_of_a_micro_batch * checkpointed
    assert unpacked == ["backward"] * len(packed)

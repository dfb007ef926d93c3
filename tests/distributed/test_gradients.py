"""The gradients of a step, which a step that fails does not leave in ``.grad``."""

from __future__ import annotations

import torch
from torch import nn

from torchgpipe.distributed.step_gradients import StepGradients


def test_a_step_that_fails_leaves_the_gradients_of_earlier_steps() -> None:
    """It left a part of its own, or nothing if the gradients of the replicas could not be added."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    first.grad = torch.ones(2)
    gradients = StepGradients([first, second], None, torch.device("cpu"))
    gradients.begin()
    first.grad = second.grad = torch.full((2,), 5.0)
    gradients.undo()
    assert second.grad is None and torch.equal(first.grad, torch.ones(2))
    gradients.begin()
    first.grad, second.grad = torch.full((2,), 5.0), torch.full((2,), 7.0)
    gradients.end()
    assert torch.equal(first.grad, torch.full((2,), 6.0)) and torch.equal(second.grad, torch.full((2,), 7.0))

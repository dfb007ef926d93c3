"""Ctrl-C while threads of the autograd engine work, and the caller waits for them."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_recomputing

pytestmark = pytest.mark.late


class Interrupted(nn.Module):
    """Presses Ctrl-C in its recomputations, once it is told to."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        if self.on and is_recomputing():
            assert threading.current_thread() is not threading.main_thread()
            os.kill(os.getpid(), signal.SIGINT)
        return x * 1


@pytest.mark.parametrize("devices", [["late:0", "late:1"], ["late:0", "late:0"]], ids=str)
def test_an_interrupt_of_a_recomputation_reaches_the_caller(devices: list[str]) -> None:
    """The waiting thread ran the callback of a weak reference first, where an exception is ignored."""
    layer = Interrupted()
    model = GPipe(nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)), [1, 2], devices=devices, checkpoint="always")
    for _ in range(3):
        layer.on = True
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 4)).sum().backward()
        layer.on = False
        model(torch.ones(2, 4)).sum().backward()

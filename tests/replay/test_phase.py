"""Which of its two runs a layer is in."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from torchgpipe import is_checkpointing, is_recomputing
from torchgpipe.replay.phase import current_phase, enter_phase

PLAIN, CHECKPOINTING, RECOMPUTING = (False, False), (True, False), (False, True)


def phase() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


def test_outside_of_a_pipeline_a_layer_is_in_neither() -> None:
    assert phase() == PLAIN


def test_the_phase_ends_with_an_exception(pipe: Pipe, checkpoint: str) -> None:
    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = pipe(nn.Sequential(Fail()), [1], checkpoint=checkpoint)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 1, requires_grad=True))
    assert phase() == PLAIN


def test_the_phase_belongs_to_the_thread_and_can_be_handed_over() -> None:
    seen = []

    def run() -> None:
        seen.append(phase())
        with enter_phase(handed):
            seen.append(phase())
        seen.append(phase())

    with enter_phase(RECOMPUTING):
        handed = current_phase()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert phase() == RECOMPUTING
    assert seen == [PLAIN, RECOMPUTING, PLAIN]


def test_phases_nest_and_end() -> None:
    with enter_phase(CHECKPOINTING):
        assert phase() == CHECKPOINTING
        with pytest.raises(ZeroDivisionError), enter_phase(RECOMPUTING):
            assert phase() == RECOMPUTING
            raise ZeroDivisionError
        assert phase() == CHECKPOINTING
    assert phase() == PLAIN

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


class Observer(nn.Module):
    """Notes the phase that each of its runs is in."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.phases.append(phase())
        return x * 2


def test_outside_of_a_pipeline_a_layer_is_in_neither() -> None:
    assert phase() == PLAIN


@pytest.mark.parametrize(
    ("checkpoint", "forward", "backward"),
    [
        ("always", [CHECKPOINTING, CHECKPOINTING, CHECKPOINTING], [RECOMPUTING, RECOMPUTING, RECOMPUTING]),
        ("except_last", [CHECKPOINTING, CHECKPOINTING, PLAIN], [RECOMPUTING, RECOMPUTING]),
        ("never", [PLAIN, PLAIN, PLAIN], []),
    ],
)
def test_the_runs_of_a_layer(
    pipe: Pipe, checkpoint: str, forward: list[tuple[bool, bool]], backward: list[tuple[bool, bool]]
) -> None:
    observers = [Observer(), Observer()]
    model = pipe(nn.Sequential(*observers), [1, 1], chunks=3, checkpoint=checkpoint)
    output = model(torch.ones(3, 1, requires_grad=True))
    assert [observer.phases for observer in observers] == [forward, forward]
    assert phase() == PLAIN
    output.sum().backward()
    assert [observer.phases for observer in observers] == [forward + backward] * 2
    assert phase() == PLAIN


def test_nothing_is_checkpointed_in_evaluation_or_without_gradients(pipe: Pipe) -> None:
    observer = Observer()
    model = pipe(nn.Sequential(observer, nn.Linear(1, 1)), [1, 1], chunks=2, checkpoint="always")
    with torch.no_grad():
        model(torch.ones(2, 1))
    with torch.inference_mode():
        model(torch.ones(2, 1))
    model.eval()
    x = torch.ones(2, 1, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert observer.phases == [PLAIN] * 6


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

"""Which of its two runs a layer is in."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from torchgpipe import GPipe, is_checkpointing, is_recomputing
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


def test_nothing_is_checkpointed_where_nothing_needs_a_gradient(pipe: Pipe) -> None:
    """A frozen partition before a trained one runs once."""
    first, second = Observer(), Observer()
    module = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), first, nn.Linear(1, 1), second)
    model = pipe(module, [2, 2], chunks=2, checkpoint="always")
    model(torch.ones(2, 1)).sum().backward()
    assert first.phases == [PLAIN, PLAIN]
    assert second.phases == [CHECKPOINTING, CHECKPOINTING, RECOMPUTING, RECOMPUTING]


def test_the_phase_ends_with_an_exception(pipe: Pipe, checkpoint: str) -> None:
    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = pipe(nn.Sequential(Fail()), [1], checkpoint=checkpoint)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 1, requires_grad=True))
    assert phase() == PLAIN


def test_a_pipeline_inside_a_recomputed_layer_is_in_both_phases() -> None:
    observer = Observer()
    inner = GPipe(nn.Sequential(observer), [1], devices=["cpu"], checkpoint="always")
    outer = GPipe(nn.Sequential(inner), [1], devices=["cpu"], checkpoint="always")
    outer(torch.ones(1, 1, requires_grad=True)).sum().backward()
    # First without a graph; then again, and because there is a graph now, checkpointed; and then recomputed.
    assert observer.phases[0] == CHECKPOINTING
    assert all(is_recomputing for _, is_recomputing in observer.phases[1:])


def test_the_phase_belongs_to_the_thread() -> None:
    seen = []
    with enter_phase(RECOMPUTING):
        thread = threading.Thread(target=lambda: seen.append(phase()))
        thread.start()
        thread.join()
        assert phase() == RECOMPUTING
    assert seen == [PLAIN]


def test_a_phase_can_be_handed_to_another_thread() -> None:
    seen = []

    def run() -> None:
        with enter_phase(handed):
            seen.append(phase())
        seen.append(phase())

    with enter_phase(CHECKPOINTING):
        handed = current_phase()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [CHECKPOINTING, PLAIN]


def test_phases_nest_and_end() -> None:
    with enter_phase(CHECKPOINTING):
        assert phase() == CHECKPOINTING
        with pytest.raises(ZeroDivisionError), enter_phase(RECOMPUTING):
            assert phase() == RECOMPUTING
            raise ZeroDivisionError
        assert phase() == CHECKPOINTING
    assert phase() == PLAIN

"""Activations on their way forward and gradients on their way back are copied at once, each on streams of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests.clocks import listening
from torchgpipe import GPipe

pytestmark = pytest.mark.late


def layers(n: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(n)])


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


M = 6


def of_gpipe(n: int, devices: list[str], **options: Any) -> tuple[nn.Module, Callable[[], Any]]:
    model = GPipe(layers(n), [1] * n, devices=devices, checkpoint="never", **options)
    return model, lambda: model.step(torch.randn(M, 4), torch.randn(M, 4))


def of_pipelined(n: int, devices: list[str], **options: Any) -> tuple[nn.Module, Callable[[], Any]]:
    model: Any = torchgpipe.pipelined(layers(n), torch.randn(M, 4), balance=[1] * n, devices=devices, **options)
    input, target = torch.randn(M, 4, device=devices[0]), torch.randn(M, 4, device=devices[-1])
    return model, lambda: model.step(input, target=target)


@pytest.mark.parametrize("make", [of_gpipe, of_pipelined])
@pytest.mark.parametrize(
    "schedule, places",
    [
        ("1F1B", [0, 1, 2]),
        ("Interleaved1F1B", [0, 1, 0, 1]),
        ("ZeroBubble", [0, 1, 2]),
        ("V-Half", [0, 1, 1, 0]),
        ("ZB-V", [0, 1, 1, 0]),
        ("V-Min", [0, 1, 1, 0]),
    ],
)
def test_a_copy_forward_does_not_wait_for_gradients_on_their_way_back(
    make: Any, schedule: str, places: list[int]
) -> None:
    n = len(places)
    devices = [f"late:{place}" for place in places]
    model, step = make(n, devices, chunks=M, schedule=schedule, loss_fn=loss_fn)
    with listening(model) as done:
        step()
    copies = [work for work in done if work.kind == "copy" and work.other is not None]
    back = [work for work in copies if work.other < work.j]  # type: ignore[operator]
    links = [(a, a + 1) for a in range(n - 1) if places[a] != places[a + 1]]
    overlaps = []
    for a, c in links:
        forward = [work for work in copies if (work.j, work.other) == (a, c)]
        backward = [work for work in back if (work.j, work.other) == (c, a)]
        assert len(forward) == M == len(backward)
        overlaps += [there.overlaps(other) for there in forward for other in backward]
    assert any(overlaps), "else this shows nothing"
    for copied in (work for work in copies if work not in back):
        # It may wait for what its device has computed, and for the copies forward before it, and these for the same.
        computed = [work for work in done if work.kind == "forward" and work.precedes(copied)]
        late_ones = [grad for grad in back if grad.precedes(copied) and not any(map(grad.precedes, computed))]
        assert not late_ones, (schedule, copied.i, copied.j, [(grad.i, grad.j) for grad in late_ones])

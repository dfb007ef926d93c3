"""Activations on their way forward and gradients on their way back are copied at once, each on streams of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests import late
from tests.clocks import ClockedStreams, Done
from torchgpipe import GPipe
from torchgpipe.frames.pipelined import runs_of

pytestmark = pytest.mark.late


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


M = 6


def of_gpipe(n: int, devices: list[str], schedule: str, listener: Done) -> Callable[[], Any]:
    layers = nn.Sequential(*[block() for _ in range(n)])
    model = GPipe(layers, [1] * n, devices=devices, chunks=M, schedule=schedule, loss_fn=loss_fn, checkpoint="never")
    model._mechanisms = replace(model._mechanisms, streams=ClockedStreams(), recorder=listener)
    return lambda: model.step(torch.randn(M, 4), torch.randn(M, 4))


def of_pipelined(n: int, devices: list[str], schedule: str, listener: Done) -> Callable[[], Any]:
    layers = nn.Sequential(*[block() for _ in range(n)])
    options: Any = {"chunks": M, "schedule": schedule, "loss_fn": loss_fn}
    model: Any = torchgpipe.pipelined(layers, torch.randn(M, 4), balance=[1] * n, devices=devices, **options)
    pipeline = runs_of(model)
    assert pipeline is not None
    pipeline.streams, pipeline.recorder = ClockedStreams(), listener
    input, target = torch.randn(M, 4, device=devices[0]), torch.randn(M, 4, device=devices[-1])
    return lambda: model.step(input, target=target)


@pytest.mark.parametrize("make", [of_gpipe, of_pipelined])
@pytest.mark.parametrize(
    "schedule, places",
    [("1F1B", [0, 1, 2]), ("Interleaved1F1B", [0, 1, 0, 1]), ("ZeroBubble", [0, 1, 2]), ("V-Half", [0, 1, 1, 0])],
)
def test_a_copy_forward_does_not_wait_for_gradients_on_their_way_back(
    make: Any, schedule: str, places: list[int]
) -> None:
    listener, n = Done(), len(places)
    step = make(n, [f"late:{place}" for place in places], schedule, listener)
    late.hazards()
    step()
    torch.accelerator.synchronize()
    assert late.hazards() == []
    copies = [work for work in listener if work.kind == "copy" and work.other is not None]
    back = [work for work in copies if work.other < work.j]  # type: ignore[operator]
    links = [(a, a + 1) for a in range(n - 1) if places[a] != places[a + 1]]
    for a, c in links:
        forward = [work for work in copies if (work.j, work.other) == (a, c)]
        assert len(forward) == M == len([work for work in back if (work.j, work.other) == (c, a)])
        assert any(there.overlaps(other) for there in forward for other in back if (other.j, other.other) == (c, a))
    for copied in (work for work in copies if work not in back):
        # It may wait for what its device has computed, and for the copies forward before it, and these for the same.
        computed = [work for work in listener if work.kind == "forward" and work.precedes(copied)]
        late_ones = [grad for grad in back if grad.precedes(copied) and not any(map(grad.precedes, computed))]
        assert not late_ones, (schedule, copied.i, copied.j, [(grad.i, grad.j) for grad in late_ones])

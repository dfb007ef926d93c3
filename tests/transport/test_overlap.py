"""What the streams of a pipeline leave free to run at the same time: no wait is superfluous.

The streams have clocks (`tests.clocks`), which tell what is certain to be finished before other work begins.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.clocks import Clocked, ClockedStreams, Work, listening
from torchgpipe import GPipe
from torchgpipe.transport.route import Copy, Route, Wait, wait
from torchgpipe.transport.route import copy as copy_along

M = 4


def tanhs(mode: str = "except_last") -> GPipe:
    return GPipe(nn.Sequential(nn.Tanh(), nn.Tanh()), [1, 1], devices=["cpu:0", "cpu:1"], chunks=M, checkpoint=mode)


def forward() -> tuple[list[Work], list[Work], list[Work]]:
    """Return, per micro-batch, the cell on the first device, the copy, and the cell on the second device."""
    model = tanhs()
    with listening(model) as done, torch.no_grad():
        model(torch.randn(M, 3))
    source, copies, target = done.of("forward", 0), done.of("copy", 0, 1), done.of("forward", 1)
    assert len(source) == len(copies) == len(target) == M
    return source, copies, target


def test_copy_overlaps_with_computation() -> None:
    source, copies, target = forward()
    for i in range(M):
        assert source[i].precedes(copies[i]) and copies[i].precedes(target[i])
        assert all(copies[i].overlaps(other) for other in [*source[i + 2 :], *target[:i]])
        assert all(source[i].overlaps(other) for other in target[: max(0, i - 1)])


def test_neighbouring_cells_of_a_clock_overlap() -> None:
    source, copies, target = forward()
    for i in range(M - 1):
        assert source[i + 1].overlaps(copies[i]) and source[i + 1].overlaps(target[i])


def test_neighbouring_cells_overlap_at_backward() -> None:
    """On the host, one device may be two micro-batches ahead before the other one begins to wait for the first."""
    streams = ClockedStreams()
    source, target = (streams.current(torch.device("cpu", j)) for j in range(2))
    assert isinstance(source, Clocked) and isinstance(target, Clocked)
    route = Route.between(source, target, streams, (0, 1), None)
    assert route is not None
    copies, waits, grads = [], [], []
    for i in range(2):
        (ready,) = wait([route], i, (torch.ones(3, requires_grad=True) * 2,))
        assert ready is not None
        waits.append(ready.grad_fn)
        (moved,) = copy_along(route, i, (ready,))
        assert moved is not None
        copies.append(moved.grad_fn)
    for i in (1, 0):  # backward of the second device, in the order of the engine
        ahead = Work("backward", i, 1, None, target)
        ahead.end(False)
        grads.append(Copy.backward(copies[i], torch.ones(3))[2])
    Wait.backward(waits[1], grads[0])
    behind = Work("backward", 1, 0, None, source)
    behind.end(False)
    assert ahead.overlaps(behind)


def test_copy_of_gradients_overlaps_with_computation(checkpoint: str) -> None:
    model = tanhs(checkpoint)
    with listening(model) as done:
        model(torch.randn(M, 3, requires_grad=True)).sum().backward()
    source, copies, target = done.of("backward", 1), done.of("copy", 1, 0), done.of("backward", 0)
    assert len(source) == len(copies) == len(target) == M
    for i in range(M):
        assert source[i].precedes(copies[i]) and copies[i].precedes(target[i])
        assert all(copies[i].overlaps(other) for other in [*source[:i], *target[i + 1 :]])

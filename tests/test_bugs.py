"""Bugs of the past, each with its story: bugs of the original GPipe for PyTorch, and our own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.layers import Apply, Using
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import GPipe, pipelined


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


def bias() -> nn.Module:
    return Using(lambda linear, x: x + linear.bias[None])


def of_integers() -> list[nn.Module]:
    return [Apply(lambda x: (x * 2, x.argsort(1), x > 0)), Apply(lambda v: v[0].gather(1, v[1]) * v[2])]


def of_three() -> list[nn.Module]:
    return [Using(lambda f, x: (f(x), x * 2, x)), Apply(lambda v: v[0] + v[1] * 2 + v[2] * 3)]


def of_two() -> list[nn.Module]:
    return [nn.Linear(4, 4), Apply(lambda x: (x * 2, x * 3))]


#: A name, two layers, whether the input requires grad, and the loss.
STORIES: list[tuple[str, Callable[[], list[nn.Module]], bool, Callable[[Any], Tensor]]] = [
    # A user's autograd function may return the very tensor that it was given, which then belongs to two places in the
    # graph. At a boundary between partitions the original could fail with "Returning Variables sharing storage with
    # other Variables that require grad is not supported in Python functions".
    ("a function returns its input", lambda: [Apply(Identity.apply), Apply(Identity.apply)], True, torch.sum),
    # Recomputation made all inputs of a partition require a gradient, which integers do not support.
    ("integers at a boundary", of_integers, True, torch.sum),
    # Backward waited only for the copy of the first tensor of a micro-batch. Without checkpointing, the gradients of
    # the other tensors could be summed before they had arrived.
    ("a tuple at a boundary", of_three, True, torch.sum),
    # The first output carries the order of backward. A loss of the second output alone bypassed it.
    ("an output that the loss does not use", of_two, False, lambda output: output[1].sum()),
    # The micro-batches that the loss does not use are still part of the chain that orders backward.
    ("a loss of some micro-batches", lambda: [nn.Linear(4, 4), nn.Tanh()], True, lambda output: output[1:2].sum()),
    # A checkpoint whose inputs need no gradient has no place in the graph for its recomputation.
    ("nothing to train in the first partition", lambda: [nn.ReLU(), nn.Linear(4, 4)], False, torch.sum),
    # The container of their parameters and buffers lacks parts of a dict: `get` failed, and so did `in`.
    ("a script", lambda: [nn.Tanh(), torch.jit.script(Scaled())], False, torch.sum),
    ("a trace", lambda: [nn.Tanh(), torch.jit.trace(Scaled(), torch.ones(1, 4))], False, torch.sum),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize(("layers", "requires_grad", "loss"), [row[1:] for row in STORIES], ids=[s[0] for s in STORIES])
def test_what_once_went_wrong_is_as_in_the_plain_model(
    pipe: Pipe,
    checkpoint: str,
    layers: Callable[[], list[nn.Module]],
    requires_grad: bool,
    loss: Callable[[Any], Tensor],
) -> None:
    module, x = nn.Sequential(*layers()).double(), torch.randn(6, 4, dtype=torch.float64, requires_grad=requires_grad)
    expected = plain_outcome(module, x, chunks=3, loss=loss)
    model = pipe(module, [1, 1], chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        assert_same(outcome(model, x, loss=loss), expected)


@pytest.mark.parametrize("run", ["forward", "step"])
def test_a_gradient_that_waits_shares_memory_with_that_of_a_parameter(pipe: Pipe, checkpoint: str, run: str) -> None:
    """With one row, autograd makes one tensor the gradient of the input of `bias` and of its parameter.

    The parameter's became ``.grad``, the input's waited for the partition before; meanwhile the next micro-batch added
    to ``.grad`` in place. So gradients of earlier partitions were wrong, depending on which worker was faster.
    """
    parts = [(nn.Linear(4, 4), nn.Tanh(), bias()) for _ in range(3)]
    layers = nn.Sequential(*[layer for part in parts for layer in part]).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    expected = plain_outcome(layers, x, chunks=8, loss=torch.mean).param_grads
    model = pipe(layers, [2, 3, 4], chunks=8, checkpoint=checkpoint, loss_fn=lambda output, _: output.mean())
    for _ in range(5):
        model.zero_grad()
        if run == "step":
            model.step(x)
        else:
            model(x).mean().backward()
        grads = {name: parameter.grad for name, parameter in layers.named_parameters()}
        torch.testing.assert_close(grads, expected, rtol=1e-12, atol=0)


def gpipe_of_two(layers: nn.Sequential) -> nn.Module:
    """Return a pipeline of two devices, whose loss is the mean."""
    split = [len(layers) // 2, len(layers) - len(layers) // 2]
    return GPipe(layers, split, devices=["cpu:0", "cpu:1"], chunks=3, loss_fn=lambda output, _: output.mean())


def pipelined_of_two(layers: nn.Sequential) -> nn.Module:
    """Return a pipelined model on two devices, whose loss is the mean."""
    return pipelined(
        layers, torch.ones(2, 4), chunks=3, devices=["cpu:0", "cpu:1"], balance="parameters", loss_fn=torch.mean
    )


@pytest.mark.parametrize("of", [gpipe_of_two, pipelined_of_two])
def test_control_c_twice_while_a_layer_computes(of: Callable[[nn.Sequential], nn.Module]) -> None:
    """In Python 3.11, `Thread.join` takes a thread for stopped once a signal has interrupted it.

    So a worker computed beyond the exception and changed ``.grad``, or the wait for a frame that ran had no end.
    """
    heard, computing = threading.Event(), threading.Lock()
    presses: list[None] = []  # No attribute of the layer, which a step that fails puts back: it would press again.

    def hear(*_: Any) -> None:
        heard.set()
        raise KeyboardInterrupt

    class Pressing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if presses and x.device.type != "meta":
                presses.pop()
                with computing:
                    for _ in range(2):
                        heard.clear()
                        while not heard.is_set():
                            os.kill(os.getpid(), signal.SIGINT)
                            heard.wait(0.05)  # A thread that is about to wait for a lock may hear a signal later.
                    for _ in range(3):
                        x = (x @ torch.ones(x.shape[1], 2000)) @ torch.ones(2000, x.shape[1])
            return x

    model = of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Pressing()))
    previous = signal.signal(signal.SIGINT, hear)
    threads = {*threading.enumerate()}
    try:
        presses.append(None)
        with pytest.raises(KeyboardInterrupt):
            model.step(torch.ones(6, 4))
        assert not computing.locked()
        assert threads.issuperset(threading.enumerate())
    finally:
        signal.signal(signal.SIGINT, previous)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.step(torch.ones(6, 4))


@pytest.mark.parametrize("of", [gpipe_of_two, pipelined_of_two])
def test_a_thread_that_cannot_start(of: Callable[[nn.Sequential], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes are limited, threads are, too. The wait for a frame whose thread had not started had no end."""
    model = of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    model.step(torch.ones(6, 4))  # It draws nothing, so the next steps have workers.
    model.zero_grad()
    threads = {*threading.enumerate()}
    start = threading.Thread.start

    def steps(may_start: int) -> bool:
        def limited(thread: threading.Thread) -> None:
            nonlocal may_start
            may_start -= 1
            if may_start < 0:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", limited)
            model.step(torch.ones(6, 4))
        return True

    for may_start in count():
        with suppress(RuntimeError):
            if steps(may_start):
                break
        assert threads.issuperset(threading.enumerate())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert may_start >= 2


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("step", [False, True])
def test_a_mask_that_layers_pass_on_requires_no_grad(pipe: Pipe, checkpoint: Any, step: bool) -> None:
    """Behind a cell that runs again it required grad: it was differentiated, and its gradient copied back."""
    required: list[bool] = []

    def masked(linear: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = inputs
        required.append(mask.requires_grad)
        return linear(x) + mask, mask

    layers = nn.Sequential(*[Using(masked) for _ in range(3)])
    model = pipe(layers, [1, 1, 1], chunks=2, checkpoint=checkpoint, loss_fn=lambda y, _: y[0].square().mean())
    x, mask = torch.randn(4, 4), torch.randn(4, 4)
    if step:
        model.step((x, mask))
    else:
        output, same = model((x, mask))
        assert not same.requires_grad
        output.sum().backward()
    assert not any(required)

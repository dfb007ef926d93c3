"""Bugs of the past, each with its story: bugs of the original GPipe for PyTorch, and our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE, KIND, backend, be_slow, is_there, needs_accelerator
from tests.conftest import Pipe
from tests.layers import Apply
from torchgpipe import GPipe, pipelined


def gpipe_of_two(layers: nn.Sequential) -> nn.Module:
    """Return a pipeline of two devices, whose loss is the mean."""
    split = [len(layers) // 2, len(layers) - len(layers) // 2]
    return GPipe(layers, split, devices=["cpu:0", "cpu:1"], chunks=3, loss_fn=lambda output, _: output.mean())


def pipelined_of_two(layers: nn.Sequential) -> nn.Module:
    """Return a pipelined model on two devices, whose loss is the mean."""
    return pipelined(
        layers, torch.ones(2, 4), chunks=3, devices=["cpu:0", "cpu:1"], balance="parameters", loss_fn=torch.mean
    )


def test_an_autograd_function_that_returns_its_input(pipe: Pipe, checkpoint: str) -> None:
    """A user's autograd function may return the very tensor that it was given.

    Such a tensor belongs to two places in the graph. In the original this could fail with "Returning Variables
    sharing storage with other Variables that require grad is not supported in Python functions" when the tensor
    reached a boundary between partitions.
    """

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = torch.rand(42, requires_grad=True)
    model = pipe(nn.Sequential(Apply(Identity.apply), Apply(Identity.apply)), [1, 1], chunks=2, checkpoint=checkpoint)
    y = model(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(42))


@pytest.mark.timeout(60)
def test_an_exception_does_not_hang(pipe: Pipe, checkpoint: str) -> None:
    """A partition that had failed did not report that it was done with the next micro-batch.

    So with at least three partitions and three micro-batches, the partition before it waited forever.
    """

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    layers = nn.Sequential(nn.Identity(), nn.Identity(), Apply(fail))
    model = pipe(layers, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    with pytest.raises(ArithmeticError):
        model(torch.rand(3, requires_grad=True))


def dropouts() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(*[nn.Dropout(0.005) for _ in range(20)]) for _ in range(2)])


def test_dropout_draws_the_same_mask_again(pipe: Pipe, checkpoint: str) -> None:
    """Recomputation drew other random numbers than forward, because partitions drew from one generator concurrently.

    Then an element whose output was dropped got a gradient. Many dropouts in a row make this visible.
    """
    assert_same_mask(pipe(dropouts(), [1, 1], chunks=10, checkpoint=checkpoint), "cpu")


SECOND = f"{KIND}:1"


@needs_accelerator
@pytest.mark.skipif(backend.device_count() < 2, reason="needs two GPUs")
def test_dropout_draws_the_same_mask_again_on_gpus(checkpoint: str) -> None:
    assert_same_mask(GPipe(dropouts(), [1, 1], devices=[DEVICE, SECOND], chunks=10, checkpoint=checkpoint), DEVICE)


def assert_same_mask(model: nn.Module, device: str) -> None:
    x = torch.rand(10, 10, device=device, requires_grad=True)
    y = model(x)
    y.norm().backward()
    assert not y.all(), "some elements were dropped"
    assert torch.equal(y.bool().cpu(), x.grad.bool().cpu())


class Pair(nn.Module):
    """A layer with two tensors at a boundary; the gradient of the second one takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.second = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.first(x), self.second(x)
        if is_there(x) and b.requires_grad:
            b.register_hook(lambda grad: be_slow())
        return a, a * b, b


def pair_and_sum() -> nn.Sequential:
    return nn.Sequential(Pair(), Apply(lambda values: values[0] + values[1] * 2 + values[2] * 3))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).norm().backward()
    # Copies: a model that is moved takes its gradients along.
    return [parameter.grad.cpu().clone() for parameter in model.parameters()]


def test_all_tensors_of_a_tuple_are_waited_for(pipe: Pipe, checkpoint: str) -> None:
    """Backward waited only for the copy of the first tensor of a micro-batch.

    Without checkpointing, the gradients of the other tensors could be summed before they had arrived.
    """
    module, x = pair_and_sum(), torch.rand(8, 3, 4, 4)
    expected = gradients(module, x)
    actual = gradients(pipe(module, [1, 1], chunks=4, checkpoint=checkpoint), x)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@needs_accelerator
@pytest.mark.parametrize("second", ["cpu", SECOND])
def test_all_tensors_of_a_tuple_are_waited_for_on_gpus(checkpoint: str, second: str) -> None:
    if second == SECOND and backend.device_count() < 2:
        pytest.skip("needs two GPUs")
    # In float32, convolutions on a GPU round to the 10 bits of TF32.
    module, x = pair_and_sum().double(), torch.rand(8, 3, 32, 32, dtype=torch.float64)
    expected = gradients(module, x)
    model = GPipe(module, [1, 1], devices=[DEVICE, second], chunks=4, checkpoint=checkpoint)
    for a, b in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_integers_at_a_boundary_need_no_gradient(pipe: Pipe, checkpoint: str) -> None:
    """Recomputation made all inputs of a partition require a gradient, which integers do not support."""

    layers = nn.Sequential(Apply(lambda x: (x * 2, x.argsort(1), x > 0)), Apply(lambda v: v[0].gather(1, v[1]) * v[2]))
    x = torch.randn(4, 3, requires_grad=True)
    model = pipe(layers, [1, 1], chunks=2, checkpoint=checkpoint)
    model(x).sum().backward()
    expected = x.detach().clone().requires_grad_()
    layers(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_an_output_that_the_loss_does_not_use(pipe: Pipe, checkpoint: str) -> None:
    """The first output carries the order of backward. A loss of the second output alone bypassed it."""

    unused, used = nn.Linear(2, 2), nn.Linear(2, 2)
    two = Apply(lambda x: (unused(x), used(x)))
    two.both = nn.ModuleList([unused, used])
    module = nn.Sequential(nn.Linear(2, 2), two)
    model = pipe(module, [1, 1], chunks=3, checkpoint=checkpoint)
    model(torch.randn(6, 2))[1].sum().backward()
    assert unused.weight.grad is None
    assert used.weight.grad is not None
    assert module[0].weight.grad is not None


def test_a_loss_of_some_micro_batches_only(pipe: Pipe, checkpoint: str) -> None:
    """The micro-batches that the loss does not use are still part of the chain that orders backward."""
    model = pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=4, checkpoint=checkpoint)
    x = torch.randn(4, 2, requires_grad=True)
    model(x)[1:2].sum().backward()
    assert x.grad is not None
    assert [bool(row.any()) for row in x.grad] == [False, True, False, False]


def test_no_parameter_and_no_input_needs_a_gradient_in_the_first_partition(pipe: Pipe, checkpoint: str) -> None:
    """A checkpoint whose inputs need no gradient has no place in the graph for its recomputation."""
    model = pipe(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), [1, 1], chunks=2, checkpoint=checkpoint)
    model(torch.randn(4, 2)).sum().backward()
    assert model[1].weight.grad is not None


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_data_loader_with_forked_workers_runs_beside_it_without_warnings() -> None:
    """Worker threads that wait for the next mini-batch exist while the loader forks.

    Python warns about this, and a process forked this way may deadlock. The script runs in its own process, because
    other tests may have left threads of PyTorch in this one.
    """
    script = """
        import threading
        import torch
        from torch import nn
        from torch.utils.data import DataLoader
        from torchgpipe import GPipe

        torch.set_num_threads(1)
        model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)
        loader = DataLoader(list(torch.randn(8, 2)), batch_size=4, num_workers=1, multiprocessing_context="fork")
        for epoch in range(2):
            for x in loader:
                before = threading.active_count()
                model(x).sum().backward()
                assert threading.active_count() == before
        print("done")
    """
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr, result.returncode) == ("done\n", "", 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("compiled", ["script", "trace"])
def test_layers_of_torch_script(pipe: Pipe, checkpoint: str, compiled: str) -> None:
    """The container of their parameters and buffers lacks parts of a dict: `get` failed, and so did `in`."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.scale

    layer: nn.Module = torch.jit.script(Layer()) if compiled == "script" else torch.jit.trace(Layer(), torch.ones(1, 3))
    model = pipe(nn.Sequential(nn.Tanh(), layer), [1, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(3).tanh() * 8)


@pytest.mark.parametrize("run", ["forward", "step"])
def test_a_gradient_that_waits_shares_memory_with_that_of_a_parameter(pipe: Pipe, checkpoint: str, run: str) -> None:
    """With one row, autograd makes one tensor the gradient of the input of `Bias` and of its parameter.

    The parameter's became ``.grad``, the input's waited for the partition before; meanwhile the next micro-batch added
    to ``.grad`` in place. So gradients of earlier partitions were wrong, depending on which worker was faster.
    """

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bias[None]

    lines = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)]
    layers = nn.Sequential(lines[0], nn.Tanh(), Bias(), lines[1], nn.Tanh(), Bias(), lines[2], nn.Tanh())
    x = torch.randn(8, 8, dtype=torch.float64)
    for row in x.split(1):
        (layers(row).mean() / 8).backward()
    expected = [parameter.grad for parameter in layers.parameters()]
    for parameter in layers.parameters():
        parameter.grad = None
    model = pipe(layers, [2, 3, 3], chunks=8, checkpoint=checkpoint, loss_fn=lambda output, _: output.mean())
    for _ in range(5):
        if run == "step":
            model.step(x)
        else:
            model(x).mean().backward()
        torch.testing.assert_close([parameter.grad for parameter in layers.parameters()], expected, rtol=1e-12, atol=0)
        model.zero_grad()


@pytest.mark.parametrize("of", [gpipe_of_two, pipelined_of_two])
def test_control_c_twice_while_a_layer_computes(of: Callable[[nn.Sequential], nn.Module]) -> None:
    """In Python 3.11, `Thread.join` takes a thread for stopped once a signal has interrupted it.

    So a worker computed beyond the exception and changed ``.grad``, or the wait for a frame that ran had no end.
    """
    heard, computing = threading.Event(), threading.Lock()

    def hear(*_: Any) -> None:
        heard.set()
        raise KeyboardInterrupt

    class Pressing(nn.Module):
        presses = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.presses and x.device.type != "meta":
                self.presses -= 1
                with computing:
                    for _ in range(2):
                        heard.clear()
                        while not heard.is_set():
                            os.kill(os.getpid(), signal.SIGINT)
                            heard.wait(0.05)  # A thread that is about to wait for a lock may hear a signal later.
                    for _ in range(3):
                        x = (x @ torch.ones(x.shape[1], 2000)) @ torch.ones(2000, x.shape[1])
            return x

    pressing = Pressing()
    model = of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), pressing))
    previous = signal.signal(signal.SIGINT, hear)
    threads = {*threading.enumerate()}
    try:
        pressing.presses = 1
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

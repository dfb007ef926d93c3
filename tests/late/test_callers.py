"""What belongs to the caller: memory that a copy reads, streams of its own, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from tests.layers import Apply, Using, Weighted
from torchgpipe import GPipe, is_recomputing, pipelined
from torchgpipe.devices.stream import Streams

pytestmark = pytest.mark.late

DEVICES = ["late:0", "late:1"]


# Memory: what is copied may belong to somebody else as well, who overwrites it while the copy is under way.


def delay(purpose: str) -> None:
    """Let copies of a kind be late, as on a busy bus."""
    for device in DEVICES:
        with Streams().side(torch.device(device), purpose).use():
            torch.late._sleep(100_000_000)  # type: ignore[attr-defined]


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(
    "shape", [lambda p: p, lambda p: p.view(2, 4), lambda p: p.view(4, 2).t()], ids=["itself", "a view", "strides"]
)
def test_a_gradient_on_its_way_back_is_also_that_of_a_parameter(
    checkpoint: str, shape: Callable[[Tensor], Tensor]
) -> None:
    def gradients(devices: list[str]) -> list[Tensor]:
        torch.manual_seed(0)
        # A parameter of the shape of a micro-batch, such as positions where micro-batches have one row.
        shift = Weighted(lambda x, parameter: (x + shape(parameter)).tanh(), (2, 4))
        layers = nn.Sequential(nn.Linear(4, 4), shift, nn.Linear(4, 4)).double()
        model = GPipe(layers, [1, 2], devices=devices, chunks=3, checkpoint=checkpoint)
        loss = model(torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(6, 4)).square().sum()
        if devices == DEVICES:
            delay("gradient arriving")
        loss.backward()
        return [parameter.grad.cpu() for parameter in layers.parameters() if parameter.grad is not None]

    expected = gradients(["cpu", "cpu"])
    assert all(map(torch.equal, gradients(DEVICES), expected))


@pytest.mark.parametrize("call", ["forward", "step"])
@pytest.mark.parametrize("own", [False, True], ids=["input", "parameter"])
def test_the_caller_may_overwrite_what_a_call_has_copied(call: str, own: bool) -> None:
    """The first layer returns memory of the caller's: its input, or its parameter."""
    first = Using(lambda linear, x: linear.bias.expand(x.shape) if own else x)
    nn.init.ones_(first.linear.bias)
    layers, loss_fn = nn.Sequential(first, nn.Identity()), lambda output, _: output.mean()
    model = GPipe(layers, [1, 1], devices=DEVICES, chunks=2, loss_fn=loss_fn)
    x = torch.ones(4, 4, device="late:0")
    delay("leaving")
    with torch.no_grad():
        y = model(x) if call == "forward" else model.step(x)
        x.zero_()
        first.linear.bias.zero_()
    assert bool((y == 1).all())


def test_anomaly_mode_finds_no_nan_in_a_gradient_that_has_not_arrived() -> None:
    model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=DEVICES, chunks=2)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        model(torch.ones(4, 4)).sum().backward()


# Streams: the threads of the autograd engine do not always know those of the caller.


def test_a_recomputation_of_what_goes_to_the_host_is_on_its_device() -> None:
    """Its node of the autograd graph belongs to no accelerator, so the engine does not enter one."""
    to_host = Using(lambda linear, x: (linear(x) + torch.ones(4, device="late")).cpu())
    model = GPipe(nn.Sequential(to_host), [1], devices=DEVICES[1:], chunks=2, checkpoint="always")
    model(torch.ones(4, 4)).sum().backward()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_gradients_of_a_pipelined_model_are_ready_for_nodes_of_other_streams() -> None:
    """The engine lets these wait for the stream of the one node of the mini-batch, which is of one device."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipelined(model, torch.ones(2, 4), chunks=2, devices=DEVICES, balance="parameters")
    nodes = [get_gradient_edge(parameter) for parameter in model.parameters()]  # as DistributedDataParallel keeps
    streams = [torch.Stream(device) for device in DEVICES]
    for _ in range(2):
        with streams[1], streams[0]:
            loss = model(torch.ones(4, 4)).sum()
        for stream in streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        loss.backward()
    gradients = [node.node.variable.grad for node in nodes]
    assert all([bool(gradient.isfinite().all()) for gradient in gradients])


# Ctrl-C while threads of the autograd engine work, and the caller waits for them.


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("devices", [["late:0", "late:1"], ["late:0", "late:0"]], ids=str)
def test_an_interrupt_of_a_recomputation_reaches_the_caller(devices: list[str]) -> None:
    """The waiting thread ran the callback of a weak reference first, where an exception is ignored."""
    interrupts = False

    def interrupt(x: Tensor) -> Tensor:
        if interrupts and is_recomputing():
            assert threading.current_thread() is not threading.main_thread()
            os.kill(os.getpid(), signal.SIGINT)
        return x * 1

    layers = nn.Sequential(nn.Linear(4, 4), Apply(interrupt), nn.Linear(4, 4))
    model = GPipe(layers, [1, 2], devices=devices, checkpoint="always")
    for _ in range(3):
        interrupts = True
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 4)).sum().backward()
        interrupts = False
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_partition_whose_output_is_on_the_host(checkpoint: str) -> None:
    """Its node runs in the caller's thread, and the graph of the cell in that of its device: the gradient of an input
    was taken for one that something else had differentiated."""

    def gradients(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x.cpu()), nn.Tanh()).double()
        model = GPipe(layers, [2, 1], devices=[device, device], chunks=2, checkpoint=checkpoint)
        x = torch.linspace(-2, 2, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
        model(x).sum().backward()
        return [one.grad.cpu() for one in (x, *layers.parameters()) if one.grad is not None]

    assert all(map(torch.equal, gradients("late:0"), gradients("cpu")))

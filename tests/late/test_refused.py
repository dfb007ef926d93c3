"""Refused before anything runs: pipelines on other devices in a layer, and CUDA graphs in several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.front.models import Chain
from torchgpipe import GPipe, pipelined

pytestmark = pytest.mark.late

DEVICES = ["late:0", "late:1"]


# Pipelines as layers of others: right, or refused.


def a_row(devices: list[str]) -> nn.Module:
    return GPipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), [1, 1], devices=devices, chunks=2)


def any_module(devices: list[str]) -> nn.Module:
    return pipelined(Chain(), torch.ones(2, 4), chunks=2, devices=devices)


@pytest.mark.parametrize("inner", [a_row, any_module])
def test_a_pipeline_on_other_devices_is_refused(inner: Callable[[list[str]], nn.Module]) -> None:
    layer = inner(["late:1", "late:2"])
    before = [(parameter, parameter.device) for parameter in layer.parameters()]
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer), nn.Linear(4, 4))
    refusal = r"is a pipeline on late:1, late:2 in partition 0 on late:1; .* unwrap it"
    with pytest.raises(ValueError, match=refusal):
        GPipe(layers, [2, 1], devices=["late:1", "late:2"])
    assert layers[0].weight.device.type == "cpu"
    assert [(parameter, parameter.device) for parameter in layer.parameters()] == before
    model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Identity()), [1, 1], devices=["late:1", "late:2"])
    with pytest.raises(ValueError, match=r"is a pipeline on late:1, late:2 in partition 1 on late:2"):
        model[1] = layer


@pytest.mark.parametrize("outer", ["always", "except_last", "never"])
def test_a_pipeline_on_the_device_of_its_partition_draws_the_same_again(outer: str) -> None:
    inner = GPipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.2)), [1, 1], devices=["late:1"] * 2, chunks=2)
    layers = nn.Sequential(nn.Identity(), inner)
    model = GPipe(layers, [1, 1], devices=["late:0", "late:1"], chunks=3, checkpoint=outer)
    x = torch.ones(6, 4, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach().cpu())


# Modules that were compiled into CUDA graphs are refused wherever each device has a thread.


class Compiled:
    """What ``layer.compile()`` leaves: calls the layer. The compiler takes seconds to import."""

    def __init__(self, layer: nn.Module, *, graphs: bool) -> None:
        self._layer, self._graphs = layer, graphs

    def __call__(self, *args: Any) -> Any:
        return self._layer._call_impl(*args)

    def get_compiler_config(self) -> dict[str, Any]:
        return {"triton.cudagraphs": self._graphs}


def compile(layer: Any, *, graphs: bool = True) -> None:
    layer._compiled_call_impl = Compiled(layer, graphs=graphs)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_layers_and_partitions_of_a_gpipe() -> None:
    module = layers()
    compile(module[1])
    with pytest.raises(ValueError, match=r"a module \(Linear\) was compiled into CUDA graphs"):
        GPipe(module, [1, 1], devices=DEVICES, chunks=2)
    model = GPipe(layers(), [1, 1], devices=DEVICES, chunks=2, loss_fn=nn.functional.mse_loss)
    compile(model.partitions[1], graphs=False)
    model(torch.rand(4, 2))
    compile(model.partitions[1])
    with pytest.raises(ValueError, match="compile it with mode='default'"):
        model(torch.rand(4, 2))
    with pytest.raises(ValueError, match="on 2 devices"):
        model.step(torch.rand(4, 2), torch.rand(4, 2))


def test_modules_of_a_pipelined_model() -> None:
    sample = torch.rand(4, 2)
    module = layers()
    compile(module[1])
    with pytest.raises(ValueError, match="was compiled into CUDA graphs"):
        pipelined(module, sample, balance=[1, 1], devices=DEVICES, chunks=2)
    model: Any = pipelined(layers(), sample, balance=[1, 1], devices=DEVICES, chunks=2)
    compile(model[0])  # A door is in front of the compiled code from the next call on.
    for _ in range(2):
        with pytest.raises(ValueError, match="was compiled into CUDA graphs"):
            model(sample)

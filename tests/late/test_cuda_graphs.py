"""Modules that were compiled into CUDA graphs are refused wherever each device has a thread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from torchgpipe import GPipe

pytestmark = pytest.mark.late

DEVICES = ["late:0", "late:1"]


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
        torchgpipe.pipelined(module, sample, balance=[1, 1], devices=DEVICES, chunks=2)
    model: Any = torchgpipe.pipelined(layers(), sample, balance=[1, 1], devices=DEVICES, chunks=2)
    compile(model[0])  # A door is in front of the compiled code from the next call on.
    for _ in range(2):
        with pytest.raises(ValueError, match="was compiled into CUDA graphs"):
            model(sample)

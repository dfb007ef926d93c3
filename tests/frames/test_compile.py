"""Compiled blocks in a pipelined model: before and after, without a graph break at a door."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.frames.models import TWO, batch, chain, decoder, expect_plain, gradients, plain_loss, sample_of
from tests.layers import Using
from tests.practice.test_compile import Graphs, nothing_is_compiled  # noqa: F401
from torchgpipe import pipelined

# torch.compile looks at every input's `.grad` and hides the warning about it, unless warnings are errors.
pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"), pytest.mark.slow]


def by_method(model: Any, graphs: Graphs) -> None:
    for layer in model.layers:
        layer.compile(backend=graphs, fullgraph=True)


def by_wrapping(model: Any, graphs: Graphs) -> None:
    for k, layer in enumerate(model.layers):
        model.layers[k] = torch.compile(layer, backend=graphs, fullgraph=True)


@pytest.mark.parametrize("compiled", [by_method, by_wrapping])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_blocks(compiled: Callable[[Any, Graphs], None], when: str) -> None:
    model, data = decoder(), batch()
    plain = copy.deepcopy(model)
    graphs, alone = Graphs(), Graphs()
    compiled(plain, alone)
    plain_loss(plain, data, 3)
    gradients(plain)
    torch.compiler.reset()
    if when == "before":
        compiled(model, graphs)
    pipelined(model, sample_of(data), chunks=3, devices=TWO, balance=[3, 4])
    if when == "after":
        compiled(model, graphs)
    for _ in range(2):
        expect_plain(model, plain, data)
    # The two runs of the sample, with a row less and without grad, have graphs of their own.
    assert graphs.count <= alone.count + 2


def test_a_compiled_function_around_the_model() -> None:
    """The pipeline stays outside of the graph."""
    model: Any = pipelined(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(2, 2), chunks=2, devices=TWO)

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        out: Tensor = model(x) * 2
        return out

    x = torch.randn(4, 2)
    torch.testing.assert_close(run(x), model(x) * 2)
    run(x).sum().backward()


def test_a_mode_that_the_model_enters_reaches_compiled_blocks() -> None:
    """The run of the sample that finds the spine took it off the stack in place of its own mode."""
    runs: list[list[str]] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in ("linear", "relu"):  # and not what the compiler of an older PyTorch calls
                runs[-1].append(func.__name__)
            return func(*args, **(kwargs or {}))

    def forward(self: Any, x: Tensor) -> Tensor:
        runs.append([])
        with Noting():
            for block in self.layers:
                x = block(x)
        return x

    model = chain(forward, *[Using(lambda linear, x: linear(x).relu()) for _ in range(2)])
    for block in model.layers:
        block.compile(backend=Graphs())
    pipelined(model, torch.randn(4, 4), chunks=2, devices=TWO, balance="parameters", verify=False)
    assert len(runs) > 1 and runs[0] and all(run == runs[0] for run in runs)

"""Compiled blocks in a pipelined model: before and after, without a graph break at a door."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from tests.front.models import TWO, batch, chain, decoder, expect_plain, gradients, plain_loss, same, sample_of
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


@pytest.mark.parametrize(("compiled", "when"), [(by_method, "before"), (by_wrapping, "after")])
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


def squash(x: Tensor) -> Tensor:
    return 1 / (2 + x * x)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x) * y + x


def attended(x: Tensor) -> Tensor:
    q = x.detach().view(len(x), 2, 2, 4)
    return x + flex_attention(q, q, q).flatten(1)  # type: ignore[operator]


class Inside(nn.Module):
    """A layer that calls a function, which may be compiled."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(16, 16), [function]

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self.linear(x))


class Between(nn.Module):
    """A model that calls a function between two layers, unless it is told not to."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)]), [function]

    def forward(self, x: Tensor, shows: bool = True) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            y = layer(x)
            if not shows:
                x = y
            else:
                x = self.function[0](first, y) if self.function[0].__name__ == "gated" else self.function[0](y)
        return x


def of_layers(function: Callable[..., Tensor]) -> nn.Module:
    return nn.Sequential(*[Inside(function) for _ in range(4)])


#: The model, the function, the backend of the compiler, whether all is one graph, and the devices.
COMPILED: list[tuple[Callable[[Any], nn.Module], Callable[..., Tensor], str, bool, list[str]]] = [
    (of_layers, squash, "eager", True, ["cpu"]),
    (of_layers, squash, "aot_eager", False, TWO),
    (Between, squash, "eager", False, TWO),
    (Between, squash, "eager", True, ["cpu"]),
    (Between, squash, "aot_eager", True, TWO),
    (Between, gated, "eager", True, TWO),
    (Between, gated, "eager", False, ["cpu"]),
]


def trained_in(model: Any, plain: nn.Module, **arguments: Any) -> None:
    x = torch.randn(6, 16, dtype=torch.float64)
    expected = torch.cat([plain(part, **arguments) for part in x.chunk(3)])
    with torch.no_grad():
        torch.testing.assert_close(model(x, **arguments), expected, rtol=1e-12, atol=1e-12)
    output = model(x, **arguments)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for one in (output, expected):
        one.square().sum().backward()
    same(gradients(model), gradients(plain))


@pytest.mark.parametrize(("make", "function", "backend", "fullgraph", "devices"), COMPILED)
def test_a_compiled_function(make: Any, function: Any, backend: str, fullgraph: bool, devices: list[str]) -> None:
    """The compiler traced the mode that looks at operations, and kept the ids and numbers that it found there."""
    plain = make(function).double()
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    model = copy.deepcopy(plain)
    for child in model.modules():
        if hasattr(child, "function"):
            child.function = [compiled]
    pipelined(model, torch.randn(2, 16, dtype=torch.float64), chunks=3, devices=devices, balance="parameters")
    trained_in(model, plain)


def test_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag of the process is no sign that the compiler is in this thread."""
    plain = Between(gated).double()
    model = copy.deepcopy(plain)
    pipelined(model, torch.randn(2, 16, dtype=torch.float64), chunks=3, devices=TWO, balance="parameters")
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    trained_in(model, plain)


def test_a_compiled_function_that_the_sample_does_not_show() -> None:
    """The outputs were wrong."""
    plain = Between(squash).double()
    model = copy.deepcopy(plain)
    model.function = [torch.compile(squash, backend="eager")]
    pipelined(model, (torch.randn(2, 16, dtype=torch.float64), False), chunks=3, devices=TWO, balance="parameters")
    trained_in(model, plain)


def test_a_compiled_function_that_takes_a_tensor_of_another_partition() -> None:
    model = Between(torch.compile(gated, backend="aot_eager")).double()
    with pytest.raises(
        RuntimeError, match=r"takes a tensor that .* compiled functions, .* let one module of the spine"
    ):
        pipelined(model, torch.randn(2, 16, dtype=torch.float64), chunks=3, devices=TWO, balance="parameters")


@pytest.mark.late
def test_a_compiled_function_that_takes_tensors_of_two_devices() -> None:
    model = Between(torch.compile(gated, backend="eager")).double()
    sample = torch.randn(2, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError) as raised:
        pipelined(model, sample, chunks=3, devices=["late:0", "late:1"], balance="parameters")
    assert any(["call them in a module that gets these" in note for note in raised.value.__notes__])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("make", [of_layers, Between])
def test_flex_attention(make: Any) -> None:
    """It compiles itself."""
    plain = make(attended).double()
    model = pipelined(copy.deepcopy(plain), torch.randn(2, 16, dtype=torch.float64), chunks=3, devices=TWO)
    trained_in(model, plain)


def test_a_compiled_loss_function() -> None:
    plain = of_layers(squash).double()
    loss_fn = torch.compile(nn.functional.mse_loss, backend="aot_eager", fullgraph=True)
    model: Any = copy.deepcopy(plain)
    x = torch.randn(6, 16, dtype=torch.float64)
    pipelined(model, x[:2], chunks=3, devices=TWO, balance="parameters", loss_fn=loss_fn)
    for part in x.chunk(3):
        nn.functional.mse_loss(plain(part), part).div(3).backward()
    model.step(x, target=x)
    same(gradients(model), gradients(plain))


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

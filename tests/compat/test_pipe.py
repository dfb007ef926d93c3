"""`torchgpipe.pipe.Pipe` runs code that was written for PyTorch's removed Pipe.

Parameters can only be on one kind of CPU device. So these tests place layers with `WithDevice`, either all on
``'cpu'`` or on ``'cpu:0'``, ``'cpu:1'`` and so on.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import Devices
from tests.layers import Apply, Using
from tests.plain import Outcome, assert_same, mapped, outcome, run_plain, tensors
from tests.skip.layers import pair
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.pipe import LocalRRef, NoChunk, Pipe, PipeSequential, WithDevice

pytestmark = pytest.mark.usefixtures("rounded")

MODES = ["always", "except_last", "never"]


def Fork() -> nn.Module:
    """Return a layer from one tensor to two."""
    return Using(lambda linear, x: (linear(x), x.sin()), width=3)


def Join() -> nn.Module:
    """Return a layer from two tensors to one."""
    return Using(lambda linear, x, y: x * linear(y), width=3)


def placed(layers: Sequence[nn.Module], devices: Sequence[str | None]) -> nn.Sequential:
    """Return the layers, each wrapped for its device unless the device is None."""
    return nn.Sequential(
        *[layer if device is None else WithDevice(layer, device) for layer, device in zip(layers, devices, strict=True)]
    )


def value_of(model: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    """Return the value in the reference that a pipeline returns."""
    return model(*inputs, **keywords).local_value()


def pipe_outcome(model: Pipe, *inputs: Any) -> Outcome:
    return outcome(model, *inputs, run=partial(value_of, model))


def plain_outcome(layers: Sequence[nn.Module], *inputs: Any, chunks: int) -> Outcome:
    """Return the outcome of the plain model; a tuple is several arguments, also inside a nested Sequential."""
    model = PipeSequential(*[PipeSequential(*layer) if type(layer) is nn.Sequential else layer for layer in layers])
    return outcome(model, *inputs, run=partial(run_plain, nn.Sequential(model), chunks=chunks))


def layers() -> list[nn.Module]:
    return [nn.Linear(3, 3), nn.Tanh(), Fork(), Join(), nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())]


# The plain model


#: The kind of a tensor together with a number, in place of a count of tensors.
NUMBERED = -1

#: What makes a layer, the number of its arguments, and that of its results.
KINDS: list[tuple[Callable[[], nn.Module], int, int]] = [
    (lambda: nn.Linear(3, 3), 1, 1),
    (lambda: nn.Tanh(), 1, 1),
    (lambda: nn.Sequential(Fork(), Join()), 1, 1),
    (lambda: nn.Sequential(nn.Tanh(), Fork()), 1, 2),
    (Fork, 1, 2),
    (lambda: Apply(lambda x: (x, x.exp())), 1, 2),
    (lambda: Apply(lambda x, y: (y, x)), 2, 2),
    (Join, 2, 1),
    (lambda: Apply(lambda x: (x, 2)), 1, NUMBERED),
    (lambda: Apply(lambda x, n: (x.sin(), n + 1)), NUMBERED, NUMBERED),
    (lambda: Apply(lambda x, n: n * x), NUMBERED, 1),
]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[nn.Module], int]:
    """Draw layers, and the number of arguments of the first layer."""
    first = width = draw(st.integers(1, 2))
    result = []
    for _ in range(draw(st.integers(1, 6))):
        make, _, width = draw(st.sampled_from([kind for kind in KINDS if kind[1] == width]))
        result.append(make().double())
    if width == NUMBERED:
        result.append(KINDS[-1][0]())
    return result, first


@given(drawn=models(), data=st.data(), mode=st.sampled_from(MODES), chunks=st.integers(1, 4), size=st.integers(1, 6))
def test_a_pipeline_computes_the_same_wherever_its_layers_are(
    drawn: tuple[list[nn.Module], int], data: st.DataObject, mode: str, chunks: int, size: int
) -> None:
    plain, width = drawn
    places = [data.draw(st.sampled_from([None, "cpu", "cpu:0", "cpu:1"])) for _ in plain]
    model = Pipe(placed(copy.deepcopy(plain), places), chunks, mode)
    inputs = [torch.rand(size, 3, dtype=torch.float64, requires_grad=True) for _ in range(width)]
    assert_same(pipe_outcome(model, *inputs), plain_outcome(plain, *inputs, chunks=chunks))


X, Y = torch.randint(9, (4, 3)).float(), torch.randint(9, (4, 3)).float()

#: Layers, and inputs of the pipeline: what is not a tensor is passed whole to every micro-batch, and so are tensors
#: inside of an argument, which have gradients. Integers, because cells sum the gradients of a table in another order.
ARGUMENTS: list[tuple[list[nn.Module], tuple[Any, ...]]] = [
    ([*pair(), Apply(lambda x: [x, x]), Apply(lambda pair: pair[0] + pair[1])], (X,)),
    (
        [Apply(lambda x, pair: (x * pair[0], pair[1])), Apply(lambda x, named: x * named["scale"] + named["b"].sum())],
        (X, (NoChunk(Y[0].clone()), {"scale": 2.0, "no": [None], "b": NoChunk(Y.clone())})),
    ),
    (
        [Apply(lambda x, table: (x * table[:2].sum(), table)), Apply(lambda x, table: x + table[0])],
        (X, NoChunk(Y.clone())),
    ),
]


@pytest.mark.parametrize("k", range(len(ARGUMENTS)))
def test_arguments_of_any_kind(devices: Devices, checkpoint: str, k: int) -> None:
    plain, inputs = ARGUMENTS[k]
    for tensor in tensors(inputs):
        tensor.requires_grad_()
    model = Pipe(placed(copy.deepcopy(plain), devices(len(plain))), 2, checkpoint)
    bare = inputs if isinstance(inputs[-1], NoChunk) else mapped(lambda x: x, inputs, whole=lambda x: x)
    assert_same(pipe_outcome(model, *bare), plain_outcome(plain, *inputs, chunks=2))


# Where layers are


def on(device: str) -> nn.Module:
    return WithDevice(nn.Linear(3, 3), device)


@pytest.mark.parametrize(
    ("module", "balance", "devices"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [2], ["cpu"]),
        (nn.Sequential(on("cpu:0"), on("cpu:0"), on("cpu:1"), on("cpu:0")), [2, 1, 1], ["cpu:0", "cpu:1", "cpu:0"]),
        # A layer without parameters follows the layer before it.
        (nn.Sequential(on("cpu:1"), nn.ReLU(), nn.Linear(3, 3), nn.ReLU()), [2, 2], ["cpu:1", "cpu"]),
        (nn.Sequential(on("cpu:1"), WithDevice(nn.ReLU(), "cpu:0"), nn.Tanh()), [1, 2], ["cpu:1", "cpu:0"]),
        # At the start, there is no layer before it.
        (nn.Sequential(nn.ReLU(), nn.Tanh(), on("cpu:1")), [3], ["cpu:1"]),
        (nn.Sequential(nn.ReLU(), nn.Tanh()), [2], ["cpu"]),
        (nn.Sequential(), [], []),
        # Without parameters, buffers determine the device.
        (nn.Sequential(on("cpu:1"), nn.BatchNorm1d(3, affine=False)), [1, 1], ["cpu:1", "cpu"]),
    ],
)
def test_consecutive_layers_on_one_device_are_a_partition(
    module: nn.Sequential, balance: list[int], devices: list[str]
) -> None:
    model = Pipe(module)
    assert model.balance == balance
    assert [len(partition) for partition in model.partitions] == balance
    assert model.devices == [torch.device(device) for device in devices]


def test_with_device() -> None:
    """It brings a layer from the meta device, is transparent outside of a pipeline, and the module is not changed."""
    model = Pipe(nn.Sequential(nn.Linear(3, 3), WithDevice(nn.Linear(3, 3, device="meta"), "cpu:1")))
    assert value_of(model, torch.rand(2, 3)).isfinite().all()
    layer = nn.Bilinear(3, 3, 2)
    x, y = torch.rand(2, 4, 3)
    wrapped = WithDevice(layer, "cpu:1")
    assert (wrapped.module, wrapped.device) == (layer, torch.device("cpu:1"))
    assert torch.equal(wrapped(x, input2=y), layer(x, y))
    module = placed(layers(), ["cpu:0", None, "cpu:1", None, None])
    before = [(name, type(child)) for name, child in module.named_modules()]
    model = Pipe(module)
    assert [(name, type(child)) for name, child in module.named_modules()] == before
    assert model[0] is module[0].module
    assert model[1] is module[1]


# Errors


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(1, 1)
        self.there = nn.Linear(1, 1, device="meta")


def called(*layers: nn.Module, inputs: Sequence[Any] = (torch.ones(2, 1),), **options: Any) -> Any:
    return Pipe(nn.Sequential(*layers), **options)(*inputs)


LAYER = nn.Linear(1, 1)
NO_TENSOR = "at least one tensor.*but got {}; .*model\\(x, y\\)"
NO_OUTPUT = r"the output of layer '1' \(Apply\) must have a tensor in it.*micro-batch 0 of 1"
DIFFERENT = Apply(lambda x: (x, x) if len(x) == 3 else (x, "text"))

#: A call, the class of its error, and what it says. `gpipe/test_refusals.py` has what GPipe refuses as well.
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Pipe(nn.ModuleList([LAYER])), TypeError, r"module must be nn\.Sequential to be partitioned"),
    (lambda: called(LAYER, WithDevice(LAYER, "cpu:1")), ValueError, "module with duplicate children"),
    (
        lambda: called(Scattered(), LAYER, Scattered()),
        ValueError,
        r"please use \.to\(\).*layer '0' \(Scattered\) is on cpu, meta; layer '2' \(Scattered\) is on cpu, meta",
    ),
    (lambda: called(LAYER, nn.Linear(1, 1, device="meta")), ValueError, r"WithDevice.*layer '1' \(Linear\) is on meta"),
    (lambda: called(LAYER, inputs=()), TypeError, NO_TENSOR.format("nothing")),
    (lambda: called(LAYER, inputs=("hello", [torch.rand(2)])), TypeError, NO_TENSOR.format("str, list")),
    (lambda: called(LAYER, inputs=(NoChunk(torch.rand(2)),)), TypeError, NO_TENSOR.format("NoChunk")),
    (
        lambda: called(Apply(lambda x, n, y: x), chunks=2, inputs=(torch.rand(4, 2), "text", torch.rand(3, 2))),
        ValueError,
        r"same size in dimension 0.*\[0\] is \(4, 2\), \[2\] is \(3, 2\).*NoChunk",
    ),
    *[
        (lambda value=value: called(LAYER, Apply(lambda x: value)), TypeError, NO_OUTPUT)
        for value in ((), None, ("hello", [5]))
    ],
    (lambda: called(DIFFERENT, chunks=2, inputs=(torch.rand(5, 2),)), ValueError, "return the same structure"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert re.search(text, " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])]))


# Arguments


def test_layers_of_a_nested_sequential_are_layers_of_the_pipeline(checkpoint: str) -> None:
    """Users nest layers to move them to a device together, as PyTorch's tutorial and `partition_model` do."""
    plain = [nn.Sequential(nn.Linear(3, 3), Fork()), nn.Sequential(), nn.Sequential(Join(), nn.Sequential(nn.Tanh()))]
    module = copy.deepcopy(plain)
    model = Pipe(placed(module, [None, None, "cpu:1"]), 2, checkpoint)
    layers = [*module[0], *module[2]]
    assert [list(partition) for partition in model.partitions] == [layers[:2], layers[2:]]
    assert (model.balance, model.devices) == ([2, 2], [torch.device("cpu"), torch.device("cpu:1")])
    assert (len(model), list(model), list(model[1:3])) == (4, layers, layers[1:3])
    assert [model[0], model[-1]] == [layers[0], layers[-1]]
    assert [*model.state_dict()] == [*nn.Sequential(*plain).state_dict()]
    assert type(module[0]) is nn.Sequential
    x = torch.rand(4, 3, requires_grad=True)
    assert_same(pipe_outcome(model, x), plain_outcome(plain, x, chunks=2))
    model.set_submodule("2.0", nn.Linear(2, 2))
    with pytest.raises(TypeError) as caught:
        model(x)
    assert "partition 1 (layers '2.0'..'2.1') on cpu:1, during forward" in caught.value.__notes__[0]


def test_keyword_inputs_are_those_of_the_first_layer(devices: Devices, checkpoint: str) -> None:
    settings = object()

    def first(x: Tensor, *, mask: Tensor, power: int, other: object, nothing: None) -> Any:
        assert len(x) == len(mask) == 2
        assert (other, nothing) == (settings, None)
        return x * mask, power

    model = Pipe(placed([Apply(first), Apply(lambda x, power: x**power)], devices(2)), 2, checkpoint)
    x, mask = torch.rand(4, 2, requires_grad=True), torch.rand(4, 2)
    output = value_of(model, x, mask=mask, power=2, other=settings, nothing=None)
    assert torch.equal(output, (x * mask) ** 2)
    output.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x * mask**2)
    with pytest.raises(ValueError, match=r"\['mask'\] is \(3, 2\)"):
        model(x, mask=mask[:3])


# Outputs


def test_tensors_are_joined_and_all_else_is_listed(devices: Devices, checkpoint: str) -> None:
    last = Apply(lambda x, n: (x, n, {"x": x}, None, (len(x), [x.sum()])))
    model = Pipe(placed([last], devices(1)), 2, checkpoint)
    x = torch.rand(5, 2, requires_grad=True)
    same, n, dicts, none, others = value_of(model, x, 7)
    assert torch.equal(same, x)
    assert n == [7, 7]
    assert [list(one) for one in dicts] == [["x"], ["x"]]
    assert torch.equal(torch.cat([one["x"] for one in dicts]), x)
    assert none == [None, None]
    assert [size for size, _ in others] == [3, 2]
    (same.sum() + 2 * dicts[0]["x"].sum() + 3 * others[1][1][0]).backward()
    assert torch.equal(x.grad, torch.tensor([[3.0], [3.0], [3.0], [4.0], [4.0]]).expand(5, 2))


# The reference


def test_a_local_object_refers_to_the_output() -> None:
    reference = Pipe(nn.Sequential(nn.Tanh()))(torch.rand(2, 3))
    assert isinstance(reference, LocalRRef)
    assert reference.is_owner()
    assert reference.local_value() is reference.to_here(timeout=3.0) is reference.to_here()


def test_backward_runs_from_the_reference() -> None:
    model, x = Pipe(nn.Sequential(nn.Linear(3, 1))), torch.rand(1, 3)
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(model[0].weight.grad, 2 * x)
    for output, context, message in [
        (model(x.expand(2, 3)), -1, "scalar outputs"),
        (loss, 7, "knows no context of distributed autograd, .* 7"),
    ]:
        with pytest.raises((RuntimeError, ValueError), match=message):
            output.backward(context)


# A module


def test_a_pipeline_has_the_attributes_of_the_removed_one() -> None:
    model = Pipe(nn.Sequential(nn.Tanh()), 42, "never")
    assert (model.chunks, model.checkpoint) == (42, "never") and isinstance(model.partitions[0], nn.Sequential)
    default = Pipe(nn.Sequential())
    assert (default.chunks, default.checkpoint) == (1, "except_last")
    assert isinstance(Pipe(nn.Sequential(nn.BatchNorm1d(4)), deferred_batch_norm=True)[0], DeferredBatchNorm)


def test_a_state_dict_of_the_removed_pipe_is_loaded_by_its_order() -> None:
    """PyTorch's Pipe counted the layers of each partition from 0: read as names, its keys would exchange layers."""
    model = Pipe(nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)))
    theirs = {"partitions.0.0.weight": torch.zeros(1, 1), "partitions.1.0.weight": torch.ones(1, 1)}
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match=r"load dict\(zip\(model.state_dict\(\), state_dict.values\(\), strict=True"
        ):
            model.load_state_dict(theirs, strict=strict)
    model.load_state_dict(dict(zip(model.state_dict(), theirs.values(), strict=True)))
    assert [layer.weight.item() for layer in (model[0], model[2])] == [0, 1]


# PipeSequential alone


def test_a_pipe_sequential_spreads_tuples_and_nothing_else() -> None:
    model = PipeSequential(Apply(lambda a, b: (a + b, [a, b])), Apply(lambda c, pair: [c, *pair]), Apply(len))
    assert model(torch.ones(1), torch.ones(1)) == 3
    assert PipeSequential(Apply(lambda pair: pair[0]))((5, 6)) == 5
    assert PipeSequential()(1, 2) == (1, 2)

"""Inputs: splitting of the mini-batch, nested and keyword inputs, and inputs that are refused."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.gpipe.helpers import Pair, Recorder, assert_transparent, make_input, make_model
from tests.layers import Apply
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import NoChunk


@pytest.mark.parametrize(
    ("batch", "chunks"), [(6, 3), (6, 1), (5, 2), (7, 4), (5, 4), (2, 3), (1, 4), (0, 1), (0, 3), (9, 100)]
)
def test_a_mini_batch_is_split_as_torch_chunk_does(pipe: Pipe, checkpoint: str, batch: int, chunks: int) -> None:
    recorder = Recorder()
    module, x = nn.Sequential(*make_model(2), recorder), make_input(batch)
    expected = plain_outcome(module, x, chunks=chunks)
    recorder.seen.clear()
    model = pipe(module, [1, 2], chunks=chunks, checkpoint=checkpoint)
    output = model(x)
    assert output.shape == (batch, 2)
    assert [len(micro_batch) for micro_batch in recorder.seen] == [len(chunk) for chunk in x.chunk(chunks)]
    assert_same(outcome(model, x), expected)


def sum_of(value: Any) -> Tensor:
    """Return any input of a layer as one tensor."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        parts = [sum_of(item) for item in value if item not in (None, ())]
        return sum(parts[1:], parts[0])
    return value.to(torch.float64)


@pytest.mark.parametrize(
    "nest",
    [
        lambda x, y: x,
        lambda x, y: (x,),
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: {"x": x, "y": y},
        lambda x, y: (x, None),
        lambda x, y: (x, [y, {"again": x, "nothing": None}], ()),
        lambda x, y: {"deep": [({"x": x},), None], "y": y},
        lambda x, y: (x, x),
        lambda x, y: OrderedDict(y=y, x=x),
        lambda x, y: Pair(x, (y,)),
    ],
)
def test_nested_inputs(pipe: Pipe, nest: Callable[[Tensor, Tensor], Any]) -> None:
    recorder = Recorder()
    value = nest(make_input(5), make_input(5))
    pipe(nn.Sequential(recorder, Apply(sum_of)), [1, 1], chunks=2, checkpoint="never")(value)
    assert [type(micro_batch) for micro_batch in recorder.seen] == [type(value)] * 2
    if not isinstance(value, Pair | OrderedDict):  # the comparison supports neither
        assert_transparent(pipe, nn.Sequential(Apply(sum_of), *make_model(2)), [1, 2], value)


def test_containers_keep_their_types_all_the_way(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2)
    x, y = make_input(4), make_input(4)
    value = {"pair": Pair(x, y), "list": [x, None], "tuple": (y,), "empty": (), "ordered": OrderedDict(b=x, a=y)}
    output = model(value)
    assert list(output) == list(value)
    assert type(output["pair"]) is Pair
    assert torch.equal(output["pair"].second, y)
    assert type(output["list"]) is list
    assert output["list"][1] is None
    assert type(output["tuple"]) is tuple
    assert output["empty"] == ()
    assert list(output["ordered"]) == ["b", "a"]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_several_positional_inputs_are_the_arguments_of_the_first_layer(pipe: Pipe, chunks: int) -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, dtype=torch.float64))

        def forward(self, x: Tensor, y: Tensor, flags: list[Tensor | None]) -> Tensor:
            assert flags[1] is None
            assert flags[0] is not None
            return x * self.weight + torch.where(flags[0], y, 0)

    inputs = make_input(), make_input(), [torch.arange(12).reshape(6, 2) % 3 == 0, None]
    assert_transparent(pipe, nn.Sequential(Add(), *make_model(2)), [1, 2], *inputs, chunks=chunks)
    assert_transparent(pipe, nn.Sequential(Add(), *make_model(2)), [2, 1], *inputs, chunks=chunks)


@pytest.mark.parametrize("chunks", [1, 3])
def test_keyword_inputs_are_those_of_the_first_layer(pipe: Pipe, checkpoint: str, chunks: int) -> None:
    """Keyword inputs are split like the others, except None and NoChunk, and are differentiated through checkpoints."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None, table: Any = None, extra: Any = 0) -> Tensor:
            assert extra is None
            assert mask is not None
            assert len(x) == len(mask)
            return (x * mask) @ table["w"]

    module = nn.Sequential(Masked(), *make_model(2))
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    inputs = make_input(), make_input(), {"w": NoChunk(weight)}, None
    expected = plain_outcome(copy.deepcopy(module), *inputs, chunks=chunks)
    model = pipe(module, [1, 2], chunks=chunks, checkpoint=checkpoint)
    for run in [
        lambda x, mask, table, extra: model(x, table=table, extra=extra, mask=mask),
        lambda x, mask, table, extra: model(mask=mask, x=x, extra=extra, table=table),
    ]:
        assert_same(outcome(model, *inputs, run=run), expected)


def test_a_keyword_input_that_does_not_fit_is_named(pipe: Pipe) -> None:
    x, model = make_input(), pipe(nn.Sequential(Apply(lambda x, mask: x)), [1], chunks=2)
    with pytest.raises(ValueError, match=r"\[0\] is \(6, 2\), \['mask'\]\[1\] is \(5, 2\)"):
        model(x, mask=[None, make_input(5)])
    with pytest.raises(TypeError, match=r"input must consist of .* but \['mask'\] is str"):
        model(x, mask="causal")
    with pytest.raises(TypeError, match="unexpected keyword argument 'musk'"):
        model(x, musk=x)
    with pytest.raises(TypeError, match=r"no layer .* keyword inputs \['mask'\]"):
        pipe(nn.Sequential(), [])(x, mask=x)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: torch.eye(4).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
)
def test_tensors_that_cannot_be_split_are_named(pipe: Pipe, made: Callable[[], Tensor], kind: str) -> None:
    """The errors were once those of an operation that sparse or nested tensors lack."""
    model = pipe(nn.Sequential(nn.Identity()), [1], chunks=2)
    with pytest.raises(TypeError, match=rf"along dimension 0: the value itself is {kind} .*NoChunk"):
        model(made())
    with pytest.raises(TypeError, match=rf"along dimension 0: \[1\] is {kind} "):
        model(make_input(), made())


def test_later_layers_get_one_value(pipe: Pipe) -> None:
    """A tuple that one layer returns is a single argument of the next, in the same partition or another."""
    for balance in [[1, 1], [2]]:
        recorder = Recorder()
        pipe(nn.Sequential(Apply(lambda x, y: (y, x)), recorder), balance)(make_input(2), make_input(2))
        ((a, b),) = recorder.seen
        assert a.shape == b.shape == (2, 2)


def test_a_tuple_is_one_input(pipe: Pipe) -> None:
    recorder = Recorder()
    pipe(nn.Sequential(recorder), [1])((make_input(2), make_input(2)))
    assert [type(value) for value in recorder.seen] == [tuple]


def test_no_input(pipe: Pipe) -> None:
    with pytest.raises(TypeError, match="no tensor"):
        pipe(make_model(1), [1])()


@pytest.mark.parametrize("value", [None, (), [None, None], {}, {"a": None}, NoChunk(torch.zeros(2))])
def test_an_input_without_a_tensor_to_split(pipe: Pipe, value: Any) -> None:
    with pytest.raises(TypeError, match="no tensor"):
        pipe(make_model(1), [1])(value)


@pytest.mark.parametrize(
    ("inputs", "path", "kind"),
    [
        (("text",), "itself", "str"),
        ((3,), "itself", "int"),
        (((torch.zeros(2, 2), 0.5),), "[1]", "float"),
        (([torch.zeros(2, 2), "text"],), "[1]", "str"),
        (({"x": torch.zeros(2, 2), "label": {"name": "text"}},), "['label']['name']", "str"),
        ((torch.zeros(2, 2), (None, {"flag": True})), "[1][1]['flag']", "bool"),
        (((torch.zeros(2, 2), {1, 2}),), "[1]", "set"),
        (((torch.zeros(2, 2), numpy.zeros(2)),), "[1]", "ndarray"),
    ],
)
def test_other_leaves_of_the_input_are_refused_by_path_and_type(
    pipe: Pipe, inputs: tuple[Any, ...], path: str, kind: str
) -> None:
    with pytest.raises(TypeError) as caught:
        pipe(nn.Sequential(nn.Identity()), [1], chunks=2)(*inputs)
    assert path in str(caught.value)
    assert kind in str(caught.value)
    assert "input" in str(caught.value)


def test_all_other_leaves_of_the_input_are_listed(pipe: Pipe) -> None:
    with pytest.raises(TypeError) as caught:
        pipe(nn.Sequential(nn.Identity()), [1])((torch.zeros(2), "text", [3]))
    for part in ["[1]", "str", "[2][0]", "int"]:
        assert part in str(caught.value)


def test_other_leaves_at_a_boundary_are_refused_by_layer_path_and_type(pipe: Pipe, checkpoint: str) -> None:
    module = nn.Sequential(
        OrderedDict(first=nn.Identity(), second=Apply(lambda x: (x, {"name": "text"})), third=nn.Identity())
    )
    model = pipe(module, [2, 1], chunks=2, checkpoint=checkpoint)
    with pytest.raises(TypeError) as caught:
        model(make_input())
    for part in ["'second'", "Apply", "[1]['name']", "str"]:
        assert part in str(caught.value)


def test_other_leaves_at_the_end_are_refused_too(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(OrderedDict(first=nn.Identity(), last=Apply(lambda x: (x, 1.5)))), [1, 1])
    with pytest.raises(TypeError) as caught:
        model(make_input())
    for part in ["'last'", "Apply", "[1]", "float"]:
        assert part in str(caught.value)


def test_between_layers_of_one_partition_anything_goes(pipe: Pipe, checkpoint: str) -> None:
    module = nn.Sequential(Apply(lambda x: (x, "text", 3)), Apply(lambda value: value[0] * value[2]))
    model = pipe(module, [2], chunks=2, checkpoint=checkpoint)
    x = make_input()
    output = model(x)
    assert torch.equal(output, x * 3)
    output.sum().backward()


def test_different_batch_sizes_are_listed_with_path_and_shape(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Identity()), [1], chunks=2)
    with pytest.raises(ValueError) as caught:
        model({"x": torch.zeros(6, 4), "rest": [torch.zeros(6), torch.zeros(5, 4)], "none": None})
    for part in ["['x']", "(6, 4)", "['rest'][0]", "(6,)", "['rest'][1]", "(5, 4)", "NoChunk"]:
        assert part in str(caught.value)


def test_different_batch_sizes_of_positional_inputs(pipe: Pipe) -> None:
    with pytest.raises(ValueError) as caught:
        pipe(nn.Sequential(Apply(torch.add)), [1])(torch.zeros(6, 4), torch.zeros(5, 4))
    for part in ["[0]", "(6, 4)", "[1]", "(5, 4)", "NoChunk"]:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [torch.tensor(1.0), (torch.zeros(3), torch.tensor(1.0)), [torch.tensor(1)] * 2])
def test_a_tensor_without_a_batch_dimension(pipe: Pipe, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        pipe(nn.Sequential(nn.Identity()), [1])(value)
    assert "()" in str(caught.value)

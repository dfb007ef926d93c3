"""Inputs and outputs: splitting and gathering of the mini-batch, nested values, keyword inputs, `NoChunk`.

`test_transparency` draws layers of tuples, dicts and None.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model
from tests.layers import Apply
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import NoChunk

pytestmark = pytest.mark.usefixtures("rounded")

Pair = namedtuple("Pair", ["first", "second"])


def test_containers_keep_their_types_all_the_way(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2)
    x, y = make_input(4), make_input(4)
    value = {"pair": Pair(x, y), "list": [x, None], "tuple": (y,), "empty": (), "ordered": OrderedDict(b=x, a=y)}
    value["default"] = defaultdict(list, {3: x})
    output = model(value)
    assert list(output) == list(value)
    assert type(output["pair"]) is Pair
    assert torch.equal(output["pair"].second, y)
    assert [type(output[key]) for key in ("list", "tuple")] == [list, tuple]
    assert output["list"][1] is None
    assert output["empty"] == ()
    assert list(output["ordered"]) == ["b", "a"]
    assert output["default"].default_factory is list and torch.equal(output["default"][3], x)


@pytest.mark.parametrize("chunks", [1, 3])
def test_keyword_inputs_are_those_of_the_first_layer(pipe: Pipe, checkpoint: str, chunks: int) -> None:
    """Keyword inputs are split like the others, except None and NoChunk, and are differentiated through checkpoints."""

    def masked(x: Tensor, mask: Tensor | None = None, table: Any = None, extra: Any = 0) -> Tensor:
        assert extra is None
        assert mask is not None
        assert len(x) == len(mask)
        return (x * mask) @ table["w"]

    module = nn.Sequential(Apply(masked), *make_model(2))
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    inputs = make_input(), make_input(), {"w": NoChunk(weight)}, None
    expected = plain_outcome(copy.deepcopy(module), *inputs, chunks=chunks)
    model = pipe(module, [1, 2], chunks=chunks, checkpoint=checkpoint)
    for run in [
        lambda x, mask, table, extra: model(x, table=table, extra=extra, mask=mask),
        lambda x, mask, table, extra: model(mask=mask, x=x, extra=extra, table=table),
    ]:
        assert_same(outcome(model, *inputs, run=run), expected)


def test_later_layers_get_one_value_and_no_chunk_is_passed_whole(pipe: Pipe) -> None:
    """A tuple that one layer returns is a single argument of the next, in the same partition or another."""
    table = torch.randn(7, 3)
    seen: list[Any] = []
    for balance in [[1, 1], [2]]:
        layers = nn.Sequential(Apply(lambda x, y, z: ((y, x), z)), Apply(lambda v: seen.append(v) or v[0][0]))
        model = pipe(layers, balance, chunks=3, checkpoint="never")
        model(make_input(6), make_input(6), {"table": [NoChunk(table), NoChunk(table[0, 0])]})
        for (a, b), whole in seen:
            assert a.shape == b.shape == (2, 2)
            assert torch.equal(whole["table"][0], table) and torch.equal(whole["table"][1], table[0, 0])


def test_outputs(pipe: Pipe, checkpoint: str) -> None:
    """None is one, micro-batches may come out in other sizes, and between layers of one partition anything goes."""
    x = make_input()
    assert pipe(nn.Sequential(Apply(lambda x: None)), [1], chunks=2)(x) is None
    module = nn.Sequential(Apply(lambda x: None), Apply(lambda x: torch.ones(1)))
    assert torch.equal(pipe(module, [1, 1], chunks=2)(x), torch.ones(2))
    module = nn.Sequential(Apply(lambda x: (x, "text", 3)), Apply(lambda v: v[0].sum(0, keepdim=True) * v[2]))
    output = pipe(module, [2], chunks=3, checkpoint=checkpoint)(x)
    assert torch.equal(output, torch.stack([part.sum(0) * 3 for part in x.chunk(3)]))
    output.sum().backward()

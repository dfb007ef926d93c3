"""`NoChunk`: a tensor that every micro-batch receives whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Pipe
from tests.gpipe.helpers import Recorder, assert_transparent, make_input, make_model
from tests.layers import Apply
from torchgpipe import NoChunk


def test_no_chunk_is_passed_whole_to_every_micro_batch(pipe: Pipe) -> None:
    recorder = Recorder()
    x, table = make_input(), torch.randn(7, 3)
    model = pipe(nn.Sequential(recorder, Apply(lambda value: value[0])), [1, 1], chunks=3, checkpoint="never")
    model((x, NoChunk(table), {"scalar": NoChunk(table[0, 0])}))
    assert len(recorder.seen) == 3
    for micro_batch in recorder.seen:
        assert len(micro_batch[0]) == 2
        assert torch.equal(micro_batch[1], table)
        assert torch.equal(micro_batch[2]["scalar"], table[0, 0])


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_gradient_of_no_chunk_is_summed(pipe: Pipe, chunks: int) -> None:
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    module = nn.Sequential(Apply(lambda x, weight: x @ weight), *make_model(2))
    assert_transparent(pipe, module, [1, 2], make_input(), NoChunk(weight), chunks=chunks)


def test_no_chunk_beyond_the_first_partition(pipe: Pipe) -> None:
    """At a boundary, a NoChunk tensor is a tensor like any other."""
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    module = nn.Sequential(
        Apply(lambda value: (value[0].tanh(), value[1])),
        Apply(lambda value: value[0] @ value[1]),
        *make_model(1),
    )
    assert_transparent(pipe, module, [1, 1, 1], (make_input(), NoChunk(weight)), chunks=3)


@pytest.mark.parametrize("value", [None, 3, "text", [torch.zeros(1)]])
def test_no_chunk_takes_a_tensor(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^NoChunk only supported for tensors, found: .*" + type(value).__name__):
        NoChunk(value)

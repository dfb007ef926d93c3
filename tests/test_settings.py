"""What a pipeline is told is checked in the same way, whoever is told."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.pipe import Pipe
from torchgpipe.settings import checkpoint_stop

TOLD = {
    "GPipe": lambda chunks: GPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu"], chunks=chunks),
    "Pipe": lambda chunks: Pipe(nn.Sequential(nn.Tanh()), chunks),
    "DeferredBatchNorm": lambda chunks: DeferredBatchNorm(3, chunks=chunks),
    "convert_deferred_batch_norm": lambda chunks: DeferredBatchNorm.convert_deferred_batch_norm(
        nn.BatchNorm1d(3), chunks
    ),
}


@pytest.mark.parametrize("who", TOLD)
@pytest.mark.parametrize("chunks", [0, -1, 0.5, None, "a"])
def test_chunks_must_be_positive_whoever_is_told(who: str, chunks: Any) -> None:
    """A deferred batch norm compared what it got with 1: of 'a' it said that '<' is not supported for strings."""
    with pytest.raises(ValueError, match="number of chunks must be positive integer, but got") as caught:
        TOLD[who](chunks)
    assert repr(chunks) in str(caught.value)


@pytest.mark.parametrize("who", TOLD)
def test_chunks_are_an_integer_from_then_on(who: str) -> None:
    chunks = TOLD[who]("4").chunks
    assert (chunks, type(chunks)) == (4, int)


@pytest.mark.parametrize(("mode", "stop"), [("always", 5), ("except_last", 4), ("never", 0)])
def test_the_first_micro_batches_are_checkpointed(mode: str, stop: int) -> None:
    assert checkpoint_stop(mode, 5) == stop

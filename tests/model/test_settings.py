"""`GPipe`, `Pipe` and deferred batch norms check their settings in the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.pipe import Pipe

TOLD = {
    "GPipe": lambda chunks: GPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu"], chunks=chunks),
    "Pipe": lambda chunks: Pipe(nn.Sequential(nn.Tanh()), chunks),
    "DeferredBatchNorm": lambda chunks: DeferredBatchNorm(3, chunks=chunks),
    "convert_deferred_batch_norm": lambda chunks: DeferredBatchNorm.convert_deferred_batch_norm(
        nn.BatchNorm1d(3), chunks
    ),
}


class Mode:
    """A setting with a text, as of a library for configurations."""

    def __str__(self) -> str:
        return "except_last"


@pytest.mark.parametrize("who", TOLD)
@pytest.mark.parametrize(("chunks", "error"), [(0, ValueError), (-1, ValueError), (2.9, TypeError), ("4", TypeError)])
def test_chunks_must_be_a_positive_integer_everywhere(who: str, chunks: Any, error: type[Exception]) -> None:
    """2.9 once became 2 silently."""
    with pytest.raises(error, match="number of chunks must be positive integer, but got") as caught:
        TOLD[who](chunks)
    assert repr(chunks) in str(caught.value)


@pytest.mark.parametrize("who", TOLD)
@pytest.mark.parametrize("given", [torch.tensor(4), np.int64(4), 4.0, np.float64(4)], ids=repr)
def test_chunks_become_an_int(who: str, given: Any) -> None:
    """16 / 4 micro-batches once were refused; the original takes them."""
    chunks = TOLD[who](given).chunks
    assert (chunks, type(chunks)) == (4, int)


@pytest.mark.parametrize(
    ("given", "mode"), [(True, "always"), (False, "never"), (Mode(), "except_last")], ids=["on", "off", "object"]
)
def test_checkpoint_modes_by_other_names(given: Any, mode: str) -> None:
    model = GPipe(nn.Sequential(nn.Tanh()), [1], devices=["cpu"], checkpoint=given)
    assert model.checkpoint == mode

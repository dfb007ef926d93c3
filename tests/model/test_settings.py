"""`GPipe`, `Pipe` and deferred batch norms check their settings in the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchgpipe import GPipe, MicroBatches, follow, windows
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
@pytest.mark.parametrize(
    ("chunks", "error"),
    [(0, ValueError), (-1, ValueError), (2.9, TypeError), ("4", TypeError), (True, TypeError)],
)
def test_chunks_must_be_a_positive_integer_everywhere(who: str, chunks: Any, error: type[Exception]) -> None:
    """2.9 once became 2 silently, and True 1."""
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


def gpipe(**options: Any) -> GPipe:
    return GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **{"balance": [1, 1], **options})


class Cache:
    layers = (type("DynamicLayer", (), {})(),)


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: windows([], "2"), TypeError, "size must be positive integer, but got '2'"),  # type: ignore[arg-type]
    (lambda: MicroBatches(3), TypeError, "takes a list of batches, but got one int"),  # type: ignore[arg-type]
    (lambda: MicroBatches([1], weights=["a"]), TypeError, r"must be a list of numbers, .* but got \['a'\]"),
    (lambda: MicroBatches.of_sequence({"input_ids": torch.ones(1, 4)}, "3", Cache()), TypeError, "chunks must be an"),
    (lambda: MicroBatches.of_sequence({"input_ids": torch.ones(1, 4)}, [2, "2"], Cache()), TypeError, "but got '2'"),
    (lambda: follow("x", nn.Linear(2, 2)), TypeError, "follow takes a network of adapters, .* but got 'x'"),
    (lambda: gpipe(devices=[None] * 2), ValueError, "a device must be one of PyTorch, .* but got None"),
    (lambda: gpipe(devices=["gpu:0"] * 2), ValueError, "such as 'cuda:0' or 'cpu', but got 'gpu:0'"),
    (lambda: gpipe(balance=[True, 1]), TypeError, "a list of integers, .* but got \\[True, 1\\]"),
    (lambda: gpipe(no_chunk=3), TypeError, "no_chunk must be a list of names, such as .* but got 3"),
    (lambda: gpipe(slots=4), ValueError, "slots=4 and pin=None are for offload=True; leave them out"),
]


@pytest.mark.parametrize(("make", "error", "message"), WRONG, ids=[row[2][:30] for row in WRONG])
def test_wrong_types_and_values_are_named(make: Any, error: type[Exception], message: str) -> None:
    """These were errors of Python's own, or had no effect."""
    with pytest.raises(error, match=message):
        make()

"""Nested values are taken apart, split into micro-batches, and put together again."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.plain import assert_equal, tensors
from torchgpipe import GPipe, MicroBatches, NoChunk, pipelined, windows
from torchgpipe.batch.microbatch import Batch, gather, scatter

CPU, X = torch.device("cpu"), torch.randn(2, 2)


def values(batches: list[Batch]) -> list[Any]:
    return [batch.value for batch in batches]


def numbers(batch: int) -> Tensor:
    return torch.arange(batch * 2.0).reshape(batch, 2)


# Batch: a value and its leaves


# Scatter


def test_scatter_copies_nothing_and_passes_no_chunk_whole() -> None:
    x, table = numbers(4), NoChunk(numbers(7))
    for inputs in ((x, table), (table, x)):
        pieces = values(scatter(inputs, 2, CPU))
        assert [{x.data_ptr(), table.tensor.data_ptr()}, {x[2:].data_ptr(), table.tensor.data_ptr()}] == [
            {tensor.data_ptr() for tensor in tensors(piece)} for piece in pieces
        ]
    assert repr(table) == "NoChunk((7, 2))"


def test_given_micro_batches_are_scattered_as_they_are_wherever_they_stand() -> None:
    a, b, table = numbers(1), numbers(3), numbers(7)
    assert [batch.leaves[0] is x for batch, x in zip(scatter((MicroBatches([a, b]),), 1, CPU), (a, b), strict=True)]
    window = MicroBatches([{"x": a, "table": NoChunk(table)}, [b, None]])
    assert_equal(values(scatter((window,), 1, CPU)), [{"x": a, "table": table}, [b, None]])
    beside = scatter((MicroBatches([a, b]), None, NoChunk(table)), 1, CPU, {"more": MicroBatches([(b,), a])})
    assert_equal(
        [tuple(value) for value in values(beside)],
        [((a, None, table), {"more": (b,)}), ((b, None, table), {"more": a})],
    )
    with pytest.raises(TypeError, match=r"^micro-batch 1 must consist of tensors and None .*, but \['x'\] is int"):
        scatter((MicroBatches([a, {"x": 1}]),), 1, CPU)


# Gather


@pytest.mark.parametrize("m", [1, 2])
def test_a_gathered_output_has_memory_of_its_own(m: int) -> None:
    """A single micro-batch was once returned as it was: the caller's own input, or a tensor that cannot be viewed."""
    x, images = torch.rand(3, 2), torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for piece in (x, x.T, images):
        output = gather([Batch.of(piece, "piece")] * m)
        assert torch.equal(output, torch.cat([piece] * m))
        assert output.stride() == torch.cat([piece] * 2).stride()
        assert output.untyped_storage().data_ptr() != piece.untyped_storage().data_ptr()


def test_a_single_micro_batch_may_have_no_dimensions_and_several_are_told_what_to_do() -> None:
    x = torch.tensor(3)
    output = gather([Batch.of(x, "x")])
    assert output == 3
    assert output is not x
    with pytest.raises(ValueError, match="dimension"):
        gather([Batch.of(torch.tensor(1), "x"), Batch.of(torch.tensor(2), "x")])


@pytest.mark.parametrize("call", ["forward", "step"])
@pytest.mark.parametrize("kind", ["GPipe", "pipelined"])
def test_fewer_rows_than_chunks_are_told_of_once(kind: str, call: str) -> None:
    options: Any = {"devices": ["cpu:0", "cpu:1"], "chunks": 8, "loss_fn": lambda output, target: output.mean()}

    def ran(*batches: int) -> list[warnings.WarningMessage]:
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model: Any = GPipe(layers, [1, 1], **options) if kind == "GPipe" else pipelined(layers, X, **options)
        run = model if call == "forward" else model.step
        with torch.no_grad():
            run(torch.randn(1, 2))  # A single row is what one has in evaluation.
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for rows in batches:
                run(torch.randn(rows, 2))
        return told

    (told,) = ran(3, 2, 8)
    assert re.search(r"3 rows makes only 3 micro-batches instead of chunks=8.*chunks=3$", str(told.message))
    assert told.filename == __file__
    assert not ran(9, 3), "the last mini-batch of an epoch is often short"


# Windows: batches in groups of which each is a mini-batch


def test_windows_of_a_loader_come_again_and_have_a_length() -> None:
    loader = [numbers(rows) for rows in (1, 3, 2, 1, 1)]
    grouped = windows(loader, 2)
    assert len(grouped) == 3
    for _ in range(2):
        assert [[*window] for window in grouped] == [loader[:2], loader[2:4], loader[4:]]
    assert [len(window) for window in windows(iter(loader), 4)] == [4, 1]
    with pytest.raises(ValueError, match="size must be positive integer, but got 0"):
        windows(loader, 0)


def test_what_moves_batches_does_not_make_a_window_anew() -> None:
    """Lightning moved a window's batches, and pinning pinned them: both made it of its items, without the weights."""
    window = MicroBatches([numbers(1), numbers(3)], weights=[1, 2])
    assert not isinstance(window, (Sequence, Mapping)) and window[1] is window.batches[1] and len(window) == 2

"""Sequences: lengths and masks as inputs, tensors that every layer needs, time as the first dimension, and text."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchgpipe
from tests.conftest import Pipe
from tests.layers import Apply, Using, With
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import NoChunk

sys.path.append(str(Path(torchgpipe.__file__).parent.parent / "examples"))


def recurrent(lstm: nn.LSTM, value: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stop at the end of each sequence."""
    packed = pack_padded_sequence(value["x"], value["lengths"].cpu(), batch_first=True, enforce_sorted=False)
    x, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=value["x"].shape[1])
    return {**value, "x": x}


def last(value: dict[str, Tensor]) -> Tensor:
    """Return the vector at the end of each sequence."""
    x, lengths = value["x"], value["lengths"]
    return x[torch.arange(len(x), device=x.device), lengths - 1]


def attend(attention: nn.MultiheadAttention, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Skip padding, and do not look ahead."""
    x, padding, future = value
    attended, _ = attention(x, x, x, key_padding_mask=padding, attn_mask=future, need_weights=False)
    return x + attended, padding, future


def modulate(k: int) -> Callable[[nn.Linear, dict[str, Any]], dict[str, Any]]:
    """Scale and shift by tensors of layer ``k``'s own, in the input."""
    return lambda linear, value: {**value, "x": (linear(value["x"]) * value["scale"][k] + value["bias"][k]).tanh()}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def masks(batch: int, time: int) -> tuple[Tensor, Tensor]:
    """Return the masks of padding (batch, time) and of the future (time, time), true where attention must not look."""
    lengths = torch.randint(1, time + 1, (batch, 1))
    return torch.arange(time) >= lengths, torch.ones(time, time, dtype=torch.bool).triu(1)


def masked(batch: int) -> Any:
    padding, future = masks(batch, 6)
    return numbers(batch, 6, 4), padding, NoChunk(future)


def with_lengths(batch: int) -> Any:
    return {"x": numbers(batch, 7, 4), "lengths": torch.randint(1, 8, (batch,))}


def with_scales(extra: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda batch: {
        "x": numbers(batch, 4),
        "scale": [extra(batch) for _ in range(3)],
        "bias": [extra(batch) for _ in range(3)],
    }


def lengths_model() -> list[nn.Module]:
    return [*[With(nn.LSTM(4, 4, batch_first=True), recurrent) for _ in range(2)], Apply(last)]


def masks_model() -> list[nn.Module]:
    attentions = [With(nn.MultiheadAttention(4, 2, batch_first=True), attend) for _ in range(2)]
    # A tensor without a batch dimension cannot be gathered.
    return [*attentions, Apply(lambda value: value[0])]


def scales_model() -> list[nn.Module]:
    return [*[Using(modulate(k)) for k in range(3)], Apply(lambda value: value["x"])]


def time_first_model() -> list[nn.Module]:
    """Layers that want time first stand between two that transpose."""
    recurrences = [With(nn.LSTM(4, 4), lambda lstm, x: lstm(x)[0]) for _ in range(2)]
    transpose = Apply(lambda x: x.transpose(0, 1))
    return [transpose, *recurrences, Apply(transpose.function)]


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], list[int], Callable[[int], Any]]] = {
    "lengths": (lengths_model, [1, 1, 1], with_lengths),
    "masks": (masks_model, [1, 1, 1], masked),
    "scales for all": (scales_model, [1, 2, 1], with_scales(lambda batch: NoChunk(numbers(4)))),
    "scales for each row": (scales_model, [1, 2, 1], with_scales(lambda batch: numbers(batch, 4))),
    "time first": (time_first_model, [2, 2], lambda batch: numbers(batch, 7, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_along_with_sequences(pipe: Pipe, checkpoint: str, name: str) -> None:
    make, balance, inputs = MODELS[name]
    module = nn.Sequential(*make()).double()
    model = pipe(copy.deepcopy(module), balance, chunks=2, checkpoint=checkpoint)
    for batch in (5, 2):
        value = inputs(batch)
        actual, expected = outcome(model, value), plain_outcome(module, value, chunks=2)
        # An LSTM's weights have a gradient per time step, which a checkpointed cell sums first.
        torch.testing.assert_close(actual.param_grads, expected.param_grads)
        actual.param_grads = expected.param_grads
        assert_same(actual, expected)


def test_what_is_not_split_in_rows_is_refused(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(*masks_model()), [1, 1, 1], chunks=2)
    with pytest.raises(ValueError, match=r"same size in dimension 0.*\[0\] is \(4, 6, 4\).*\[2\] is \(6, 6\).*NoChunk"):
        model((torch.randn(4, 6, 4), *masks(4, 6)))
    # Such a tensor alone would be split in time: the pipeline cannot know which dimension is the batch.
    model = pipe(nn.Sequential(*lengths_model()), [1, 1, 1], chunks=2)
    with pytest.raises(ValueError, match=r"\['x'\] is \(7, 5, 4\).*\['lengths'\] is \(5,\)"):
        model({"x": torch.randn(7, 5, 4), "lengths": torch.tensor([7, 2, 3, 1, 5])})


def test_text_is_the_one_that_the_plain_model_writes(pipe: Pipe) -> None:
    """One character is generated at a time, from a prompt of batch size 1: every length occurs once."""
    pytest.importorskip("tqdm")
    from adapters import Block, Embedding, generate

    module = nn.Sequential(Embedding(8), Block(8), nn.Dropout(), Block(8), nn.Linear(8, 128)).double()
    model = pipe(copy.deepcopy(module), [2, 2, 1], chunks=4)
    written = ["".join(generate(each, "The ", 60, seed=0)) for each in [model, module]]
    assert len(written[0]) == 60
    assert written[0] == written[1]

"""Sequences: lengths and masks as inputs, tensors that every layer needs, and time as the first dimension."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.conftest import Pipe
from tests.plain import Outcome, assert_same, outcome, plain_outcome
from torchgpipe import NoChunk


def assert_same_up_to_sums(actual: Outcome, expected: Outcome) -> None:
    """Assert equality up to the order of summation.

    An LSTM's weights have a gradient per time step, which a checkpointed cell sums first.
    """
    torch.testing.assert_close(actual.param_grads, expected.param_grads)
    actual.param_grads = expected.param_grads
    assert_same(actual, expected)


# Lengths


class Recurrent(nn.Module):
    """An LSTM that stops at the end of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        lengths = value["lengths"].cpu()
        packed = pack_padded_sequence(value["x"], lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=value["x"].shape[1])
        return {**value, "x": x}


class Last(nn.Module):
    """A layer that returns the vector at the end of each sequence."""

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        x, lengths = value["x"], value["lengths"]
        return x[torch.arange(len(x), device=x.device), lengths - 1]


def test_lengths_come_along(pipe: Pipe, checkpoint: str) -> None:
    module = nn.Sequential(Recurrent(), Recurrent(), Last()).double()
    model = pipe(copy.deepcopy(module), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    for lengths in [[5, 2, 7, 1, 3], [2, 4]]:
        sequences = [torch.randn(length, 4, dtype=torch.float64) for length in lengths]
        batch = {
            "x": pad_sequence(sequences, batch_first=True).requires_grad_(),
            "lengths": torch.tensor(lengths),
        }
        assert_same_up_to_sums(outcome(model, batch), plain_outcome(module, batch, chunks=2))
        alone = [module({"x": x[None], "lengths": torch.tensor([len(x)])})[0] for x in sequences]
        torch.testing.assert_close(model(batch), torch.stack(alone))


# Masks


class Attention(nn.Module):
    """Attention that skips padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, padding, future = value
        attended, _ = self.attention(x, x, x, key_padding_mask=padding, attn_mask=future, need_weights=False)
        return x + attended, padding, future


class Drop(nn.Module):
    """A layer that drops the masks: a tensor without a batch dimension cannot be gathered."""

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return value[0]


def masks(batch: int, time: int) -> tuple[Tensor, Tensor]:
    """Return the masks of padding (batch, time) and of the future (time, time), true where attention must not look."""
    lengths = torch.randint(1, time + 1, (batch, 1))
    return torch.arange(time) >= lengths, torch.ones(time, time, dtype=torch.bool).triu(1)


def test_masks_of_sequences_are_split_and_those_of_positions_are_not(pipe: Pipe, checkpoint: str) -> None:
    module = nn.Sequential(Attention(), Attention(), Drop()).double()
    model = pipe(copy.deepcopy(module), [1, 1, 1], chunks=2, checkpoint=checkpoint)
    for batch, time in [(5, 6), (4, 3)]:
        x = torch.randn(batch, time, 4, dtype=torch.float64, requires_grad=True)
        padding, future = masks(batch, time)
        inputs = (x, padding, NoChunk(future))
        assert_same(outcome(model, inputs), plain_outcome(module, inputs, chunks=2))
        torch.testing.assert_close(model(inputs), module((x, padding, future)))


def test_a_mask_of_positions_without_no_chunk_is_refused(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(Attention(), Drop()), [1, 1], chunks=2)
    padding, future = masks(4, 6)
    with pytest.raises(ValueError, match=r"same size in dimension 0.*\[0\] is \(4, 6, 4\).*\[2\] is \(6, 6\).*NoChunk"):
        model((torch.randn(4, 6, 4), padding, future))


# Tensors that every layer needs


class Modulated(nn.Module):
    """A layer that scales and shifts by its own tensors of the input."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(4, 4)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        scale, bias = value["scale"][self.index], value["bias"][self.index]
        return {**value, "x": (self.linear(value["x"]) * scale + bias).tanh()}


@pytest.mark.parametrize("whole", [True, False], ids=["one for all", "one for each sample"])
def test_a_scale_and_a_bias_for_each_layer(pipe: Pipe, checkpoint: str, whole: bool) -> None:
    class Take(nn.Module):
        def forward(self, value: dict[str, Any]) -> Tensor:
            x: Tensor = value["x"]
            return x

    module = nn.Sequential(*[Modulated(k) for k in range(3)], Take()).double()
    model = pipe(copy.deepcopy(module), [1, 2, 1], chunks=3, checkpoint=checkpoint)

    def extra() -> Any:
        tensor = torch.randn(*([] if whole else [6]), 4, dtype=torch.float64, requires_grad=True)
        return NoChunk(tensor) if whole else tensor

    batch = {
        "x": torch.randn(6, 4, dtype=torch.float64, requires_grad=True),
        "scale": [extra() for _ in range(3)],
        "bias": [extra() for _ in range(3)],
    }
    assert_same(outcome(model, batch), plain_outcome(module, batch, chunks=3))


# Time first


class Transpose(nn.Module):
    """A transposition of (batch, time, ...) to (time, batch, ...), or back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Recurrence(nn.Module):
    """An LSTM over (time, batch, width), as nn.LSTM without batch_first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


def test_layers_that_want_time_first_stand_between_two_that_transpose(pipe: Pipe, checkpoint: str) -> None:
    inner = nn.Sequential(Recurrence(), Recurrence()).double()
    module = nn.Sequential(Transpose(), *inner, Transpose())
    x = torch.randn(5, 7, 4, dtype=torch.float64, requires_grad=True)
    expected = plain_outcome(module, x, chunks=2)
    model = pipe(copy.deepcopy(module), [2, 2], chunks=2, checkpoint=checkpoint)
    assert_same_up_to_sums(outcome(model, x), expected)
    torch.testing.assert_close(model(x).transpose(0, 1), inner(x.transpose(0, 1)))


def test_lengths_tell_that_time_is_first(pipe: Pipe) -> None:
    """Such a tensor alone would be split in time: the pipeline cannot know which dimension is the batch."""
    model = pipe(nn.Sequential(Recurrent(), Last()), [1, 1], chunks=2)
    with pytest.raises(ValueError, match=r"\['x'\] is \(7, 5, 4\).*\['lengths'\] is \(5,\)"):
        model({"x": torch.randn(7, 5, 4), "lengths": torch.tensor([7, 2, 3, 1, 5])})

"""What a first user ran into: each was wrong or lost without a word."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe

DEVICES = ["cpu:0", "cpu:1"]


class Tower(nn.Module):
    """Six blocks with an activation that has no parameters, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.tanh = nn.Tanh()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.tanh(block(x))
        return self.head(x)


def pipelined(model: nn.Module, sample: Any = None, **options: Any) -> Any:
    return torchgpipe.pipelined(
        model, torch.randn(2, 8) if sample is None else sample, chunks=4, devices=DEVICES, **options
    )


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        ({"blocks.4": 1}, [4, 3]),
        ({"blocks.4": 1, "blocks.2": 0}, [4, 3]),
        ({**{f"blocks.{k}": int(k > 2) for k in range(6)}, "tanh": 0, "head": 1}, [3, 4]),
        ({"blocks": 0, "head": 1}, [6, 1]),
        ({"blocks": 0, "blocks.5": 1, "head": 1}, [5, 2]),
    ],
)
def test_a_balance_by_names_loses_no_part(names: dict[str, int], counts: list[int]) -> None:
    """The last name of a partition won: with a whole device_map, some blocks were in no partition."""
    assert pipelined(Tower(), balance=names).layout.balance == counts


@pytest.mark.parametrize(
    ("balance", "error", "message"),
    [
        (
            {"blocks.1": 1, "blocks.4": 0},
            ValueError,
            "puts 'blocks.4' into partition 0, which is 'blocks.0' to 'blocks.0'",
        ),
        ({"blocks.0": 1}, ValueError, "each of 2 partitions but the first begins"),
        ({"blocks.3": 0}, ValueError, "1 partition does not go evenly round 2 devices"),
        ({"blocks.3": "1"}, TypeError, "balance must be"),
        (3, TypeError, "balance must be"),
    ],
)
def test_a_balance_that_does_not_fit_says_why(balance: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipelined(Tower(), balance=balance)


class Counting(Tower):
    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x), "rows": len(x), "width": 8}


def test_a_number_that_counts_rows_is_refused() -> None:
    """Each micro-batch counted its own rows, and all agreed."""
    with pytest.raises(ValueError, match="the output 'rows' is int, which depends on the rows"):
        pipelined(Counting())


@pytest.mark.parametrize("kind", [Tensor.numpy, lambda y: deque([y])])
def test_an_output_that_does_not_compare_is_refused_by_name(kind: Any) -> None:
    """The error was that of its comparison, without a name."""

    class Other(Tower):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"y": y, "other": kind(y.detach())}

    with pytest.raises(ValueError, match=r"the output 'other' is .*, which differs between micro-batches"):
        pipelined(Other())


class Speaker(nn.Module):
    """Compares with the next label."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        x = self.head(x)
        return {"logits": x, "loss": F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


@pytest.mark.parametrize("by_name", [True, False])
def test_labels_that_are_shifted_are_seen_in_a_sample_without_padding(by_name: bool) -> None:
    """Micro-batches had the weights of their rows, where the mini-batch was padded."""
    ids = torch.randint(3, 32, (8, 6))
    labels = ids.where(torch.arange(6) < torch.tensor([6, 6, 2, 2, 3, 1, 4, 6])[:, None], -100)
    plain = Speaker().double()
    arguments = (lambda rows: {"ids": ids[rows], "labels": labels[rows]}) if by_name else None
    whole, few = slice(None), slice(0, 2)
    model = pipelined(copy.deepcopy(plain), arguments(few) if arguments else (ids[few], labels[few]))
    loss = model.step(**arguments(whole)) if arguments else model.step(ids, labels)
    expected = plain(ids, labels)["loss"]
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-14)


def test_padding_counts_in_a_step_of_layers_too() -> None:
    """Only pipelined models counted labels; of a GPipe, each row weighed as much, and one without labels was nan."""
    words = torch.randint(32, (8, 6))
    labels = words.where(torch.arange(6) < torch.tensor([6, 6, 2, 2, 3, 1, 0, 0])[:, None], -100).roll(-1, 1)
    layers = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32)).double()
    loss_fn = lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())  # noqa: E731
    expected = loss_fn(layers(words), labels).detach()
    model = torchgpipe.GPipe(layers, [1, 1], devices=DEVICES, chunks=4, loss_fn=loss_fn)
    torch.testing.assert_close(model.step(words, labels), expected, rtol=1e-12, atol=0)


def test_a_setting_that_would_have_no_effect_is_an_error() -> None:
    model = pipelined(Tower())
    with pytest.raises(AttributeError, match=r"chunks of a pipelined model cannot be set; call unpipelined\(\)"):
        model.chunks = 8
    model.note = "of the user's own"


def test_offload_has_several_partitions_for_each_device() -> None:
    """One for each device would leave nothing in host memory."""
    assert len(pipelined(Tower(), offload=True).layout.partitions) == 7


@pytest.mark.parametrize("setting", ["loss_fn", "weight"])
def test_a_function_that_is_none_is_an_error(setting: str) -> None:
    """It was one in the first step only, without a name."""
    for make in (
        pipelined,
        lambda model, **given: torchgpipe.GPipe(nn.Sequential(model), [1], devices=["cpu"], **given),
    ):
        with pytest.raises(TypeError, match=f"{setting} must be a function, .*, but got 'mse'"):
            make(Tower(), **{setting: "mse"})


class Neighbours(nn.Module):
    """Has a table for all rows, and takes its rows by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor | None = None, y: Tensor | None = None, *, table: Tensor) -> Any:
        z: Any = y if x is None else x
        for block in self.blocks:
            z = block(z) + table.sum(0)
        return z


def test_rows_are_those_of_what_is_split() -> None:
    """They were those of the table, so that every micro-batch got all rows of the other."""
    model, table, y = Neighbours().double(), torch.randn(5, 8, dtype=torch.float64), torch.randn(6, 8).double()
    expected = model(table=table, y=y)
    pipelined(model, {"x": y[:3], "table": table})
    torch.testing.assert_close(model(table=table, y=y), expected, rtol=1e-12, atol=1e-12)


def test_a_sample_without_rows_is_refused() -> None:
    """Every micro-batch got all rows of later mini-batches."""
    with pytest.raises(ValueError, match=r"the sample has no rows in \['x'\]"):
        pipelined(Tower(), torch.randn(0, 8))

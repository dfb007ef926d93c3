"""The `balance` argument: accepted values, and errors that point to automatic balancing."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from tests.conftest import with_accelerators
from tests.gpipe.helpers import make_model
from torchgpipe import GPipe


def test_balance_is_required() -> None:
    with pytest.raises(ValueError, match=r"balance is required") as caught:
        GPipe(make_model(3))
    assert "3" in str(caught.value)
    _assert_points_to_balancing(caught.value)


@pytest.mark.parametrize("balance", [[], [1], [1, 1], [2, 2], [1, 1, 1, 1], [7]])
def test_balance_with_another_sum(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="module and sum of balance have different length") as caught:
        GPipe(make_model(3), balance)
    first_line = str(caught.value).splitlines()[0]
    assert "3" in first_line
    assert str(sum(balance)) in first_line
    _assert_points_to_balancing(caught.value)


@pytest.mark.parametrize("balance", [[0, 3], [3, 0], [-1, 4], [1, -1, 3]])
def test_balance_with_an_empty_partition(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="all balance numbers must be positive integer") as caught:
        GPipe(make_model(3), balance)
    first_line = str(caught.value).splitlines()[0]
    assert str(balance) in first_line
    assert "3" in first_line
    _assert_points_to_balancing(caught.value)


@pytest.mark.parametrize("balance", [3, "12", ["1", "2"], [1.0, 2.0], [1.5, 1.5], [None, 3], [[1], [2]]], ids=str)
def test_balance_takes_integers_only(balance: Any) -> None:
    """The errors were once those of int(), and fractions were silently truncated."""
    with pytest.raises(TypeError, match="balance takes a list of integers") as caught:
        GPipe(make_model(3), balance)
    assert repr(balance) in str(caught.value)
    _assert_points_to_balancing(caught.value)


@pytest.mark.parametrize(
    ("balance", "accelerators", "partitions"),
    [
        ([4, 4], 0, 2),
        ([1, 1, 1], 0, 3),
        ([0, 3], 0, 2),
        ([1] * 12, 0, 5),
        ([], 0, 2),
        (None, 0, 2),
        (None, 4, 4),
        (None, 8, 5),
    ],
)
def test_the_recommended_number_of_partitions_is_the_given_one(
    monkeypatch: pytest.MonkeyPatch, balance: Any, accelerators: int, partitions: int
) -> None:
    """The message once recommended 4 partitions in every case."""
    with_accelerators(monkeypatch, accelerators)
    with pytest.raises(ValueError, match=f"partitions={partitions}\\)"):
        GPipe(make_model(5), balance)


def _assert_points_to_balancing(error: Exception) -> None:
    assert "torchgpipe.plan(module, sample, batch=...)" in str(error)
    assert "torchgpipe_balancing" in str(error)


@pytest.mark.parametrize("balance", [(1, 2), iter([1, 2]), torch.tensor([1, 2]), numpy.array([1, 2]), range(1, 3)])
def test_balance_may_be_any_iterable_of_integers(balance: Any) -> None:
    model = GPipe(make_model(3), balance, devices=["cpu", "cpu"])
    assert model.balance == [1, 2]
    assert [type(number) for number in model.balance] == [int, int]


def test_balance_may_be_a_keyword() -> None:
    assert GPipe(make_model(3), balance=[3], devices=["cpu"]).balance == [3]


def test_options_are_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        GPipe(make_model(1), [1], ["cpu"])

"""The bytes that an optimizer keeps are counted, whatever way the optimizer is given."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW

from torchgpipe_balancing.planning.optimizer import states_of


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (None, 0),
        (1.5, 1.5),
        (AdamW, 2),  # For other classes and settings see the table of `torchgpipe.balance.balance_by_size`.
        (partial(SGD, lr=0.1, momentum=0.9), 1),
        # A row and a column for each matrix of 256 x 256, and not a second matrix.
        (Adafactor, 2 / 256),
        # An optimizer has the settings that will train: here those of one group, which are not the defaults.
        (Adam([nn.Parameter(torch.zeros(3))], amsgrad=True), 3),
        (lambda parameters: SGD(parameters, momentum=0.5), 1),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),  # Without addresses, which differ by process.
)
def test_states_for_each_byte_of_a_parameter(optimizer: Any, states: float) -> None:
    assert states_of(optimizer) == states


def test_an_optimizer_that_was_given_is_not_changed() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    given = AdamW([parameter])
    assert states_of(given) == 2
    assert not given.state
    assert parameter.equal(torch.zeros(3))


@pytest.mark.parametrize(
    "wrong", ["AdamW", nn.Linear, object(), lambda parameters: None, lambda parameters, lr: AdamW(parameters, lr)]
)
def test_something_else_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a class such as torch\.optim\.AdamW, a function") as caught:
        states_of(wrong)
    assert repr(wrong) in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_number_of_bytes_is_at_least_0_and_finite(wrong: float) -> None:
    with pytest.raises(ValueError, match="an optimizer keeps 0 bytes or more"):
        states_of(wrong)

"""Layers that work in place.

ReLU is idempotent: a recomputation that starts from a changed input gives the same output. So most layers here
double their input.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.plain import assert_same, outcome, plain_outcome

CHECKPOINTED = ["always", "except_last"]


class Double(nn.Module):
    """A layer that doubles in place and declares it, as the layers of PyTorch do."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.mul_(2) if self.inplace else x * 2
        for tensor in x.values() if isinstance(x, dict) else x:
            tensor.mul_(2)
        return x


class SecretlyDouble(nn.Module):
    """A layer that doubles in place without declaring it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def make_linear() -> nn.Linear:
    return nn.Linear(2, 2, dtype=torch.float64)


def make_input(batch: int = 5, requires_grad: bool = True) -> Tensor:
    return torch.randn(batch, 2, dtype=torch.float64, requires_grad=requires_grad)


# Supported


@pytest.mark.parametrize(
    "layer",
    [
        Double(),
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.5, inplace=True),
        nn.ELU(inplace=True),
        nn.Hardtanh(-0.5, 0.5, inplace=True),
        nn.Sequential(Double(), nn.Tanh()),
        nn.Sequential(nn.Sequential(nn.Sequential(Double(), make_linear()))),
        nn.Sequential(Double(), Double()),
    ],
    ids=str,
)
@pytest.mark.parametrize("balance", [[1, 1, 1], [2, 1], [1, 2], [3]])
def test_layers_that_declare_it_give_the_right_gradients_wherever_the_partition_starts(
    pipe: Pipe, checkpoint: str, layer: nn.Module, balance: list[int]
) -> None:
    module = nn.Sequential(make_linear(), copy.deepcopy(layer), make_linear())
    x = make_input()
    model = pipe(copy.deepcopy(module), balance, chunks=2, checkpoint=checkpoint)
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_first_layer_in_place_does_not_change_the_users_mini_batch(
    pipe: Pipe, checkpoint: str, requires_grad: bool, training: bool
) -> None:
    module, x = nn.Sequential(Double(), make_linear()).train(training), make_input(requires_grad=requires_grad)
    before = x.detach().clone()
    model = pipe(copy.deepcopy(module), [1, 1], chunks=2, checkpoint=checkpoint)
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))
    output = model(x)
    assert torch.equal(x, before)
    output.sum().backward()
    assert torch.equal(x, before)


def test_without_gradients_the_users_mini_batch_is_unchanged_too(pipe: Pipe, checkpoint: str) -> None:
    model, x = pipe(nn.Sequential(Double()), [1], chunks=2, checkpoint=checkpoint), make_input(requires_grad=False)
    for context in [torch.no_grad, torch.inference_mode]:
        before = x.clone()
        with context():
            output = model(x)
        assert torch.equal(x, before)
        assert torch.equal(output, 2 * before)


@pytest.mark.parametrize("nest", [lambda x, y: (x, y), lambda x, y: [x, y], lambda x, y: {"x": x, "y": y}])
def test_several_inputs_changed_in_place(pipe: Pipe, checkpoint: str, nest: Any) -> None:
    class Add(nn.Module):
        def forward(self, values: Any) -> Tensor:
            x, y = values.values() if isinstance(values, dict) else values
            return x * y

    module, value = nn.Sequential(Double(), Add(), make_linear()), nest(make_input(), make_input())
    model = pipe(copy.deepcopy(module), [1, 2], chunks=2, checkpoint=checkpoint)
    assert_same(outcome(model, value), plain_outcome(module, value, chunks=2))


def test_a_layer_may_change_in_place_what_a_layer_of_its_partition_has_made(pipe: Pipe, checkpoint: str) -> None:
    module, x = nn.Sequential(make_linear(), SecretlyDouble(), make_linear(), SecretlyDouble()), make_input()
    model = pipe(copy.deepcopy(module), [2, 2], chunks=2, checkpoint=checkpoint)
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))


def test_without_checkpointing_a_layer_may_change_what_another_partition_has_made(pipe: Pipe) -> None:
    """As in the plain model, a layer may change the output of another partition on the same device."""
    module, x = nn.Sequential(make_linear(), SecretlyDouble(), make_linear(), SecretlyDouble()), make_input()
    model = pipe(copy.deepcopy(module), [1, 1, 1, 1], chunks=2, checkpoint="never")
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_user_may_change_the_output_in_place(pipe: Pipe, checkpoint: str, chunks: int) -> None:
    """With one chunk, the output is the tensor of the last cell, not a concatenation."""
    module, x = nn.Sequential(make_linear(), make_linear()), make_input()
    model = pipe(copy.deepcopy(module), [1, 1], chunks=chunks, checkpoint=checkpoint)
    expected = plain_outcome(module, x, chunks=chunks, loss=lambda output: output.mul_(2).sum())
    assert_same(outcome(model, x, loss=lambda output: output.mul_(2).sum()), expected)


def test_layers_that_do_not_work_in_place_get_no_copy(pipe: Pipe) -> None:
    """A copy costs time, so only a layer that declares ``inplace`` gets one.

    PyTorch itself copies a tensor from 'cpu' to 'cpu:0', as if these were two devices.
    """

    class Where(nn.Module):
        pointers: list[int]

        def __init__(self) -> None:
            super().__init__()
            self.pointers = []

        def forward(self, x: Tensor) -> Tensor:
            self.pointers.append(x.data_ptr())
            return x

    where = Where()
    model = pipe(nn.Sequential(where, Double(inplace=False)), [1, 1], chunks=2)
    x = make_input(4, requires_grad=False)
    model(x)
    assert where.pointers == [x.data_ptr(), x[2:].data_ptr()]


# Refused


@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
@pytest.mark.parametrize(
    ("layers", "balance", "partition"),
    [
        ([SecretlyDouble(), make_linear()], [2], "partition 0 (layers '0'..'1')"),
        ([make_linear(), SecretlyDouble()], [1, 1], "partition 1 (layers '1'..'1')"),
        ([make_linear(), nn.Identity(), nn.ReLU(inplace=True)], [1, 2], "partition 1 (layers '1'..'2')"),
        ([make_linear(), nn.Flatten(0), SecretlyDouble()], [1, 2], "partition 1 (layers '1'..'2')"),
        ([make_linear(), nn.Sequential(nn.Identity(), Double())], [1, 1], "partition 1 (layers '1'..'1')"),
        ([make_linear(), make_linear(), SecretlyDouble()], [1, 1, 1], "partition 2 (layers '2'..'2')"),
    ],
)
def test_a_hidden_change_of_a_checkpointed_input_is_an_error_that_names_partition_and_remedy(
    pipe: Pipe, checkpoint: str, layers: list[nn.Module], balance: list[int], partition: str
) -> None:
    model = pipe(nn.Sequential(*layers, nn.Identity()), [*balance, 1], chunks=2, checkpoint=checkpoint)
    with pytest.raises(RuntimeError) as caught:
        model(make_input(4, requires_grad=False))
    message = str(caught.value)
    assert partition in message
    for remedy in ["in place", "clone()", "inplace=True", "checkpoint='never'"]:
        assert remedy in message


@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
def test_changing_one_of_several_inputs_is_seen(pipe: Pipe, checkpoint: str) -> None:
    class Mask(nn.Module):
        def forward(self, value: dict[str, Tensor]) -> Tensor:
            value["mask"].logical_not_()
            return value["x"] * value["mask"]

    model = pipe(nn.Sequential(nn.Identity(), Mask()), [1, 1], chunks=2, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match=r"partition 1 .*in place"):
        model({"x": make_input(4), "mask": torch.ones(4, 2, dtype=torch.bool)})


def test_the_model_works_on_after_the_error(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(make_linear(), SecretlyDouble(), make_linear()), [1, 2], chunks=2, checkpoint="always")
    with pytest.raises(RuntimeError, match="in place"):
        model(make_input())
    setattr(model, "1", Double())
    model(make_input()).sum().backward()


@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
def test_the_users_change_of_the_input_before_backward_is_an_error(pipe: Pipe, checkpoint: str) -> None:
    """A recomputation would start from the changed input. PyTorch raises the same error for any saved tensor."""
    model, x = pipe(nn.Sequential(make_linear()), [1], chunks=2, checkpoint=checkpoint), make_input(requires_grad=False)
    output = model(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()

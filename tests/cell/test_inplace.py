"""Layers that work in place without telling.

Layers that declare it are in `tests.recipes`, and `tests.plain` looks that the caller's input stays. ReLU
is idempotent: a recomputation that starts from a changed input gives the same output. So the layers here double.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.layers import Apply
from tests.plain import assert_equal, assert_same, gradients, outcome, plain_outcome
from tests.recipes import Double
from torchgpipe import MicroBatches

CHECKPOINTED = ["always", "except_last"]


def secretly_double() -> nn.Module:
    """Return a layer that doubles in place without declaring it."""
    return Apply(lambda x: x.mul_(2))


def make_linear() -> nn.Linear:
    return nn.Linear(2, 2, dtype=torch.float64)


def make_input(batch: int = 5, requires_grad: bool = True) -> Tensor:
    return torch.randn(batch, 2, dtype=torch.float64, requires_grad=requires_grad)


# Supported


@pytest.mark.parametrize("balance", [[2, 2], [1, 1, 1, 1]])
def test_a_layer_may_change_in_place_what_a_layer_of_its_partition_has_made(
    pipe: Pipe, checkpoint: str, balance: list[int]
) -> None:
    """As in the plain model; and without checkpointing what another partition has made, on the same device."""
    module, x = nn.Sequential(make_linear(), secretly_double(), make_linear(), secretly_double()), make_input()
    mode = checkpoint if len(balance) == 2 else "never"
    model = pipe(copy.deepcopy(module), balance, chunks=2, checkpoint=mode)
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))


@pytest.mark.parametrize("front", ["call", "step", "given"])
def test_the_first_layer_may_change_the_mini_batch_in_place(pipe: Pipe, front: str) -> None:
    """Micro-batches shared one version, so each change spoiled what earlier ones had saved for backward."""
    module = nn.Sequential(Apply(lambda x: x.sub_(0.5).div_(2)), make_linear(), make_linear())
    x, plain = make_input(8, requires_grad=False), copy.deepcopy(module)
    for part in reversed(x.clone().chunk(4)):
        (plain(part).square().mean() / 4).backward()
    how = {"chunks": 4, "schedule": "GPipe", "loss_fn": lambda output, _: output.square().mean()}
    model = pipe(copy.deepcopy(module), [2, 1], checkpoint="never", **how)
    if front == "call":
        sum([part.square().mean() / 4 for part in model(x).chunk(4)]).backward()
    else:
        model.step(MicroBatches(x.chunk(4)) if front == "given" else x)
    assert_equal(gradients(model), gradients(plain))


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

    pointers: list[int] = []
    where = Apply(lambda x: pointers.append(x.data_ptr()) or x)
    model = pipe(nn.Sequential(where, Apply(lambda x: x * 2)), [1, 1], chunks=2)
    x = make_input(4, requires_grad=False)
    model(x)
    assert pointers == [x.data_ptr(), x[2:].data_ptr()]


# Refused


@pytest.mark.parametrize("checkpoint", CHECKPOINTED)
@pytest.mark.parametrize(
    ("layers", "balance", "partition"),
    [
        ([secretly_double(), make_linear()], [2], "partition 0 (layers '0'..'1')"),
        ([make_linear(), nn.Identity(), nn.ReLU(inplace=True)], [1, 2], "partition 1 (layers '1'..'2')"),
        ([make_linear(), nn.Flatten(0), secretly_double()], [1, 2], "partition 1 (layers '1'..'2')"),
        ([make_linear(), nn.Sequential(nn.Identity(), Double())], [1, 1], "partition 1 (layers '1'..'1')"),
        ([make_linear(), make_linear(), secretly_double()], [1, 1, 1], "partition 2 (layers '2'..'2')"),
        (
            [make_linear(), Apply(lambda x: {"x": x, "y": x > 0}), Apply(lambda d: d["x"] * d["y"].logical_not_())],
            [2, 1],
            "partition 1 (layers '2'..'2')",
        ),
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


def test_the_users_change_of_the_input_before_backward_is_an_error(pipe: Pipe, checkpoint: str) -> None:
    """A recomputation would start from the changed input. PyTorch raises the same error for any saved tensor."""
    model, x = pipe(nn.Sequential(make_linear()), [1], chunks=2, checkpoint=checkpoint), make_input(requires_grad=False)
    output = model(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()

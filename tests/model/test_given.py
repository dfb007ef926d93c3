"""Micro-batches that the caller gives, in a GPipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torchgpipe import GPipe, MicroBatches, NoChunk


def make_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_window(*rows: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(sum(rows))
    return (
        [torch.randn(count, 4, dtype=torch.float64) for count in rows],
        [torch.randint(3, (count,)) for count in rows],
    )


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZeroBubble"])
@pytest.mark.parametrize("rows", [(1,), (2, 1), (1, 3, 2, 5, 1, 1, 4)])
def test_a_step_is_the_sum_of_the_backwards_of_the_micro_batches(schedule: Any, rows: tuple[int, ...]) -> None:
    """More or fewer micro-batches than devices or ``chunks``, each with other rows; the mean is over all rows."""
    inputs, targets = make_window(*rows)
    plain, devices = make_layers(), ["cpu:0", "cpu:1", "cpu:2"]
    model = GPipe(
        make_layers(), [2, 2, 1], devices=devices, chunks=4, schedule=schedule, loss_fn=functional.cross_entropy
    )
    loss = model.step(MicroBatches(inputs), MicroBatches(targets))
    shares = [functional.cross_entropy(plain(x), y) * (len(x) / sum(rows)) for x, y in zip(inputs, targets)]
    for share in reversed(shares) if schedule == "GPipe" else shares:
        share.backward()
    assert torch.equal(loss, sum([share.detach() for share in shares], torch.zeros(())))
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_a_window_of_rows_is_the_mini_batch_of_them() -> None:
    (batch,), (target,) = make_window(8)
    model = GPipe(make_layers(), [3, 2], chunks=8, loss_fn=functional.cross_entropy)
    loss = model.step(batch, target)
    expected = gradients(model)
    model.zero_grad()
    assert torch.equal(model.step(MicroBatches(batch.split(1)), MicroBatches(target.split(1))), loss)
    assert all(map(torch.equal, gradients(model), expected))


def test_a_call_returns_an_output_for_each_micro_batch() -> None:
    inputs, _ = make_window(2, 1, 5)
    plain, model = make_layers(), GPipe(make_layers(), [2, 3], devices=["cpu:0", "cpu:1"])
    outputs = model(MicroBatches(inputs))
    assert all(map(torch.equal, outputs, map(plain, inputs)))
    outputs[1].sum().backward()
    plain(inputs[1]).sum().backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    with torch.no_grad():
        assert [len(output) for output in model(MicroBatches(inputs[:1]))] == [2]
    assert model.verify(MicroBatches(inputs)).is_equal


class Scale(nn.Module):
    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        x = x if scale is None else x * scale
        return x if shift is None else x + shift


def test_arguments_are_windows_of_their_own() -> None:
    """What only some micro-batches have is None in the others, and what all have whole is in NoChunk."""
    inputs, _ = make_window(2, 3)
    model, scale, shift = GPipe(nn.Sequential(Scale(), nn.Identity()), [1, 1]), torch.rand(4), torch.rand(2, 4)
    first, second = model(MicroBatches(inputs), NoChunk(scale), shift=MicroBatches([shift, None]))
    assert torch.equal(first, inputs[0] * scale + shift)
    assert torch.equal(second, inputs[1] * scale)


def test_weights_of_the_caller_replace_the_rows() -> None:
    inputs, targets = make_window(1, 4)
    model = GPipe(make_layers(), [2, 3], loss_fn=functional.cross_entropy)
    loss = model.step(MicroBatches(inputs, weights=[3, 1]), MicroBatches(targets))
    first, second = [functional.cross_entropy(model(x), y) for x, y in zip(inputs, targets)]
    torch.testing.assert_close(loss, (3 * first + second) / 4)


def test_a_loss_function_of_ones_own_needs_weights_where_rows_differ() -> None:
    """Whether it is a mean over rows, two micro-batches show as one; those of one size are averaged anyway."""
    model = GPipe(make_layers(), [2, 3], loss_fn=lambda output, _: output[-1].square().sum())
    model.step(MicroBatches(make_window(2, 2)[0]))
    inputs, _ = make_window(1, 3)
    with pytest.raises(ValueError, match="weight="):
        model.step(MicroBatches(inputs))
    first, second = [model(x)[-1].square().sum() for x in inputs]
    torch.testing.assert_close(model.step(MicroBatches(inputs, weights=[1, 1])), (first + second) / 2)


def test_other_values_of_a_loss_function_come_in_a_list() -> None:
    inputs, _ = make_window(1, 3)
    model = GPipe(make_layers(), [2, 3], loss_fn=lambda output, _: (output.mean(), {"rows": output}))
    _, values = model.step(MicroBatches(inputs, weights=[1, 1]))
    assert [value["rows"].shape for value in values] == [(1, 3), (3, 3)]


x, y = make_window(2)[0][0], make_window(2)[1][0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MicroBatches(x), TypeError, "takes a list of batches, but got one Tensor"),
        (lambda: MicroBatches([]), ValueError, "one batch or more"),
        (lambda: MicroBatches([MicroBatches([x])]), TypeError, "inside of MicroBatches"),
        (lambda: MicroBatches([x], weights=[1, 2]), ValueError, "1 batches, but 2 weights"),
        (lambda: MicroBatches([x], weights=[-1]), ValueError, "must be 0 or more"),
    ],
)
def test_what_is_no_window_is_refused(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("input", "target", "options", "error", "message"),
    [
        (MicroBatches([x]), y, {}, TypeError, "one alone is MicroBatches"),
        (x, MicroBatches([y]), {}, TypeError, "one alone is MicroBatches"),
        (MicroBatches([x, x]), MicroBatches([y]), {}, ValueError, "2 MicroBatches in the input, but 1"),
        (MicroBatches([x], weights=[1]), MicroBatches([y]), {"reduce": "sum"}, ValueError, "without use"),
        ((MicroBatches([x]), x), MicroBatches([y]), {}, TypeError, r"\[1\].* are not"),
        ((MicroBatches([x]), MicroBatches([x, x])), MicroBatches([y]), {}, ValueError, r"\[1, 2\]"),
        (MicroBatches(["text"]), MicroBatches([y]), {}, TypeError, "micro-batch 0 must consist of tensors"),
    ],
)
def test_a_window_that_does_not_fit_is_refused(input: Any, target: Any, options: Any, error: Any, message: str) -> None:
    model = GPipe(make_layers(), [2, 3], loss_fn=functional.cross_entropy, **options)
    with pytest.raises(error, match=message):
        model.step(input, target)


def test_few_rows_are_told_of_windows() -> None:
    model = GPipe(make_layers(), [2, 3], devices=["cpu:0", "cpu:1"], chunks=4)
    with pytest.warns(UserWarning, match="MicroBatches"):
        model(x)
    GPipe(make_layers(), [2, 3], devices=["cpu:0", "cpu:1"], chunks=4)(MicroBatches([x]))

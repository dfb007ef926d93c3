"""The order in which a step runs micro-batches that differ in length, and what it returns, in both fronts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, MicroBatches, pipelined
from torchgpipe.model.given import order_of

TWO = ["cpu:0", "cpu:1"]
#: The rows of each micro-batch, and their numbers as they run: the longest in the middle.
ROWS, ORDER = [3, 9, 1, 7, 5], [2, 4, 1, 3, 0]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in ROWS]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).square().mean(), output


def of_layers(model: nn.Sequential, how: dict[str, Any]) -> Any:
    return GPipe(model, [2, 1], devices=TWO, loss_fn=loss_fn, checkpoint="never", **how)


def of_any_module(model: nn.Sequential, how: dict[str, Any]) -> Any:
    return pipelined(model, MicroBatches(batches()[:2]), devices=TWO, balance=[1, 1], loss_fn=loss_fn, **how)


@pytest.mark.parametrize("front", [of_layers, of_any_module])
@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubble"])
def test_the_longest_run_in_the_middle_and_results_are_in_the_callers_order(
    front: Callable[..., Any], schedule: str
) -> None:
    xs, plain, ran = batches(), layers(), list[int]()
    ys = [x.sum(1, keepdim=True) for x in xs]
    total, losses = sum(ROWS), {}
    for i in ORDER:
        share = loss_fn(plain(xs[i]), ys[i])[0] * (ROWS[i] / total)
        share.backward()
        losses[i] = share.detach()
    model = layers()
    stepping = front(model, {"schedule": schedule})
    model[0].register_forward_hook(lambda _, inputs, __: ran.append(len(inputs[0])))
    loss, values = stepping.step(MicroBatches(xs, order="longest"), target=MicroBatches(ys))
    assert ran == [ROWS[i] for i in ORDER]
    torch.testing.assert_close(loss, torch.stack([losses[i] for i in range(5)]).sum())
    torch.testing.assert_close(values, [plain(x).detach() for x in xs])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_length_is_that_of_the_first_tensor_wherever_it_is() -> None:
    forms = [
        ((torch.zeros(1, 5),), {}),
        {"ids": torch.zeros(1, 2), "mask": torch.zeros(9)},
        torch.zeros(4),
        "no tensor",
    ]
    assert order_of(MicroBatches(forms, order="longest")) == [3, 2, 0, 1]
    assert order_of(MicroBatches(forms)) is None


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order must be 'longest', or None .* but got 'shortest'"):
        MicroBatches([torch.zeros(1)], order="shortest")  # type: ignore[arg-type]

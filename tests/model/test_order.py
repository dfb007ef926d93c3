"""The order in which a step runs micro-batches that differ in length, what it returns, and what it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.held import HeldBytes, Saved
from torchgpipe import GPipe, MicroBatches, pipelined
from torchgpipe.batch.given import order_of
from torchgpipe.schedule import program_of, simulate

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


class Exp(nn.Module):
    """Keeps its output for backward, and counts the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.held = HeldBytes()

    def forward(self, input: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: Saved(x, self.held), lambda saved: saved.tensor):
            return (input * 0 + self.weight).exp()


@pytest.mark.parametrize("front", ["layers", "any module"])
@pytest.mark.parametrize("order", [None, "longest"])
def test_a_window_of_64_keeps_what_four_micro_batches_keep(front: str, order: Any) -> None:
    n, rows = 4, [1 + 5 * i % 9 for i in range(64)]
    xs = MicroBatches([torch.zeros(count, 4, dtype=torch.float64) for count in rows], order=order)
    layers, where = [Exp() for _ in range(n)], [f"cpu:{j}" for j in range(n)]
    how: dict[str, Any] = {"devices": where, "schedule": "1F1B", "loss_fn": lambda output, _: output.mean()}
    model: Any = (
        GPipe(nn.Sequential(*layers), [1] * n, checkpoint="never", **how)
        if front == "layers"
        else pipelined(nn.Sequential(*layers), MicroBatches(xs[:2]), balance=[1] * n, verify=False, **how)
    )
    for layer in layers:
        layer.held.peak = 0
    model.step(xs)
    program = program_of("1F1B", 64, range(n), order_of(xs))
    assert [layer.held.peak for layer in layers] == simulate(program, memory=lambda cell: 32 * rows[cell.i]).peaks
    assert layers[0].held.peak <= 32 * sum(sorted(rows)[-n:])


def test_a_length_is_that_of_the_first_tensor_wherever_it_is() -> None:
    forms = [
        ((torch.zeros(1, 5),), {}),
        {"ids": torch.zeros(1, 2), "mask": torch.zeros(9)},
        torch.zeros(4),
        "no tensor",
    ]
    assert order_of(MicroBatches(forms, order="longest")) == [3, 2, 0, 1]
    assert order_of(MicroBatches(forms)) is None


@pytest.mark.parametrize("front", [of_layers, of_any_module])
def test_running_statistics_of_another_order_are_refused(front: Callable[..., Any]) -> None:
    """They were those of the order in which micro-batches had run. A norm that is frozen, or deferred, has no order."""
    xs = [torch.cat([x, x + 1]) for x in batches()]
    ys = MicroBatches([x.sum(1, keepdim=True) for x in xs])
    model = layers()
    model[1] = nn.BatchNorm1d(4, affine=False).double()
    plain = copy.deepcopy(model)
    stepping = front(model, {})
    with pytest.raises(
        ValueError, match=r"running statistics of '1' \(BatchNorm1d\), .*; leave order= out, freeze the"
    ):
        stepping.step(MicroBatches(xs, order="longest"), target=ys)
    model[1].eval()
    stepping.step(MicroBatches(xs, order="longest"), target=ys)
    if front is of_layers:
        deferred = of_layers(copy.deepcopy(plain), {"deferred_batch_norm": True})
        again = copy.deepcopy(deferred)
        deferred.step(MicroBatches(xs, order="longest"), target=ys)
        again.step(MicroBatches(xs), target=ys)
        torch.testing.assert_close(deferred[1].running_var, again[1].running_var)


@pytest.mark.parametrize("front", [of_layers, of_any_module])
def test_a_micro_batch_without_rows_weighs_nothing(front: Callable[..., Any]) -> None:
    """It weighed as much as one row, and its loss, a mean over nothing, was nan."""
    xs = [*batches(), torch.zeros(0, 4, dtype=torch.float64)]
    ys, plain, model = [x.sum(1, keepdim=True) for x in xs], layers(), layers()
    loss_fn(plain(torch.cat(xs)), torch.cat(ys))[0].backward()
    loss, _ = front(model, {}).step(MicroBatches(xs), target=MicroBatches(ys))
    torch.testing.assert_close(loss, loss_fn(plain(torch.cat(xs)), torch.cat(ys))[0].detach())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order must be 'longest', or None .* but got 'shortest'"):
        MicroBatches([torch.zeros(1)], order="shortest")  # type: ignore[arg-type]

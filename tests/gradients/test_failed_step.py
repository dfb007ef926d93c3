"""What a step that fails leaves: all as it was, so that the same step can run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from torchgpipe import GPipe


class _Fault(torch.autograd.Function):
    """Call a function forward, and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> Tensor:
        ctx.at_backward = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.at_backward()
        return grad, None, None


class Scarce(nn.Module):
    """A layer that runs out of memory in an action of a phase, once."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []  # of a list, nobody knows what is in it

    def forward(self, x: Tensor) -> Tensor:
        def act(phase: str) -> None:
            if self.faults[-1:] == [phase] and self.faults.pop() and not self.faults:
                raise torch.OutOfMemoryError("the device is full")

        return _Fault.apply(x, lambda: act("forward"), lambda: act("backward"))  # type: ignore[no-any-return]


class Counts(nn.Module):
    """A layer that computes with what it keeps, and changes it: a number, tensors, and generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale, self.tensor = 1.0, torch.ones((), dtype=torch.float64)
        self.prompt = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 0.5
        self.tensor.mul_(0.5)
        noise = 1 + torch.rand(6, generator=self.generator, dtype=torch.float64).to(x.device)
        output: Tensor = self.linear(x + self.prompt.to(x.device)) * (1 + self.scale + self.tensor.to(x.device)) * noise
        return output


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (output * self.temperature - target).square().mean()


X, Y = torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)


def make(front: str, devices: list[str], loss_fn: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"chunks": 4, "devices": devices, "loss_fn": loss_fn, "reduce": "mean", "checkpoint": "never", **options}
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), Counts(), Scarce(), nn.Linear(6, 4)]
    model = nn.Sequential(*layers).double()
    if front == "GPipe":
        return GPipe(model, [3, 3], **options)
    options["checkpoint"] = options["checkpoint"] != "never"
    return torchgpipe.pipelined(model, X[:4], balance=[3, 1], verify=False, **options)


def state_of(model: Any, loss: Any) -> list[Any]:
    counts = model[3]
    leaves = [*model.parameters(), counts.prompt, loss.temperature]
    tensors = [*[leaf.grad for leaf in leaves], *model.buffers(), counts.tensor, counts.generator.get_state()]
    return [*tensors, counts.scale, loss.calls, torch.get_rng_state()]


def are_equal(a: list[Any], b: list[Any]) -> bool:
    return all([torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True)])


INLINE = ["cpu", "cpu"]
WORKERS = [["cpu:0", "cpu:1"], pytest.param(["late:0", "late:1"], marks=pytest.mark.late)]


@pytest.mark.parametrize("front", ["GPipe", "pipelined"])
@pytest.mark.parametrize("devices", [INLINE, *WORKERS])
@pytest.mark.parametrize(
    ("checkpoint", "fault"), [("never", ["forward"] * 3), ("never", ["backward"]), ("always", ["backward"] * 2)]
)
def test_a_step_that_has_failed_leaves_nothing_and_runs_again(
    front: str, devices: list[str], checkpoint: str, fault: list[str]
) -> None:
    """A failed step left a part of the gradients at the parameters of the loss function, and changed attributes."""
    loss = Loss()
    model = make(front, devices, loss.to(devices[1]), checkpoint=checkpoint)
    torch.manual_seed(3)
    model.step(X, target=Y)
    before = [value.clone() if isinstance(value, Tensor) else value for value in state_of(model, loss)]
    model[4].faults = [*fault]
    with pytest.raises(torch.OutOfMemoryError):
        model.step(X, target=Y)
    assert are_equal(state_of(model, loss), before)
    model.chunks *= 2
    value = model.step(X, target=Y)

    expected_loss = Loss()
    expected = make(front, devices, expected_loss.to(devices[1]), checkpoint=checkpoint)
    torch.manual_seed(3)
    expected.step(X, target=Y)
    expected.chunks = 8
    assert torch.equal(expected.step(X, target=Y), value)
    assert are_equal(state_of(expected, expected_loss), state_of(model, loss))


TEMPERATURE = nn.Parameter(torch.ones((), dtype=torch.float64))


def test_a_leaf_that_a_loss_function_has_in_any_way_gets_its_whole_gradient_or_none() -> None:
    leaf = nn.Parameter(torch.ones((), dtype=torch.float64))
    held = Loss()

    def closes(output: Tensor, target: Tensor) -> Tensor:
        return (output * leaf - target).square().mean()

    def looks_up(output: Tensor, target: Tensor) -> Tensor:
        return (output * TEMPERATURE - target).square().mean()

    ways: list[tuple[Any, nn.Parameter]] = [(closes, leaf), (looks_up, TEMPERATURE), (held.forward, held.temperature)]
    for loss_fn, parameter in ways:
        model = make("GPipe", INLINE, loss_fn)
        parameter.grad = torch.ones_like(parameter)
        model[4].faults = ["backward"] * 3
        with pytest.raises(torch.OutOfMemoryError):
            model.step(X, Y)
        assert parameter.grad.item() == 1
        model.step(X, Y)
        assert parameter.grad.item() != 1


def test_a_large_tensor_that_changes_stays_changed_and_the_error_says_so() -> None:
    """There is no copy of it."""

    class Queue(nn.Module):
        queue: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(1 << 14, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.queue.add_(1)
            return x

    layers = nn.Sequential(Queue(), nn.Linear(4, 4), Scarce()).double()
    model = GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=4, checkpoint="never", loss_fn=nn.MSELoss())
    for _ in range(2):
        layers[2].faults = ["forward"] * 2
        with pytest.raises(torch.OutOfMemoryError) as error:
            model.step(X, Y)
        assert "'queue' of a Queue has changed in this step, and stays so" in error.value.__notes__
    assert layers[0].queue[0] == 4

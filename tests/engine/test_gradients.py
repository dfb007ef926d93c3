"""Each cell adds its gradients to ``.grad``: one at a time, exactly, in every kind of backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import Pipe
from tests.engine.gradients import CHUNKS, WIDTH, batch, model_of
from tests.plain import assert_same, outcome, plain_outcome

# -------------------------------------------------------------------------------------------- one at a time


class Traced(nn.Module):
    """``x * weight[0]``, whose backward notes how many of the gradients computed before are still in memory.

    The gradient of ``weight`` takes more memory than ``x``.
    """

    def __init__(self, traces: list[StorageWeakRef], alive: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, WIDTH))
        self.traces = traces
        self.alive = alive

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Traced.apply(input, self.weight, self.traces, self.alive)
        return output


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, traces: Any, alive: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.traces, ctx.alive = traces, alive
        return x * weight[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        ctx.alive.append(sum(not trace.expired() for trace in ctx.traces))
        grad = torch.zeros_like(weight)
        grad[0] = (grads[0] * x).sum(0)
        ctx.traces.append(StorageWeakRef(grad.untyped_storage()))
        return grads[0] * weight[0], grad, None, None


def test_a_gradient_is_freed_before_the_next_is_computed(pipe: Pipe, checkpoint: str) -> None:
    """The gradients of the last micro-batch become ``.grad``; each later gradient is added to it and freed."""
    traces: list[StorageWeakRef] = []
    alive: list[int] = []
    count = 5
    module = nn.Sequential(*[Traced(traces, alive) for _ in range(count)])
    model = pipe(module, [count], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    model(torch.rand(2 * CHUNKS, WIDTH)).sum().backward()
    if checkpoint != "never":
        assert alive == list(range(count)) + [count] * (count * (CHUNKS - 1))
        present = [layer.weight.grad for layer in module]
        alive.clear()
        model(torch.rand(2 * CHUNKS, WIDTH)).sum().backward()
        assert all(layer.weight.grad is grad for layer, grad in zip(module, present))
        assert alive == [count] * (count * CHUNKS)


def test_zero_grad_frees_every_gradient(pipe: Pipe, checkpoint: str) -> None:
    """The sum is handed over, not copied: only ``.grad`` holds it."""
    module, model = model_of(pipe, checkpoint)
    model(batch()).sum().backward()
    grads = [weakref.ref(parameter.grad) for parameter in module.parameters()]
    module.zero_grad()
    assert all(grad() is None for grad in grads)


# ------------------------------------------------------------------------------------------------- exactness


class TwoBiases(nn.Module):
    """Two parameters with equal gradients, for which autograd returns the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(2, WIDTH))
        self.b = nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return (input + self.a + self.b).tanh()


class Plus(nn.Module):
    """If the output has one row, the gradient of the weight is the gradient of the output itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return input + self.weight


class Expanded(nn.Module):
    """The gradient of the weight is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight.sum()


class Twice(nn.Module):
    """A layer that uses its weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return (input @ self.weight).tanh() @ self.weight.t()


class Itself(nn.Module):
    """A layer that returns its parameter, so that no node lies between output and parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return self.weight


class Table(nn.Module):
    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=sparse)

    def forward(self, input: Tensor) -> Tensor:
        return input * self.table(input.detach().round().long().abs()[:, 0])


class SparseAndDense(Table):
    """The gradient of the table is sparse for one micro-batch and dense for another."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if bool(input.detach()[0, 0] > 0) else input * self.table.weight.sum()


LAYERS: list[Callable[[], nn.Module]] = [TwoBiases, Expanded, Twice, Itself, Table, SparseAndDense]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_sum_is_that_of_the_plain_model(pipe: Pipe, checkpoint: str, layer: Callable[[], nn.Module]) -> None:
    module, model = model_of(pipe, checkpoint, layer())
    x = batch()
    actual, expected = outcome(model, x), plain_outcome(module, x, chunks=CHUNKS)
    if layer is Twice and checkpoint != "never":
        # A cell adds the two gradients of a micro-batch to each other first.
        name = "1.weight"
        torch.testing.assert_close(actual.param_grads[name], expected.param_grads.pop(name), rtol=1e-12, atol=1e-12)
        del actual.param_grads[name]
    assert_same(actual, expected)


@pytest.mark.parametrize("layer", [TwoBiases, Table, SparseAndDense])
def test_the_next_step_adds_to_it(pipe: Pipe, checkpoint: str, layer: Callable[[], nn.Module]) -> None:
    module, model = model_of(pipe, checkpoint, layer())
    x = batch()
    model(x).square().sum().backward()
    used = [parameter for parameter in module.parameters() if parameter.grad is not None]
    once = [parameter.grad.to_dense().clone() for parameter in used]
    model(x).square().sum().backward()
    for parameter, grad in zip(used, once):
        # Equal to the last bit, except that micro-batches are added to the earlier gradient in another order.
        tolerance = 0.0 if checkpoint == "never" else 1e-12
        torch.testing.assert_close(parameter.grad.to_dense(), 2 * grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_no_gradient_shares_its_memory(pipe: Pipe, checkpoint: str, chunks: int) -> None:
    """The engine may return one tensor as the gradient of two parameters."""
    module = nn.Sequential(Plus(), Plus())
    model = pipe(module, [2], devices=["cpu"], chunks=chunks, checkpoint=checkpoint)
    for _ in range(2):
        model(torch.ones(chunks, WIDTH)).sum().backward()
    first, second = (layer.weight.grad for layer in module)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.tolist() == second.tolist() == [[2 * chunks] * WIDTH]


# ------------------------------------------------------------------------------------- passes of all kinds


class Calls(nn.Module):
    """A layer that runs a callback when it is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Callable[[], None]] = []

    def forward(self, input: Tensor) -> Tensor:
        output = input * 1
        if output.requires_grad:
            output.register_hook(lambda grad: self.callbacks.pop()() if self.callbacks else None)
        return output


def test_each_backward_pass_has_sums_of_its_own(pipe: Pipe, checkpoint: str) -> None:
    """A pass that runs in the middle of another pass, which has added some of its gradients and not others."""
    layer = Calls()
    module, model = model_of(pipe, checkpoint, layer)
    x = batch()
    expected = plain_outcome(module, x, chunks=CHUNKS, loss=lambda output: output.sum() + output.square().sum())
    module.zero_grad()
    first, second = model(x).square().sum(), model(x).sum()
    layer.callbacks = [first.backward]
    second.backward()
    assert not layer.callbacks
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.param_grads[name], rtol=1e-12, atol=1e-12)


def test_a_graph_that_is_kept_gives_the_same_again(pipe: Pipe, checkpoint: str) -> None:
    module, model = model_of(pipe, checkpoint)
    parameters = list(module.parameters())
    loss = model(batch()).square().sum()
    grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(3)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*grads))


class Costly(nn.Module):
    """A layer that notes each gradient of its weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.log: list[str] = []

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight * 1
        if weight.requires_grad:
            weight.register_hook(lambda grad: self.log.append("weight"))
        return input * weight


def test_gradients_that_are_not_requested_are_not_computed(pipe: Pipe, checkpoint: str) -> None:
    costly = Costly()
    _, model = model_of(pipe, checkpoint, costly)
    x = batch()
    torch.autograd.grad(model(x).sum(), x)
    assert costly.log == []
    costly.log.clear()
    model(x).sum().backward()
    assert costly.log == ["weight"] * CHUNKS


def test_only_requested_gradients_are_added(pipe: Pipe, checkpoint: str) -> None:
    module, model = model_of(pipe, checkpoint)
    parameters = list(module.parameters())
    model(batch()).square().sum().backward()
    first = [parameter.grad.clone() for parameter in parameters]

    grads = torch.autograd.grad(model(batch()).square().sum(), parameters[1:])
    torch.testing.assert_close(list(grads), first[1:], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(parameters, first))

    model(batch()).square().sum().backward(inputs=parameters[:1])
    torch.testing.assert_close(parameters[0].grad, 2 * first[0], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(parameters[1:], first[1:]))


class Fails(nn.Module):
    """A layer that raises in its backward."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Fails.apply(input)
        return output


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("at backward")


def test_a_pass_that_fails_leaves_no_sums(pipe: Pipe, checkpoint: str) -> None:
    """Even if the output, and with it the graph, is kept."""
    traces: list[StorageWeakRef] = []
    module = nn.Sequential(Fails(), Traced(traces, []), Traced(traces, []))
    module[1].weight.register_hook(lambda grad: None)  # With a hook, the gradients are kept as sums beside ``.grad``.
    model = pipe(module, [3], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    x = torch.rand(2 * CHUNKS, WIDTH, requires_grad=True)
    output = model(x)
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    assert traces
    assert all(trace.expired() for trace in traces)
    assert module[1].weight.grad is None
    del output


def test_nothing_is_handed_over_without_a_gradient(pipe: Pipe, checkpoint: str) -> None:
    module, model = model_of(pipe, checkpoint)
    output = model(batch())
    torch.autograd.backward(output, torch.zeros_like(output))
    assert all(not parameter.grad.any() for parameter in module.parameters())


def test_a_pass_inside_another_through_the_same_graph(pipe: Pipe, checkpoint: str) -> None:
    """The inner pass once took the sums that the outer pass was waiting for."""
    layer = Calls()
    module, model = model_of(pipe, checkpoint, layer)
    x = batch()
    output = model(x)
    first, second = output.square().sum(), output.sum()
    layer.callbacks = [lambda: first.backward(retain_graph=True)]
    second.backward(retain_graph=True)
    expected = torch.autograd.grad(module(x).square().sum() + module(x).sum(), [x, *module.parameters()])
    found = [x.grad, *[parameter.grad for parameter in module.parameters()]]
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-12)

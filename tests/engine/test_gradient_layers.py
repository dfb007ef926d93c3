"""Gradients of layers with custom backward functions, hooks, views, nested tensors or checkpoints of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import Pipe
from tests.engine.gradients import CHUNKS, WIDTH, batch, model_of
from tests.plain import assert_same, loss_of, outcome, plain_outcome


class Keeps(nn.Module):
    """The weights are views that are made once. The nodes of these views outlive every graph."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.ParameterList([torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64) for _ in range(3)])
        self.weights = [flat.view(WIDTH, WIDTH).t() for flat in self.flat]

    def forward(self, input: Tensor) -> Tensor:
        for weight in self.weights:
            input = (input @ weight).tanh()
        return input


def _once(model: nn.Module) -> None:
    model(batch()).sum().backward()


def _twice(model: nn.Module) -> None:
    _once(model)
    _once(model)


def _kept(model: nn.Module) -> None:
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _asked(model: nn.Module) -> None:
    _twice(model)
    parameters = list(model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(model(batch()).sum(), parameters)):
        assert parameter.grad is not None
        parameter.grad -= 3 * grad


@pytest.mark.parametrize("passes", [_once, _twice, _kept, _asked])
def test_nodes_that_outlive_their_graph_serve_later_passes(
    pipe: Pipe, checkpoint: str, passes: Callable[[nn.Module], None]
) -> None:
    """Views that are made once belong to no micro-batch, but the backward pass of each micro-batch visits them."""
    torch.manual_seed(0)
    module = nn.Sequential(Keeps(), Keeps())
    passes(module)
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    passes(pipe(module, [1, 1], chunks=CHUNKS, checkpoint=checkpoint))
    found = [parameter.grad for parameter in module.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Ragged(nn.Module):
    """A layer whose weights multiply tensors of several lengths at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()

    def forward(self, input: Tensor) -> Tensor:
        ragged = torch.nested.as_nested_tensor([input, input[:1]])
        output: Tensor = self.layers(ragged).to_padded_tensor(0.0)
        return output[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(pipe: Pipe, checkpoint: str) -> None:
    """PyTorch cannot compare the sizes of nested tensors."""
    module, model = model_of(pipe, checkpoint, Ragged())
    expected = plain_outcome(module, batch(), chunks=CHUNKS)
    torch.testing.assert_close(outcome(model, batch()).param_grads, expected.param_grads, rtol=1e-12, atol=1e-12)


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight.sum(0)).tanh()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x * weight.sum(0)).tanh(), (x, weight), grads)


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, None


class Adjoint(nn.Module):
    """A layer whose backward differentiates a graph of its own, down to the weight, as adjoint methods do."""

    function: Any = _Adjoint

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4 * WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.function.apply(input, self.weight)
        return output


class GivesNone(Adjoint):
    """A layer that returns None as the gradient of its weight."""

    function = _GivesNone


class HooksItsInput(Adjoint):
    """A layer that doubles the gradient of its input by a hook."""

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad:
            input.register_hook(lambda grad: 2 * grad)
        return super().forward(input)


class NeedsItsInputsGrad(Adjoint):
    """A layer that makes its input require grad, as networks with a differential equation do."""

    def forward(self, input: Tensor) -> Tensor:
        input.requires_grad_()
        return super().forward(input)


class Norm(Adjoint):
    """A layer that returns the weight itself as the gradient of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        norm: Tensor = _Norm.apply(self.weight)
        return super().forward(input) + norm


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.saved_tensors[0]


@pytest.mark.parametrize("layer", [Adjoint, HooksItsInput, NeedsItsInputsGrad, Norm, GivesNone])
def test_what_layers_do_with_gradients(pipe: Pipe, checkpoint: str, layer: Callable[[], nn.Module]) -> None:
    """Graphs inside graphs, hooks, and gradients that are None, shared, or an existing tensor."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), layer()).double()
    model = pipe(module, [1, 2], chunks=CHUNKS, checkpoint=checkpoint)
    x = batch()
    expected = plain_outcome(module, x, chunks=CHUNKS)
    actual = outcome(model, x)
    torch.testing.assert_close(actual.input_grads, expected.input_grads, rtol=1e-12, atol=1e-12)
    for passes in (1, 2):
        for name, parameter in module.named_parameters():
            grad = expected.param_grads[name]
            if grad is None:
                assert parameter.grad is None or not parameter.grad.any()
            else:
                torch.testing.assert_close(parameter.grad, passes * grad, rtol=1e-12, atol=1e-12)
        if passes == 1:
            loss_of(model(x)).backward()  # type: ignore[union-attr]


class Saves(nn.Module):
    """``exp``, whose output is saved for backward."""

    def __init__(self, saved: list[StorageWeakRef]) -> None:
        super().__init__()
        self.saved = saved

    def forward(self, input: Tensor) -> Tensor:
        output = input.exp()
        if output.requires_grad:
            self.saved.append(StorageWeakRef(output.untyped_storage()))
        return output


def test_backward_frees_saved_tensors_although_the_output_is_kept(pipe: Pipe, checkpoint: str) -> None:
    saved: list[StorageWeakRef] = []
    _, model = model_of(pipe, checkpoint, Saves(saved))
    output = model(batch())
    output.sum().backward()
    assert len(saved) >= CHUNKS
    assert all(one.expired() for one in saved)
    del output


class Remembers(nn.Module):
    """A layer that keeps its output of the last micro-batch, so that the user can add it to the loss."""

    def forward(self, input: Tensor) -> Tensor:
        self.last = input * 3
        return self.last


def test_a_loss_of_an_inner_tensor_of_the_last_micro_batch_is_refused(pipe: Pipe, checkpoint: str) -> None:
    """With 'except_last' the last micro-batch has a graph, which reaches earlier partitions only through the output.

    The gradients of earlier layers would lack the part of this loss. A checkpointed micro-batch has no graph to use.
    """
    layer = Remembers()
    module, model = model_of(pipe, checkpoint, layer)
    x = batch()
    loss = model(x).sum() + layer.last.square().sum()
    if checkpoint == "except_last":
        with pytest.raises(RuntimeError, match="return it as an output of the layers"):
            loss.backward()
    else:
        loss.backward()
    module.zero_grad()
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=CHUNKS))


class Reentrant(nn.Module):
    """A layer with PyTorch's reentrant checkpoint, which differentiates the layer in a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = torch.utils.checkpoint.checkpoint(self.linear, input, use_reentrant=True)
        return output


def test_layers_that_checkpoint_themselves(pipe: Pipe, checkpoint: str) -> None:
    """Models of transformers do. Cells that collected gradients with `torch.autograd.grad` made PyTorch refuse it."""
    module, model = model_of(pipe, checkpoint, Reentrant())
    assert_same(outcome(model, batch()), plain_outcome(module, batch(), chunks=CHUNKS))

"""Each cell adds its gradients to ``.grad``: one at a time, exactly, in every kind of backward pass, for any layer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import Devices, Pipe
from tests.gradients.model import CHUNKS, WIDTH, batch, model_of
from tests.layers import Apply, Using, Weighted, With
from tests.plain import assert_same, loss_of, outcome, plain_outcome
from torchgpipe import GPipe
from torchgpipe.replay.runs import Run

# ------------------------------------------------------------------------------------------- layers of all kinds


def looked_up(embedding: nn.Embedding, input: Tensor, always_sparse: bool) -> Tensor:
    """Use a table whose gradient is sparse, or else dense for some micro-batches."""
    if always_sparse or bool(input.detach()[0, 0] > 0):
        return input * embedding(input.detach().round().long().abs()[:, 0])
    return input * embedding.weight.sum()


def table(always_sparse: bool) -> nn.Module:
    return With(nn.Embedding(5, WIDTH, sparse=True), partial(looked_up, always_sparse=always_sparse))


def ragged() -> nn.Module:
    """Return a layer whose weights multiply tensors of several lengths at once: PyTorch cannot compare their sizes."""

    def forward(layers: nn.Sequential, input: Tensor) -> Tensor:
        padded: Tensor = layers(torch.nested.as_nested_tensor([input, input[:1]])).to_padded_tensor(0.0)
        return padded[0]

    return With(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), forward)


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


class _Adjoint(torch.autograd.Function):
    """Its backward differentiates a graph of its own, down to the weight, as adjoint methods do."""

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


class _GivesTheWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.saved_tensors[0]


def with_a_hook(input: Tensor, weight: Tensor) -> Tensor:
    if input.requires_grad:
        input.register_hook(lambda grad: 2 * grad)
    return _Adjoint.apply(input, weight)  # type: ignore[no-any-return]


SQUARE = (WIDTH, WIDTH)

#: Layers whose gradients are summed as in the plain model.
EXACT: dict[str, Callable[[], nn.Module]] = {
    "one gradient of two": lambda: Weighted(lambda x, a, b: (x + a + b).tanh(), (2, WIDTH), (2, WIDTH)),
    "a number, expanded": lambda: Weighted(lambda x, w: x * w.sum(), SQUARE),
    "the weight is the output": lambda: Weighted(lambda x, w: w, (2, WIDTH)),
    "sparse": lambda: table(True),
    "sparse and dense": lambda: table(False),
    # Cells that collected gradients with `torch.autograd.grad` made PyTorch refuse this, which transformers do.
    "reentrant checkpoint": lambda: Using(partial(torch.utils.checkpoint.checkpoint, use_reentrant=True), WIDTH),
}

#: Layers for which a cell sums in another order, or which change what a plain step would find.
CLOSE: dict[str, Callable[[], nn.Module]] = {
    "weight used twice": lambda: Weighted(lambda x, w: (x @ w).tanh() @ w.t(), SQUARE),
    "kept views": Keeps,
    "nested tensors": ragged,
    "graph of its own": lambda: Weighted(_Adjoint.apply, (4 * WIDTH, WIDTH)),
    "hook on the input": lambda: Weighted(with_a_hook, (4 * WIDTH, WIDTH)),
    # As networks with a differential equation do.
    "input that requires grad": lambda: Weighted(lambda x, w: _Adjoint.apply(x.requires_grad_(), w), SQUARE),
    "the weight is its gradient": lambda: Weighted(lambda x, w: x * 2 + _GivesTheWeight.apply(w), SQUARE),
    "None": lambda: Weighted(_GivesNone.apply, SQUARE),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_the_sum_is_that_of_the_plain_model(pipe: Pipe, checkpoint: str, name: str) -> None:
    """Also in a second step, in a graph that is kept, and beside `torch.autograd.grad`, which adds nothing."""
    layer = (EXACT | CLOSE)[name]
    module, model = model_of(pipe, checkpoint, layer(), layer())
    x = batch()
    expected, actual = plain_outcome(module, x, chunks=CHUNKS), outcome(model, x)
    if name in EXACT:
        assert_same(actual, expected)
    torch.testing.assert_close(actual.input_grads, expected.input_grads, rtol=1e-12, atol=1e-12)
    loss = loss_of(model(x))
    assert loss is not None
    loss.backward(retain_graph=True)
    loss.backward()
    if name != "reentrant checkpoint":  # PyTorch refuses it.
        wanted = [parameter for parameter in module.parameters() if parameter.grad is not None]
        torch.autograd.grad(loss_of(model(x)), wanted, allow_unused=True)  # type: ignore[arg-type]
    for key, parameter in module.named_parameters():
        grad = expected.param_grads[key]
        if grad is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad.to_dense(), 3 * grad.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_no_gradient_shares_its_memory(pipe: Pipe, checkpoint: str, chunks: int) -> None:
    """The engine may return one tensor as the gradient of two parameters: with one row, that of the output itself."""
    module = nn.Sequential(*[Weighted(lambda x, w: x + w, (1, WIDTH)) for _ in range(2)])
    model = pipe(module, [2], devices=["cpu"], chunks=chunks, checkpoint=checkpoint)
    for _ in range(2):
        model(torch.ones(chunks, WIDTH)).sum().backward()
    first, second = (parameter.grad for parameter in module.parameters())
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.tolist() == second.tolist() == [[2 * chunks] * WIDTH]


# -------------------------------------------------------------------------------------------- one at a time


class _Traced(torch.autograd.Function):
    """``x * weight[0]``, whose backward notes how many of the gradients computed before are still in memory.

    The gradient of ``weight`` takes more memory than ``x``.
    """

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


def traced(traces: list[StorageWeakRef], alive: list[int]) -> nn.Module:
    return Weighted(lambda x, weight: _Traced.apply(x, weight, traces, alive), (64, WIDTH))


def test_a_gradient_is_freed_before_the_next_is_computed(pipe: Pipe, checkpoint: str) -> None:
    """The gradients of the last micro-batch become ``.grad``; each later gradient is added to it and freed."""
    traces: list[StorageWeakRef] = []
    alive: list[int] = []
    count = 5
    module = nn.Sequential(*[traced(traces, alive) for _ in range(count)])
    model = pipe(module, [count], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    model(torch.rand(2 * CHUNKS, WIDTH)).sum().backward()
    if checkpoint != "never":
        assert alive == list(range(count)) + [count] * (count * (CHUNKS - 1))
        present = [parameter.grad for parameter in module.parameters()]
        alive.clear()
        model(torch.rand(2 * CHUNKS, WIDTH)).sum().backward()
        assert all(parameter.grad is grad for parameter, grad in zip(module.parameters(), present))
        assert alive == [count] * (count * CHUNKS)


def test_zero_grad_frees_every_gradient(pipe: Pipe, checkpoint: str) -> None:
    """The sum is handed over, not copied: only ``.grad`` holds it."""
    module, model = model_of(pipe, checkpoint)
    model(batch()).sum().backward()
    grads = [weakref.ref(parameter.grad) for parameter in module.parameters()]
    module.zero_grad()
    assert all(grad() is None for grad in grads)


def test_a_pass_that_fails_leaves_no_sums(pipe: Pipe, checkpoint: str) -> None:
    """Even if the output, and with it the graph, is kept."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError("at backward")

    def fails(input: Tensor) -> Tensor:
        output = input * 1
        if output.requires_grad:
            output.register_hook(fail)
        return output

    traces: list[StorageWeakRef] = []
    module = nn.Sequential(Apply(fails), traced(traces, []), traced(traces, []))
    weight = next(module.parameters())
    weight.register_hook(lambda grad: None)  # With a hook, the gradients are kept as sums beside ``.grad``.
    model = pipe(module, [3], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    output = model(torch.rand(2 * CHUNKS, WIDTH, requires_grad=True))
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    assert traces
    assert all(trace.expired() for trace in traces)
    assert weight.grad is None
    del output


# ------------------------------------------------------------------------------------- passes of all kinds


@pytest.mark.parametrize("same_graph", [True, False])
def test_a_pass_inside_another_has_sums_of_its_own(pipe: Pipe, checkpoint: str, same_graph: bool) -> None:
    """The outer pass has added some of its gradients and not others. The inner one once took its sums."""
    callbacks: list[Callable[[], None]] = []

    def calls(input: Tensor) -> Tensor:
        output = input * 1
        if output.requires_grad:
            output.register_hook(lambda grad: callbacks.pop()() if callbacks else None)
        return output

    module, model = model_of(pipe, checkpoint, Apply(calls))
    x = batch()
    output = model(x)
    other = output if same_graph else model(x)
    first, second = other.square().sum(), output.sum()
    callbacks.append(lambda: first.backward(retain_graph=True))
    second.backward(retain_graph=True)
    assert not callbacks
    expected = torch.autograd.grad(module(x).square().sum() + module(x).sum(), [x, *module.parameters()])
    found = [x.grad, *[parameter.grad for parameter in module.parameters()]]
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-12)


def test_passes_in_two_threads_differentiate_a_second_run_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One took the second run that the other had made, which then had none."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH)).double()
    model = GPipe(module, [1], devices=["cpu"], chunks=1, checkpoint="always")
    x = batch()
    loss = model(x).square().sum()
    (expected,) = torch.autograd.grad(module(x).square().sum(), [x])
    both, second = threading.Barrier(2, timeout=60), Run.second

    def together(self: Run, compute: Any) -> Any:
        outputs = second(self, compute)
        both.wait()
        return outputs

    monkeypatch.setattr(Run, "second", together)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(torch.autograd.grad, loss, [x], retain_graph=True) for _ in range(2)]
        assert all(torch.equal(one.result()[0], expected) for one in found)


def test_gradients_that_are_not_requested_are_not_computed(pipe: Pipe, checkpoint: str) -> None:
    log: list[str] = []

    def costly(input: Tensor, weight: Tensor) -> Tensor:
        weight = weight * 1
        if weight.requires_grad:
            weight.register_hook(lambda grad: log.append("weight"))
        return input * weight

    _, model = model_of(pipe, checkpoint, Weighted(costly, (WIDTH,)))
    x = batch()
    torch.autograd.grad(model(x).sum(), x)
    assert log == []
    model(x).sum().backward()
    assert log == ["weight"] * CHUNKS


@pytest.mark.parametrize("balance", [[1, 2], [2, 1]])
def test_a_loss_of_an_inner_tensor_of_the_last_micro_batch_is_refused(
    pipe: Pipe, checkpoint: str, balance: list[int]
) -> None:
    """With 'except_last' the last micro-batch has a graph, which reaches earlier partitions only through the output.

    The gradients of earlier layers would lack the part of this loss; and where there are none, the graph of the cell
    was freed, and PyTorch told of "a second time". A checkpointed micro-batch has no graph to use.
    """
    last: list[Tensor] = []

    def remember(input: Tensor) -> Tensor:
        last[:] = [input * 3]
        return last[0]

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(remember), nn.Linear(WIDTH, WIDTH)).double()
    model = pipe(module, balance, chunks=CHUNKS, checkpoint=checkpoint)
    x = batch()
    loss = model(x.detach()).sum() + last[0].square().sum()
    if checkpoint == "except_last":
        with pytest.raises(RuntimeError, match="return it as an output of the layers"):
            loss.backward()
    else:
        loss.backward()
    module.zero_grad()
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=CHUNKS))


class MaxNorm(nn.Linear):
    """Bound the norm of each row of the weight before it is used, by an assignment to ``.data``."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(input)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_a_forward_assigns_to_the_data_of_a_weight_stays(devices: Devices, checkpoint: str) -> None:
    """In a step the layer has an alias of its weight, and the new memory went with the alias."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), MaxNorm(WIDTH, WIDTH)).double())
    plain, layers = made
    x = batch().detach()
    model = GPipe(
        layers, [1, 1], devices=devices(2), chunks=CHUNKS, checkpoint=checkpoint, loss_fn=nn.functional.mse_loss
    )
    model.step(x, x)
    loss = sum(nn.functional.mse_loss(plain(part), part) / CHUNKS for part in x.chunk(CHUNKS))
    loss.backward()
    assert torch.equal(layers[1].weight, plain[1].weight)
    for ours, theirs in zip(layers.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)


def test_under_offload_what_a_forward_assigns_to_the_data_of_a_weight_is_refused(devices: Devices) -> None:
    """The memory of an alias leaves the device, and the parameter in host memory stayed as it was."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), MaxNorm(WIDTH, WIDTH))
    how = {"devices": devices(1), "chunks": CHUNKS, "loss_fn": nn.functional.mse_loss, "offload": True}
    model = GPipe(layers, [1, 1], **how)  # type: ignore[arg-type]
    x = batch().detach().float()
    with pytest.raises(RuntimeError, match="the forward changes the weight 'weight' of a MaxNorm"):
        model.step(x, x)

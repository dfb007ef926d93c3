"""The gradients of parameters: each cell adds them to ``.grad``, or they come once and whole to whatever listens."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import Pipe
from tests.plain import assert_same, loss_of, outcome, plain_outcome
from torchgpipe import GPipe

CHUNKS = 3
WIDTH = 4


def batch() -> Tensor:
    return torch.linspace(-2, 2, CHUNKS * 2 * WIDTH, dtype=torch.float64).reshape(-1, WIDTH).requires_grad_()


def model_of(pipe: Pipe, checkpoint: str, *layers: nn.Module) -> tuple[nn.Sequential, GPipe]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH)).double()
    return module, pipe(module, [1, len(layers) + 1], chunks=CHUNKS, checkpoint=checkpoint)


# -------------------------------------------------------------------------------------------- one at a time


class Traced(nn.Module):
    """``x * weight[0]``, whose backward looks which gradients that it has computed before are still in memory.

    The gradient of its weight takes more memory than ``x`` does.
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


def test_a_gradient_is_gone_before_the_next_is_computed(pipe: Pipe, checkpoint: str) -> None:
    """The gradients of the last micro-batch become ``.grad``; each of the others joins it and is let go."""
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


def test_an_optimizer_step_in_between_finds_all_gone(pipe: Pipe, checkpoint: str) -> None:
    """The sum is handed over, not copied: nothing but ``.grad`` holds it."""
    module, model = model_of(pipe, checkpoint)
    model(batch()).sum().backward()
    grads = [weakref.ref(parameter.grad) for parameter in module.parameters()]
    module.zero_grad()
    assert all(grad() is None for grad in grads)


# ------------------------------------------------------------------------------------------------- exactness


class TwoBiases(nn.Module):
    """Both have the same gradient, and autograd gives both the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(2, WIDTH))
        self.b = nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return (input + self.a + self.b).tanh()


class Plus(nn.Module):
    """Its weight has the gradient of the output, if that has one row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return input + self.weight


class Expanded(nn.Module):
    """The gradient of its weight is one number that is seen everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight.sum()


class Twice(nn.Module):
    """Uses its weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return (input @ self.weight).tanh() @ self.weight.t()


class Itself(nn.Module):
    """Returns a parameter, beside which there is no node."""

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
    """The gradient of its table is sparse for one micro-batch, and dense for another."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if bool(input.detach()[0, 0] > 0) else input * self.table.weight.sum()


LAYERS: list[Callable[[], nn.Module]] = [TwoBiases, Expanded, Twice, Itself, Table, SparseAndDense]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_sum_is_that_of_the_plain_model(pipe: Pipe, checkpoint: str, layer: Callable[[], nn.Module]) -> None:
    module, model = model_of(pipe, checkpoint, layer())
    x = batch()
    actual, expected = outcome(model, x), plain_outcome(module, x, chunks=CHUNKS)
    if layer is Twice and checkpoint != "never":
        # The two gradients of a micro-batch are added to each other first.
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
        # To the last bit, but for the order in which those of micro-batches join those that are there.
        tolerance = 0.0 if checkpoint == "never" else 1e-12
        torch.testing.assert_close(parameter.grad.to_dense(), 2 * grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_no_gradient_shares_its_memory(pipe: Pipe, checkpoint: str, chunks: int) -> None:
    """What the engine hands out for one micro-batch may go to another parameter as well."""
    module = nn.Sequential(Plus(), Plus())
    model = pipe(module, [2], devices=["cpu"], chunks=chunks, checkpoint=checkpoint)
    for _ in range(2):
        model(torch.ones(chunks, WIDTH)).sum().backward()
    first, second = (layer.weight.grad for layer in module)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.tolist() == second.tolist() == [[2 * chunks] * WIDTH]


# ------------------------------------------------------------------------------------- passes of all kinds


class Calls(nn.Module):
    """Calls back when it is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Callable[[], None]] = []

    def forward(self, input: Tensor) -> Tensor:
        output = input * 1
        if output.requires_grad:
            output.register_hook(lambda grad: self.callbacks.pop()() if self.callbacks else None)
        return output


def test_each_backward_pass_has_sums_of_its_own(pipe: Pipe, checkpoint: str) -> None:
    """One runs from the midst of another, where some of that one's gradients have been added, and others have not."""
    layer = Calls()
    module, model = model_of(pipe, checkpoint, layer)
    x = batch()
    expected = plain_outcome(module, x, chunks=CHUNKS, loss=lambda output: output.sum() + output.square().sum())
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


class Keeps(nn.Module):
    """Its layers' weights are views that are made once, and the nodes of these views outlive every graph."""

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
def test_nodes_that_outlive_their_graph_give_what_other_passes_need(
    pipe: Pipe, checkpoint: str, passes: Callable[[nn.Module], None]
) -> None:
    """Views that are made once belong to no micro-batch, and each one's backward pass goes through them."""
    torch.manual_seed(0)
    module = nn.Sequential(Keeps(), Keeps())
    passes(module)
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    passes(pipe(module, [1, 1], chunks=CHUNKS, checkpoint=checkpoint))
    found = [parameter.grad for parameter in module.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Ragged(nn.Module):
    """Its weights meet tensors of several lengths at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()

    def forward(self, input: Tensor) -> Tensor:
        ragged = torch.nested.as_nested_tensor([input, input[:1]])
        output: Tensor = self.layers(ragged).to_padded_tensor(0.0)
        return output[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(pipe: Pipe, checkpoint: str) -> None:
    """Their sizes are none that PyTorch could compare."""
    module, model = model_of(pipe, checkpoint, Ragged())
    expected = plain_outcome(module, batch(), chunks=CHUNKS)
    torch.testing.assert_close(outcome(model, batch()).param_grads, expected.param_grads, rtol=1e-12, atol=1e-12)


class Costly(nn.Module):
    """Notes the gradients that its backward is asked for: of the input, and of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.log: list[str] = []

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight * 1
        if weight.requires_grad:
            weight.register_hook(lambda grad: self.log.append("weight"))
        return input * weight


def test_gradients_that_nobody_wants_are_not_computed(pipe: Pipe, checkpoint: str) -> None:
    costly = Costly()
    _, model = model_of(pipe, checkpoint, costly)
    x = batch()
    torch.autograd.grad(model(x).sum(), x)
    assert costly.log == []
    costly.log.clear()
    model(x).sum().backward()
    assert costly.log == ["weight"] * CHUNKS


Listen = Callable[[nn.Parameter, Callable[[Tensor], None]], Any]

LISTENERS: dict[str, Listen] = {
    "before": lambda weight, heard: weight.register_hook(lambda grad: heard(grad.clone())),
    "after": lambda weight, heard: weight.register_post_accumulate_grad_hook(lambda weight: heard(weight.grad.clone())),
    "node": lambda weight, heard: torch.autograd.graph.get_gradient_edge(weight).node.register_hook(
        lambda _, grads: heard(weight.grad + 0 * grads[0])
    ),
}


@pytest.mark.parametrize("listen", LISTENERS.values(), ids=LISTENERS)
def test_who_listens_hears_once_and_all(pipe: Pipe, checkpoint: str, listen: Listen) -> None:
    """A hook of a parameter is called with the gradient of one pass, the others when that has joined ``.grad``."""
    module, model = model_of(pipe, checkpoint)
    heard: list[list[Tensor]] = [[] for _ in module.parameters()]
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in module.parameters()]
    for parameter, log in zip(module.parameters(), heard):
        listen(parameter, log.append)
    steps: list[list[Tensor]] = [[] for _ in module.parameters()]
    for _ in range(2):
        model(batch()).square().sum().backward()
        for grads, parameter in zip(steps, module.parameters()):
            grads.append(parameter.grad.clone())
    of_one_pass = listen is LISTENERS["before"]
    for log, (first, second) in zip(heard, steps):
        expected = [first, second - first] if of_one_pass else [first, second]
        assert len(log) == 2
        torch.testing.assert_close(log, expected, rtol=1e-12, atol=1e-12)
    del nodes  # A parameter alone does not keep its node, and the hooks of that one.


def test_only_the_gradients_that_are_asked_for_join_what_is_there(pipe: Pipe, checkpoint: str) -> None:
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
    """Raises at its first backward; before, lets a gradient be watched."""

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
    """Also if the output, and so the graph, is kept."""
    traces: list[StorageWeakRef] = []
    module = nn.Sequential(Fails(), Traced(traces, []), Traced(traces, []))
    module[1].weight.register_hook(lambda grad: None)  # or the gradients would be in ``.grad``
    model = pipe(module, [3], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    x = torch.rand(2 * CHUNKS, WIDTH, requires_grad=True)
    output = model(x)
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    assert traces
    assert all(trace.expired() for trace in traces)
    assert module[1].weight.grad is None
    del output


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
    """Its backward differentiates a graph of its own, down to the weight, as adjoint methods do."""

    function: Any = _Adjoint

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4 * WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.function.apply(input, self.weight)
        return output


class GivesNone(Adjoint):
    """A node of its says that there is no gradient."""

    function = _GivesNone


class HooksItsInput(Adjoint):
    """Doubles the gradient of its input by a hook."""

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad:
            input.register_hook(lambda grad: 2 * grad)
        return super().forward(input)


class NeedsItsInputsGrad(Adjoint):
    """Makes its input one that requires grad, as networks with a differential equation do."""

    def forward(self, input: Tensor) -> Tensor:
        input.requires_grad_()
        return super().forward(input)


class Norm(Adjoint):
    """The gradient of its weight is the weight itself."""

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
    """Graphs in graphs, hooks, and gradients that are not there, shared, or somebody else's tensor."""
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
    """``exp``, which saves its output for backward."""

    def __init__(self, saved: list[StorageWeakRef]) -> None:
        super().__init__()
        self.saved = saved

    def forward(self, input: Tensor) -> Tensor:
        output = input.exp()
        if output.requires_grad:
            self.saved.append(StorageWeakRef(output.untyped_storage()))
        return output


def test_backward_frees_what_was_saved_though_the_output_is_kept(pipe: Pipe, checkpoint: str) -> None:
    saved: list[StorageWeakRef] = []
    _, model = model_of(pipe, checkpoint, Saves(saved))
    output = model(batch())
    output.sum().backward()
    assert len(saved) >= CHUNKS
    assert all(one.expired() for one in saved)
    del output


def test_nothing_is_handed_over_without_a_gradient(pipe: Pipe, checkpoint: str) -> None:
    module, model = model_of(pipe, checkpoint)
    output = model(batch())
    torch.autograd.backward(output, torch.zeros_like(output))
    assert all(not parameter.grad.any() for parameter in module.parameters())


class Remembers(nn.Module):
    """Keeps its output of the last micro-batch, for a loss of its own."""

    def forward(self, input: Tensor) -> Tensor:
        self.last = input * 3
        return self.last


def test_a_loss_from_the_midst_of_the_last_micro_batch_is_refused(pipe: Pipe, checkpoint: str) -> None:
    """With 'except_last' its graph is kept, but the way from there to earlier partitions leads through the output.

    The gradients of earlier layers would be short of what comes from there. A checkpointed one has no graph to use.
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
    """Checkpoints itself in PyTorch's older way, which differentiates the layer by a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = torch.utils.checkpoint.checkpoint(self.linear, input, use_reentrant=True)
        return output


def test_layers_that_checkpoint_themselves(pipe: Pipe, checkpoint: str) -> None:
    """Models of transformers do. Cells that collected their gradients had PyTorch refuse it."""
    module, model = model_of(pipe, checkpoint, Reentrant())
    assert_same(outcome(model, batch()), plain_outcome(module, batch(), chunks=CHUNKS))


class Captures(nn.Module):
    """Uses a tensor that is not registered."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.hidden = [tensor]

    def forward(self, input: Tensor) -> Tensor:
        return input * self.hidden[0]


@pytest.mark.parametrize("listens", ["hook", "post-accumulate hook", "hook of the node", "grad", "inputs"])
def test_a_captured_tensor_gets_its_gradient_unless_something_listens(
    pipe: Pipe, checkpoint: str, listens: str
) -> None:
    """Then it is refused, because nothing but ``.grad`` could take the gradient."""
    leaf = torch.full((WIDTH,), 2.0, dtype=torch.float64, requires_grad=True)
    module, model = model_of(pipe, checkpoint, Captures(leaf))
    model(batch()).sum().backward()
    assert leaf.grad is not None
    (expected,) = torch.autograd.grad(module(batch()).sum(), [leaf])
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)

    weight = module[2].weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    if listens == "hook":
        weight.register_hook(lambda grad: None)
    elif listens == "post-accumulate hook":
        weight.register_post_accumulate_grad_hook(lambda weight: None)
    elif listens == "hook of the node":
        node.register_hook(lambda *_: None)
    loss = model(batch()).sum()

    def differentiate() -> None:
        if listens == "grad":
            torch.autograd.grad(loss, [weight])
        else:
            loss.backward(inputs=[weight] if listens == "inputs" else None)

    if checkpoint == "never":
        differentiate()
    else:
        with pytest.raises(RuntimeError, match="register it as a parameter"):
            differentiate()


@pytest.mark.parametrize("inner", ["always", "except_last", "never"])
def test_a_pipeline_in_a_layer_with_hooks(pipe: Pipe, checkpoint: str, inner: str) -> None:
    """Its phonies were once taken for tensors that the layer has captured."""
    within = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    layer = GPipe(within, [1, 2], devices=["cpu", "cpu"], chunks=2, checkpoint=inner)
    module, model = model_of(pipe, checkpoint, layer)
    x = batch()
    expected = torch.autograd.grad(model(x).square().sum(), [x, *module.parameters()])
    heard: list[Tensor] = []
    hooks = [parameter.register_hook(heard.append) for parameter in module.parameters()]
    model(x).square().sum().backward()
    assert len(heard) == len(hooks)
    found = [x.grad, *[parameter.grad for parameter in module.parameters()]]
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-12)
    plain = torch.autograd.grad(
        torch.cat([module[2](within(module[0](part))) for part in x.chunk(CHUNKS)]).square().sum(), [x]
    )
    torch.testing.assert_close(x.grad, plain[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_captured_tensor_is_not_called_with_parts(pipe: Pipe, checkpoint: str, kind: str) -> None:
    """It was once called for each micro-batch."""
    leaf = torch.full((WIDTH,), 2.0, dtype=torch.float64, requires_grad=True)
    _, model = model_of(pipe, checkpoint, Captures(leaf))
    calls: list[Tensor] = []
    getattr(leaf, kind)(calls.append)
    if checkpoint == "never":
        model(batch()).sum().backward()
        assert len(calls) == 1
    else:
        with pytest.raises(RuntimeError, match="a hook of it would hear parts"):
            model(batch()).sum().backward()
        assert not calls


def test_a_pass_from_the_midst_of_another_through_the_same_graph(pipe: Pipe, checkpoint: str) -> None:
    """The inner one once took for itself what the outer one waited for."""
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


def test_under_distributed_data_parallel_gradients_arrive_whole(
    pipe: Pipe, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hooks cannot be seen, so the call itself is asked; two real processes are in `practice/test_ddp.py`."""
    layer = nn.Linear(WIDTH, WIDTH)
    absent: list[bool] = []

    class Look(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            output = input * 2
            if output.requires_grad:
                output.register_hook(lambda _: absent.append(layer.weight.grad is None))
            return output

    model = pipe(nn.Sequential(Look(), layer), [2], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    monkeypatch.setattr("torchgpipe.engine.pipeline.is_replicated", lambda: True)
    model(batch().float()).sum().backward()
    if checkpoint != "never":  # Then autograd's engine sums the gradients, and may add the sum before the last hook.
        assert absent == [True] * CHUNKS
    assert layer.weight.grad is not None

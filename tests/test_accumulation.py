"""The gradients of a partition's parameters are summed over its micro-batches, beside ``.grad``.

Those of large parameters are, one at a time. The small ones are left to the engine, and the results are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import VARIANTS, Pipe
from tests.plain import assert_same, loss_of, outcome, plain_outcome
from torchgpipe import GPipe, accumulation, cell
from torchgpipe.accumulation import Accumulation, Source, Sums

CHUNKS = 3
WIDTH = 4


class Way(NamedTuple):
    """How a test runs: on which devices, in which mode, and whether all parameters are large, or none."""

    variant: str
    checkpoint: str
    large: bool


#: All pairs of the three; and the one way in which gradients come to a cell after its sums were delivered.
WAYS = [
    Way("inline", "always", True),
    Way("inline", "except_last", False),
    Way("inline", "never", True),
    Way("workers", "always", False),
    Way("workers", "except_last", True),
    Way("workers", "never", False),
    Way("inline", "except_last", True),
]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way.variant}-{way.checkpoint}-{'large' if way.large else 'small'}")
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    found: Way = request.param
    monkeypatch.setattr(accumulation, "SMALL", 0 if found.large else 10**9)
    monkeypatch.setattr(accumulation, "TINY", 0 if found.large else 10**9)
    return found


@pytest.fixture
def pipe(way: Way) -> Pipe:
    def wrap(module: nn.Sequential, balance: Iterable[int], **options: Any) -> GPipe:
        balance = list(balance)
        options.setdefault("devices", [VARIANTS[way.variant](j) for j in range(len(balance))])
        return GPipe(module, balance, **options)

    return wrap


@pytest.fixture
def checkpoint(way: Way) -> str:
    return way.checkpoint


@pytest.fixture
def large(way: Way) -> bool:
    return way.large


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


def test_a_gradient_is_gone_before_the_next_is_computed(pipe: Pipe, checkpoint: str, large: bool) -> None:
    """The first ones are the sums themselves. In a graph of its own, each of the others would live to its end."""
    traces: list[StorageWeakRef] = []
    alive: list[int] = []
    count = 5
    module = nn.Sequential(*[Traced(traces, alive) for _ in range(count)])
    model = pipe(module, [count], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    model(torch.rand(2 * CHUNKS, WIDTH)).sum().backward()
    if large and checkpoint != "never":
        assert alive == list(range(count)) + [count] * (count * (CHUNKS - 1))


def test_an_optimizer_step_in_between_finds_all_gone(pipe: Pipe, checkpoint: str) -> None:
    """The sum is handed over, not copied: nothing but ``.grad`` holds it."""
    module, model = model_of(pipe, checkpoint)
    model(batch()).sum().backward()
    grads = [weakref.ref(parameter.grad) for parameter in module.parameters()]
    module.zero_grad()
    assert all(grad() is None for grad in grads)


@pytest.mark.parametrize("rows", [2, 4000], ids=["few rows", "many rows"])
def test_beside_a_gradient_of_an_earlier_pass_there_is_no_sum(
    pipe: Pipe, checkpoint: str, large: bool, rows: int
) -> None:
    """Nor does a gradient wait to join it, though it may be little beside the activations."""
    traces: list[StorageWeakRef] = []
    alive: list[int] = []
    module = nn.Sequential(*[Traced(traces, alive) for _ in range(5)])
    model = pipe(module, [5], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    x = torch.rand(rows * CHUNKS, WIDTH)
    model(x).sum().backward()
    present = [layer.weight.grad for layer in module]
    traces.clear()
    alive.clear()
    model(x).sum().backward()
    assert all(layer.weight.grad is grad for layer, grad in zip(module, present))
    if large and checkpoint != "never":
        assert alive == [0] * (5 * CHUNKS)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.attention(input, input, input)[0]
        return output


@pytest.mark.parametrize(
    "layer, shape, weights, rows, casts",
    [
        (lambda: nn.Linear(32, 32), (5, 32), 2, 1, True),
        (lambda: nn.Sequential(nn.Linear(32, 512), nn.Linear(512, 32)), (32,), 4, 800, False),
        (lambda: nn.ConvTranspose1d(32, 32, 3, padding=1), (32, 5), 2, 800, True),
        (lambda: Attention(32), (5, 32), 4, 1, False),
    ],
    ids=["linear", "linear, wide inside", "transposed", "attention"],
)
def test_what_is_heavy_depends_on_the_activations(
    layer: Callable[[], nn.Module],
    shape: tuple[int, ...],
    weights: int,
    rows: int,
    casts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On those of the layer itself: they go when its gradient has come."""
    found: list[int] = []

    class Noted(Accumulation):
        def heavy(self, sources: Sequence[Source]) -> set[int]:
            heavy = super().heavy(sources)
            found.append(sum(self.large[k].ndim > 1 for k in heavy))
            return heavy

    monkeypatch.setattr(accumulation, "SMALL", 2**10)
    monkeypatch.setattr(accumulation, "TINY", 2**10)
    monkeypatch.setattr(cell, "Accumulation", Noted)
    layers = nn.Sequential(*[layer() for _ in range(4)])
    model = GPipe(layers, [2, 2], devices=["cpu", "cpu"], chunks=CHUNKS, checkpoint="always")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        output = model(torch.rand(rows * CHUNKS, *shape))
    output.float().sum().backward()
    assert found == [weights if rows == 1 else 0] * 2


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
def test_the_sum_is_that_of_the_plain_model(
    pipe: Pipe, checkpoint: str, layer: Callable[[], nn.Module], large: bool
) -> None:
    module, model = model_of(pipe, checkpoint, layer())
    x = batch()
    actual, expected = outcome(model, x), plain_outcome(module, x, chunks=CHUNKS)
    if layer is Twice and checkpoint != "never":
        # Unless a hook takes them, the two gradients of a micro-batch are added to each other first.
        name = "1.weight"
        torch.testing.assert_close(actual.param_grads[name], expected.param_grads.pop(name), rtol=1e-12, atol=1e-12)
        del actual.param_grads[name]
    assert_same(actual, expected)


@pytest.mark.parametrize("layer", [TwoBiases, Table, SparseAndDense])
def test_the_next_step_adds_to_it(pipe: Pipe, checkpoint: str, layer: Callable[[], nn.Module], large: bool) -> None:
    module, model = model_of(pipe, checkpoint, layer())
    x = batch()
    model(x).square().sum().backward()
    used = [parameter for parameter in module.parameters() if parameter.grad is not None]
    once = [parameter.grad.to_dense().clone() for parameter in used]
    model(x).square().sum().backward()
    for parameter, grad in zip(used, once):
        # To the last bit, but for the order in which large ones join those that are there.
        tolerance = 1e-12 if large and checkpoint != "never" else 0.0
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


def test_half_precision_has_a_sum_of_its_own(pipe: Pipe, checkpoint: str) -> None:
    """Each micro-batch alone is too little for a large gradient in bfloat16, whose next numbers are 256 and 258."""
    module = nn.Sequential(Plus().bfloat16())
    model = pipe(module, [1], devices=["cpu"], chunks=2, checkpoint=checkpoint)
    module[0].weight.grad = torch.full_like(module[0].weight, 256)
    model(torch.zeros(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
    assert module[0].weight.grad.tolist() == [[258] * WIDTH]


def test_what_is_added_at_once_is_all(pipe: Pipe, checkpoint: str) -> None:
    """The engine adds nothing to it afterwards, not even the sign of a zero."""
    module = nn.Sequential(Plus())
    model = pipe(module, [1], devices=["cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    module[0].weight.grad = torch.full((1, WIDTH), -0.0)
    output = model(torch.zeros(CHUNKS, WIDTH))
    torch.autograd.backward(output, torch.full_like(output, -0.0))
    assert module[0].weight.grad.signbit().all()


def test_a_sum_changes_no_gradient_that_somebody_else_holds() -> None:
    """Neither one that is kept, nor one that shares its memory with another, or with itself."""
    kept, base = torch.ones(2), torch.ones(3, 2)
    parameters = [torch.ones(2, requires_grad=True) for _ in range(5)]
    sums = Sums(Accumulation(parameters, torch.device("cpu")), {})
    sums.add(0, kept)
    sums.add(1, base[1])
    sums.add(2, torch.empty_strided((2,), (0,)).fill_(1))
    sums.add(3, torch.ones(2))
    sums.add(4, torch.ones(2, 1).t()[0])  # A view, as is the gradient of a Linear's weight.
    memory = [grad.data_ptr() for grad in sums._sums[3:]]
    for _ in range(3):
        for k in range(5):
            sums.add(k, torch.ones(2))
    assert [grad.tolist() for grad in sums._sums] == [[4, 4]] * 5
    assert [grad.data_ptr() for grad in sums._sums[3:]] == memory
    assert kept.tolist() == [1, 1]
    assert base.tolist() == [[1, 1]] * 3


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
    """A hook that stays on such a node takes gradients of later passes, for sums that are no more."""
    torch.manual_seed(0)
    module = nn.Sequential(Keeps(), Keeps())
    passes(module)
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    passes(pipe(module, [1, 1], chunks=CHUNKS, checkpoint=checkpoint))
    found = [parameter.grad for parameter in module.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_nodes_that_outlive_their_graph_keep_nothing(
    pipe: Pipe, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Accumulation] = weakref.WeakSet()

    class Noted(Accumulation):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(self)

    calls: list[int] = []
    take = accumulation._take_if_wanted

    def counted(*args: Any) -> Any:
        calls[-1] += 1
        return take(*args)

    monkeypatch.setattr(cell, "Accumulation", Noted)
    monkeypatch.setattr(accumulation, "_take_if_wanted", counted)
    model = pipe(nn.Sequential(Keeps(), Keeps()), [1, 1], chunks=CHUNKS, checkpoint=checkpoint)
    for _ in range(3):
        calls.append(0)
        _once(model)
    model(batch())
    assert not alive
    assert calls == calls[:1] * 3


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
    """PyTorch cannot compare their sizes, which it does with what hooks of nodes return."""
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


def test_gradients_that_nobody_wants_are_not_computed(pipe: Pipe, checkpoint: str, large: bool) -> None:
    costly = Costly()
    _, model = model_of(pipe, checkpoint, costly)
    x = batch()
    torch.autograd.grad(model(x).sum(), x)
    if large or checkpoint == "never":
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
    """A hook that takes a gradient must not hear, change or confuse what is not its own."""
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


class Remembers(nn.Module):
    """Keeps its output of the last micro-batch, for a loss of its own."""

    def forward(self, input: Tensor) -> Tensor:
        self.last = input * 3
        return self.last


def test_the_last_micro_batch_is_in_the_graph_of_the_caller(pipe: Pipe) -> None:
    """Unless it is checkpointed. A loss can come from the midst of it, whatever the sizes of parameters."""
    layer = Remembers()
    module, model = model_of(pipe, "except_last", layer)
    x = batch()
    loss = model(x).sum() + layer.last.square().sum()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    expected = torch.autograd.grad(module(x).sum() + _last(module, x).square().sum(), list(module.parameters()))
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)


def _last(module: nn.Sequential, x: Tensor) -> Tensor:
    module(x.chunk(CHUNKS)[-1])
    last: Tensor = module[1].last  # type: ignore[assignment]
    return last


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

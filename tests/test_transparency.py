"""Whatever the model and its partitions, results equal the plain model's to the last bit.

The plain model runs micro-batch by micro-batch, in float64. Models are drawn at random from the layers in `RECIPES`,
each of which turns one kind of value into another:

    vector   a tensor of shape (batch, 4)
    image    a tensor of shape (batch, 2, 2): channels and length
    tokens   integers of shape (batch, 3)
    pair     a tuple of two vectors
    mapping  a dict of a vector, a mask and None
    complex  a complex tensor of shape (batch, 4)

This list has everything that layers may do to make life hard for a pipeline; a new trick belongs here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.conftest import Devices, Pipe
from tests.layers import Apply, Using
from tests.plain import Outcome, assert_same, loss_of, mapped, outcome, run_plain
from torchgpipe import NoChunk, is_recomputing

MODES = ["always", "except_last", "never"]

Context: TypeAlias = Callable[[], AbstractContextManager[Any]]


# Layers


class Double(nn.Module):
    """A layer that works in place and is not idempotent: a second run on the same tensor shows."""

    inplace = True

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Counter(nn.Module):
    """A layer that counts its micro-batches."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.count += 1
        return x


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(tokens)
        return embedded.sum(1)


class Cubed(torch.autograd.Function):
    """A function of Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grads[0]


def doubling(tensor: Tensor) -> Tensor:
    """Let a hook double the gradient of a tensor."""
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: grad * 2)
    return tensor


def complexly(tensor: Tensor) -> Tensor:
    """Compute with complex numbers, which PyTorch lacks for bfloat16, or has without their operations."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return (wide * (1 + 2j)).exp().imag.to(tensor.dtype)


class First(nn.Module):
    """A first layer with several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, extra: tuple[Tensor, None], table: Tensor) -> Tensor:
        y, nothing = extra
        assert nothing is None
        mapped: Tensor = self.linear(x)
        return mapped @ table - y


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def evaluated(layer: nn.Module) -> nn.Module:
    """Keep a layer in eval mode, whatever the mode of the model."""
    layer.always_evaluated = True
    return layer


class Recipe(NamedTuple):
    """A layer that a model can contain.

    Attributes:
        name: the name in the report of a failure
        takes: the kind of its input
        gives: the kind of its output
        make: makes the layer
        traits: ``'exact'``: its arithmetic does not round, if parameters and inputs are small fractions of two;
            ``'fresh'``: its output is used nowhere else, not for backward either;
            ``'in place'``: it changes its input, which must be fresh; ``'random'``: it draws random numbers;
            ``'sums'``: the gradient of a parameter is a sum even within a micro-batch
    """

    name: str
    takes: str
    gives: str
    make: Callable[[], nn.Module]
    traits: tuple[str, ...] = ()


def recipe(name: str, takes: str, gives: str, make: Callable[[], nn.Module], *traits: str) -> Recipe:
    return Recipe(name, takes, gives, make, traits)


RECIPES = [
    # The layers of most models.
    recipe("linear", "vector", "vector", lambda: nn.Linear(4, 4), "exact", "fresh"),
    recipe("linear without bias", "vector", "vector", lambda: nn.Linear(4, 4, bias=False), "exact", "fresh"),
    recipe("frozen linear", "vector", "vector", lambda: frozen(nn.Linear(4, 4)), "exact", "fresh"),
    recipe("relu", "vector", "vector", nn.ReLU, "exact"),
    recipe("tanh", "vector", "vector", nn.Tanh),
    recipe("softmax", "vector", "vector", lambda: nn.Softmax(1)),
    recipe("layer norm", "vector", "vector", lambda: nn.LayerNorm(4)),
    recipe("residual", "vector", "vector", lambda: Using(lambda linear, x: x + linear(x).tanh())),
    recipe("linear twice", "vector", "vector", lambda: Using(lambda f, x: f(f(x))), "exact", "sums"),
    recipe("two linear", "vector", "vector", lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))),
    recipe("weight norm", "vector", "vector", lambda: weight_norm(nn.Linear(4, 4))),
    recipe("complex numbers inside", "vector", "vector", lambda: Using(lambda f, x: complexly(f(x)))),
    recipe("function of Python", "vector", "vector", lambda: Using(lambda f, x: Cubed.apply(f(x)))),
    recipe("hook on the input", "vector", "vector", lambda: Using(lambda f, x: f(doubling(x * 1))), "exact"),
    recipe("hook on the output", "vector", "vector", lambda: Using(lambda f, x: doubling(f(x))), "exact"),
    recipe("hook on a weight", "vector", "vector", lambda: Using(lambda f, x: x * doubling(f.bias * 2)), "exact"),
    # Layers that work in place.
    recipe("relu in place", "vector", "vector", lambda: nn.ReLU(inplace=True), "exact", "in place"),
    recipe("double in place", "vector", "vector", Double, "exact", "in place"),
    recipe(
        "nested in place", "vector", "vector", lambda: nn.Sequential(nn.Sequential(Double(), nn.Tanh())), "in place"
    ),
    recipe("elu in place", "vector", "vector", lambda: nn.ELU(inplace=True), "in place"),
    recipe("leaky relu in place", "image", "image", lambda: nn.LeakyReLU(0.5, inplace=True), "exact", "in place"),
    # Layers that return their input, a view of it, or a flipped copy.
    recipe("identity", "vector", "vector", nn.Identity, "exact"),
    recipe("view", "vector", "vector", lambda: Apply(lambda x: x.view(-1, 2, 2).view(-1, 4)), "exact"),
    recipe("transposed twice", "vector", "vector", lambda: Apply(lambda x: x.t().t()), "exact"),
    recipe("flip", "vector", "vector", lambda: Apply(lambda x: x.flip(1)), "exact", "fresh"),
    # Layers that stop gradients.
    recipe("detach", "vector", "vector", lambda: Apply(lambda x: x.detach()), "exact"),
    recipe("constant", "vector", "vector", lambda: Apply(torch.ones_like), "exact"),
    recipe("detach, then linear", "vector", "vector", lambda: Using(lambda f, x: f(x.detach())), "exact"),
    recipe("no_grad inside", "vector", "vector", lambda: Using(torch.no_grad()(lambda f, x: f(x))), "exact"),
    recipe("parameter only", "vector", "vector", lambda: Using(lambda f, x: f.bias.expand(len(x), 4)), "exact"),
    recipe("unused parameter", "vector", "vector", lambda: Using(lambda f, x: x * 0.5), "exact"),
    # Layers that count.
    recipe("counter", "vector", "vector", Counter, "exact"),
    # Layers of integers.
    recipe("argsort", "vector", "tokens", lambda: Apply(lambda x: x.argsort(1)[:, :3]), "exact"),
    recipe("other tokens", "tokens", "tokens", lambda: Apply(lambda x: (x + 1) % 8), "exact"),
    recipe("embedding", "tokens", "vector", Embed, "exact"),
    recipe("frozen embedding", "tokens", "vector", lambda: frozen(Embed()), "exact"),
    # Layers of images.
    recipe("to image", "vector", "image", lambda: nn.Unflatten(1, (2, 2)), "exact"),
    recipe("flatten", "image", "vector", nn.Flatten, "exact"),
    recipe("conv", "image", "image", lambda: nn.Conv1d(2, 2, 3, padding=1), "exact", "fresh"),
    recipe("group norm", "image", "image", lambda: nn.GroupNorm(1, 2)),
    recipe("batch norm", "image", "image", lambda: nn.BatchNorm1d(2)),
    recipe("batch norm, cumulative", "image", "image", lambda: nn.BatchNorm1d(2, momentum=None)),
    recipe("batch norm without parameters", "image", "image", lambda: nn.BatchNorm1d(2, affine=False)),
    recipe("batch norm without statistics", "image", "image", lambda: nn.BatchNorm1d(2, track_running_stats=False)),
    recipe("batch norm in evaluation", "image", "image", lambda: evaluated(nn.BatchNorm1d(2))),
    recipe("batch norm, frozen", "image", "image", lambda: frozen(nn.BatchNorm1d(2))),
    recipe("instance norm", "image", "image", lambda: nn.InstanceNorm1d(2)),
    recipe(
        "instance norm with all",
        "image",
        "image",
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
    ),
    # Layers of several tensors.
    recipe("keep", "vector", "pair", lambda: Using(lambda f, x: (f(x), x)), "exact"),
    recipe("same twice", "vector", "pair", lambda: Apply(lambda x: (x, x)), "exact"),
    recipe("views", "vector", "pair", lambda: Apply(lambda x: (x.view(-1, 4), x[:, :1].expand(-1, 4))), "exact"),
    recipe("one detached", "vector", "pair", lambda: Using(lambda f, x: (x.detach(), f(x))), "exact"),
    recipe("swap", "pair", "pair", lambda: Apply(lambda p: (p[1], p[0])), "exact"),
    recipe("first only", "pair", "pair", lambda: Using(lambda f, p: (f(p[0]), p[1])), "exact"),
    recipe("second detached", "pair", "pair", lambda: Apply(lambda p: (p[0], p[1].detach())), "exact"),
    recipe("add", "pair", "vector", lambda: Apply(lambda p: p[0] + p[1]), "exact", "fresh"),
    recipe("forget the second", "pair", "vector", lambda: Apply(lambda p: p[0]), "exact"),
    recipe("gate", "pair", "vector", lambda: Apply(lambda p: p[0] * p[1].sigmoid())),
    recipe("name", "vector", "mapping", lambda: Apply(lambda x: {"x": x, "mask": x > 0, "no": None}), "exact"),
    recipe("inner", "mapping", "mapping", lambda: Using(lambda f, d: {**d, "x": f(d["x"])}), "exact"),
    recipe("where", "mapping", "vector", lambda: Apply(lambda d: torch.where(d["mask"], d["x"], 0)), "exact"),
    recipe("arguments", "arguments", "vector", First, "exact", "fresh"),
    # Layers of complex numbers. A checkpointed partition once said that these need no gradient.
    recipe("to complex", "vector", "complex", lambda: Apply(lambda x: x * (1 + 2j)), "exact"),
    recipe("conjugate", "complex", "complex", lambda: Apply(lambda z: z.conj()), "exact"),
    recipe("complex sine", "complex", "complex", lambda: Using(lambda f, z: (z * f.bias).sin())),
    recipe("real part", "complex", "vector", lambda: Apply(lambda z: z.real), "exact"),
    recipe("angle", "complex", "vector", lambda: Apply(lambda z: z.angle())),
    # Layers that draw random numbers.
    recipe("dropout", "vector", "vector", lambda: nn.Dropout(0.5), "random"),
    recipe("dropout in place", "vector", "vector", lambda: nn.Dropout(0.3, inplace=True), "random", "in place"),
    recipe("noise", "vector", "vector", lambda: Apply(lambda x: x + torch.randn_like(x)), "random"),
    recipe("permutation", "vector", "vector", lambda: Apply(lambda x: x[:, torch.randperm(4)]), "random"),
    recipe("feature dropout", "image", "image", lambda: nn.Dropout1d(0.5), "random"),
    recipe("mask", "vector", "mapping", lambda: Apply(_random_mask), "random"),
    recipe("random tokens", "vector", "tokens", lambda: Apply(lambda x: torch.randint(8, (len(x), 3))), "random"),
]


#: Recipes for which the accelerator of the tests lacks operators, or rounds as no CPU does.
NOT_ON_LATE = {"complex numbers inside", "batch norm in evaluation", "layer norm", "group norm"}
NOT_ON_LATE |= {"instance norm", "instance norm with all"}
NOT_ON_LATE |= {each.name for each in RECIPES if "complex" in (each.takes, each.gives)}


def _random_mask(x: Tensor) -> dict[str, Tensor | None]:
    return {"x": x, "mask": torch.rand(x.shape) > 0.5, "no": None}


# Models, and how they are run


@dataclass
class Case:
    """A model and a way to run it."""

    names: list[str]
    module: nn.Sequential
    balance: list[int]
    placing: list[int]
    chunks: int
    checkpoint: str | list[int]  # a mode, or the layers that are checkpointed by name
    inputs: tuple[Any, ...]
    training: bool
    used: list[bool]

    def pipeline(self, pipe: Pipe, devices: Devices, checkpoint: str | list[int] | None = None) -> nn.Module:
        names = devices(len(self.balance))
        layers = [*self.module._modules]
        mode = self.checkpoint if checkpoint is None else checkpoint
        model = pipe(
            copy.deepcopy(self.module),
            self.balance,
            devices=[names[k] for k in self.placing],
            chunks=self.chunks,
            checkpoint=mode if isinstance(mode, str) else [layers[k] for k in mode],
        )
        return self.set_mode(model)

    def set_mode(self, model: Any) -> Any:
        model.train(self.training)
        for module in model.modules():
            if hasattr(module, "always_evaluated"):
                module.eval()
        return model

    def loss(self, output: Any) -> Tensor | None:
        return loss_of(output, self.used)

    def plain(self, within: Context = nullcontext, each: Context = nullcontext) -> Outcome:
        """Return the plain model's outcome: the call runs inside ``within``, and each micro-batch inside ``each``."""
        module = self.set_mode(copy.deepcopy(self.module))
        return self._outcome(module, partial(run_plain, module, chunks=self.chunks, each=each), within)

    def piped(self, pipe: Pipe, devices: Devices, within: Context = nullcontext) -> Outcome:
        """Return the pipeline's outcome, called inside ``within``."""
        model = self.pipeline(pipe, devices)
        return self._outcome(model, model, within)

    def _outcome(self, model: nn.Module, run: Callable[..., Any], within: Context) -> Outcome:
        def call(*inputs: Any) -> Any:
            with within():
                return run(*inputs)

        return outcome(model, *self.inputs, loss=self.loss, run=call)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    random: bool = False,
    exact: bool = False,
    dtype: torch.dtype = torch.float64,
    training: st.SearchStrategy[bool] = st.sampled_from([True, True, True, False]),  # noqa: B008
) -> Case:
    """Draw any model with any way to cut and run it.

    Args:
        random: whether layers draw random numbers
        exact: whether no arithmetic rounds, so that sums do not depend on their order; layers then share weights
        dtype: of parameters and inputs
        training: whether the model trains
    """
    torch.manual_seed(draw(st.integers(0, 99)))
    recipes = draw(_recipes(random, exact, dtype))
    layers = [layer.make() for layer in recipes]
    shared = _share_weights(draw, layers) if exact else []
    balance = draw(_compositions(len(layers)))
    module = _nest(draw, layers, balance)
    placing = draw(st.permutations(range(len(balance)))) if draw(st.booleans()) else list(range(len(balance)))
    if draw(st.integers(0, 3)) == 0:
        placing = draw(st.lists(st.integers(0, len(balance) - 1), min_size=len(balance), max_size=len(balance)))
    if shared:  # on one device
        placing = [placing[0]] * len(balance)
    if exact:
        _make_exact(module)
    chunks = draw(st.integers(1, 5))
    normalised = any(layer.name.startswith(("batch norm", "instance norm")) for layer in recipes)
    inputs = _make_inputs(draw, recipes[0].takes, draw(st.integers(1 if normalised else 0, 7)), exact)
    return Case(
        names=[layer.name for layer in recipes],
        module=module.to(dtype),
        balance=balance,
        placing=placing,
        chunks=chunks,
        checkpoint=draw(st.sampled_from(MODES) | st.lists(st.integers(0, len(module) - 1), unique=True)),
        inputs=copy.deepcopy(mapped(partial(_cast, dtype), inputs)),
        training=draw(training),
        used=draw(st.lists(st.sampled_from([True, True, False]), max_size=2)),
    )


@st.composite
def _recipes(draw: st.DrawFn, random: bool, exact: bool, dtype: torch.dtype) -> list[Recipe]:
    kinds = ["vector", "vector", "vector", "tokens", "image", "pair", "mapping", "arguments", "complex"]
    unknown = set() if dtype == torch.float64 else {"complex"}
    kind = draw(st.sampled_from([kind for kind in kinds if kind not in unknown]))
    chosen: list[Recipe] = []
    length = draw(st.integers(1, 7))
    while len(chosen) < length:
        fresh = not chosen or "fresh" in chosen[-1].traits
        allowed = [
            candidate
            for candidate in RECIPES
            if candidate.takes == kind
            and candidate.gives not in unknown
            and (random or "random" not in candidate.traits)
            and ("exact" in candidate.traits if exact else "sums" not in candidate.traits)
            and (fresh or "in place" not in candidate.traits)
        ]
        chosen.append(draw(st.sampled_from(allowed)))
        kind = chosen[-1].gives
    return chosen


def _share_weights(draw: st.DrawFn, layers: Sequence[nn.Module]) -> list[nn.Linear]:
    """Make some linear layers share one weight."""
    linear = [layer for layer in layers if type(layer) is nn.Linear and layer.weight.requires_grad]
    if len(linear) < 2 or not draw(st.booleans()):
        return []
    for layer in linear[1:]:
        layer.weight = linear[0].weight
    return linear


@st.composite
def _compositions(draw: st.DrawFn, total: int) -> list[int]:
    """Draw positive numbers with this sum."""
    numbers = []
    while total > 0:
        numbers.append(draw(st.integers(1, total)))
        total -= numbers[-1]
    return numbers


def _nest(draw: st.DrawFn, layers: list[nn.Module], balance: list[int]) -> nn.Sequential:
    """Return a Sequential in which the layers of some partitions are nested in a Sequential of their own."""
    nested: list[nn.Module] = []
    rest = iter(layers)
    for j, count in enumerate(balance):
        part = [next(rest) for _ in range(count)]
        if not isinstance(part[0], First) and draw(st.integers(0, 3)) == 0:
            part, balance[j] = [nn.Sequential(*part)], 1
        nested += part
    return nn.Sequential(*nested)


def _make_exact(module: nn.Module) -> None:
    """Make parameters such small fractions of two that sums and products over several layers do not round."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape) / 2)


def _make_inputs(draw: st.DrawFn, kind: str, batch: int, exact: bool) -> tuple[Any, ...]:
    def number(*shape: int) -> Tensor:
        values = torch.randint(-3, 4, shape) / 2 if exact else torch.randn(shape)
        return values.requires_grad_(draw(st.sampled_from([True, True, False])))

    if kind == "arguments":
        table = number(4, 4)
        return number(batch, 4), (number(batch, 4), None), NoChunk(table)
    value: Any
    if kind == "vector":
        value = number(batch, 4)
    elif kind == "image":
        value = number(batch, 2, 2)
    elif kind == "tokens":
        value = torch.randint(8, (batch, 3))
    elif kind == "complex":
        value = torch.randint(-3, 4, (batch, 4)) * (1 - 0.5j)
        value = value.to(torch.complex128).requires_grad_(draw(st.booleans()))
    elif kind == "pair":
        value = number(batch, 4), number(batch, 4)
    else:
        value = {"x": number(batch, 4), "mask": torch.rand(batch, 4) > 0.5, "no": None}
    return (value,)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor


# The promise


@given(case=cases())
def test_any_model_gives_what_the_plain_model_gives(pipe: Pipe, devices: Devices, case: Case) -> None:
    assert_same(case.piped(pipe, devices), case.plain())


@given(case=cases(exact=True))
def test_any_model_with_shared_weights_gives_what_the_plain_model_gives(
    pipe: Pipe, devices: Devices, case: Case
) -> None:
    """A gradient of several parts is summed in any order; here no sum is rounded."""
    assert_same(case.piped(pipe, devices), case.plain())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@settings(max_examples=settings.default.max_examples // 2)
@given(case=cases())
def test_without_gradients(pipe: Pipe, devices: Devices, context: Context, case: Case) -> None:
    assert_same(case.piped(pipe, devices, within=context), case.plain(within=context))


@given(case=cases(random=True), seed=st.integers(0, 9))
def test_random_layers_draw_what_they_draw_without_checkpointing(
    pipe: Pipe, devices: Devices, case: Case, seed: int
) -> None:
    """The caller may draw between forward and backward, and backward does not advance the caller's generator."""

    def loss(output: Any) -> Tensor | None:
        torch.rand(3)
        states.append(torch.get_rng_state())
        return case.loss(output)

    outcomes, states = [], []
    for checkpoint in ["never", case.checkpoint]:
        model = case.pipeline(pipe, devices, checkpoint)
        torch.manual_seed(seed)
        outcomes.append(outcome(model, *case.inputs, loss=loss))
        states.append(torch.get_rng_state())
    if len(set(devices(2))) > 1:
        # Workers number their nodes separately: with several tensors between partitions, the engine may sum the
        # gradients of the micro-batches in another order.
        grads = outcomes[0].param_grads
        torch.testing.assert_close(outcomes[1].param_grads, grads, rtol=1e-12, atol=1e-12, equal_nan=True)
        outcomes[1] = replace(outcomes[1], param_grads=grads)
    assert_same(outcomes[1], outcomes[0])
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_other_precisions(pipe: Pipe, devices: Devices, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype=dtype))
    assert_same(case.piped(pipe, devices), case.plain())


@pytest.mark.parametrize("cache", [True, False])
@settings(max_examples=settings.default.max_examples // 2)
@given(case=cases(dtype=torch.float32))
def test_autocast(pipe: Pipe, devices: Devices, cache: bool, case: Case) -> None:
    """Backward, with its recomputation, comes after the block.

    Micro-batches that share a cast weight sum its gradients in bfloat16; micro-batches that cast their own copy sum in
    float32. In the plain model they share if autocast keeps its cache. Checkpointed micro-batches never share. (A
    tensor in NoChunk may be shared in part: the tie between micro-batches sits on an input that needs a gradient, and
    autocast caches only the casts of leaves.)
    """
    assume(not cache or "arguments" not in case.names)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=cache)
    actual = case.piped(pipe, devices, within=autocast)
    if case.checkpoint in ("never", []) or not case.training:
        assert_same(actual, case.plain(within=autocast))
    else:
        assert_same(actual, case.plain(each=autocast))


# More than one call


def make_exact_model() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(4, 4), Double(), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    _make_exact(module)
    return module


def make_exact_input(batch: int) -> Tensor:
    return (torch.randint(-3, 4, (batch, 4)) / 2).double().requires_grad_()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: model(x) + model(x.flip(0)),
        lambda model, x: model(model(x)),
        lambda model, x: model(x)[:2] + model(x[:2]),
        lambda model, x: torch.cat([model(x[:1]), model(x[1:])]),
        lambda model, x: model(x) * model(x.detach()).detach(),
    ],
    ids=["twins", "on its own output", "of two sizes", "in turn", "one of them detached"],
)
def test_a_model_that_is_called_twice_before_backward(
    pipe: Pipe, checkpoint: str, use: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> None:
    module, x = make_exact_model(), make_exact_input(5)
    model = pipe(copy.deepcopy(module), [1, 3, 2], chunks=2, checkpoint=checkpoint)
    plain = partial(run_plain, module, chunks=2)
    expected = outcome(module, x, run=lambda x: use(plain, x))
    assert_same(outcome(model, x, run=lambda x: use(model, x)), expected)


def test_gradients_accumulate_over_mini_batches_of_different_sizes(pipe: Pipe, checkpoint: str) -> None:
    """The last mini-batch of an epoch has fewer micro-batches, or none that is checkpointed."""
    module = make_exact_model()
    model = pipe(copy.deepcopy(module), [1, 3, 2], chunks=4, checkpoint=checkpoint)
    for batch in [8, 7, 2, 1]:
        x = make_exact_input(batch)
        loss_of(model(x)).backward()
        loss_of(run_plain(module, x, chunks=4)).backward()
        for actual, expected in zip(model.parameters(), module.parameters(), strict=True):
            assert torch.equal(actual.grad, expected.grad)

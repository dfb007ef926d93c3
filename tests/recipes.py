"""The layers of random models: a new trick of a layer is a row of `RECIPES`, one of a skip a row of `KINDS` or `USES`.

A row turns one kind of value into another:

    vector   a tensor of shape (batch, 4)
    image    a tensor of shape (batch, 2, 2): channels and length
    tokens   integers of shape (batch, 3)
    pair     a tuple of two vectors
    mapping  a dict of a vector, a mask and None
    complex  a complex tensor of shape (batch, 4)

The table has everything that layers may do to make life hard for a pipeline. A `node` pops and stashes any number of
skips around a linear map.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.layers import Apply, Using, With
from tests.plain import tensors
from torchgpipe import GPipe, is_recomputing
from torchgpipe.skip import Namespace, pop, skippable, stash

__all__ = ["KINDS", "RECIPES", "USES", "WAYS", "Double", "First", "Keeps", "Recipe", "Skip", "node"]


class Double(nn.Module):
    """A layer that works in place and is not idempotent: a second run on the same tensor shows."""

    inplace = True

    def forward(self, x: Any) -> Any:
        for tensor in tensors(x):
            tensor.mul_(2)
        return x


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


def _replaced(layer: Keeps) -> None:
    layer.kept = layer.kept + 1


def _replaced_twice(layer: Keeps) -> None:
    """The second of two new buffers takes over the id of the first, which is freed."""
    layer.kept = layer.kept * 2
    layer.kept = layer.kept + 1


def _changed_by_numpy(layer: Keeps) -> None:
    kept = layer.kept.view(torch.int16) if layer.kept.dtype == torch.bfloat16 else layer.kept  # which NumPy lacks
    values = kept.numpy()
    values += 1


#: How a layer may change what it keeps.
WAYS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda layer: layer.kept.add_(1),
    "guarded": lambda layer: None if is_recomputing() else layer.kept.add_(1),
    "data": lambda layer: layer.kept.data.add_(1),
    "guarded data": lambda layer: None if is_recomputing() else layer.kept.data.add_(1),
    "NumPy": _changed_by_numpy,
    "replaced": _replaced,
    "replaced twice": _replaced_twice,
    "guarded, replaced": lambda layer: None if is_recomputing() else _replaced(layer),
    "attribute": lambda layer: layer.kept.add_(1),
    "attribute, replaced": _replaced,
    "number": _replaced,
    "to and fro": lambda layer: setattr(layer, "kept", 3 - layer.kept),
    "guarded number": lambda layer: None if is_recomputing() else _replaced(layer),
}


class Keeps(nn.Module):
    """A linear map by something that the layer keeps, and changes in one of `WAYS`."""

    kept: Any

    def __init__(self, way: str, features: int = 4) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(features, features), way
        if "number" in way or way == "to and fro":
            self.kept = 1
        elif "attribute" in way:
            self.kept = torch.ones(1)
        else:
            self.register_buffer("kept", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept
        if isinstance(kept, Tensor):
            # An attribute does not move with the layer.
            kept = kept.to(x, copy=True)
        y: Tensor = self.linear(x) * kept
        with torch.no_grad():
            WAYS[self.way](self)
        return y


def embed() -> nn.Module:
    return With(nn.Embedding(8, 4), lambda embedding, tokens: embedding(tokens).sum(1))


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


def backward_hooked() -> nn.Module:
    """Return a layer whose hooks change the gradients of its output and of its input, which has one."""
    hooked = nn.ReLU()
    hooked.register_full_backward_pre_hook(lambda layer, after: (after[0] + 1,))
    hooked.register_full_backward_hook(lambda layer, before, after: (before[0] * 2,))
    return nn.Sequential(nn.Linear(4, 4), hooked)


def pipeline(mode: str, device: str) -> nn.Module:
    """Return a layer that is itself a pipeline."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return GPipe(layers, [1, 2], devices=["cpu:0", device], chunks=2, checkpoint=mode)


def pipeline_of(first: nn.Module, second: nn.Module) -> nn.Module:
    """Return a layer that is itself a pipeline, in which each layer runs once, and in checkpoints."""
    return GPipe(nn.Sequential(first, second).requires_grad_(False), [1, 1], devices=["cpu:0", "cpu:1"])


def _random_mask(x: Tensor) -> dict[str, Tensor | None]:
    return {"x": x, "mask": torch.rand(x.shape) > 0.5, "no": None}


class Recipe(NamedTuple):
    """A layer that a model can contain.

    Attributes:
        name: the name in the report of a failure
        takes: the kind of its input
        gives: the kind of its output
        make: makes the layer
        traits: ``exact``: its arithmetic does not round, if parameters and inputs are small fractions of two;
            ``fresh``: its output is used nowhere else, not for backward either;
            ``in place``: it changes its input, which must be fresh; ``random``: it draws random numbers;
            ``sums``: the gradient of a parameter is a sum even within a micro-batch;
            ``not late``: the accelerator of the tests lacks operators, or rounds as no CPU does
    """

    name: str
    takes: str
    gives: str
    make: Callable[[], nn.Module]
    traits: str = ""


RECIPES = [
    # The layers of most models.
    Recipe("linear", "vector", "vector", lambda: nn.Linear(4, 4), "exact fresh"),
    Recipe("linear without bias", "vector", "vector", lambda: nn.Linear(4, 4, bias=False), "exact fresh"),
    Recipe("frozen linear", "vector", "vector", lambda: frozen(nn.Linear(4, 4)), "exact fresh"),
    Recipe("relu", "vector", "vector", nn.ReLU, "exact"),
    Recipe("tanh", "vector", "vector", nn.Tanh),
    Recipe("softmax", "vector", "vector", lambda: nn.Softmax(1)),
    Recipe("layer norm", "vector", "vector", lambda: nn.LayerNorm(4), "not late"),
    Recipe("residual", "vector", "vector", lambda: Using(lambda linear, x: x + linear(x).tanh())),
    Recipe("linear twice", "vector", "vector", lambda: Using(lambda f, x: f(f(x))), "exact sums"),
    Recipe("two linear", "vector", "vector", lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))),
    Recipe("weight norm", "vector", "vector", lambda: weight_norm(nn.Linear(4, 4))),
    Recipe("complex numbers inside", "vector", "vector", lambda: Using(lambda f, x: complexly(f(x))), "not late"),
    Recipe("function of Python", "vector", "vector", lambda: Using(lambda f, x: Cubed.apply(f(x)))),
    Recipe("hook on the input", "vector", "vector", lambda: Using(lambda f, x: f(doubling(x * 1))), "exact"),
    Recipe("hook on the output", "vector", "vector", lambda: Using(lambda f, x: doubling(f(x))), "exact"),
    Recipe("hook on a weight", "vector", "vector", lambda: Using(lambda f, x: x * doubling(f.bias * 2)), "exact"),
    Recipe("backward hook", "vector", "vector", backward_hooked, "exact"),
    # Layers that work in place.
    Recipe("relu in place", "vector", "vector", lambda: nn.ReLU(inplace=True), "exact in place"),
    Recipe("double in place", "vector", "vector", Double, "exact in place"),
    Recipe(
        "nested in place", "vector", "vector", lambda: nn.Sequential(nn.Sequential(Double(), nn.Tanh())), "in place"
    ),
    Recipe("pair in place", "pair", "pair", Double, "exact in place"),
    Recipe("elu in place", "vector", "vector", lambda: nn.ELU(inplace=True), "in place"),
    Recipe("leaky relu in place", "image", "image", lambda: nn.LeakyReLU(0.5, inplace=True), "exact in place"),
    # Layers that return their input, a view of it, or a flipped copy.
    Recipe("identity", "vector", "vector", nn.Identity, "exact"),
    Recipe("view", "vector", "vector", lambda: Apply(lambda x: x.view(-1, 2, 2).view(-1, 4)), "exact"),
    Recipe("transposed twice", "vector", "vector", lambda: Apply(lambda x: x.t().t()), "exact"),
    Recipe("flip", "vector", "vector", lambda: Apply(lambda x: x.flip(1)), "exact fresh"),
    # Layers that stop gradients.
    Recipe("detach", "vector", "vector", lambda: Apply(lambda x: x.detach()), "exact"),
    Recipe("constant", "vector", "vector", lambda: Apply(torch.ones_like), "exact"),
    Recipe("detach, then linear", "vector", "vector", lambda: Using(lambda f, x: f(x.detach())), "exact"),
    Recipe("no_grad inside", "vector", "vector", lambda: Using(torch.no_grad()(lambda f, x: f(x))), "exact"),
    Recipe("parameter only", "vector", "vector", lambda: Using(lambda f, x: f.bias.expand(len(x), 4)), "exact"),
    Recipe("unused parameter", "vector", "vector", lambda: Using(lambda f, x: x * 0.5), "exact"),
    Recipe("sometimes", "vector", "vector", lambda: Using(lambda f, x: f(x) if (x > 0).all() else x * 2), "exact"),
    *[
        Recipe(
            f"pipeline, {mode}, {device}", "vector", "vector", partial(pipeline, mode, device), "exact sums not late"
        )
        for mode in ("always", "except_last", "never")
        for device in ("cpu:0", "cpu:1")
    ],
    # Layers that count.
    Recipe("counter", "vector", "vector", Counter, "exact"),
    *[Recipe(f"keeps, {way}", "vector", "vector", partial(Keeps, way), "not late" * (way == "NumPy")) for way in WAYS],
    # Layers of integers.
    Recipe("argsort", "vector", "tokens", lambda: Apply(lambda x: x.argsort(1)[:, :3]), "exact"),
    Recipe("other tokens", "tokens", "tokens", lambda: Apply(lambda x: (x + 1) % 8), "exact"),
    Recipe("embedding", "tokens", "vector", embed, "exact"),
    Recipe("frozen embedding", "tokens", "vector", lambda: frozen(embed()), "exact"),
    # Layers of images.
    Recipe("to image", "vector", "image", lambda: nn.Unflatten(1, (2, 2)), "exact"),
    Recipe("flatten", "image", "vector", nn.Flatten, "exact"),
    Recipe("conv", "image", "image", lambda: nn.Conv1d(2, 2, 3, padding=1), "exact fresh"),
    Recipe("group norm", "image", "image", lambda: nn.GroupNorm(1, 2), "not late"),
    Recipe("batch norm", "image", "image", lambda: nn.BatchNorm1d(2)),
    Recipe("batch norm, cumulative", "image", "image", lambda: nn.BatchNorm1d(2, momentum=None)),
    Recipe("batch norm without parameters", "image", "image", lambda: nn.BatchNorm1d(2, affine=False)),
    Recipe("batch norm without statistics", "image", "image", lambda: nn.BatchNorm1d(2, track_running_stats=False)),
    Recipe("batch norm in evaluation", "image", "image", lambda: evaluated(nn.BatchNorm1d(2)), "not late"),
    Recipe("batch norm, frozen", "image", "image", lambda: frozen(nn.BatchNorm1d(2))),
    Recipe("batch norm in a pipeline", "image", "image", lambda: pipeline_of(nn.BatchNorm1d(2), nn.ReLU()), "not late"),
    Recipe("instance norm", "image", "image", lambda: nn.InstanceNorm1d(2), "not late"),
    Recipe("instance norm with all", "image", "image", lambda: nn.InstanceNorm1d(2, 1e-5, 0.1, True, True), "not late"),
    # Layers of several tensors.
    Recipe("keep", "vector", "pair", lambda: Using(lambda f, x: (f(x), x)), "exact"),
    Recipe("same twice", "vector", "pair", lambda: Apply(lambda x: (x, x)), "exact"),
    Recipe("views", "vector", "pair", lambda: Apply(lambda x: (x.view(-1, 4), x[:, :1].expand(-1, 4))), "exact"),
    Recipe("one detached", "vector", "pair", lambda: Using(lambda f, x: (x.detach(), f(x))), "exact"),
    Recipe("swap", "pair", "pair", lambda: Apply(lambda p: (p[1], p[0])), "exact"),
    Recipe("first only", "pair", "pair", lambda: Using(lambda f, p: (f(p[0]), p[1])), "exact"),
    Recipe("second detached", "pair", "pair", lambda: Apply(lambda p: (p[0], p[1].detach())), "exact"),
    Recipe("add", "pair", "vector", lambda: Apply(lambda p: p[0] + p[1]), "exact fresh"),
    Recipe("forget the second", "pair", "vector", lambda: Apply(lambda p: p[0]), "exact"),
    Recipe("gate", "pair", "vector", lambda: Apply(lambda p: p[0] * p[1].sigmoid())),
    Recipe("name", "vector", "mapping", lambda: Apply(lambda x: {"x": x, "mask": x > 0, "no": None}), "exact"),
    Recipe("inner", "mapping", "mapping", lambda: Using(lambda f, d: {**d, "x": f(d["x"])}), "exact"),
    Recipe("where", "mapping", "vector", lambda: Apply(lambda d: torch.where(d["mask"], d["x"], 0)), "exact"),
    Recipe("arguments", "arguments", "vector", First, "exact fresh"),
    # Layers of complex numbers. A checkpointed partition once said that these need no gradient.
    Recipe("to complex", "vector", "complex", lambda: Apply(lambda x: x * (1 + 2j)), "exact"),
    Recipe("conjugate", "complex", "complex", lambda: Apply(lambda z: z.conj()), "exact"),
    Recipe("complex sine", "complex", "complex", lambda: Using(lambda f, z: (z * f.bias).sin())),
    Recipe("real part", "complex", "vector", lambda: Apply(lambda z: z.real), "exact"),
    Recipe("angle", "complex", "vector", lambda: Apply(lambda z: z.angle())),
    # Layers that draw random numbers.
    Recipe("dropout", "vector", "vector", lambda: nn.Dropout(0.5), "random"),
    Recipe(
        "dropout in a pipeline", "vector", "vector", lambda: pipeline_of(nn.Dropout(), nn.Tanh()), "random not late"
    ),
    Recipe("dropout in place", "vector", "vector", lambda: nn.Dropout(0.3, inplace=True), "random in place"),
    Recipe("noise", "vector", "vector", lambda: Apply(lambda x: x + torch.randn_like(x)), "random"),
    Recipe("permutation", "vector", "vector", lambda: Apply(lambda x: x[:, torch.randperm(4)]), "random"),
    Recipe("feature dropout", "image", "image", lambda: nn.Dropout1d(0.5), "random"),
    Recipe("mask", "vector", "mapping", lambda: Apply(_random_mask), "random"),
    Recipe("random tokens", "vector", "tokens", lambda: Apply(lambda x: torch.randint(8, (len(x), 3))), "random"),
]


# Skips

# No tensor gets its gradient from more than two sides, and no parameter from two in one micro-batch: the order of a
# longer sum is not promised. So a node has a parameter for each of its skips.

KINDS: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    "itself": lambda own, x: x,
    "view": lambda own, x: x.view(-1, 2, 2),
    "part": lambda own, x: x[:, 1:],
    "computed": lambda own, x: own.linear(x),
    "without a graph": lambda own, x: torch.no_grad()(own.linear)(x),
    "detached": lambda own, x: x.detach(),
    "number": lambda own, x: x.mean(),
    "nothing in it": lambda own, x: x[:, :0],
    "parameter": lambda own, x: own.scale,
    "constant": lambda own, x: torch.ones_like(x),
    "integers": lambda own, x: x.argsort(1),
    "mask": lambda own, x: x > 0,
    "None": lambda own, x: None,
}


def _add(own: Any, x: Tensor, skip: Tensor | None) -> Tensor:
    if skip is None:
        return x
    if skip.dtype == torch.bool:
        return torch.where(skip, x, -x)
    if not skip.is_floating_point():
        embedded: Tensor = own.embedding(skip)
        return x + embedded.sum(1)
    return x + (skip.sin() if skip.shape == x.shape else skip.cos().sum())


USES: dict[str, Callable[[Any, Tensor, Tensor | None], Tensor]] = {
    "add": _add,
    "add it detached": lambda own, x, skip: _add(own, x, None if skip is None else skip.detach()),
    "go on with it": lambda own, x, skip: x if skip is None or skip.shape != x.shape else skip.to(x.dtype),
    "ignore": lambda own, x, skip: x,
}


class Own(nn.Module):
    """The parameters of a node for one of its skips."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.embedding = nn.Embedding(4, 4)
        self.scale = nn.Parameter(torch.rand(4))


class Skip(NamedTuple):
    """One end of a skip, with its kind where it is stashed, and its use where it is popped."""

    name: str
    namespace: Namespace
    way: str


class Node(nn.Module):
    """A linear map that pops skips before it and stashes skips after it."""

    count: Tensor

    def __init__(self, pops: list[Skip], stashes: list[Skip], trainable: bool) -> None:
        super().__init__()
        self.pops = pops
        self.stashes = stashes
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(2)
        self.own = nn.ModuleDict({skip.name: Own() for skip in pops + stashes})
        self.register_buffer("count", torch.tensor(0))
        self.requires_grad_(trainable)

    def forward(self, x: Tensor) -> Any:
        if not is_recomputing():
            self.count += 1
        for name, _, use in self.pops:
            skip = yield pop(name)
            x = USES[use](self.own[name], x, skip)
        x = self.norm(self.linear(x).tanh().view(-1, 2, 2)).view(-1, 4)
        for name, _, kind in self.stashes:
            yield stash(name, KINDS[kind](self.own[name], x))
            x = x * 0.75
        return x


def node(pops: list[Skip], stashes: list[Skip], trainable: bool) -> Any:
    """Return a `Node` of a new class that declares the skips of this node."""
    kind = skippable([skip.name for skip in stashes], [skip.name for skip in pops])(type("Node", (Node,), {}))
    layer = kind(pops, stashes, trainable)
    for name, namespace, _ in pops + stashes:
        layer.isolate(namespace, only=[name])
    return layer

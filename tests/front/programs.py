"""Random programs: forwards of the kinds that people write, each a list of moves over the tensors that it has so far.

A move is a function of a run of forward and of a number. Most moves are harmless: a pipelined model takes them, and
gives what the plain model gives. Those after the line `DOUBTFUL` couple rows, keep state on the model, or hide an
operation from the pipeline; where a pipeline cannot be right about them, it must refuse the model.

The modules that moves call may keep something, and the model's loss is one of `LOSSES`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

from tests.front.models import Hidden
from tests.recipes import WAYS, Keeps

__all__ = [
    "COMPILED",
    "DOUBTFUL",
    "HARMLESS",
    "KEEPING",
    "LOSSES",
    "MOVES",
    "OF_AUXILIARY",
    "Loss",
    "Program",
    "Run",
    "move",
    "programs",
]

WIDTH = 4


@dataclass
class Record:
    """What modules pass to each other, as transformers do."""

    x: Tensor
    other: Tensor


class Named(NamedTuple):
    """The same, as a named tuple."""

    x: Tensor
    other: Tensor


class Plain:
    """The same, as an object of which nobody knows what it holds."""

    def __init__(self, x: Tensor, other: Tensor) -> None:
        self.x, self.other = x, other


PACKS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, other: x,
    lambda x, other: [x, other],
    lambda x, other: {"x": x, "others": (other,)},
    Record,
    Named,
    Plain,
]


def unpacked(value: Any) -> tuple[Tensor, Tensor]:
    """Return the two tensors of anything that `PACKS` makes."""
    if isinstance(value, Tensor):
        return value, value
    if isinstance(value, dict):
        return value["x"], value["others"][0]
    return (value.x, value.other) if hasattr(value, "other") else tuple(value)


class Loss(NamedTuple):
    """A loss.

    Attributes:
        of: its value for the last tensor, a matrix of parameters and labels
        weight: the weight of a micro-batch in the mean, given its labels, or its rows alone; None for a sum
        takes_labels: whether it has labels
    """

    of: Callable[[Tensor, Tensor, Any], Tensor]
    weight: Callable[[Tensor], float] | None
    takes_labels: bool = True


def _entropy(x: Tensor, square: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return cross_entropy((x[:, :, None] * square)[:, : labels.shape[1]].flatten(0, 1), labels.flatten(), **options)


def _counted(labels: Tensor) -> float:
    return float((labels != -100).sum())


def _of_classes(labels: Tensor) -> float:
    return float(CLASS_WEIGHTS[labels[labels != -100]].sum())


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)

#: The kinds of parts that compute with something that they keep.
KEEPING = {f"keeps, {way}": functools.partial(Keeps, way) for way in WAYS}

#: The losses of a model by what they are.
LOSSES = {
    "mean": Loss(lambda x, square, labels: x.square().mean(), lambda rows: float(len(rows)), False),
    "sum": Loss(lambda x, square, labels: x.square().sum(), None, False),
    "labels": Loss(_entropy, _counted),
    "next labels": Loss(lambda x, square, labels: _entropy(x, square, labels[:, 1:]), lambda y: _counted(y[:, 1:])),
    "next labels, padded": Loss(
        lambda x, square, labels: _entropy(x, square, pad(labels, (0, 1), value=-100)[:, 1:]),
        lambda labels: _counted(labels[:, 1:]),
    ),
    "sum of labels": Loss(functools.partial(_entropy, reduction="sum"), None),
    "class weights": Loss(
        lambda x, square, labels: _entropy(x, square, labels, weight=CLASS_WEIGHTS.to(x)), _of_classes
    ),
}


class Part(nn.Module):
    """A module of the spine: takes anything that `PACKS` makes, and returns another.

    Args:
        kind: what it does; one of `KEEPING` for a part that computes with something that it keeps
        pack: the number of what it returns
    """

    def __init__(self, kind: str, pack: int) -> None:
        super().__init__()
        self.kind, self.pack = kind, PACKS[pack]
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        norm = KEEPING.get(kind, nn.BatchNorm1d if kind == "norm" else nn.LayerNorm)
        self.norm = norm(WIDTH)
        self.auxiliary: Tensor | None = None
        if kind == "hooked":
            self.register_forward_pre_hook(_halve)

    def forward(self, value: Any) -> Any:
        x, other = unpacked(value)
        if self.kind == "frozen":
            with torch.no_grad():
                x = self.b(x)
        y = torch.tanh(self.a(x)) + self.norm(self.b(other))
        if self.kind == "in place":
            y = y * 2
            y[:, :1].add_(x[:, 1:2])
        if self.kind == "auxiliary" and self.training:
            self.auxiliary = y.square().mean()
        if self.kind in COMPILED:
            y = COMPILED[self.kind](y, x)
        if isinstance(value, dict) and "memory" in value:
            y = y + sum(value["memory"])
            value["memory"].append(y * 0.5)
        return self.pack(y, y.mean(1, keepdim=True) * x)


def _gated(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y) + y


@functools.cache  # The compiler is not imported before somebody wants it.
def _compiled(as_a_whole: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_gated, backend="eager", fullgraph=as_a_whole)


COMPILED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "compiled": lambda x, y: _compiled(False)(x, y),
    "compiled as a whole": lambda x, y: _compiled(True)(x, y),
}


def _halve(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, other = unpacked(args[0])
    return ([x * 0.5, other],)


class Program(nn.Module):
    """A model whose forward follows a list of moves.

    Args:
        moves: the names of moves, each with a number
        parts: the kinds of the modules, each with what it returns
        tied: whether the last module shares a weight with the first
        loss: the name of the loss

    Attributes:
        told: takes the loss and what modules add to it, in each run; None to tell nobody
    """

    def __init__(
        self, moves: list[tuple[str, int]], parts: list[tuple[str, int]], tied: bool, loss: str = "mean"
    ) -> None:
        super().__init__()
        self.moves, self.loss_name = moves, loss
        self.told: list[tuple[Tensor, Tensor | None]] | None = None
        self.lock = Lock()
        self.parts = nn.ModuleList([Part(kind, pack) for kind, pack in parts])
        self.loose = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH))
        if tied:
            self.parts[-1].a.weight = self.parts[0].a.weight  # type: ignore[union-attr]
        self.register_buffer("table", torch.randn(3, WIDTH))
        self.register_buffer("sum", torch.zeros(()))
        self.recurrent = nn.RNN(WIDTH, WIDTH) if any([name == "sequence first" for name, _ in moves]) else None
        self.state: dict[str, Any] = {}
        self.kept: Any = None
        self.calls = 0

    def __repr__(self) -> str:  # what hypothesis prints
        parts = [(part.kind, PACKS.index(part.pack)) for part in self.parts]  # type: ignore[union-attr, arg-type]
        return f"Program({self.moves}, {parts}, loss={self.loss_name!r})"

    def forward(self, x: Tensor, mask: Tensor | None = None, extra: Any = None, **labels: Tensor) -> Any:
        run = Run(self, x, mask, extra, *labels.values())
        for name, k in self.moves:
            MOVES[name](run, k)
        loss = run.loss()
        if self.told is not None:
            self.told.append((loss, run.added))
        return {"out": run.x, "aside": run.aside, "loss": loss if run.added is None else loss + run.added}


class Lock:
    """A lock that can be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> Lock:
        return Lock()


class Run:
    """A run of forward: the tensors so far."""

    def __init__(
        self, model: Program, x: Tensor, mask: Tensor | None, extra: Any, labels: Tensor | None = None
    ) -> None:
        self.model, self.mask, self.extra, self.labels = model, mask, extra, labels
        #: What modules add to the loss.
        self.added: Tensor | None = None
        self.seen = [x]
        self.aside: list[Tensor] = []
        self.memory: list[Tensor] = []
        self.next = 0

    @property
    def x(self) -> Tensor:
        return self.seen[-1]

    def earlier(self, k: int) -> Tensor:
        return self.seen[k % len(self.seen)]

    def call(self, value: Any, again: bool = False) -> Tensor:
        """Call the next module; after the last one, no module."""
        self.next += not again
        if self.next > len(self.model.parts):
            return unpacked(value)[0]
        x, other = unpacked(self.model.parts[self.next - 1](value))
        return x + other

    def call_again(self, x: Tensor, k: int) -> Tensor | None:
        """Call a module that was called before, perhaps in an earlier partition."""
        called = self.model.parts[: self.next]
        return sum(unpacked(called[k % len(called)](x)), x) if called else None

    def loss(self) -> Tensor:
        return LOSSES[self.model.loss_name].of(self.x, self.model.square, self.labels)


Move = Callable[[Run, int], None]
MOVES: dict[str, Move] = {}


def move(name: str) -> Callable[[Callable[[Run, Tensor, Tensor, int], Tensor | None]], None]:
    """Add a function of the run, its tensor, an earlier one and a number, which returns the next tensor, if any."""

    def add(function: Callable[[Run, Tensor, Tensor, int], Tensor | None]) -> None:
        def made(run: Run, k: int) -> None:
            result = function(run, run.x, run.earlier(k), k)
            if result is not None:
                run.seen.append(result)

        MOVES[name] = made

    return add


move("call")(lambda run, x, y, k: run.call(x))
move("call with")(lambda run, x, y, k: run.call(PACKS[k % len(PACKS)](x, y)))
move("call twice")(lambda run, x, y, k: run.call(run.call(x), again=True) if run.next < len(run.model.parts) else None)
move("again")(lambda run, x, y, k: run.call_again(x, k))
move("call in loop")(lambda run, x, y, k: sum([run.call(x * factor) for factor in range(1, 2 + k % 2)], x))
move("call that remembers")(lambda run, x, y, k: run.call({"x": x, "others": (y,), "memory": run.memory}))
move("remembered")(lambda run, x, y, k: x * run.memory[k % len(run.memory)].sigmoid() if run.memory else None)
move("add")(lambda run, x, y, k: x + y)
move("product")(lambda run, x, y, k: x * torch.sigmoid(y))
move("cat")(lambda run, x, y, k: torch.cat([x, y], 1)[:, 1 : WIDTH + 1])
move("loose")(lambda run, x, y, k: x * run.model.loose[k % 2])
move("square")(lambda run, x, y, k: torch.tanh(x @ run.model.square))
move("table")(lambda run, x, y, k: x + run.model.table[k % 3])
move("view")(lambda run, x, y, k: torch.cat([x[:, :2] * 2, y[:, 2:]], 1))
move("transposed")(lambda run, x, y, k: x.t().reshape(WIDTH, -1).t())
move("sorted")(lambda run, x, y, k: x.sort(1).values)
move("detached")(lambda run, x, y, k: x * y.detach())
move("mask")(lambda run, x, y, k: x if run.mask is None else x.masked_fill(~(y > 0), 0.25) * run.mask[:, None])
move("extra")(lambda run, x, y, k: x if run.extra is None else x + run.extra["list"][k % 2])
move("by shape")(lambda run, x, y, k: x + 1 if x.shape[1] > 2 + k else x * y)
move("new")(lambda run, x, y, k: x + torch.arange(WIDTH, dtype=x.dtype, device=x.device))


@move("no grad")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        gate = y.sigmoid() if k % 2 else run.call(y)
        with torch.enable_grad():
            x = x * run.model.loose[0]
    return x * gate


@move("in place")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    x = x * 1
    x[:, 0] += y[:, 1]
    return x.mul_(2)


@move("in place through a view")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    x = x * 1
    view = x[:, 1:]
    view.add_(y[:, 1:])
    return run.call(x) if k % 2 else x


@move("running sum")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    total = torch.zeros_like(x.detach())
    for _ in range(2):
        x = run.call(x)
        with torch.no_grad():
            if k % 2:
                torch.add(total * 0.5, x, out=total)
            else:
                total.mul_(0.5).add_(x)
        x = x + total.clone()  # which backward keeps
    return x


@move("hook")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 0.5)
        x.retain_grad()
    return x


@move("autocast")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = run.call(x) if k % 2 else x @ run.model.square
    return torch.tanh(x).to(y.dtype)


@move("checkpoint")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Any:
    def inside(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * run.model.loose[0]) + y

    return checkpoint(inside, x, y, use_reentrant=False)


@move("aside")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    run.aside.append(y)


HARMLESS = list(MOVES)

# ------------------------------------------------------------------------------------------------------------ DOUBTFUL

move("mean of rows")(lambda run, x, y, k: x - x.mean(0))
move("logsumexp")(lambda run, x, y, k: x + y.logsumexp(0))
move("flipped rows")(lambda run, x, y, k: x + y.flip(0))
move("by value")(lambda run, x, y, k: x * 2 if float(y.detach().mean()) > 0 else x - 1)
move("kept")(lambda run, x, y, k: x if run.model.kept is None else x * run.model.kept.sigmoid())
move("kept in a dict")(lambda run, x, y, k: x + run.model.state["x"].mean(1, True) if run.model.state else x)
move("counted")(lambda run, x, y, k: x * (1 + 0.1 * run.model.calls))
move("sum of a buffer")(lambda run, x, y, k: x + run.model.sum)
move("hidden")(lambda run, x, y, k: Hidden.apply(x, y))
move("reentrant")(lambda run, x, y, k: checkpoint(torch.mul, x, y.tanh(), use_reentrant=True))
move("changed earlier")(lambda run, x, y, k: x + y.mul_(1.5) if y.grad_fn is not None else None)
move("two axes")(lambda run, x, y, k: x[:, None, :].expand(-1, 2, -1).reshape(-1, WIDTH)[:: 1 + k % 2])


@move("thread pool")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.mul, x, y.sigmoid()).result()


@move("keep")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    run.model.kept = y.detach() if k % 2 else y


@move("keep in a dict")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    if k % 3 == 2:
        run.model.state.clear()
    else:
        run.model.state["x"] = y


@move("count")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    run.model.calls += 1


@move("add to a buffer")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    with torch.no_grad():
        if k % 2:
            run.model.sum += y.mean()
        else:
            run.model.sum = run.model.sum * 0.5 + y.mean()


@move("change a parameter")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    run.model.loose[0].data.mul_(0.9)


@move("gradient in forward")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor | None:
    with torch.enable_grad():
        y = (y.detach() if k % 2 else y).requires_grad_(k % 2 == 1 or y.requires_grad)
        if not y.requires_grad:
            return None
        return x + torch.autograd.grad((y.square().sum() if k % 3 else (x * y).sum()), y, create_graph=True)[0]


@move("add what parts keep")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    for part in run.model.parts[: run.next]:
        if run.model.training and part.auxiliary is not None:
            run.added = part.auxiliary if run.added is None else run.added + part.auxiliary


@move("the caller adds what parts keep")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    """Add nothing here."""


@move("locked")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    with run.model.lock.lock:
        return run.call(run.call(x)) if k % 2 else run.call(x)


@move("sequence first")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    assert run.model.recurrent is not None
    return x + run.model.recurrent(x[:, None] if k % 2 else x[None])[0].reshape(x.shape)


for _name, _function in COMPILED.items():
    move(_name)(lambda run, x, y, k, function=_function: function(x, y))

DOUBTFUL = [name for name in MOVES if name not in HARMLESS]
#: Moves that take the losses that parts keep.
OF_AUXILIARY = ["add what parts keep", "the caller adds what parts keep"]


@st.composite
def programs(draw: st.DrawFn, *, late: bool = False) -> Program:
    """Draw a program: harmless, or with up to three doubtful moves, in float64, or float32 where it uses autocast.

    Compiled functions take long, so few programs of campaigns have them, and no others.

    Args:
        late: whether it runs on the accelerator of the tests, whose tensors NumPy cannot see
    """
    numbers = st.integers(0, 11)
    keeping = st.sampled_from([kind for kind in KEEPING if not (late and "NumPy" in kind)])
    names = ["plain", "plain", "plain", "norm", "in place", "hooked", "frozen", "auxiliary", "keeps"]
    kinds = st.sampled_from(names).flatmap(lambda kind: keeping if kind == "keeps" else st.just(kind))
    parts = draw(st.lists(st.tuples(kinds, st.integers(0, len(PACKS) - 1)), min_size=2, max_size=5))
    has_losses = any([kind == "auxiliary" for kind, _ in parts])
    unused = {*COMPILED, *([] if has_losses else OF_AUXILIARY)}
    used = st.sampled_from([name for name in DOUBTFUL if name not in unused])
    doubtful = draw(st.lists(st.tuples(used, numbers), max_size=3))
    if settings.get_current_profile_name() == "campaign" and draw(st.integers(0, 49)) == 49:
        name = draw(st.sampled_from([*COMPILED]))
        if draw(st.booleans()):
            parts[draw(st.integers(0, len(parts) - 1))] = name, 0
        else:
            doubtful.append((name, 0))
    if has_losses and draw(st.booleans()):
        doubtful.append((draw(st.sampled_from(OF_AUXILIARY)), 0))
    # What rows do to each other may be no more than autocast rounds, which the proof lets pass.
    harmless = [name for name in HARMLESS if name != "autocast" or not doubtful]
    moves = draw(st.lists(st.tuples(st.sampled_from(harmless), numbers), min_size=2, max_size=9))
    casts = any([name == "autocast" for name, _ in moves])
    for pair in doubtful:
        moves.insert(draw(st.integers(0, len(moves))), pair)
    calls = [k for k, (name, _) in enumerate(moves) if name.startswith("call")]
    for _ in range(len(parts) - len(calls)):
        moves.insert(draw(st.integers(0, len(moves))), ("call", 0))
    if draw(st.booleans()):  # when the last partition has begun
        moves.append(("again", draw(numbers)))
    changes_buffers = any([name == "add to a buffer" for name, _ in moves])
    changes_buffers |= any([kind == "norm" or kind in KEEPING for kind, _ in parts])
    if changes_buffers and any([name == "add what parts keep" for name, _ in moves]):
        # Rows together are not compared in training, in which alone parts add means to the loss.
        losses = ["mean"]
    else:
        losses = ["mean", "sum"] if casts else [*LOSSES]
    loss = draw(st.just("mean") | st.sampled_from(losses))
    torch.manual_seed(draw(st.integers(0, 1000)))
    program = Program(moves, parts, draw(st.booleans()), loss)
    return program if casts else program.double()

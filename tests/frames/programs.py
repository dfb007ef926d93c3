"""Random programs: forwards of the kinds that people write, each a list of moves over the tensors that it has so far.

A move is a function of a run of forward and of a number. Most moves are harmless: a pipelined model takes them, and
gives what the plain model gives. Those after the line `DOUBTFUL` couple rows, keep state on the model, or hide an
operation from the pipeline; where a pipeline cannot be right about them, it must refuse the model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["DOUBTFUL", "MOVES", "Program", "Run", "move", "programs"]

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


class Part(nn.Module):
    """A module of the spine: takes anything that `PACKS` makes, and returns another."""

    def __init__(self, kind: str, pack: int) -> None:
        super().__init__()
        self.kind, self.pack = kind, PACKS[pack]
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else nn.LayerNorm(WIDTH)
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
        if isinstance(value, dict) and "memory" in value:
            y = y + sum(value["memory"])
            value["memory"].append(y * 0.5)
        return self.pack(y, y.mean(1, keepdim=True) * x)


def _halve(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, other = unpacked(args[0])
    return ([x * 0.5, other],)


class Program(nn.Module):
    """A model whose forward follows a list of moves.

    Args:
        moves: the names of moves, each with a number
        parts: the kinds of the modules, each with what it returns
        tied: whether the last module shares a weight with the first
    """

    def __init__(self, moves: list[tuple[str, int]], parts: list[tuple[str, int]], tied: bool) -> None:
        super().__init__()
        self.moves = moves
        #: Whether the loss is a sum over rows, and not a mean.
        self.sums = any([name == "sum" for name, _ in moves])
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
        return f"Program({self.moves}, {[(part.kind, PACKS.index(part.pack)) for part in self.parts]})"  # type: ignore

    def forward(self, x: Tensor, mask: Tensor | None = None, extra: Any = None) -> Any:
        run = Run(self, x, mask, extra)
        for name, k in self.moves:
            MOVES[name](run, k)
        return {"out": run.x, "aside": run.aside, "loss": run.loss()}


class Run:
    """A run of forward: the tensors so far."""

    def __init__(self, model: Program, x: Tensor, mask: Tensor | None, extra: Any) -> None:
        self.model, self.mask, self.extra = model, mask, extra
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
        return self.x.square().sum() if self.model.sums else self.x.square().mean()


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


class Hidden(torch.autograd.Function):
    """A product that no function mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


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


@move("sum")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> None:
    """The loss is a sum, wherever this comes."""


@move("sequence first")
def _(run: Run, x: Tensor, y: Tensor, k: int) -> Tensor:
    assert run.model.recurrent is not None
    return x + run.model.recurrent(x[:, None] if k % 2 else x[None])[0].reshape(x.shape)


DOUBTFUL = [name for name in MOVES if name not in HARMLESS]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program: harmless, or with up to two doubtful moves, in float64, or float32 where it uses autocast."""
    numbers = st.integers(0, 11)
    kinds = st.sampled_from(["plain", "plain", "norm", "in place", "hooked", "frozen"])
    parts = draw(st.lists(st.tuples(kinds, st.integers(0, len(PACKS) - 1)), min_size=2, max_size=5))
    doubtful = draw(st.lists(st.tuples(st.sampled_from(DOUBTFUL), numbers), max_size=3))
    # What rows do to each other may be no more than autocast rounds, which the proof lets pass.
    harmless = [name for name in HARMLESS if name != "autocast" or not doubtful]
    moves = draw(st.lists(st.tuples(st.sampled_from(harmless), numbers), min_size=2, max_size=9))
    for pair in doubtful:
        moves.insert(draw(st.integers(0, len(moves))), pair)
    calls = [k for k, (name, _) in enumerate(moves) if name.startswith("call")]
    for _ in range(len(parts) - len(calls)):
        moves.insert(draw(st.integers(0, len(moves))), ("call", 0))
    if draw(st.booleans()):  # when the last partition has begun
        moves.append(("again", draw(numbers)))
    torch.manual_seed(draw(st.integers(0, 1000)))
    program = Program(moves, parts, tied=draw(st.booleans()))
    return program if any([name == "autocast" for name, _ in moves]) else program.double()

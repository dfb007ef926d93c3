"""However skips cross, nest and are cut by partitions, results equal the plain model's to the last bit.

Models are drawn at random from nodes, which pop and stash any number of skips around a linear map. `KINDS` lists
what a skip may be, and `USES` what may become of it; a new trick belongs there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.plain import Outcome, assert_same, outcome, run_plain
from torchgpipe import GPipe, is_recomputing
from torchgpipe.skip import Namespace, pop, skippable, stash

MODES = ["always", "except_last", "never"]

Context: TypeAlias = Callable[[], AbstractContextManager[Any]]

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


class Node(nn.Module):
    """A linear map that pops skips before it and stashes skips after it.

    Args:
        pops: pairs of a name and the use of the skip
        stashes: pairs of a name and the kind of skip
    """

    count: Tensor

    def __init__(self, pops: list[tuple[str, str]], stashes: list[tuple[str, str]], trainable: bool) -> None:
        super().__init__()
        self.pops = pops
        self.stashes = stashes
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(2)
        self.own = nn.ModuleDict({name: Own() for name, _ in pops + stashes})
        self.register_buffer("count", torch.tensor(0))
        self.requires_grad_(trainable)

    def forward(self, x: Tensor) -> Any:
        if not is_recomputing():
            self.count += 1
        for name, use in self.pops:
            skip = yield pop(name)
            x = USES[use](self.own[name], x, skip)
        x = self.norm(self.linear(x).tanh().view(-1, 2, 2)).view(-1, 4)
        for name, kind in self.stashes:
            yield stash(name, KINDS[kind](self.own[name], x))
            x = x * 0.75
        return x


def node(pops: list[tuple[str, str]], stashes: list[tuple[str, str]], trainable: bool) -> Any:
    """Return a `Node` of a new class that declares the skips of this node."""
    kind = skippable([name for name, _ in stashes], [name for name, _ in pops])(type("Node", (Node,), {}))
    return kind(pops, stashes, trainable)


@dataclass
class Skip:
    """A skip that is stashed in one layer and popped in a later one."""

    name: str
    source: int
    target: int
    kind: str
    use: str
    namespace: Namespace = field(default_factory=Namespace)


@dataclass
class Case:
    """A model and a way to run it."""

    skips: list[Skip]
    module: nn.Sequential
    balance: list[int]
    devices: list[str]
    chunks: int
    checkpoint: str
    input: Tensor
    training: bool

    def plain(self, within: Context = nullcontext) -> Outcome:
        module = copy.deepcopy(self.module).train(self.training)
        return self._outcome(module, partial(run_plain, module, chunks=self.chunks), within)

    def piped(self, within: Context = nullcontext) -> Outcome:
        model = GPipe(
            copy.deepcopy(self.module),
            self.balance,
            devices=self.devices,
            chunks=self.chunks,
            checkpoint=self.checkpoint,
        ).train(self.training)
        return self._outcome(model, model, within)

    def _outcome(self, model: nn.Module, run: Callable[..., Any], within: Context) -> Outcome:
        def call(x: Tensor) -> Any:
            with within():
                return run(x)

        return outcome(model, self.input, run=call)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(draw(st.integers(0, 99)))
    n = draw(st.integers(2, 7))
    skips = [
        Skip(
            draw(st.sampled_from("ab")),
            source := draw(st.integers(0, n - 2)),
            draw(st.integers(source + 1, n - 1)),
            draw(st.sampled_from(list(KINDS))),
            draw(st.sampled_from(list(USES))),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    layers = []
    for k in range(n):
        # A layer can have only one skip of each name, so further skips get another layer in the same block.
        stashes = [skip for skip in skips if skip.source == k]
        pops = [skip for skip in skips if skip.target == k]
        pops.sort(key=lambda skip: draw(st.integers()))
        layers.append(_layer(stashes, pops, draw(st.sampled_from([True, True, False]))))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=4)))
    balance = [end - start for start, end in pairwise([0, *cuts, n])]
    inline = draw(st.integers(0, 2)) == 0
    numbers = draw(st.lists(st.integers(0, 2), min_size=len(balance), max_size=len(balance)))
    chunks = draw(st.integers(1, 4))
    x = torch.rand(draw(st.integers(1, 6)), 4, dtype=dtype).requires_grad_(draw(st.booleans()))
    return Case(
        skips=skips,
        module=nn.Sequential(*layers).to(dtype),
        balance=balance,
        devices=["cpu" if inline else f"cpu:{number}" for number in numbers],
        chunks=chunks,
        checkpoint=draw(st.sampled_from(MODES)),
        input=x,
        training=draw(st.sampled_from([True, True, True, False])),
    )


def _layer(stashes: list[Skip], pops: list[Skip], trainable: bool) -> nn.Module:
    """Return one node, or a block of several where a name would occur twice."""
    nodes: list[tuple[list[Skip], list[Skip]]] = [([], [])]
    for end, skips in enumerate([pops, stashes]):
        for skip in skips:
            taken = {other.name for ends in nodes[-1] for other in ends}
            if skip.name in taken:
                nodes.append(([], []))
            nodes[-1][end].append(skip)
    modules = []
    for popped, stashed in nodes:
        layer = node([(s.name, s.use) for s in popped], [(s.name, s.kind) for s in stashed], trainable)
        for skip in popped + stashed:
            layer.isolate(skip.namespace, only=[skip.name])
        modules.append(layer)
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


@given(case=cases())
def test_any_skips_give_what_the_plain_model_gives(case: Case) -> None:
    assert_same(case.piped(), case.plain())


@pytest.mark.late
@given(case=cases(), numbers=st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_skips_wait_for_their_streams(case: Case, numbers: list[int]) -> None:
    case.devices = [f"late:{number}" for number in numbers[: len(case.balance)]]
    case.training = True  # The accelerator of the tests lacks batch norms in evaluation.
    assert_same(case.piped(), case.plain())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@settings(max_examples=settings.default.max_examples // 4)
@given(case=cases())
def test_without_gradients(context: Context, case: Case) -> None:
    case.input.requires_grad_(False)
    assert_same(case.piped(context), case.plain(context))


@settings(max_examples=settings.default.max_examples // 4)
@given(case=cases(dtype=torch.float32))
def test_autocast(case: Case) -> None:
    """Without autocast's cache, which concerns weights (see the other test_transparency) and not skips."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    assert_same(case.piped(autocast), case.plain(autocast))

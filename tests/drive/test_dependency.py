"""Fork, Join and phonies: the order of backward, read from the autograd graph.

With a worker per device, only the graph makes the engine finish micro-batch i+1 on a partition before it starts
micro-batch i. The engine visits a node after all nodes that lead to it. So these tests examine the graph: cell
(i+1, j) leads to cell (i, j).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from tests.graph import graph
from tests.layers import Apply, Using
from tests.separate_memory import separate_memory
from torchgpipe import GPipe
from torchgpipe.graph.dependency import join
from torchgpipe.graph.phony import get_phony

pytestmark = pytest.mark.usefixtures("cpu_workers")

# ---------------------------------------------------------------------------------------------------- phonies


class _EmptyIsOnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.to("meta") if func is torch.empty else result


CONTEXTS = [torch.inference_mode, lambda: torch.device("meta"), FakeTensorMode, _EmptyIsOnMeta, torch.no_grad]


@pytest.mark.parametrize(("index", "context"), list(enumerate(CONTEXTS, 110)))  # devices that no other test uses
def test_the_first_phony_of_a_device_is_like_any_other(index: int, context: Any) -> None:
    """A phony is kept for the life of the process, so it must not keep the settings of the call that made it."""
    device = torch.device("cpu", index)
    with context():
        get_phony(device)
    phony = get_phony(device)
    assert (type(phony), phony.shape, phony.device, phony.requires_grad) == (Tensor, (0,), torch.device("cpu"), False)
    assert get_phony(device) is not phony
    assert get_phony(device).untyped_storage().data_ptr() == phony.untyped_storage().data_ptr()
    assert not phony.is_inference()
    assert not phony.is_meta
    x = torch.ones(2, requires_grad=True)
    joined = join(x, phony.requires_grad_())
    joined.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


# ---------------------------------------------------------------------------------------------- fork and join


class Log(torch.autograd.Function):
    """The identity, noting when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, log: list[Any], name: Any, input: Tensor) -> Tensor:
        ctx.log, ctx.name = log, name
        return input.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        ctx.log.append(ctx.name)
        return None, None, grads[0]


# ------------------------------------------------------------------------------------ the graph of a pipeline


def marks(j: int, outputs: int) -> nn.Module:
    """Return a layer whose nodes name their cell (i, j). A micro-batch is a row that begins with i."""

    def mark(linear: nn.Linear, input: Any) -> Any:
        tensors = input if isinstance(input, tuple) else (input,)
        i = int(tensors[0][0, 0].item())
        marked = tuple(_Mark.apply((i, j), x, linear.weight) for x in tensors)
        marked = (*marked, *marked[:1] * outputs)[:outputs]
        return marked if outputs > 1 else marked[0]

    return Using(mark, width=1, bias=False)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cell: tuple[int, int], x: Tensor, weight: Tensor) -> Tensor:
        ctx.cell = cell
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, grads[0], grads[0].sum().reshape(1, 1)


def cells(root: Any, m: int, n: int) -> dict[tuple[int, int], set[Any]]:
    """Return the nodes of each cell.

    The nodes of a cell in the caller's graph carry a mark. A cell with a graph of its own has one node.
    """
    found: dict[tuple[int, int], set[Any]] = {(i, j): set() for i in range(m) for j in range(n)}
    for node in graph(root):
        if type(node).__name__ == "_MarkBackward":
            found[node.cell].add(node)
        if type(node).__name__ == "CellNodeBackward":
            found[node.cell.i, node.cell.column.j].add(node)
    return found


@pytest.mark.parametrize("outputs", [1, 2], ids=["one tensor", "two tensors"])
@pytest.mark.parametrize("needs_grad", [True, False], ids=["input needs grad", "plain input"])
@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:1", "cpu:0"]], ids=str)
@pytest.mark.parametrize("separate", [False, True], ids=["one memory", "separate memory"])
@pytest.mark.parametrize("m", [1, 4])
def test_every_cell_comes_after_the_next_micro_batch(
    checkpoint: str, m: int, separate: bool, devices: list[str], needs_grad: bool, outputs: int
) -> None:
    n = 3
    layers = nn.Sequential(*[marks(j, outputs) for j in range(n)])
    model = GPipe(layers, [1] * n, devices=devices, chunks=m, checkpoint=checkpoint)
    with separate_memory(model) if separate else nullcontext():
        output = model(torch.tensor([[float(i), 0.5] for i in range(m)], requires_grad=needs_grad))
    root = (output[0] if outputs > 1 else output).grad_fn

    members = cells(root, m, n)
    assert all(members.values())
    for (i, j), its_nodes in members.items():
        if i == m - 1:
            continue
        before = members[i + 1, j]
        if not its_nodes <= graph(*before).keys():
            # A cell without an input gradient cannot end a lane at its input. The join on its output ends the
            # lane; that join is differentiated just before the cell.
            assert checkpoint != "always"
            assert j == 0
            assert not needs_grad
            joins = {node for node in graph(root) if not before.isdisjoint(graph(node)[node])}
            assert its_nodes <= graph(*joins).keys(), f"{(i, j)} does not wait for {(i + 1, j)}"


def test_a_recomputation_waits_for_the_cell_before_it_and_for_no_gradient() -> None:
    """A recomputation waits for the next micro-batches to finish on its partition, but not for its own gradient."""
    m, n = 3, 3
    layers = nn.Sequential(*[marks(j, 1) for j in range(n)])
    devices = [f"cpu:{j}" for j in range(n)]
    model = GPipe(layers, [1] * n, devices=devices, chunks=m, checkpoint="always")
    root = model(torch.tensor([[float(i), 0.5] for i in range(m)])).grad_fn

    members = cells(root, m, n)
    for (i, j), its_nodes in members.items():
        (recompute,) = {
            node
            for node in graph(root)
            if type(node).__name__ == "RecomputeBackward" and not its_nodes.isdisjoint(graph(node)[node])
        }
        waits_for = {cell for cell, nodes in members.items() if recompute in graph(*nodes)}
        assert {its_i for its_i, its_j in waits_for if its_j == j} == set(range(i + 1, m))
        assert i not in {its_i for its_i, _ in waits_for}


@pytest.mark.parametrize("swaps", [0, 1])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_outputs_beside_the_first_keep_the_order(swaps: int, requires_grad: bool) -> None:
    """When only one output waited, the micro-batches of the other output came in the order 2, 0, 1."""
    log: list[Any] = []

    def first(linear: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        i = int(pair[0][0, 0])
        return Log.apply(log, ("first", i), linear(pair[0])), Log.apply(log, ("second", i), pair[1])

    detached = Using(lambda linear, x: (x.detach(), linear(x)), width=2)
    swap = [Apply(lambda pair: (pair[1], pair[0])) for _ in range(swaps + 1)]
    layers = nn.Sequential(detached, Using(first, width=2), *swap)
    model = GPipe(layers, [2 + swaps, 1], devices=["cpu:0", "cpu:1"], chunks=4, checkpoint="never")
    x = torch.tensor([[float(i), 0.5] for i in range(4)], requires_grad=requires_grad)
    sum(output.sum() for output in model(x)).backward()
    assert [i for name, i in log if name == "first"] == [3, 2, 1, 0]
    assert [i for name, i in log if name == "second"] == [3, 2, 1, 0]

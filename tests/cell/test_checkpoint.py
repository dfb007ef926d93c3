"""How many autograd nodes a checkpoint adds, and when its layers run again.

Other files test the results. This file tests number and order: an extra node costs host time, and an early
recomputation costs memory.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.faults import Cell, Plan, build, rows
from tests.graph import graph
from torchgpipe import GPipe

pytestmark = pytest.mark.usefixtures("rounded")


def kinds(output: Tensor) -> Counter[str]:
    return Counter(type(node).__name__ for node in graph(output))


def stop(checkpoint: str, m: int) -> int:
    return {"always": m, "except_last": m - 1, "never": 0}[checkpoint]


@pytest.fixture
def plan() -> Plan:
    return Plan()


def backward_of(plan: Plan) -> list[tuple[Cell, str]]:
    """Return what has run in backward, without the gradients of weights."""
    return [(cell, phase) for cell, phase in plan.runs if phase in ("recomputation", "backward")]


# -------------------------------------------------------------------------------------------------- the graph


def recomputed(output: Tensor) -> int:
    """Return the number of cells that run again at backward."""
    return sum(node.cell.recomputes for node in graph(output) if type(node).__name__ == "CellNodeBackward")


@pytest.mark.usefixtures("cpu_workers")
@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain input", "input needs grad"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("m", [1, 4])
def test_nodes_of_each_checkpointed_cell(
    pipe: Pipe, plan: Plan, checkpoint: str, m: int, n: int, needs_grad: bool
) -> None:
    """A checkpointed cell has one `CellNode`, and with several devices one `Recompute`; other cells have neither.

    There are no copies, because all CPU devices share the same memory. On one device there are no ties: one thread
    creates all nodes, and the engine visits these in the reverse order of creation.
    """
    model = pipe(build(plan, n), [2] * n, chunks=8, checkpoint=checkpoint)
    x = rows(m).requires_grad_(needs_grad)
    counts = kinds(output := model(x))
    several = len(set(model.devices)) > 1
    assert recomputed(output) == stop(checkpoint, m) * n
    assert counts["RecomputeBackward"] == (stop(checkpoint, m) * n if several else 0)
    ours = {"CopyBackward", "WaitBackward", *(() if several else ("ForkBackward", "JoinBackward"))}
    assert ours.isdisjoint(counts)
    counts = kinds(model.eval()(x))
    assert counts["CellNodeBackward"] == counts["RecomputeBackward"] == 0
    assert counts["SinBackward0"] == m * n, "the graph is there all the same"


def test_no_nodes_in_partitions_that_need_no_gradient(pipe: Pipe, plan: Plan, checkpoint: str) -> None:
    """The first partition is frozen, the second is trained, and the third passes gradients through."""
    layers = build(plan, 3).requires_grad_(False)
    layers[2].requires_grad_(True)
    output = pipe(layers, [2, 2, 2], chunks=3, checkpoint=checkpoint)(rows(3))
    assert recomputed(output) == 2 * stop(checkpoint, 3)
    output.sum().backward()
    assert {j for _, j in plan.of("recomputation")} == (set() if checkpoint == "never" else {1, 2})


# -------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain input", "input needs grad"])
@pytest.mark.parametrize("devices", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:1", "cpu:0"]], ids=str)
def test_micro_batches_go_backward_in_reverse_one_at_a_time(
    plan: Plan, devices: list[str], checkpoint: str, needs_grad: bool
) -> None:
    """A device has at most one recomputed micro-batch in memory, however many of its partitions there are."""
    m, n = 4, 3
    model = GPipe(build(plan, n), [2] * n, devices=devices, chunks=m, checkpoint=checkpoint)
    model(rows(m).requires_grad_(needs_grad)).sum().backward()
    for j in range(n):
        assert [(i, phase) for (i, its), phase in backward_of(plan) if its == j] == [
            (i, phase)
            for i in reversed(range(m))
            for phase in ["recomputation"] * (i < stop(checkpoint, m)) + ["backward"]
        ]
    for (_, j), others in plan.alive_before.items():
        assert not [other for other in others if other[1] == j or len(set(devices)) == 1]
    assert not plan.alive("recomputation")


@pytest.mark.usefixtures("cpu_workers")
def test_recomputation_comes_before_the_gradient_with_several_devices(plan: Plan) -> None:
    """All devices can recompute their last micro-batch at once, before the first gradient arrives."""
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    GPipe(build(plan, 3), [2] * 3, devices=devices, chunks=2, checkpoint="always")(rows(2)).sum().backward()
    events = backward_of(plan)
    assert sorted(events[: events.index(((1, 2), "backward"))]) == [((1, j), "recomputation") for j in range(3)]


def test_recomputation_comes_just_before_its_backward_with_one_device(plan: Plan) -> None:
    """With one device, recomputing ahead would gain no time and cost memory."""
    GPipe(build(plan, 2), [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint="always")(rows(3)).sum().backward()
    events = backward_of(plan)
    assert [cell for cell, _ in events[::2]] == [cell for cell, _ in events[1::2]]
    assert {phase for _, phase in events[::2]} == {"recomputation"}


# ---------------------------------------------------------------------------------- only as much as is needed


def test_partitions_without_a_wanted_gradient_are_not_recomputed(pipe: Pipe, plan: Plan) -> None:
    """`torch.autograd.grad` for the last partition's parameter does not recompute earlier partitions."""
    layers = build(plan, 3)
    loss = pipe(layers, [2, 2, 2], chunks=3, checkpoint="always")(rows(3)).sum()
    torch.autograd.grad(loss, [layers[4].weight])
    assert {j for _, j in plan.of("recomputation")} == {2}


def test_buffers_and_parameters_that_count_no_changes(pipe: Pipe, checkpoint: str) -> None:
    """A buffer made in inference mode has no version counter; reading its version raises an error."""

    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.register_buffer("table", torch.ones(3))
                self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, input: Tensor) -> Tensor:
            return input + self.table + self.weight

    layers = nn.Sequential(nn.Linear(3, 3), Add(), nn.Linear(3, 3))
    model = pipe(layers, [2, 1], chunks=2, checkpoint=checkpoint)
    model(torch.rand(4, 3)).sum().backward()
    assert layers[0].weight.grad.any()

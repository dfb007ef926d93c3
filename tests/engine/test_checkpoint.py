"""How many autograd nodes a checkpoint adds, and when its layers run again.

Other files test the results. This file tests number and order: an extra node costs host time, and an early
recomputation costs memory.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.conftest import Pipe
from tests.graph import graph
from torchgpipe import GPipe, is_checkpointing, is_recomputing

Cell = tuple[int, int]


def kinds(output: Tensor) -> Counter[str]:
    return Counter(type(node).__name__ for node in graph(output))


class Record:
    """The events of a model's layers, in order: (phase, cell)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Cell]] = []
        self.recomputed: dict[Cell, StorageWeakRef] = {}

    def of(self, phase: str) -> list[Cell]:
        return [cell for its_phase, cell in self.events if its_phase == phase]

    def alive(self) -> set[Cell]:
        """Return the cells whose recomputed tensors are in memory."""
        return {cell for cell, storage in self.recomputed.items() if not storage.expired()}


class _Backward(torch.autograd.Function):
    """The identity, noting when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, record: Record, cell: Cell) -> Tensor:
        ctx.record, ctx.cell = record, cell
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.record.events.append(("backward", ctx.cell))
        return grads[0], None, None


class Layer(nn.Module):
    """A layer that notes its runs. A micro-batch is a row whose first number is its index."""

    def __init__(self, record: Record, j: int, *, trains: bool = True) -> None:
        super().__init__()
        self.record = record
        self.j = j
        self.weight = nn.Parameter(torch.ones(2), requires_grad=trains)
        self.alive_at_recomputation: list[set[Cell]] = []

    def forward(self, input: Tensor) -> Tensor:
        cell = int(input[0, 0].item()), self.j
        phase = "recompute" if is_recomputing() else "checkpoint" if is_checkpointing() else "plain"
        self.record.events.append((phase, cell))
        if is_recomputing():
            self.alive_at_recomputation.append(self.record.alive())
        result = (input[:, 1:] * self.weight).exp()  # exp keeps its output for backward
        if is_recomputing():
            self.record.recomputed[cell] = StorageWeakRef(result.untyped_storage())
        result = _Backward.apply(result, self.record, cell)  # type: ignore[no-untyped-call]
        return torch.cat([input[:, :1], result], dim=1)


def build(n: int) -> tuple[nn.Sequential, Record]:
    record = Record()
    return nn.Sequential(*[Layer(record, j) for j in range(n)]), record


def rows(m: int, requires_grad: bool = False) -> Tensor:
    return torch.tensor([[float(i), 0.1, 0.2] for i in range(m)], requires_grad=requires_grad)


def stop(checkpoint: str, m: int) -> int:
    return {"always": m, "except_last": m - 1, "never": 0}[checkpoint]


# -------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain input", "input needs grad"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("m", [1, 4])
def test_nodes_of_each_checkpointed_cell(pipe: Pipe, checkpoint: str, m: int, n: int, needs_grad: bool) -> None:
    """A checkpointed cell has one `Checkpoint`, and with several devices one `Recompute`; other cells have neither.

    There are no copies, because all CPU devices share the same memory. On one device there are no ties: one thread
    creates all nodes, and the engine visits these in the reverse order of creation.
    """
    layers, _ = build(n)
    model = pipe(layers, [1] * n, chunks=8, checkpoint=checkpoint)
    counts = kinds(model(rows(m, needs_grad)))
    several = len(set(model.devices)) > 1
    assert counts["CheckpointBackward"] == stop(checkpoint, m) * n
    assert counts["RecomputeBackward"] == (stop(checkpoint, m) * n if several else 0)
    ours = {"CopyBackward", "WaitBackward", *(() if several else ("ForkBackward", "JoinBackward"))}
    assert ours.isdisjoint(counts)
    counts = kinds(model.eval()(rows(m, needs_grad)))
    assert counts["CheckpointBackward"] == counts["RecomputeBackward"] == 0
    assert counts["_BackwardBackward"] == m * n, "the graph is there all the same"


def test_no_nodes_in_partitions_that_need_no_gradient(pipe: Pipe, checkpoint: str) -> None:
    """The first partition is frozen, the second is trained, and the third passes gradients through."""
    record = Record()
    layers = nn.Sequential(*[Layer(record, j, trains=j == 1) for j in range(3)])
    output = pipe(layers, [1, 1, 1], chunks=3, checkpoint=checkpoint)(rows(3))
    assert kinds(output)["CheckpointBackward"] == 2 * stop(checkpoint, 3)
    output.sum().backward()
    assert {j for _, j in record.of("recompute")} == (set() if checkpoint == "never" else {1, 2})


# -------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("m", [1, 4])
def test_each_cell_runs_once_and_is_recomputed_once(pipe: Pipe, checkpoint: str, m: int, n: int) -> None:
    layers, record = build(n)
    model = pipe(layers, [1] * n, chunks=m, checkpoint=checkpoint)
    model(rows(m)).sum().backward()
    recomputed = {(i, j) for i in range(stop(checkpoint, m)) for j in range(n)}
    every = {(i, j) for i in range(m) for j in range(n)}
    for phase, cells in {
        "checkpoint": recomputed,
        "plain": every - recomputed,
        "recompute": recomputed,
        "backward": every,
    }.items():
        assert sorted(record.of(phase)) == sorted(cells), phase


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain input", "input needs grad"])
@pytest.mark.parametrize("devices", [["cpu"] * 3, ["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:1", "cpu:0"]], ids=str)
def test_micro_batches_go_backward_in_reverse_one_at_a_time(
    devices: list[str], checkpoint: str, needs_grad: bool
) -> None:
    """A device has at most one recomputed micro-batch in memory, however many of its partitions there are."""
    m, n = 4, 3
    layers, record = build(n)
    model = GPipe(layers, [1] * n, devices=devices, chunks=m, checkpoint=checkpoint)
    model(rows(m, needs_grad)).sum().backward()
    for j, layer in enumerate(layers):
        events = [
            (phase, i) for phase, (i, its_j) in record.events if its_j == j and phase not in ("checkpoint", "plain")
        ]
        recomputed = range(stop(checkpoint, m))
        assert events == [
            (phase, i) for i in reversed(range(m)) for phase in ["recompute"] * (i in recomputed) + ["backward"]
        ]
        assert len(layer.alive_at_recomputation) == len(recomputed)
        for others in layer.alive_at_recomputation:
            one = len(set(devices)) == 1
            assert (others if one else {cell for cell in others if cell[1] == j}) == set()
    assert record.alive() == set()


def test_recomputation_comes_before_the_gradient_with_several_devices() -> None:
    """All devices can recompute their last micro-batch at once, before the first gradient arrives."""
    m, n = 2, 3
    layers, record = build(n)
    devices = [f"cpu:{j}" for j in range(n)]
    GPipe(layers, [1] * n, devices=devices, chunks=m, checkpoint="always")(rows(m)).sum().backward()
    events = [event for event in record.events if event[0] in ("recompute", "backward")]
    first_backward = events.index(("backward", (m - 1, n - 1)))
    assert {cell for _, cell in events[:first_backward]} == {(m - 1, j) for j in range(n)}


def test_recomputation_comes_just_before_its_backward_with_one_device() -> None:
    """With one device, recomputing ahead would gain no time and cost memory."""
    m, n = 3, 2
    layers, record = build(n)
    GPipe(layers, [1] * n, devices=["cpu"] * n, chunks=m, checkpoint="always")(rows(m)).sum().backward()
    events = [event for event in record.events if event[0] in ("recompute", "backward")]
    assert [cell for _, cell in events[::2]] == [cell for _, cell in events[1::2]]
    assert {phase for phase, _ in events[::2]} == {"recompute"}


# ---------------------------------------------------------------------------------- only as much as is needed


def test_partitions_without_a_wanted_gradient_are_not_recomputed(pipe: Pipe) -> None:
    """`torch.autograd.grad` for the last partition's parameter does not recompute earlier partitions."""
    layers, record = build(3)
    loss = pipe(layers, [1, 1, 1], chunks=3, checkpoint="always")(rows(3)).sum()
    torch.autograd.grad(loss, [layers[2].weight])
    assert {j for _, j in record.of("recompute")} == {2}


class Replaces(nn.Module):
    """A layer that replaces its buffer by a new tensor twice in a run, recomputations included."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, input: Tensor) -> Tensor:
        self.seen = self.seen * 2
        self.seen = self.seen + 1
        return input * self.weight


class Counts(nn.BatchNorm1d):
    """A batch norm with an additional buffer."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(input)


@pytest.mark.parametrize("layer", [Replaces, Counts])
def test_a_buffer_that_changes_twice_is_seen(pipe: Pipe, layer: type[nn.Module]) -> None:
    """Two changes once went unnoticed, and counted twice.

    A buffer was known by its id, which the second of two new buffers takes over as soon as the first one is freed. And
    all buffers of a batch norm were taken for statistics, of which a recomputation has copies.
    """
    model = pipe(nn.Sequential(layer(), nn.Tanh()), [1, 1], chunks=2, checkpoint="always")
    with pytest.raises(RuntimeError, match=r"buffer 'seen' of a .* not is_recomputing\(\)"):
        model(torch.rand(4, 3)).sum().backward()


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

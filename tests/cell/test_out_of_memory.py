"""When memory runs out, the error tells the action that failed, and what takes less."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.faults import Plan, build, rows
from tests.layers import Apply
from torchgpipe import GPipe, pipelined
from torchgpipe.devices.memory import memory_in_use, ran_out_of_memory
from torchgpipe.schedule import program

LESS = "to take less: smaller micro-batches (more chunks)"
PLAN = "what torchgpipe.plan(model, sample, batch=..., memory=[...]) finds"


def shortage(function: Callable[[], Any]) -> list[str]:
    """Call a function that runs out of memory, and return the lines of the note."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        function()
    place, told = caught.value.__notes__
    assert place.startswith("micro-batch")
    return [line.removeprefix("  ") for line in told.split("\n")]


def on(*devices: str, **options: Any) -> tuple[Plan, GPipe]:
    plan = Plan()
    options = (
        {"chunks": 8, "checkpoint": "never", "loss_fn": lambda y, _: y.sum(), "reduce": "mean"}
        | options
        | {"devices": devices}
    )
    return plan, GPipe(build(plan, 2), [2, 2], **options)


def pairs() -> Tensor:
    """Return micro-batches of two rows."""
    return rows(8).repeat_interleave(2, dim=0)


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "cell", "phase", "action"),
    [
        ("GPipe", "never", (5, 0), "forward", "F(5,0)"),
        ("1F1B", "always", (2, 0), "recomputation", "R(2,0)"),
        ("ZeroBubble", "never", (2, 1), "weight", "W(2,1)"),
    ],
)
def test_a_step(schedule: str, checkpoint: str, cell: tuple[int, int], phase: str, action: str) -> None:
    plan, model = on("cpu:0", "cpu:1", schedule=schedule, checkpoint=checkpoint)
    plan.add(cell, phase, torch.OutOfMemoryError)
    advice = "schedule='1F1B', or checkpoint='except_last', or " if checkpoint == "never" else ""
    assert shortage(lambda: model.step(pairs())) == [
        f"out of memory in {action} on cpu:{cell[1]}, under schedule={schedule!r}",
        f"{LESS}, or {advice}{PLAN}",
    ]


def test_partitions_that_are_joined_are_counted_one_by_one() -> None:
    plan, model = on("cpu", "cpu", schedule=program("GPipe", 8, [0, 0]))
    plan.add((1, 1), "forward", torch.OutOfMemoryError)
    told, *_ = shortage(lambda: model.step(pairs()))
    assert told == "out of memory in F(1,1) on cpu, under a program of your own"


@pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])
def test_forward_and_backward_by_autograd(phase: str) -> None:
    plan, model = on("cpu:0", "cpu:1", checkpoint="except_last")
    plan.add((4, 0), phase, torch.OutOfMemoryError)
    action = "F(4,0)" if phase == "forward" else "B(4,0)"
    assert shortage(lambda: model(pairs()).sum().backward()) == [
        f"out of memory in {action} on cpu:0, with loss.backward()",
        f"{LESS}, or model.step(input, target) under schedule='1F1B', or {PLAN}",
    ]


def test_without_backward(pipe: Pipe) -> None:
    plan = Plan()
    model = pipe(build(plan, 2), [2, 2], chunks=8, loss_fn=lambda y, _: y.sum(), reduce="mean")
    plan.add((4, 1), "forward", torch.OutOfMemoryError)
    for run in (model, model.step):
        with torch.no_grad():
            first, *advice = shortage(lambda run=run: run(pairs()))
        assert first.startswith("out of memory in F(4,1) on ") and first.endswith("without backward")
        assert advice == [LESS]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pipelined_model(phase: str) -> None:
    plan = Plan()
    options: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "balance": [1, 1], "schedule": "GPipe"}
    model: Any = pipelined(build(plan, 2), rows(2), chunks=8, loss_fn=lambda output, _: output.mean(), **options)
    plan.add((4, 0), phase, torch.OutOfMemoryError)
    action = "F(4,0)" if phase == "forward" else "B(4,0)"
    rest = f"or checkpoint=True, or {PLAN}"
    assert shortage(lambda: model.step(pairs())) == [
        f"out of memory in {action} on cpu:0, under schedule='GPipe'",
        f"{LESS}, or schedule='1F1B', {rest}",
    ]
    assert shortage(lambda: model(pairs()).sum().backward()) == [
        f"out of memory in {action} on cpu:0, with loss.backward()",
        f"{LESS}, or model.step(input, target) under schedule='1F1B', {rest}",
    ]


# ----------------------------------------------------------------------------------------------------- the error itself


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_note_keeps_nothing_alive(pipe: Pipe, phase: str) -> None:
    plan = Plan()
    model = pipe(build(plan, 2), [2, 2], chunks=4, loss_fn=lambda y, _: y.sum(), reduce="mean")
    error = torch.OutOfMemoryError("device is full")
    plan.add((1, 1), phase, error)
    with suppress(torch.OutOfMemoryError):
        model.step(rows(4))
    assert len(error.__notes__) == 2
    error.__traceback__ = None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_the_allocator_of_the_cpu_says() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), Apply(lambda input: input.new_empty(2**50)))
    model = GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=2)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        model(torch.ones(2, 2))
    assert caught.value.__notes__[1].startswith("out of memory in F(0,1) on cpu, ")


def test_other_errors_are_no_shortage() -> None:
    assert not ran_out_of_memory(RuntimeError("size mismatch"))
    assert not ran_out_of_memory(KeyError("DefaultCPUAllocator: can't allocate memory"))
    plan, model = on("cpu:0", "cpu:1")
    plan.add((0, 0), "forward", RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        model.step(rows(8))
    assert len(caught.value.__notes__) == 1


def test_the_memory_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the accelerator that is there, and not of the CPU beside it."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (1, 4))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 2)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 3)
    assert memory_in_use(device) == (2, 3, 4)
    assert memory_in_use(torch.device("cpu")) is None

    def cannot(_: Any) -> None:
        raise NotImplementedError("this accelerator cannot tell")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", cannot)
    assert memory_in_use(device) is None
    monkeypatch.setattr("torchgpipe.cell.out_of_memory.memory_in_use", lambda _: (2**30, 3 * 2**29, 2**31))
    plan, model = on("cpu:0", "cpu:1")
    plan.add((0, 0), "forward", torch.OutOfMemoryError)
    assert "cpu:0 has 2.00 GiB: 1.00 GiB in tensors, 1.50 GiB reserved" in shortage(lambda: model.step(rows(8)))

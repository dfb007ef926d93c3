"""When memory runs out, the error tells the position in the schedule, what was alive, and what would take less."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import VARIANTS, Pipe
from tests.test_faults import Plan, rows
from tests.test_step_faults import build, grads_of, pipeline
from tests.test_step_transparency import Placing, placings
from torchgpipe import GPipe, pipelined
from torchgpipe.devices.memory import memory_in_use, ran_out_of_memory
from torchgpipe.schedule import program, simulate

PLAN = (
    "torchgpipe.plan(model, sample, batch=..., memory=[...]) finds a balance, chunks, a schedule and layers to "
    "recompute that fit"
)


def shortage(function: Callable[[], Any]) -> list[str]:
    """Call a function that runs out of memory, and return the lines of the note."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        function()
    place, told = caught.value.__notes__
    assert place.startswith("micro-batch")
    return [line.removeprefix("  ") for line in told.split("\n")]


def on(*devices: str, **options: Any) -> tuple[Plan, GPipe]:
    plan = Plan()
    options = {"chunks": 8, "checkpoint": "never", "loss_fn": lambda y, _: y.sum()} | options
    return plan, GPipe(build(plan, 2), [2, 2], devices=devices, **options)


def pairs() -> Tensor:
    """Return micro-batches of two rows."""
    return rows(8).repeat_interleave(2, dim=0)


def test_forward_of_a_step() -> None:
    plan, model = on("cpu:0", "cpu:1", schedule="GPipe")
    plan.add((5, 0), "forward", torch.OutOfMemoryError)
    assert shortage(lambda: model.step(pairs())) == [
        "out of memory at action 6 of 16 of cpu:0 under schedule='GPipe': F(5,0)",
        "alive on cpu:0: 6 of at most 8 micro-batches",
        "schedule='1F1B' would hold at most 2 micro-batches on cpu:0 instead of 8",
        "checkpoint='except_last' would keep only the inputs of 5 of these 6 micro-batches",
        PLAN,
    ]


def test_recomputation_in_a_step() -> None:
    """Its device holds the inputs of another micro-batch, and smaller micro-batches are smaller when recomputed."""
    plan, model = on("cpu:0", "cpu:1", schedule="ZeroBubble", checkpoint="always")
    plan.add((2, 0), "recomputation", torch.OutOfMemoryError)
    assert shortage(lambda: model.step(pairs())) == [
        "out of memory at action 9 of 24 of cpu:0 under schedule='ZeroBubble': I(2,0)",
        "alive on cpu:0: 2 of at most 2 micro-batches, 1 of them with their inputs only",
        "chunks=16 would make micro-batches of 1 row instead of 2, and cpu:0 hold at most 2 micro-batches",
        PLAN,
    ]


def test_the_gradients_of_weights_in_a_step() -> None:
    plan, model = on("cpu:0", "cpu:1", schedule="ZeroBubble")
    plan.add((2, 1), "weight", torch.OutOfMemoryError)
    assert shortage(lambda: model.step(pairs())) == [
        "out of memory at action 11 of 24 of cpu:1 under schedule='ZeroBubble': W(2,1)",
        "alive on cpu:1: 2 of at most 2 micro-batches, 2 of them between I and W",
        "schedule='1F1B' would hold at most 1 micro-batches on cpu:1 instead of 2",
        "checkpoint=[...], with names of layers, would keep only the inputs of these layers",
        "chunks=16 would make micro-batches of 1 row instead of 2, and cpu:1 hold at most 2 micro-batches",
        PLAN,
    ]


def test_several_partitions_of_a_device_in_a_program_of_ones_own() -> None:
    """The inner partitions are joined, and still counted one by one."""
    plan, model = on("cpu", "cpu", schedule=program("GPipe", 4, [0, 0]), chunks=4)
    plan.add((1, 1), "forward", torch.OutOfMemoryError)
    assert shortage(lambda: model.step(rows(4))) == [
        "out of memory at action 4 of 16 of cpu under a program of your own: F(1,1)",
        "alive on cpu: 4 of at most 8 cells (2 in partition 0, 2 in partition 1)",
        "schedule='1F1B' would hold at most 2 cells on cpu instead of 8",
        "checkpoint='except_last' would keep only the inputs of 3 of these 4 cells",
        PLAN,
    ]


@pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])
def test_forward_and_backward_by_autograd(phase: str) -> None:
    plan, model = on("cpu:0", "cpu:1", checkpoint="except_last")
    plan.add((4, 0), phase, torch.OutOfMemoryError)
    action, number = ("F(4,0)", 5) if phase == "forward" else ("B(4,0)", 12)
    assert shortage(lambda: model(pairs()).sum().backward()) == [
        f"out of memory at action {number} of 16 of cpu:0, all forward and then loss.backward(): {action}",
        "alive on cpu:0: 5 of at most 8 micro-batches, 4 of them with their inputs only",
        "model.step(input, target) under schedule='1F1B' would hold at most 2 micro-batches on cpu:0 instead of 8",
        "chunks=16 would make micro-batches of 1 row instead of 2, and cpu:0 hold at most 16 micro-batches",
        PLAN,
    ]


def test_without_backward(pipe: Pipe) -> None:
    plan = Plan()
    model = pipe(build(plan, 2), [2, 2], chunks=8, loss_fn=lambda y, _: y.sum())
    plan.add((4, 1), "forward", torch.OutOfMemoryError)
    for run in (model, model.step):
        with torch.no_grad():
            first, *advice = shortage(lambda run=run: run(pairs()))
        assert first.endswith("without backward: F(4,1)")
        assert advice == ["chunks=16 would make micro-batches of 1 row instead of 2"]


class Blocks(nn.Module):
    """A model that need not be a Sequential, with the layers of `build`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(build(plan, 2))

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = block(input)
        return input


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pipelined_model(phase: str) -> None:
    plan = Plan()
    model = pipelined(
        Blocks(plan),
        rows(2),
        chunks=8,
        devices=["cpu:0", "cpu:1"],
        balance=[1, 1],
        schedule="GPipe",
        loss_fn=lambda output, target=None: output.mean(),
    )
    plan.add((4, 0), phase, torch.OutOfMemoryError)
    action, number = ("F(4,0)", 5) if phase == "forward" else ("B(4,0)", 12)
    rest = [
        "schedule='1F1B' would hold at most 2 micro-batches on cpu:0 instead of 8",
        "checkpoint=True would keep only the inputs of the parts of the spine, and recompute part by part",
        PLAN,
    ]
    alive = "alive on cpu:0: 5 of at most 8 micro-batches"
    assert shortage(lambda: model.step(pairs())) == [
        f"out of memory at action {number} of 16 of cpu:0 under schedule='GPipe': {action}",
        alive,
        *rest,
    ]
    rest[0] = f"model.step(input, target) under {rest[0]}"
    assert shortage(lambda: model(pairs()).sum().backward()) == [
        f"out of memory at action {number} of 16 of cpu:0, all forward and then loss.backward(): {action}",
        alive,
        *rest,
    ]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Placing, Callable[[int], str], int]:
    variant = draw(st.sampled_from(sorted(VARIANTS)))
    placing = draw(placings(draw(st.integers(1, 4)), exact=True, one_device=variant == "inline"))
    return placing, VARIANTS[variant], draw(st.integers(1, 6))


@given(how=steps(), data=st.data())
def test_every_number_is_that_of_the_programs(how: tuple[Placing, Callable[[int], str], int], data: Any) -> None:
    placing, device, m = how
    plan, actions = Plan(), placing.make(m)
    model = pipeline(plan, placing, device, m, "never")
    if placing.schedule is not None:
        model.schedule = placing.schedule
    i, j = data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, len(placing.places) - 1))
    plan.add((i, j), data.draw(st.sampled_from(["forward", "backward", "weight"])), torch.OutOfMemoryError)
    first, alive, *advice = shortage(lambda: model.step(rows(m).repeat_interleave(4, dim=0)))

    own = actions[placing.places[j]]
    there = next(action for action in own if str(action) == first.rpartition(": ")[2])
    assert (there.i, there.j) == (i, j)
    k = own.index(there)
    name = "a program of your own" if placing.schedule is None else f"schedule={placing.schedule!r}"
    where = device(placing.places[j])
    assert first == f"out of memory at action {k + 1} of {len(own)} of {where} under {name}: {there}"

    started = [(one.i, one.j) for one in own[: k + 1] if one.kind == "F"]
    ended = [(one.i, one.j) for one in own[:k] if one.kind in "BW"]
    held, peak = len(started) - len(ended), simulate(actions).peaks[placing.places[j]]
    assert alive.startswith(f"alive on {where}: {held} of at most {peak:.0f} ")
    for line in advice:
        other = re.match(r"schedule='(.*)' would hold at most (\d+) ", line)
        if other is not None:
            assert int(other[2]) == simulate(program(other[1], m, placing.places)).peaks[placing.places[j]] < held
        more = re.match(r"chunks=(\d+) would make micro-batches of (\d) rows? instead of 4, .* at most (\d+)", line)
        if more is not None:
            new, size, most = map(int, more.groups())
            assert new * size == m * 4
            assert most == simulate(program(placing.schedule, new, placing.places)).peaks[placing.places[j]]
            assert most * size < held * 4
    assert advice[-1] == PLAN


# ----------------------------------------------------------------------------------------------------- the error itself


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_note_keeps_nothing_alive_and_the_model_works_on(pipe: Pipe, phase: str) -> None:
    plan = Plan()
    model = pipe(build(plan, 2), [2, 2], chunks=4, loss_fn=lambda y, _: y.sum())
    error: Any = torch.OutOfMemoryError("device is full")
    plan.add((1, 1), phase, error)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model.step(rows(4))
        assert caught.value is error
    assert len(error.__notes__) == 2, "an error that is raised again has its notes already"
    assert grads_of(model) == [None] * len(list(model.parameters()))
    del caught
    plan.faults.clear()
    model.step(rows(4))
    error.__traceback__ = None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_the_allocator_of_the_cpu_says() -> None:
    class Greedy(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input.new_empty(2**50)

    model = GPipe(nn.Sequential(nn.Linear(2, 2), Greedy()), [1, 1], devices=["cpu", "cpu"], chunks=2)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        model(torch.ones(2, 2))
    assert caught.value.__notes__[1].startswith("out of memory at action 3 of 8 of cpu, ")


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
    monkeypatch.setattr("torchgpipe.engine.out_of_memory.memory_in_use", lambda _: (2**30, 3 * 2**29, 2**31))
    plan, model = on("cpu:0", "cpu:1")
    plan.add((0, 0), "forward", torch.OutOfMemoryError)
    assert "cpu:0 has 2.00 GiB: 1.00 GiB in tensors, 1.50 GiB reserved" in shortage(lambda: model.step(rows(8)))

"""A failing layer raises the caller's own exception, with its place; nothing hangs or leaks, and the model works on."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torchgpipe.engine.forward_pass
from tests.conftest import Devices, Pipe
from tests.faults import Cell, Fault, Layer, Plan, build, note, rows
from tests.layers import Apply
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.replay.ambient import Ambient

PHASES = ["forward", "recomputation", "backward"]


def in_schedule_order(cells: Iterable[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (sum(cell), cell[1]))


def step(model: nn.Module, m: int) -> None:
    model(rows(m)).sum().backward()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


@pytest.fixture
def plan() -> Plan:
    return Plan()


every_phase = pytest.mark.parametrize("phase", PHASES)


# ------------------------------------------------------------------------------------ what the caller is told


@every_phase
def test_the_traceback_leads_into_the_layer(pipe: Pipe, plan: Plan, phase: str) -> None:
    model = pipe(build(plan, 2), [2, 2], chunks=2, checkpoint="always")
    plan.add((1, 1), phase)
    with pytest.raises(Fault) as caught:
        step(model, 2)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[0] == "test_the_traceback_leads_into_the_layer"
    assert frames[-2:] == ["<lambda>" if phase == "backward" else "forward", "enter"]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@every_phase
@pytest.mark.parametrize(
    "error",
    [
        ValueError("message"),
        KeyError("key"),
        StopIteration("value"),
        StopAsyncIteration("value"),
        AssertionError(),
        RuntimeError("generator raised StopIteration"),
        MemoryError(),
        torch.OutOfMemoryError("device is full"),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        ExceptionGroup("group", [ValueError("first"), ValueError("second")]),
        type("NeedsNothing", (BaseException,), {})(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_is_raised_as_it_is(pipe: Pipe, plan: Plan, error: BaseException, phase: str) -> None:
    """The caller gets the same instance, whatever exception it is."""
    model = pipe(build(plan, 2), [2, 2], chunks=2, checkpoint="always")
    plan.add((0, 1), phase, error)
    with pytest.raises(type(error)) as caught:
        step(model, 2)
    assert caught.value is error
    plan.faults.clear()
    step(model, 2)


def test_one_instance_raised_again_and_again(pipe: Pipe, devices: Devices, plan: Plan) -> None:
    """The notes do not accumulate, and the last place is among them."""
    error = ValueError("the only one")
    model = pipe(build(plan, 2), [2, 2], chunks=3, checkpoint="always")
    plan.add((0, 1), "forward", error)
    for _ in range(3):
        with pytest.raises(ValueError, match="the only one"):
            model(rows(3))
    assert error.__notes__ == [note((0, 1), 3, devices(2)[1], "forward")]

    plan.faults.clear()
    plan.add((1, 0), "recomputation", error)
    for _ in range(3):
        with pytest.raises(ValueError, match="the only one"):
            step(model, 3)
    assert error.__notes__[-1] == note((1, 0), 3, devices(2)[0], "recomputation")
    assert len(error.__notes__) == len(set(error.__notes__))


def test_notes_of_a_pipeline_in_a_pipeline(pipe: Pipe, plan: Plan) -> None:
    """The first note tells the place in the inner pipeline, the second the place in the outer one."""
    inner = pipe(build(plan, 2), [2, 2], chunks=1)
    outer = pipe(nn.Sequential(nn.Identity(), inner), [1, 1], chunks=2)
    plan.add((1, 1), "forward")
    with pytest.raises(Fault) as caught:
        outer(rows(2))
    first, second = caught.value.__notes__
    assert first.startswith("micro-batch 0 of 1, partition 1 (layers '2'..'3')")
    assert second.startswith("micro-batch 1 of 2, partition 1 (layers '1'..'1')")


# ------------------------------------------------------------------------------------------------------ order


@given(data=st.data())
def test_the_first_in_schedule_order_wins(devices: Devices, data: st.DataObject) -> None:
    m, n = data.draw(st.integers(1, 5), label="m"), data.draw(st.integers(1, 4), label="n")
    mode = data.draw(st.sampled_from(["always", "except_last", "never"]))
    cells = st.tuples(st.integers(0, m - 1), st.integers(0, n - 1))
    failing = data.draw(st.sets(cells, min_size=1, max_size=4))
    plan = Plan()
    model = GPipe(build(plan, n), [2] * n, devices=devices(n), chunks=m, checkpoint=mode)
    for cell in failing:
        plan.add(cell, "forward")

    with pytest.raises(Fault) as caught:
        model(rows(m))

    first = in_schedule_order(failing)[0]
    assert caught.value.cell == first
    assert caught.value.__notes__ == [note(first, m, devices(n)[first[1]], "forward")]
    # All cells before it have run, and no cell of a later clock.
    started = [cell for cell, _ in plan.runs]
    before = in_schedule_order((i, j) for i in range(m) for j in range(n))
    before = before[: before.index(first) + 1]
    assert set(before) <= set(started)
    assert max(map(sum, started)) == sum(first)
    assert len(started) == len(set(started))


@pytest.mark.parametrize("slow", [0, 1])
def test_the_first_wins_also_if_it_is_the_last_to_fail(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """Cells of one clock fail at the same time, on devices that need not take turns.

    Both have started before one of them fails; the other fails after the first has finished.
    """
    monkeypatch.setattr(torchgpipe.engine.forward_pass, "sharing_generator", lambda devices: set())
    both_started = threading.Barrier(2, timeout=30)
    fast_is_through = threading.Event()

    def fails(j: int, input: Tensor) -> Tensor:
        cell = int(input[0, 0].item()), j
        if sum(cell) == 1:
            both_started.wait()
            if j == slow:
                assert fast_is_through.wait(timeout=30)
            fast_is_through.set()
            raise Fault(cell, "forward")
        return input

    layers = nn.Sequential(*[Apply(partial(fails, j)) for j in range(2)])
    model = GPipe(layers, [1, 1], devices=["cpu:0", "cpu:1"], chunks=2)
    for _ in range(2):
        fast_is_through.clear()
        with pytest.raises(Fault) as caught:
            model(rows(2))
        assert caught.value.cell == (1, 0)
        assert len(caught.value.__notes__) == 1


def test_a_worker_that_failed_runs_no_other_cell_of_the_clock(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Two partitions share one device, and the devices need not take turns."""
    monkeypatch.setattr(torchgpipe.engine.forward_pass, "sharing_generator", lambda devices: set())
    model = GPipe(build(plan, 3), [2, 2, 2], devices=["cpu:0", "cpu:1", "cpu:0"], chunks=3)
    plan.add((2, 0), "forward")
    with pytest.raises(Fault):
        model(rows(3))
    started = {cell for cell, _ in plan.runs}
    assert (2, 0) in started and (0, 2) not in started


@given(data=st.data())
def test_any_faults(devices: Devices, data: st.DataObject) -> None:
    """For any cells and phases, the caller gets a planned error with its place, and the model then works as before."""
    m, n = data.draw(st.integers(1, 4), label="m"), data.draw(st.integers(1, 3), label="n")
    mode = data.draw(st.sampled_from(["always", "except_last", "never"]))
    cells = st.tuples(st.integers(0, m - 1), st.integers(0, n - 1))
    plan = Plan()
    layers = build(plan, n)
    # M in a note is the number of micro-batches, which may be less than chunks.
    model = GPipe(layers, [2] * n, devices=devices(n), chunks=m + data.draw(st.integers(0, 3)), checkpoint=mode)
    before = copy.deepcopy(layers.state_dict())
    expected = plain_outcome(layers, rows(m), chunks=m)
    stop = {"always": m, "except_last": m - 1, "never": 0}[mode]

    for _ in range(data.draw(st.integers(1, 3), label="steps")):
        plan.faults.clear()
        for cell, phase in data.draw(st.sets(st.tuples(cells, st.sampled_from(PHASES)), max_size=4)):
            plan.add(cell, phase)
        happens = {(c, p) for c, p in plan.faults if p != "recomputation" or c[0] < stop}
        layers.zero_grad()
        try:
            step(model, m)
        except Fault as error:
            assert (error.cell, error.phase) in happens
            if error.phase == "forward" or error.cell[0] < stop:
                i, j = error.cell
                assert error.__notes__ == [note((i, j), m, devices(n)[j], error.phase)]
                assert traceback.format_exception(error)[-1].rstrip() == error.__notes__[0]
            elif mode == "never":  # None of our code runs at backward.
                assert not hasattr(error, "__notes__")
        else:
            assert not happens
        assert not is_checkpointing() and not is_recomputing() and torch.is_grad_enabled()

        assert all(int(layer.count) == int(layer.norm.num_batches_tracked) for layer in layers[::2])

    plan.faults.clear()
    layers.zero_grad()
    layers.load_state_dict(before)
    assert_same(outcome(model, rows(m)), expected)


# ------------------------------------------------------------------------------------------------- afterwards


def test_backward_can_be_tried_again(pipe: Pipe, plan: Plan) -> None:
    """With retain_graph, as in the plain model."""
    layers = build(plan, 2)
    model = pipe(layers, [2, 2], chunks=3, checkpoint="always")
    expected = plain_outcome(layers, rows(3), chunks=3, loss=torch.sum)
    layers.zero_grad()

    output = model(rows(3))
    for phase in ("recomputation", "backward"):
        plan.add((1, 0), phase)
        with pytest.raises(Fault):
            output.sum().backward(retain_graph=True)
        plan.faults.clear()
    layers.zero_grad()
    output.sum().backward()
    for name, parameter in layers.named_parameters():
        assert torch.equal(parameter.grad, expected.param_grads[name])


def test_batch_norm_counts_right_after_a_fault(pipe: Pipe, plan: Plan) -> None:
    """The scratch statistics of a failed recomputation do not stay in the layer."""
    layers = nn.Sequential(nn.BatchNorm1d(3, momentum=0.5).double(), Layer(plan, 0))
    layers[0].weight.data.zero_()  # the index of the micro-batch, which the next layer reads, becomes 0
    model = pipe(layers, [2], chunks=1, checkpoint="always")
    statistics = dict(layers.named_buffers())
    output = model(rows(4))
    expected = {name: buffer.clone() for name, buffer in statistics.items()}

    plan.add((0, 0), "recomputation")
    with pytest.raises(Fault):
        output.sum().backward()
    now = dict(layers.named_buffers())
    assert all(now[name] is buffer for name, buffer in statistics.items())
    assert all(torch.equal(now[name], buffer) for name, buffer in expected.items())
    assert layers[0].num_batches_tracked == 1


# --------------------------------------------------------------------------------------------------- no leaks


@every_phase
def test_nothing_leaks(pipe: Pipe, plan: Plan, checkpoint: str, phase: str) -> None:
    """Every computed tensor is freed when the caller has dropped the exception and the output.

    Reference counts suffice: a cycle would live until a collection, with all its tensors.
    """
    model = pipe(build(plan, 3), [2, 2, 2], chunks=3, checkpoint=checkpoint)
    plan.add((1, 1), phase)

    gc.disable()
    try:
        for _ in range(2):
            with suppress(Fault):
                step(model, 3)
        # After an error, the autograd engine's queue keeps its ready tasks until the next backward.
        torch.ones((), requires_grad=True).backward()
        assert plan.storages
        assert plan.alive == 0
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.timeout(60)
def test_a_worker_that_cannot_start_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thread fails before its first cell, the caller must not wait for its answer."""

    def fail(*args: Any) -> None:
        raise ValueError("cannot be entered here")

    model = GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=["cpu:0", "cpu:1"])
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="cannot be entered here"):
        patch.setattr(Ambient, "run", fail)
        model(rows(1))
    model(rows(1))

"""A failing layer raises the caller's own exception, with its place; nothing hangs or leaks, and the model works on.

The layers fail on demand: forward, in recomputation, in backward, and where the gradient of a weight is computed, which
a split backward does later. The loss function of a step and hooks of parameters fail, too.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import VARIANTS, Pipe
from tests.faults import Cell, Fault, Plan, build, note, rows
from tests.plain import assert_equal, plain_outcome
from tests.random_pipelines import MODES, Placing, in_order, placings
from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.replay.ambient import Ambient
from torchgpipe.schedule import Action

#: The cells and phases that fail.
Places: TypeAlias = set[tuple[Cell, str]]

every_phase = pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])

#: Exceptions, with their arguments.
ERRORS: dict[type[BaseException], tuple[Any, ...]] = {
    ValueError: ("message",),
    KeyError: ("key",),
    StopIteration: ("value",),
    StopAsyncIteration: ("value",),
    AssertionError: (),
    RuntimeError: ("generator raised StopIteration",),
    MemoryError: (),
    torch.OutOfMemoryError: ("device is full",),
    KeyboardInterrupt: (),
    SystemExit: (3,),
    GeneratorExit: (),
    asyncio.CancelledError: (),
    ExceptionGroup: ("group", [ValueError("first"), ValueError("second")]),
    type("NeedsNothing", (BaseException,), {}): (),
}


def step(model: nn.Module, m: int) -> None:
    model(rows(m)).sum().backward()


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def copies(values: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if value is None else value.clone() for value in values]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


@pytest.fixture
def plan() -> Plan:
    return Plan()


# ------------------------------------------------------------------------------------------------------ any faults


def failing(plan: Plan, executor: str, placing: Placing, device: Callable[[int], str], m: int, mode: str) -> GPipe:
    """Return a pipeline whose layers, loss function and hooks fail as planned."""
    n = len(placing.places)

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        plan.enter((int(output[0, 0].item()), n - 1), "loss")
        return output.square().sum()

    steps: dict[str, Any] = (
        {"schedule": placing.make(m), "loss_fn": loss_fn, "reduce": "mean"} if executor == "step" else {}
    )
    devices = [device(place) for place in placing.places]
    # M in a note is the number of micro-batches, which may be less than chunks.
    chunks = m if steps else m + 1
    return GPipe(build(plan, n), [2] * n, devices=devices, chunks=chunks, checkpoint=mode, **steps)


@pytest.mark.parametrize("executor", ["call", "step"])
@given(data=st.data())
def test_any_faults(executor: str, data: st.DataObject) -> None:
    """The caller gets a planned error with its place. A failed step leaves all gradients, and the model works on.

    The same error comes again at the second time, and notes do not accumulate in an instance that is raised again.
    """
    steps = executor == "step"
    m, n = data.draw(st.integers(1, 4), label="m"), data.draw(st.integers(1, 4), label="n")
    variant = data.draw(st.sampled_from(sorted(VARIANTS)), label="variant")
    mode = data.draw(st.sampled_from(MODES), label="checkpoint")
    one_device = variant == "inline"
    placing = Placing([0] * n if one_device else [*range(n)], lambda m: [], "GPipe")
    if steps:
        placing = data.draw(placings(n, exact=True, one_device=one_device), label="placing")
    device = VARIANTS[variant]
    plan = Plan()
    model = failing(plan, executor, placing, device, m, mode)
    if hooked := steps and data.draw(st.booleans(), label="hooked"):
        for j in range(n):
            # The second phase of a step, once all cells have run: no cell has failed.
            model[2 * j].weight.register_hook(lambda _, j=j: plan.enter((0, j), "hook") if plan.faults else None)

    def told(cell: Cell, phase: str) -> str:
        return note(cell, m, device(placing.places[cell[1]]), phase)

    def run() -> Tensor:
        if steps:
            loss: Tensor = model.step(rows(m))
            return loss
        output: Tensor = model(rows(m))
        output.sum().backward()
        return output.detach()

    buffers, before = [*model.buffers()], copy.deepcopy(model.state_dict())
    result, grads, counted = run(), grads_of(model), copies(buffers)
    happens = {*plan.runs, *[((0, j), "hook") for j in range(n) if hooked]}
    model.load_state_dict(before)
    model.zero_grad()
    if data.draw(st.booleans(), label="gradients are there"):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    present, values = grads_of(model), copies(grads_of(model))

    faults = data.draw(st.sets(st.sampled_from(sorted(happens)), min_size=1, max_size=4), label="faults")
    kind, arguments = data.draw(st.sampled_from([*[(Fault, None)] * len(ERRORS), *ERRORS.items()]), label="error")
    error: Any = kind if arguments is None else kind(*arguments)
    for place in faults:
        plan.add(*place, error)
    threads, raised = threading.enumerate(), []
    for _ in range(2):
        plan.runs.clear()
        with pytest.raises(kind) as caught:
            run()
        assert threading.enumerate() == threads
        assert not is_checkpointing() and not is_recomputing() and torch.is_grad_enabled()
        assert caught.value is error or arguments is None
        raised.append(caught.value)
        assert all(int(layer.count) == int(layer.norm.num_batches_tracked) for layer in model[::2])
        assert all(now is buffer for now, buffer in zip(model.buffers(), buffers)), "scratch statistics have stayed"
        if steps:
            assert all(now is grad for now, grad in zip(grads_of(model), present))
            assert_equal(present, values)
        if arguments is None and steps:
            assert_place_of_step(caught.value, faults, told, in_order(placing.make(m)))
        elif arguments is None:
            assert_place_of_call(caught.value, faults, told, [cell for cell, _ in plan.runs], m, n, mode)
    del caught
    if steps and arguments is None:
        assert raised[0].args == raised[1].args, "another error at the second time"
        assert getattr(raised[0], "__notes__", []) == getattr(raised[1], "__notes__", [])
    elif arguments is not None:
        # Workers may raise one instance at several places at once.
        notes = getattr(error, "__notes__", [])
        assert len(set(notes)) == len(notes) <= len(faults) * (1 + isinstance(error, torch.OutOfMemoryError))

    plan.faults.clear()
    model.zero_grad()
    model.load_state_dict(before)
    assert torch.equal(run(), result)
    assert_equal(grads_of(model), grads)
    assert_equal([*model.buffers()], counted)


def assert_place_of_call(
    error: Fault, faults: Places, told: Callable[[Cell, str], str], started: list[Cell], m: int, n: int, mode: str
) -> None:
    """Assert that an error tells its place, and that the first in the order of the schedule wins in forward."""
    assert (error.cell, error.phase) in faults
    stop = {"always": m, "except_last": m - 1, "never": 0}[mode]
    if error.phase == "forward" or error.cell[0] < stop:
        assert error.__notes__ == [told(error.cell, error.phase.replace("weight", "backward"))]
        assert traceback.format_exception(error)[-1].rstrip() == error.__notes__[0]
    elif mode == "never":  # None of our code runs at backward.
        assert not hasattr(error, "__notes__")
    forward = [cell for cell, phase in faults if phase == "forward"]
    if forward:
        order = sorted([(i, j) for i in range(m) for j in range(n)], key=lambda cell: (sum(cell), cell[1]))
        first = min(forward, key=order.index)
        assert (error.cell, error.phase) == (first, "forward")
        # All cells before it have run, and no cell of a later clock.
        assert {*order[: order.index(first) + 1]} <= {*started}
        assert max(map(sum, started)) == sum(first)
        assert len(started) == len({*started})


def assert_place_of_step(error: Fault, faults: Places, told: Callable[[Cell, str], str], actions: list[Action]) -> None:
    """Assert that an error is the first in the order of the program, and tells its place."""
    assert (error.cell, error.phase) in faults
    cells = {fault for fault in faults if fault[1] != "hook"}
    if error.phase == "hook":
        assert not cells
        return
    phase = error.phase
    place = told(error.cell, "")
    (line,) = error.__notes__
    # Where neighbours are joined, backward does not tell where among them it has come to.
    joined = re.match(r"(micro-batch \d+ of \d+, )partitions (\d+) to (\d+) \(.*?\) on \S+, during ", line)
    if joined and phase != "forward":
        assert place.startswith(joined[1]) and int(joined[2]) <= error.cell[1] <= int(joined[3])
        place = joined[0]
    assert line.startswith(place)
    kinds = {"weight": ["backward"], "loss": ["forward", "recomputation"]}.get(phase, [phase])
    # A half of a backward is told as such: "backward of the weights".
    assert line.removeprefix(place).partition(" of the ")[0] in kinds
    # The gradient of a weight belongs to B, I or W, as the graph allows. So does all of backward in the first
    # partition, whose input needs no gradient.
    splits = {(action.i, action.j) for action in actions if action.kind == "I"}
    in_any_half = {(cell, "backward") for cell in splits if cell[1] == 0}
    if all(part in ("forward", "recomputation", "backward") for _, part in cells) and not cells & in_any_half:
        position = {
            (cell, part): next(
                k
                for k, (kind, *place) in enumerate(actions)
                if tuple(place) == cell and (kind == "F") == (part == "forward") and kind != "W"
            )
            for cell, part in cells
        }
        assert position[error.cell, phase] == min(position.values()), "not the first in the order of the program"


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


@pytest.mark.usefixtures("cpu_workers")
@pytest.mark.parametrize("slow", [0, 1])
def test_the_first_wins_also_if_it_is_the_last_to_fail(plan: Plan, slow: int) -> None:
    """Cells of one clock fail at the same time, on devices that need not take turns.

    Both have started before one of them fails; the other fails after the first has finished.
    """
    both_started = threading.Barrier(2, timeout=30)
    fast_is_through = threading.Event()

    def fails(cell: Cell) -> None:
        both_started.wait()
        if cell[1] == slow:
            assert fast_is_through.wait(timeout=30)
        fast_is_through.set()
        raise Fault(cell, "forward")

    model = GPipe(build(plan, 2), [2, 2], devices=["cpu:0", "cpu:1"], chunks=2)
    for cell in ((0, 1), (1, 0)):
        plan.add(cell, "forward", partial(fails, cell))
    for _ in range(2):
        fast_is_through.clear()
        with pytest.raises(Fault) as caught:
            model(rows(2))
        assert caught.value.cell == (1, 0)
        assert len(caught.value.__notes__) == 1


@pytest.mark.usefixtures("cpu_workers")
def test_a_worker_that_failed_runs_no_other_cell_of_the_clock(plan: Plan) -> None:
    """Two partitions share one device, and the devices need not take turns."""
    model = GPipe(build(plan, 3), [2, 2, 2], devices=["cpu:0", "cpu:1", "cpu:0"], chunks=3)
    plan.add((2, 0), "forward")
    with pytest.raises(Fault):
        model(rows(3))
    started = {cell for cell, _ in plan.runs}
    assert (2, 0) in started and (0, 2) not in started


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


# --------------------------------------------------------------------------------------------------- no leaks


@every_phase
@pytest.mark.usefixtures("no_collection")
def test_nothing_leaks(pipe: Pipe, plan: Plan, checkpoint: str, phase: str) -> None:
    """Every computed tensor is freed when the caller has dropped the exception and the output.

    Reference counts suffice: a cycle would live until a collection, with all its tensors.
    """
    model = pipe(build(plan, 3), [2, 2, 2], chunks=3, checkpoint=checkpoint)
    plan.add((1, 1), phase)

    for _ in range(2):
        with suppress(Fault):
            step(model, 3)
    # After an error, the autograd engine's queue keeps its ready tasks until the next backward.
    torch.ones((), requires_grad=True).backward()
    assert plan.storages
    assert not plan.alive("forward") and not plan.alive("recomputation")


# ------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.on_late
@every_phase
@pytest.mark.parametrize("steps", [True, False], ids=["step", "backward"])
@pytest.mark.usefixtures("interruptible")
def test_control_c(pipe: Pipe, plan: Plan, phase: str, steps: bool) -> None:
    """A signal arrives while a layer computes: the main thread waits for this layer, or runs it."""

    def press() -> None:
        plan.faults.clear()
        os.kill(os.getpid(), signal.SIGINT)

    def run() -> None:
        if steps:
            model.step(rows(2))
        else:
            step(model, 2)

    options = {"schedule": "GPipe", "loss_fn": lambda y, _: y.sum(), "reduce": "mean"}
    model = pipe(build(plan, 3), [2, 2, 2], chunks=2, checkpoint="always", **options)
    run()
    grads = grads_of(model)
    values = copies(grads)
    plan.add((0, 1), phase, press)
    with pytest.raises(KeyboardInterrupt):
        run()
    for grad, before, value in zip(grads_of(model), grads, values, strict=True):
        assert grad is before and (not steps or torch.equal(grad, value))
    with suppress(KeyboardInterrupt):
        run()
    if steps:
        assert_equal(grads_of(model), [2 * value for value in values])
    model.zero_grad()
    run()
    assert_equal(grads_of(model), values)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("cpu_workers")
def test_a_worker_that_cannot_start_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thread fails before its first cell, the caller must not wait for its answer."""

    def fail(*args: Any) -> None:
        raise ValueError("cannot be entered here")

    model = GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=["cpu:0", "cpu:1"])
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="cannot be entered here"):
        patch.setattr(Ambient, "run", fail)
        model(rows(1))
    model(rows(1))

"""A step that fails raises the caller's own exception, with its place, and leaves gradients and layers as they were.

The layers fail on demand, as in ``test_faults.py``: forward, in recomputation, in backward, and where the gradient of a
weight is computed, which a split backward does later. The loss function and hooks of parameters fail, too.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import VARIANTS, Pipe
from tests.faults import Cell, Fault, Layer, Plan, build, note, rows
from tests.layers import Apply
from tests.test_step_transparency import Placing, linear, placings
from tests.test_transparency import MODES
from torchgpipe import GPipe, is_recomputing
from torchgpipe.schedule import Action

pytestmark = pytest.mark.on_late


def pipeline(plan: Plan, placing: Placing, device: Callable[[int], str], m: int, checkpoint: str) -> GPipe:
    n = len(placing.places)

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        plan.enter((int(output[0, 0].item()), n - 1), "loss")
        return output.square().sum()

    model = GPipe(
        build(plan, n),
        [2] * n,
        devices=[device(place) for place in placing.places],
        chunks=m,
        checkpoint=checkpoint,
        schedule=placing.make(m),
        loss_fn=loss_fn,
    )
    for j in range(n):
        # The second phase of a step, once all cells have run: no cell has failed.
        model[2 * j].weight.register_hook(lambda _, j=j: plan.enter((0, j), "hook") if plan.faults else None)
    return model


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def copies(values: list[Tensor | None]) -> list[Tensor | None]:
    return [None if value is None else value.clone() for value in values]


def assert_equal(actual: list[Any], expected: list[Any]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a is b is None or torch.equal(a, b)


def error_of(function: Callable[[], Any]) -> BaseException | None:
    """Call a function, and return its exception; a step that hangs is ended by the time limit of a test."""
    try:
        function()
    except BaseException as error:
        return error
    return None


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


@st.composite
def plans(draw: st.DrawFn) -> tuple[Placing, Callable[[int], str], int, str]:
    variant = draw(st.sampled_from(sorted(VARIANTS)))
    n = draw(st.integers(1, 4))
    placing = draw(placings(n, exact=True, one_device=variant == "inline"))
    return placing, VARIANTS[variant], draw(st.integers(1, 4)), draw(st.sampled_from(MODES))


ERRORS: list[Callable[[], BaseException | type[BaseException]]] = [
    *[lambda: Fault] * 4,
    lambda: torch.OutOfMemoryError("device is full"),
    lambda: KeyboardInterrupt(),
    lambda: StopIteration(),
]


@given(how=plans(), hooked=st.booleans(), data=st.data())
def test_any_faults(how: tuple[Placing, Callable[[int], str], int, str], hooked: bool, data: st.DataObject) -> None:
    placing, device, m, checkpoint = how
    n = len(placing.places)
    actions = linear(placing.make(m))
    plan = Plan()
    model = pipeline(plan, placing, device, m, checkpoint)
    if not hooked:
        for parameter in model.parameters():
            (parameter._backward_hooks or {}).clear()
    before = copy.deepcopy(model.state_dict())
    loss = model.step(rows(m))
    expected, buffers = grads_of(model), copies(list(model.buffers()))
    happens = {*plan.runs, *[((0, j), "hook") for j in range(n) if hooked]}
    model.load_state_dict(before)
    if data.draw(st.booleans(), label="gradients are there"):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    else:
        model.zero_grad()
    present = grads_of(model)
    values = copies(present)
    faults = data.draw(st.sets(st.sampled_from(sorted(happens)), min_size=1, max_size=4), label="faults")
    error = data.draw(st.sampled_from(ERRORS), label="error")()
    for place in faults:
        plan.add(*place, error)
    threads = threading.enumerate()
    raised = []
    for _ in range(2):
        plan.runs.clear()
        caught = error_of(lambda: model.step(rows(m)))
        assert threading.enumerate() == threads
        assert caught is error or type(caught) is error
        raised.append(caught)
        for grad, other, value in zip(grads_of(model), present, values, strict=True):
            assert grad is other
            assert grad is None or (value is not None and torch.equal(grad, value))
        assert all(int(layer.count) == int(layer.norm.num_batches_tracked) for layer in model[::2])
        if isinstance(caught, Fault):
            assert_place(caught, faults, actions, placing, device, m, n)
    if isinstance(error, type):
        assert raised[0].args == raised[1].args, "another error at the second time"
        assert getattr(raised[0], "__notes__", []) == getattr(raised[1], "__notes__", [])
    else:
        # Workers may raise one instance at several places at once.
        notes = getattr(error, "__notes__", [])
        assert len(set(notes)) == len(notes) <= len(faults) * (1 + isinstance(error, torch.OutOfMemoryError))

    plan.faults.clear()
    model.zero_grad()
    model.load_state_dict(before)
    assert torch.equal(model.step(rows(m)), loss)
    assert_equal(grads_of(model), expected)
    assert_equal(list(model.buffers()), buffers)


def assert_place(
    error: Fault,
    faults: set[tuple[Cell, str]],
    actions: list[Action],
    placing: Placing,
    device: Callable[[int], str],
    m: int,
    n: int,
) -> None:
    """Assert that an error is the first in the order of the program, and tells its place."""
    assert (error.cell, error.phase) in faults
    cells = {fault for fault in faults if fault[1] != "hook"}
    if error.phase == "hook":
        assert not cells
        return
    (i, j), phase = error.cell, error.phase
    first = note((i, j), m, device(placing.places[j]), "")
    (told,) = error.__notes__
    assert told.startswith(first)
    kinds = {"weight": ["backward"], "loss": ["forward", "recomputation"]}.get(phase, [phase])
    # A half of a backward is told as such: "backward of the weights".
    assert told.removeprefix(first).partition(" of the ")[0] in kinds
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


@pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize("steps", [True, False], ids=["step", "backward"])
def test_control_c(pipe: Pipe, phase: str, steps: bool) -> None:
    """A signal arrives while a layer computes: the main thread waits for this layer, or runs it."""
    waiting: list[None] = []

    def press(_: Any = None) -> None:
        if waiting:
            waiting.pop()
            os.kill(os.getpid(), signal.SIGINT)

    def interrupted(input: Tensor) -> Tensor:
        output = input * 1
        if phase == "backward":
            if output.requires_grad:
                output.register_hook(press)
        elif is_recomputing() == (phase == "recomputation"):
            press()
        return output

    def run() -> None:
        if steps:
            model.step(rows(2))
        else:
            model(rows(2)).sum().backward()

    plan = Plan()
    layers = nn.Sequential(Layer(plan, 0), Apply(interrupted), Layer(plan, 1))
    model = pipe(layers, [1, 1, 1], chunks=2, checkpoint="always", schedule="GPipe", loss_fn=lambda y, _: y.sum())
    run()
    grads = grads_of(model)
    values = copies(grads)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores the signal
    waiting.append(None)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        signal.signal(signal.SIGINT, previous)
    for grad, before, value in zip(grads_of(model), grads, values, strict=True):
        assert grad is before and (not steps or torch.equal(grad, value))
    with suppress(KeyboardInterrupt):
        run()
    if steps:
        assert_equal(grads_of(model), [2 * value for value in values])
    model.zero_grad()
    run()
    assert_equal(grads_of(model), values)


def test_a_failing_hook_undoes_what_other_hooks_have_let_pass(pipe: Pipe) -> None:
    """The gradients of other parameters with hooks had been added to ``.grad`` by then."""

    def fail(_: Tensor) -> None:
        raise Fault((0, 0), "hook")

    model = pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2, loss_fn=lambda y, _: y.sum())
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 2)
    for _ in range(2):  # without gradients, and with those of a step
        grads = grads_of(model)
        values = copies(grads)
        for parameter in model.parameters():
            handle = parameter.register_hook(fail)
            with pytest.raises(Fault):
                model.step(torch.ones(4, 2))
            handle.remove()
            assert all(grad is before for grad, before in zip(grads_of(model), grads, strict=True))
            assert_equal(grads_of(model), values)
        model.step(torch.ones(4, 2))

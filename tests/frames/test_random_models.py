"""Random programs: whatever a forward does, a pipelined model gives what the plain model gives, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.frames.programs import DOUBTFUL, Program, programs
from torchgpipe import pipelined
from torchgpipe.frames.pipelined import pipelined_apart

CHUNKS = 3

#: Where partitions run: in the caller's thread, in workers that share a memory, or on devices with a memory each.
WHERE = {
    "inline": ["cpu"] * 3,
    "workers": ["cpu:0", "cpu:1", "cpu:2"],
    "late": ["late:0", "late:1", "late:2"],
}


#: What a harmless program may be refused for.
HARMLESS = (
    "the spine of the model has",  # fewer parts than partitions
    "torch.utils.checkpoint is around an operation in partition",  # that takes a tensor from another device
)


class Refused(Exception):
    """The library has refused the program."""


@contextmanager
def refusing() -> Iterator[None]:
    """Let errors that the library raises itself be `Refused`, and no others."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None:
            frames = frames.tb_next
        ours = frames is not None and frames.tb_frame.f_globals["__name__"].startswith("torchgpipe.")
        if not ours:
            raise
        raise Refused(str(error)) from error


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of a reentrant checkpoint
@pytest.mark.parametrize("where", ["inline", "workers"])
@given(program=programs(), data=st.data())
def test_any_program(where: str, program: Program, data: st.DataObject) -> None:
    check(where, program, data)


@pytest.mark.late
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@settings(max_examples=settings.default.max_examples // 5)
@given(program=programs(), data=st.data())
def test_any_program_on_accelerators(program: Program, data: st.DataObject) -> None:

    check("late", program, data)


def check(where: str, program: Program, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, min(3, len(program.parts))))
    numbers = st.just(set()) | st.sets(st.integers(0, 20), max_size=4)
    frozen, hooked = data.draw(numbers, label="frozen"), data.draw(numbers, label="hooked")
    for k, parameter in enumerate(program.parameters()):
        parameter.requires_grad_(k not in frozen)
    plain = copy.deepcopy(program)
    heard, told = listen(program, hooked), listen(plain, hooked)
    dtype = program.square.dtype
    size = data.draw(st.sampled_from([6, 6, 5]))
    batches = [torch.randn(size, 4, dtype=dtype) for _ in range(data.draw(st.sampled_from([1, 1, 2])))]
    mask = torch.rand(size) > 0.3
    mask[:2] = True  # A sample of zeros would not show what the program does.
    extra = {"list": [torch.randn(size, 4, dtype=dtype) for _ in range(2)]} if data.draw(st.booleans()) else None
    options: dict[str, Any] = {
        "devices": WHERE[where][:n],
        "chunks": CHUNKS,
        "balance": data.draw(st.sampled_from(["parameters", "size"])),
        "schedule": data.draw(st.sampled_from(["GPipe", "1F1B", "ZeroBubble"])),
        "checkpoint": data.draw(st.booleans()),
        "loss_fn": lambda output, _: output["loss"],
        "reduce": "sum" if program.sums and data.draw(st.booleans()) else None,
    }
    arguments = [{"x": batch, "mask": mask, "extra": extra} for batch in batches]
    try:
        expected = [run(plain, partial(in_parts, plain), one) for one in arguments]
    except (RuntimeError, ValueError):
        event("the plain model fails")
        return
    doubtful = {name for name, _ in program.moves} & {*DOUBTFUL}
    # Apart, neighbours on one device are cells of their own.
    arranged: Callable[..., Any] = data.draw(st.sampled_from([pipelined, pipelined_apart]))
    try:
        with refusing():
            arranged(program, rows_of(arguments[0], slice(2)), **options)
        with refusing():
            results = [run(program, program, one, program.step) for one in arguments]
    except Refused as error:
        event("refused")
        assert doubtful or str(error).startswith(HARMLESS), error
        return
    event("right")
    # In which order the parameters get their gradients, nobody promises.
    heard, told = (sorted(each, key=lambda pair: pair[0]) for each in (heard, told))
    assert [name for name, _ in heard] == [name for name, _ in told]
    slack = 1e-10 if dtype == torch.float64 else 0.05  # bfloat16, in which a product rounds differently by strides
    for result, wanted in zip(results, expected, strict=True):
        for name, tensor in wanted.items():
            # A copy on another device has other strides, with which products may round differently.
            is_exact = name.startswith("out ") and where != "late"
            close(name, result[name], tensor, 0.0 if is_exact else slack)
    for (name, grad), (_, wanted) in zip(heard, told):
        close(f"what a hook of {name} hears", grad, wanted, slack)


def listen(model: Program, which: set[int]) -> list[tuple[str, Tensor]]:
    """Put hooks on the parameters of these numbers, and return the list of what they will hear."""
    heard: list[tuple[str, Tensor]] = []
    for k, (name, parameter) in enumerate(model.named_parameters()):
        if k in which and parameter.requires_grad:
            parameter.register_hook(lambda grad, name=name: heard.append((name, grad.clone())))
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, name=name: heard.append((f"{name}, accumulated", parameter.grad.clone()))
            )
    return heard


def close(name: str, actual: Tensor | None, expected: Tensor | None, slack: float) -> None:
    assert (actual is None) == (expected is None), name
    actual = None if actual is None else actual.cpu()
    if actual is not None and expected is not None and not torch.equal(actual, expected):
        atol = slack * max(1.0, float(expected.abs().max())) if slack else 0.0
        message = f"{name}: {actual} is not {expected}"
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol, equal_nan=True, msg=lambda _: message)


def in_parts(plain: Program, x: Tensor, mask: Tensor, extra: Any) -> dict[str, Any]:
    """Call the plain model on one micro-batch after the other."""
    rows = [len(part) for part in x.chunk(CHUNKS)]
    outputs, start = [], 0
    for count in rows:
        part = rows_of({"x": x, "mask": mask, "extra": extra}, slice(start, start + count))
        start += count
        if not torch.is_grad_enabled():  # It is a leaf, as what a caller passes is.
            part["x"] = part["x"].detach().requires_grad_()
        outputs.append(plain(**part))
    shares = [1.0 if plain.sums else count / len(x) for count in rows]
    return {
        "out": torch.cat([output["out"] for output in outputs]),
        "aside": [torch.cat(each) for each in zip(*[output["aside"] for output in outputs])],
        "loss": sum(output["loss"] * share for output, share in zip(outputs, shares)),
    }


def run(
    model: Any, call: Callable[..., Any], arguments: dict[str, Any], step: Callable[..., Tensor] | None = None
) -> dict[str, Tensor | None]:
    """Train by a call and by a step, evaluate, and return all that can be seen."""
    x = arguments["x"].clone().requires_grad_()
    output = call(**{**arguments, "x": x * 1})  # which has a graph of its own
    output["loss"].backward()
    result = {"loss": output["loss"].detach(), **seen("out ", output), "input": _taken(x), **taken(model)}
    if step is None:
        loss = call(**{**arguments, "x": x})["loss"]
        loss.backward()
    else:
        loss = step(**{**arguments, "x": x})
    result |= {"stepped": loss.detach(), "step input": _taken(x)}
    result |= {"step " + name: grad for name, grad in taken(model).items()}
    model.eval()
    with torch.no_grad():
        result |= seen("out eval ", call(**{**arguments, "x": x}))
    model.train()
    return result


def seen(what: str, output: dict[str, Any]) -> dict[str, Tensor]:
    named = {"out": output["out"], **dict(enumerate(output["aside"]))}
    return {f"{what}{name}": tensor.detach() for name, tensor in named.items()}


def taken(model: Any) -> dict[str, Tensor | None]:
    """Return gradients and buffers by name, and set the gradients to None."""
    result: dict[str, Tensor | None] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        result[name], parameter.grad = parameter.grad, None
    return result


def _taken(x: Tensor) -> Tensor | None:
    grad, x.grad = x.grad, None
    return grad


def rows_of(arguments: dict[str, Any], rows: slice) -> dict[str, Any]:
    extra = arguments["extra"] and {"list": [tensor[rows] for tensor in arguments["extra"]["list"]]}
    return {"x": arguments["x"][rows], "mask": arguments["mask"][rows], "extra": extra}

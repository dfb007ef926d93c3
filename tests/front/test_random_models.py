"""Random programs: whatever a forward does, a pipelined model gives what the plain model gives, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.front.programs import COMPILED, DOUBTFUL, KEEPING, LOSSES, Program, programs
from tests.plain import mapped
from tests.recipes import Keeps
from torchgpipe import pipelined
from torchgpipe.front.pipelined import pipelined_apart
from torchgpipe.front.sample_proof import SampleProof

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
    # A checkpoint around an operation that takes a tensor, or a parameter, from another device.
    "a micro-batch fails in the pipeline (RuntimeError: Expected all tensors to be on the same device",
    "torchgpipe.pipelined: not compared: gradients, because the plain model cannot be differentiated (RuntimeError: "
    "Expected all tensors to be on the same device",
)


#: What becomes of the first rows of a batch in the sample: often they are made to be equal.
SAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "given": lambda tensor: tensor,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "threes": lambda tensor: torch.full_like(tensor, 3),
    "repeated": lambda tensor: tensor[:1].expand_as(tensor).clone(),
    "counted": lambda tensor: torch.arange(4).to(tensor).expand_as(tensor).clone(),
}


class Refused(Exception):
    """The library has refused the program."""


@contextmanager
def refusing() -> Iterator[None]:
    """Let errors, and warnings that something is not proved, be `Refused` if the library raises them itself."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, UserWarning) as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None:
            frames = frames.tb_next
        ours = frames is not None and frames.tb_frame.f_globals["__name__"].startswith("torchgpipe.")
        # An error of the plain model on its micro-batches, or across devices, keeps its type, and a note says so.
        ours |= any(["ran through the plain model, to compare" in note for note in getattr(error, "__notes__", [])])
        if not ours:
            raise
        raise Refused(str(error)) from error


#: Warnings of a reentrant checkpoint, and of the compiler.
_quietly = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


@_quietly
@pytest.mark.parametrize("where", ["inline", "workers"])
@given(program=programs(), data=st.data())
def test_any_program(where: str, program: Program, data: st.DataObject) -> None:
    check(where, program, data)


@pytest.mark.late
@_quietly
@settings(max_examples=settings.default.max_examples // 5)
@given(program=programs(late=True), data=st.data())
def test_any_program_on_accelerators(program: Program, data: st.DataObject) -> None:
    check("late", program, data)


def check(where: str, program: Program, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, min(3, len(program.parts))))
    numbers = st.just(set()) | st.sets(st.integers(0, 20), max_size=4)
    frozen, hooked = data.draw(numbers, label="frozen"), data.draw(numbers, label="hooked")
    for k, parameter in enumerate(program.parameters()):
        parameter.requires_grad_(k not in frozen)
    used = {name for name, _ in program.moves} | {part.kind for part in program.parts}
    if used & {*COMPILED}:
        torch.compiler.reset()
    plain = copy.deepcopy(program)
    heard, told = listen(program, hooked), listen(plain, hooked)
    dtype = program.square.dtype
    size = data.draw(st.sampled_from([6, 6, 5]))
    batches = [torch.randn(size, 4, dtype=dtype) for _ in range(data.draw(st.sampled_from([1, 1, 2])))]
    mask = torch.rand(size) > 0.3
    mask[:2] = True  # A sample of zeros would not show what the program does.
    extra = {"list": [torch.randn(size, 4, dtype=dtype) for _ in range(2)]} if data.draw(st.booleans()) else None
    loss = LOSSES[program.loss_name]
    labels = {data.draw(st.sampled_from(["labels", "targets", "y"])): some_labels(size)} if loss.takes_labels else {}
    sample = data.draw(st.sampled_from(["given"] * 4 + [*SAMPLES]), label="sample")
    options: dict[str, Any] = {
        "devices": WHERE[where][:n],
        "chunks": CHUNKS,
        "balance": data.draw(st.sampled_from(["parameters", "size"])),
        "schedule": data.draw(st.sampled_from(["GPipe", "1F1B", "ZeroBubble"])),
        "checkpoint": data.draw(st.booleans()),
        "loss_fn": data.draw(st.sampled_from([None, lambda output, _: output["loss"]])),
        "reduce": "sum" if loss.weight is None and data.draw(st.booleans()) else None,
    }
    if program.loss_name == "class weights" and data.draw(st.booleans()):
        options["weight"] = lambda arguments: loss.weight(arguments[next(iter(labels))])  # type: ignore[misc]
    arguments = [{"x": batch, "mask": mask, "extra": extra, **labels} for batch in batches]
    try:
        expected = [run(plain, partial(in_parts, plain), one) for one in arguments]
    except (RuntimeError, ValueError):
        event("the plain model fails")
        return
    doubtful = used & {*DOUBTFUL, *KEEPING, *COMPILED, "auxiliary"}
    doubtful |= {program.loss_name} - {"mean", "labels"}
    # A lock that waits for ever makes the proof wait as long as it has patience.
    patience = patch.object(SampleProof, "patience", 0.25) if "locked" in doubtful else nullcontext()
    # Apart, neighbours on one device are cells of their own.
    arranged: Callable[..., Any] = data.draw(st.sampled_from([pipelined, pipelined_apart]))
    try:
        with refusing(), patience:
            arranged(program, sample_of(arguments[0], SAMPLES[sample]), **options)
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


def some_labels(size: int) -> Tensor:
    """Return labels of which some are to be ignored, but not all."""
    labels = torch.randint(4, (size, 4)).masked_fill(torch.rand(size, 4) < 0.4, -100)
    labels[0, 1] = 2
    return labels


def sample_of(arguments: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a sample for the arguments of a mini-batch, in which no label is to be ignored."""

    def changed(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.bool:
            return tensor
        return change(tensor if tensor.is_floating_point() else tensor.abs() % 4)

    sample: dict[str, Any] = mapped(changed, rows_of(arguments, slice(2)))
    return sample


def in_parts(plain: Program, x: Tensor, **others: Any) -> dict[str, Any]:
    """Call the plain model on one micro-batch after the other."""
    rows = [len(part) for part in x.chunk(CHUNKS)]
    outputs, weights, start = [], [], 0
    loss, plain.told = LOSSES[plain.loss_name], []
    for count in rows:
        part = rows_of({"x": x, **others}, slice(start, start + count))
        start += count
        if not torch.is_grad_enabled():  # It is a leaf, as what a caller passes is.
            part["x"] = part["x"].detach().requires_grad_()
        outputs.append(plain(**part))
        weights.append(loss.weight([*part.values()][-1 if loss.takes_labels else 0]) if loss.weight else 1.0)
    total = sum(weights) if loss.weight else 1.0
    losses = [value * (weight / total) for (value, _), weight in zip(plain.told, weights) if weight]
    losses += [added * (count / len(x)) for (_, added), count in zip(plain.told, rows) if added is not None]
    return {
        "out": torch.cat([output["out"] for output in outputs]),
        "aside": [torch.cat(each) for each in zip(*[output["aside"] for output in outputs])],
        "loss": sum(losses),
    }


def run(
    model: Any, call: Callable[..., Any], arguments: dict[str, Any], step: Callable[..., Tensor] | None = None
) -> dict[str, Tensor | None]:
    """Train by a call and by a step, evaluate, and return all that can be seen."""
    x = arguments["x"].clone().requires_grad_()
    output = call(**{**arguments, "x": x * 1})  # which has a graph of its own
    loss = output["loss"]
    if "the caller adds what parts keep" in dict(model.moves):
        loss = sum([part.auxiliary.to(loss.device) for part in model.parts if part.auxiliary is not None], loss)
    loss.backward()
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
    kept = {name: module.kept for name, module in model.named_modules() if isinstance(module, Keeps)}
    result |= {f"kept by {name}": torch.as_tensor(value).clone() for name, value in kept.items()}
    for name, parameter in model.named_parameters():
        result[name], parameter.grad = parameter.grad, None
    return result


def _taken(x: Tensor) -> Tensor | None:
    grad, x.grad = x.grad, None
    return grad


def rows_of(arguments: dict[str, Any], rows: slice) -> dict[str, Any]:
    result: dict[str, Any] = mapped(lambda tensor: tensor[rows], arguments)
    return result

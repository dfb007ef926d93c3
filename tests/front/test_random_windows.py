"""Random windows of random programs: micro-batches that are given, unequal in everything, give what plain ones give."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.front.programs import COMPILED, DOUBTFUL, KEEPING, LOSSES, Program, programs
from tests.front.test_random_models import HARMLESS, WHERE, Refused, close, refusing, some_labels, taken
from torchgpipe import MicroBatches, pipelined
from torchgpipe.front.sample_proof import SampleProof

#: What takes a loss that parts keep from the model: that of one micro-batch, and a window has many.
OF_ONE = "the caller adds what parts keep"

_quietly = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


@_quietly
@pytest.mark.parametrize("where", ["inline", "workers"])
@settings(max_examples=settings.default.max_examples // 3)
@given(program=programs(), data=st.data())
def test_any_window(where: str, program: Program, data: st.DataObject) -> None:
    check(where, program, data)


@pytest.mark.late
@_quietly
@settings(max_examples=settings.default.max_examples // 5)
@given(program=programs(late=True), data=st.data())
def test_any_window_on_accelerators(program: Program, data: st.DataObject) -> None:
    check("late", program, data)


def check(where: str, program: Program, data: st.DataObject) -> None:
    program.moves = [move for move in program.moves if move[0] != OF_ONE]
    used = {name for name, _ in program.moves} | {part.kind for part in program.parts}
    if used & {*COMPILED}:
        torch.compiler.reset()
    plain = copy.deepcopy(program)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=9), label="rows")
    # Of programs that may be wrong, the proof sees only what the sample has.
    doubtful = used & {*DOUBTFUL, *KEEPING, *COMPILED, "auxiliary"}
    given_to = data.draw(st.lists(st.booleans(), min_size=2 * len(sizes), max_size=2 * len(sizes)), label="optional")
    window = [
        a_batch(program, size, not doubtful or mask, not doubtful and extra)
        for size, mask, extra in zip(sizes, given_to[::2], given_to[1::2])
    ]
    weights = data.draw(st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=len(sizes), max_size=len(sizes)))
    n = data.draw(st.integers(1, min(3, len(program.parts))))
    schedule = data.draw(st.sampled_from(["GPipe", "1F1B", "ZeroBubble", "LayerMajor"]))
    offload = data.draw(st.sampled_from([False, False, True, "weights"]))
    options: dict[str, Any] = {
        "devices": WHERE[where][:n],
        "partitions": n,
        "balance": data.draw(st.sampled_from(["parameters", "size"])),
        "schedule": "LayerMajor" if offload else schedule,
        "checkpoint": data.draw(st.booleans()),
        "offload": offload,
    }
    try:
        order = range(len(window)) if offload or schedule != "GPipe" else reversed(range(len(window)))
        expected = [
            run_plain(plain, window, weights, reversed(range(len(window)))),
            run_plain(plain, window, weights, order, is_step=True),
            evaluate(plain, lambda: [plain(**batch) for batch in window]),
        ]
    except (RuntimeError, ValueError):
        event("the plain model fails")
        return
    try:
        with refusing(), patch.object(SampleProof, "patience", 0.25):
            pipelined(program, MicroBatches(copied(window[:2])), **options)
        with refusing():
            results = [
                call(program, window, weights),
                step(program, window, weights),
                evaluate(program, lambda: program(MicroBatches(window))),
            ]
    except Refused as error:
        event("refused")
        assert doubtful or str(error).startswith(HARMLESS), error
        return
    event("right")
    slack = 1e-10 if program.square.dtype == torch.float64 else 0.05
    for result, wanted in zip(results, expected, strict=True):
        assert list(result) == list(wanted)
        for name, tensor in wanted.items():
            # A copy on another device has other strides. What several partitions use has a gradient from each.
            is_exact = where != "late" and (n == 1 or "output" in name)
            close(name, result[name], tensor, 0.0 if is_exact else slack)


def a_batch(program: Program, size: int, has_mask: bool, has_extra: bool) -> dict[str, Any]:
    """Return a micro-batch, in which optional arguments may be missing."""
    dtype = program.square.dtype
    batch: dict[str, Any] = {"x": torch.randn(size, 4, dtype=dtype)}
    if has_mask:
        batch["mask"] = torch.rand(size) > 0.3
    if has_extra:
        batch["extra"] = {"list": [torch.randn(size, 4, dtype=dtype) for _ in range(2)]}
    if LOSSES[program.loss_name].takes_labels:
        batch["labels"] = some_labels(size)
    return batch


def copied(window: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return copy.deepcopy(list(window))


def leaves_of(window: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the window with inputs of its own, which get gradients."""
    return [{**batch, "x": batch["x"].clone().requires_grad_()} for batch in window]


def run_plain(
    plain: Program, window: Sequence[Any], weights: Sequence[float], order: Any, is_step: bool = False
) -> dict[str, Tensor | None]:
    """Run the plain model on each micro-batch, and differentiate them in an order."""
    window = leaves_of(window)
    outputs = [plain(**{**batch, "x": batch["x"] * 1}) for batch in window]
    for i in order:
        loss = outputs[i]["loss"]
        loss.backward(torch.full_like(loss, weights[i] / sum(weights)))
    shares = [output["loss"].detach() * (weight / sum(weights)) for output, weight in zip(outputs, weights)]
    seen = {"output": functools.reduce(torch.add, shares)} if is_step else seen_in(outputs)
    return {**seen, **inputs_of(window), **taken(plain)}


def call(model: Any, window: Sequence[Any], weights: Sequence[float]) -> dict[str, Tensor | None]:
    window = leaves_of(window)
    outputs = model(MicroBatches([{**batch, "x": batch["x"] * 1} for batch in window]))
    losses = [output["loss"] for output in outputs]
    torch.autograd.backward(losses, [torch.full_like(loss, w / sum(weights)) for loss, w in zip(losses, weights)])
    return {**seen_in(outputs), **inputs_of(window), **taken(model)}


def step(model: Any, window: Sequence[Any], weights: Sequence[float]) -> dict[str, Tensor | None]:
    window = leaves_of(window)
    loss = model.step(MicroBatches([{**batch, "x": batch["x"] * 1} for batch in window], weights=weights))
    return {"output": loss, **inputs_of(window), **taken(model)}


def evaluate(model: Any, run: Any) -> dict[str, Tensor | None]:
    model.eval()
    with torch.no_grad():
        outputs = run()
    model.train()
    return {**seen_in(outputs), **taken(model)}


def seen_in(outputs: Sequence[Any]) -> dict[str, Tensor | None]:
    return {
        f"output {i} {name}": tensor.detach()
        for i, output in enumerate(outputs)
        for name, tensor in {"out": output["out"], "loss": output["loss"], **dict(enumerate(output["aside"]))}.items()
    }


def inputs_of(window: Sequence[Any]) -> dict[str, Tensor | None]:
    return {f"input {i}": batch["x"].grad for i, batch in enumerate(window)}

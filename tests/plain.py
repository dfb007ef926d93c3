"""The plain model, run micro-batch by micro-batch: the reference for every pipeline.

This file uses no part of the library, so that a fault of the library cannot hide here. Running the micro-batches
one after the other, instead of the mini-batch at once, makes equality exact: the same kernels see tensors of the
same shapes, and gradients are summed in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe import NoChunk

__all__ = [
    "Outcome",
    "assert_equal",
    "assert_same",
    "assert_unchanged",
    "gradients",
    "loss_of",
    "mapped",
    "on_host",
    "outcome",
    "pieces",
    "plain_outcome",
    "run_plain",
    "tensors",
]


Loss: TypeAlias = Callable[[Any], Tensor | None]


@dataclass
class Outcome:
    """The results of a training step.

    Attributes:
        output: the output, as the model returns it
        input_grads: the gradient of each tensor of the input, in order
        param_grads: the gradients of parameters, by name
        buffers: the buffers, by name
    """

    output: Any
    input_grads: list[Tensor | None]
    param_grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def run_plain(
    module: nn.Sequential,
    *inputs: Any,
    chunks: int,
    each: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Return the output of ``module``, run on one micro-batch after the other, each inside its own context."""
    outputs = []
    for arguments in pieces(inputs, chunks):
        with each():
            layers = iter(module)
            value = next(layers)(*arguments)
            for layer in layers:
                value = layer(value)
        outputs.append(value)
    return outputs[0] if len(outputs) == 1 else _merge(outputs)


def on_host(tensor: Any) -> Any:
    """Return a copy of a tensor in host memory; None if there is none."""
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of the gradients of parameters in host memory, by name."""
    return {name: on_host(parameter.grad) for name, parameter in model.named_parameters()}


def plain_outcome(module: nn.Sequential, *inputs: Any, chunks: int, loss: Loss | None = None) -> Outcome:
    """Return the outcome of a training step of the plain ``module``, run micro-batch by micro-batch."""
    return outcome(module, *inputs, loss=loss, run=partial(run_plain, module, chunks=chunks))


def outcome(model: nn.Module, *inputs: Any, loss: Loss | None = None, run: Callable[..., Any] | None = None) -> Outcome:
    """Return the outcome of a training step, on copies of the inputs.

    Args:
        model: the model whose gradients and buffers are reported
        inputs: its positional arguments
        loss: the function from the output to the tensor that is differentiated, by default `loss_of`
        run: the function to call with the inputs, by default ``model``
    """
    before, inputs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    model.zero_grad(set_to_none=True)
    output = (run or model)(*inputs)
    value = (loss or loss_of)(output)
    if value is not None and value.requires_grad:
        value.backward()
    assert_unchanged(inputs, before)
    return Outcome(
        output=mapped(on_host, output),
        input_grads=[on_host(x.grad) for x in tensors(inputs)],
        param_grads=gradients(model),
        buffers={name: on_host(buffer) for name, buffer in model.named_buffers()},
    )


def loss_of(output: Any, used: Sequence[bool] = ()) -> Tensor | None:
    """Return a weighted sum of all numbers in ``output``, each with another weight; None if there are none.

    Args:
        output: nested tensors
        used: whether each tensor counts, by default all
    """
    terms = []
    for k, tensor in enumerate(tensors(output)):
        if (k < len(used) and not used[k]) or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        weights = torch.arange(1, tensor.numel() + 1, dtype=torch.float64).reshape(tensor.shape) % 7 - 2
        terms.append((tensor * weights.to(tensor.device, tensor.dtype)).sum())
    if not terms:
        return None
    total = sum(terms[1:], terms[0])
    return total.real if total.is_complex() else total


def assert_same(actual: Outcome, expected: Outcome) -> None:
    """Assert that nothing differs, not even in the last bit, and that no superfluous gradient is present."""
    assert_equal(actual.output, expected.output, "output")
    for k, (a, b) in enumerate(zip(actual.input_grads, expected.input_grads, strict=True)):
        assert_equal(a, b, f"gradient of input {k}")
    assert_equal(actual.param_grads, expected.param_grads, "gradients")
    assert_equal(actual.buffers, expected.buffers, "buffers")


def assert_equal(actual: Any, expected: Any, what: str = "value") -> None:
    """Assert that nested values are of the same types and equal to the last bit."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{what} is {actual}, not a tensor"
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")
    elif isinstance(expected, dict):
        assert type(actual) is type(expected) and list(actual) == list(expected), what
        for key in expected:
            assert_equal(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, (tuple, list)):
        assert type(actual) is type(expected) and len(actual) == len(expected), what
        for k, (a, b) in enumerate(zip(actual, expected)):
            assert_equal(a, b, f"{what}[{k}]")
    else:
        assert actual == expected, f"{what} is {actual}, not {expected}"


def assert_unchanged(inputs: Any, before: Any) -> None:
    """Assert that inputs are as they were before a call."""
    for given, kept in zip(tensors(inputs), tensors(before), strict=True):
        assert_equal(given.detach(), kept.detach(), "the caller's input")


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, NoChunk):
        yield value.tensor
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def mapped(function: Callable[[Tensor], Any], value: Any, whole: Callable[[Tensor], Any] | None = None) -> Any:
    """Return nested containers with what a function makes of each tensor.

    Args:
        function: what becomes of a tensor
        value: nested containers
        whole: what becomes of the tensor in a NoChunk, by default what ``function`` makes of it, in a NoChunk
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, NoChunk):
        return NoChunk(function(value.tensor)) if whole is None else whole(value.tensor)
    if isinstance(value, dict):
        return {key: mapped(function, item, whole) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(function, item, whole) for item in value)
    return value


def pieces(value: Any, chunks: int) -> list[Any]:
    """Split nested tensors into micro-batches: a layer that works in place may change these, but not the mini-batch."""
    counts: list[int] = []
    mapped(lambda tensor: counts.append(len(tensor.chunk(chunks))), value, whole=lambda _: None)
    assert len(set(counts)) == 1, counts
    return [
        mapped(lambda tensor, i=i: tensor.chunk(chunks)[i].clone(), value, whole=lambda tensor: tensor)
        for i in range(counts[0])
    ]


def _merge(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, dict):
        return {key: _merge([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_merge(items) for items in zip(*outputs, strict=True))
    return first

"""The reference: the plain model, run micro-batch by micro-batch, and what it is compared with.

A micro-batch has the rows that `torch.chunk` gives it. Its loss is scaled by its share of all weights before backward,
so that the gradients add up to those of the mini-batch. Outputs are compared leaf by leaf: a joined tensor must be the
micro-batches' tensors one behind the other along some dimension, and a number must be their weighted mean.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.campaigns.architectures.catalogue import Architecture, Call
from torchgpipe.batch.outputs import CacheOfMicroBatches

__all__ = ["TOLERANCE", "Run", "compare", "loss_of", "micro_batches", "run_plain", "shares_of", "state"]

TOLERANCE = 1e-10


@dataclass
class Run:
    """What a run of a mini-batch has left.

    Args:
        loss: of the mini-batch
        outputs: of each micro-batch; a single one if it is that of the mini-batch, and none after a step
        shares: of each micro-batch in the mean
        gradients: of every parameter, by name
        buffers: by name
    """

    loss: Tensor
    outputs: list[Any] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def state(model: nn.Module) -> dict[str, Any]:
    """Return gradients and buffers of a model, as `Run` has them."""
    return {
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def micro_batches(architecture: Architecture, batch: Call, rows: int, chunks: int) -> list[tuple[Call, int]]:
    """Split arguments as `torch.chunk` does, unless they are given so; return each micro-batch with its rows."""
    if architecture.given:
        (window,) = batch[0]
        return [(call, next(iter(call[1].values())).size(0)) for call in window]
    sizes = [len(part) for part in torch.empty(rows).chunk(chunks)]

    def part(value: Any, begin: int, end: int) -> Any:
        if isinstance(value, Tensor):
            return value[begin:end] if value.dim() and len(value) == rows else value
        if type(value) is list and len(value) == rows:
            return value[begin:end]
        if type(value) is dict:
            return {key: part(item, begin, end) for key, item in value.items()}
        return value

    result = []
    begin = 0
    for size in sizes:
        args, kwargs = batch
        call = (
            tuple(part(value, begin, begin + size) for value in args),
            {k: v if k in architecture.whole else part(v, begin, begin + size) for k, v in kwargs.items()},
        )
        result.append((call, size))
        begin += size
    return result


def loss_of(architecture: Architecture, output: Any) -> Tensor:
    """Return the loss of an output: the architecture's, or the output's own."""
    return architecture.loss(output) if architecture.loss is not None else output.loss


def shares_of(architecture: Architecture, parts: Sequence[tuple[Call, int]]) -> list[float]:
    """Return the share of each micro-batch in the mean."""
    weigh = architecture.weight
    weights = [float(size) if weigh is None else weigh(kwargs) for (_, kwargs), size in parts]
    return [weight / sum(weights) for weight in weights]


def run_plain(architecture: Architecture, model: nn.Module, batch: Call, rows: int, chunks: int) -> Run:
    """Run the plain model micro-batch by micro-batch, forward and backward."""
    parts = micro_batches(architecture, batch, rows, chunks)
    shares = shares_of(architecture, parts)
    run = Run(torch.zeros(()), shares=shares)
    losses = []
    for ((args, kwargs), _), share in zip(parts, shares):
        output = model(*copy.copy(args), **copy.copy(kwargs))
        loss = loss_of(architecture, output) * share
        loss.backward()
        losses.append(loss.detach())
        run.outputs.append(output)
    run.loss = torch.stack(losses).sum()
    run.gradients, run.buffers = state(model).values()
    return run


def compare(plain: Run, run: Run) -> list[str]:
    """Return in which ways another run differs from the plain one."""
    faults = list(_tensor("the loss", run.loss, plain.loss))
    if len(run.outputs) == 1:
        faults += list(_output("", run.outputs[0], plain.outputs, plain.shares, set()))
    elif run.outputs:
        for ours, expected in zip(run.outputs, plain.outputs, strict=True):
            faults += list(_output("", ours, [expected], [1.0], set()))
    for label, ours, theirs in (
        ("the gradient of", run.gradients, plain.gradients),
        ("buffer", run.buffers, plain.buffers),
    ):
        if ours.keys() != theirs.keys():
            faults.append(f"other names: {sorted(ours.keys() ^ theirs.keys())[:4]} ({label})")
            continue
        for name, expected in theirs.items():
            faults += list(_tensor(f"{label} {name}", ours[name], expected))
    return faults


def _tensor(label: str, got: Tensor | None, expected: Tensor | None) -> Iterator[str]:
    if got is None or expected is None:
        if got is not expected:
            yield f"{label} is {'None' if got is None else 'there'}, but the plain model's is not"
        return
    if got.shape != expected.shape or got.dtype != expected.dtype:
        yield f"{label} is {tuple(got.shape)} {got.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        return
    if torch.equal(got, expected) or not expected.numel():
        return
    if not expected.is_floating_point():
        yield f"{label} has other values"
        return
    alike = got.isnan() & expected.isnan() | (got == expected)
    distance = float((got - expected).abs().masked_fill(alike, 0).max())
    scale = max(1.0, float(expected.abs().nan_to_num(0, 0, 0).max()))
    if not distance <= TOLERANCE * scale:
        yield f"{label} is {distance:.1e} away, of {scale:.1e}"


def _output(path: str, got: Any, parts: Sequence[Any], shares: Sequence[float], seen: set[int]) -> Iterator[str]:
    """Compare one joined output with those of the micro-batches."""
    first = parts[0]
    if isinstance(first, Tensor):
        if not isinstance(got, Tensor):
            yield f"output {path} is {type(got).__name__}, not a tensor"
        else:
            yield from _joined(path, got, [part.detach() for part in parts], shares)
        return
    if first is None or isinstance(first, (int, float, str, bool)):
        if got != first:
            yield f"output {path} is {got!r}, not {first!r}"
        return
    if id(first) in seen:
        return
    seen.add(id(first))
    if isinstance(got, CacheOfMicroBatches):
        return  # Those of the micro-batches are not joined.
    if type(got).__name__ != type(first).__name__:
        yield f"output {path} is {type(got).__name__}, not {type(first).__name__}"
        return
    if isinstance(first, Mapping):
        if list(got) != list(first):
            yield f"output {path} has {list(got)}, not {list(first)}"
            return
        for key in first:
            yield from _output(f"{path}.{key}", got[key], [part[key] for part in parts], shares, seen)
    elif isinstance(first, (tuple, list)):
        if len(got) != len(first):
            rows = isinstance(first, list) and len(got) == sum(len(part) for part in parts)
            if not rows:
                yield f"output {path} has {len(got)} items, not {len(first)}"
            return
        for k in range(len(first)):
            yield from _output(f"{path}[{k}]", got[k], [part[k] for part in parts], shares, seen)
    elif hasattr(first, "__dict__") and not callable(first):
        for name in vars(first):
            if name.startswith("_") or name in ("config",):
                continue
            inner = [getattr(part, name, None) for part in parts]
            yield from _output(f"{path}.{name}", getattr(got, name, None), inner, shares, seen)


def _joined(path: str, got: Tensor, parts: Sequence[Tensor], shares: Sequence[float]) -> Iterator[str]:
    got = got.detach()
    if got.dim() == 0:
        if got.is_floating_point():
            yield from _tensor(f"output {path}", got, torch.stack([p * s for p, s in zip(parts, shares)]).sum())
        return
    shapes = {part.shape for part in parts}
    for dim in range(got.dim()):
        rests = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(rests) == 1 and got.shape[dim] == sum(part.shape[dim] for part in parts) and len(parts[0].shape) > dim:
            whole = torch.cat(list(parts), dim)
            if whole.shape == got.shape:
                yield from _tensor(f"output {path}", got, whole)
                return
    same = all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts)
    if same and got.shape == parts[0].shape:
        yield from _tensor(f"output {path}", got, parts[0])
        return
    yield f"output {path} is {tuple(got.shape)}, from {[tuple(part.shape) for part in parts]}"

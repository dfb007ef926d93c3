"""Running the sample: what a model calls, how its outputs depend on the rows, and how its own loss counts labels.

What a look at the model would not tell for sure is measured. The sample runs without a graph; parameters, buffers and
random states stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.frames.inputs import Arguments, Splitter
from torchgpipe.frames.outputs import Kinds, kinds_of, own_loss
from torchgpipe.frames.spine import Trace, trace
from torchgpipe.frames.values import mapped

__all__ = ["Study", "study"]


@dataclass
class Study:
    """What runs of the sample have shown.

    Attributes:
        traces: what the model calls; several, if times were wanted
        kinds: how outputs depend on the rows
        takes_items: whether the model divides its loss by ``num_items_in_batch``, which many accept and ignore
        shifts: whether the loss leaves out the first label of each row, because it compares with the next labels
        on_meta: whether the model is on the meta device, which has no values
    """

    traces: list[Trace]
    kinds: Kinds
    takes_items: bool
    shifts: bool
    on_meta: bool


def study(module: nn.Module, sample: Arguments, splitter: Splitter, *, rounds: int) -> Study:
    """Run the sample where the model is.

    Args:
        module: the model
        sample: the arguments of one micro-batch
        splitter: tells the rows of the sample
        rounds: how often to trace the model
    """
    where = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    on_meta = where.type == "meta"
    sample = Arguments(*mapped(tuple(sample), lambda tensor: tensor.detach().to(where)))
    with _as_before(module):
        try:
            traces = [_traced(module, sample) for _ in range(1 if on_meta else rounds)]
        except BaseException as error:
            error.add_note("while the sample ran through the model, to find its spine")
            if on_meta:
                error.add_note(
                    "the sample runs on the meta device, which has no values: leave arguments out of the sample whose "
                    "values the model looks at, such as attention_mask; later batches may have them"
                )
            raise
        kinds = _kinds(module, sample, splitter, traces[0])
        takes_items, shifts = _loss_of(module, sample)
    return Study(traces, kinds, takes_items, shifts, on_meta)


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Put buffers and random states back after a ``with`` block, which builds no graph."""
    buffers = [(child, name, buffer) for child in module.modules() for name, buffer in child._buffers.items()]
    values = [None if buffer is None else buffer.detach().clone() for _, _, buffer in buffers]
    devices = sorted({one.device.index for one in module.parameters() if one.device.type not in ("cpu", "meta")})
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            yield
        finally:
            for (child, name, buffer), value in zip(buffers, values):
                child._buffers[name] = buffer
                if buffer is not None and value is not None and not buffer.is_meta:
                    buffer.copy_(value)


def _traced(module: nn.Module, sample: Arguments) -> Trace:
    args, kwargs = mapped(tuple(sample), torch.Tensor.clone, caches=True)
    return trace(module, lambda: module.forward(*args, **kwargs))


def _kinds(module: nn.Module, sample: Arguments, splitter: Splitter, traced: Trace) -> Kinds:
    """Return how the outputs depend on the rows: beside those of another number of rows."""
    rows = splitter.rows
    if not rows:
        return {}
    other = rows - 1 or 2
    args, kwargs = mapped(tuple(splitter.resized(sample, other)), torch.Tensor.clone, caches=True)
    try:
        output = module.forward(*args, **kwargs)
    except Exception:
        return {}  # The model wants as many rows, as a batch norm does in training; sizes will tell.
    return kinds_of(traced.output, rows, output, other)


def _loss_of(module: nn.Module, sample: Arguments) -> tuple[bool, bool]:
    """Return two properties of the model's own loss, which a look at the model would not tell for sure.

    Returns:
        whether the loss is divided by ``num_items_in_batch``, which many models accept and ignore; and whether it
        leaves out the first label of each row, because it compares outputs with the next labels
    """
    labels = sample.kwargs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_meta:
        return False, _names_a_causal_loss(module)
    plain = _loss(module, sample)
    if plain is None:
        return False, False
    one, two = (_loss(module, sample, num_items_in_batch=count) for count in (1, 2))
    divides = one is not None and two is not None and abs(one) > 1.5 * abs(two)
    named, left_out = _names_a_causal_loss(module), labels == -100
    if labels.dim() != 2 or not (named or left_out.any()):
        return divides, False  # Another number than -100 may be left out, and -100 be an error.
    if left_out[:, 0].all():
        return divides, named
    without = labels.clone()
    without[:, 0] = -100
    return divides, _loss(module, sample, labels=without) == plain


def _loss(module: nn.Module, sample: Arguments, **others: Any) -> float | None:
    args, kwargs = mapped(tuple(sample), torch.Tensor.clone, caches=True)
    torch.manual_seed(0)
    try:
        output = module.forward(*args, **{**kwargs, **others})
    except (TypeError, RuntimeError):
        return None  # It does not take this argument.
    loss = own_loss(output)
    return float(loss) if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _names_a_causal_loss(module: nn.Module) -> bool:
    loss: Callable[..., Any] | None = getattr(module, "loss_function", None)
    config = getattr(module, "config", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss" and not getattr(config, "is_encoder_decoder", False)

"""Running the sample: what a model calls, how its outputs depend on the rows, and how its own loss counts labels.

What a look at the model would not tell for sure is measured. The sample runs without a graph, and leaves nothing
behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.frames.door import has_compiled_code
from torchgpipe.frames.inputs import Arguments, Splitter
from torchgpipe.frames.outputs import Kinds, kinds_of, own_loss
from torchgpipe.frames.spine import Trace, trace
from torchgpipe.model.untouched import in_mode, python_random_states, untouched

__all__ = ["Study", "study", "without_compiler"]


@dataclass
class Study:
    """What runs of the sample have shown; plain data, if without the traces.

    Attributes:
        traces: what the model calls; several, if times were wanted
        splitter: splits arguments as the sample is split
        kinds: how outputs depend on the rows, in evaluation and in training
        counted: the argument whose labels the model's own loss counts, and the label that it leaves out
        takes_items: whether the model divides its loss by ``num_items_in_batch``, which many accept and ignore
        shifts: whether the loss leaves out the first label of each row, because it compares with the next labels
        keeps_tensors: whether modules have put tensors on themselves
        draws_elsewhere: whether the model draws from generators of Python or NumPy
        epsilon: the rounding error of the coarsest numbers in the model, relative to 1
        on_meta: whether the model is on the meta device, which has no values
    """

    traces: list[Trace]
    splitter: Splitter
    kinds: dict[bool, Kinds]
    counted: tuple[str, int]
    takes_items: bool
    shifts: bool
    keeps_tensors: bool
    draws_elsewhere: bool
    epsilon: float
    on_meta: bool


def study(module: nn.Module, sample: Arguments, no_chunk: Collection[str], *, rounds: int) -> Study:
    """Run the sample where the model is.

    Args:
        module: the model
        sample: the arguments of one micro-batch
        no_chunk: the names of arguments that are passed whole
        rounds: how often to trace the model
    """
    splitter = Splitter(module.forward, sample, no_chunk)
    places = [*dict.fromkeys([parameter.device for parameter in module.parameters()])] or [torch.device("cpu")]
    where = places[0]
    on_meta = where.type == "meta"
    sample = sample.mapped(lambda tensor: tensor.detach().to(where), caches=False)
    with untouched(module), torch.no_grad():
        before = python_random_states()
        try:
            traces = [_traced(module, sample, splitter) for _ in range(1 if on_meta else rounds)]
        except BaseException as error:
            error.add_note("while the sample ran through the model, to find its spine")
            if len(places) > 1:
                error.add_note(
                    f"the parameters are on {[*map(str, places)]}, where a pipeline may have left them: move the model "
                    "to one device first, model.to('cpu')"
                )
            if on_meta:
                error.add_note(
                    "the sample runs on the meta device, which has no values: leave arguments out of the sample whose "
                    "values the model looks at, such as attention_mask; later batches may have them"
                )
            raise
        draws_elsewhere = python_random_states() != before
        kinds = _kinds(module, sample, splitter)
        takes_items, shifts = _loss_of(module, _with_labels_by_name(sample, splitter))
    return Study(
        traces,
        splitter,
        kinds,
        counted=traces[0].labels or ("labels", -100),
        takes_items=takes_items,
        shifts=shifts,
        keeps_tensors=any([traced.keeps_tensors for traced in traces]),
        draws_elsewhere=draws_elsewhere,
        epsilon=traces[0].epsilon,
        on_meta=on_meta,
    )


def _run(module: nn.Module, sample: Arguments, **replaced: Any) -> Any:
    args, kwargs = sample.mapped(Tensor.clone)  # which the model may change
    return module.forward(*args, **{**kwargs, **replaced})


def _traced(module: nn.Module, sample: Arguments, splitter: Splitter) -> Trace:
    sample = sample.mapped(Tensor.clone)
    return trace(module, lambda: module.forward(*sample.args, **sample.kwargs), splitter.names(sample))


def _kinds(module: nn.Module, sample: Arguments, splitter: Splitter) -> dict[bool, Kinds]:
    """Return how the outputs depend on the rows, in evaluation and in training."""
    best = -1
    result: dict[bool, Kinds] = {False: {}, True: {}}
    for reading in splitter.readings:
        splitter.read(reading)
        modes = {training: _kinds_in(module, sample, splitter, training) for training in (False, True)}
        # Best are outputs that follow the rows, and then a model that takes another number of them at all.
        follows = any([kind is not None for kinds in modes.values() for kind in (kinds or {}).values()])
        quality = 2 if follows else int(any([kinds is not None for kinds in modes.values()]))
        if quality > best:
            best, chosen = quality, reading
            # A batch norm may want more rows in training than there are.
            result = {training: kinds or modes[not training] or {} for training, kinds in modes.items()}
    if splitter.readings:
        splitter.read(chosen)
    return result


def _kinds_in(module: nn.Module, sample: Arguments, splitter: Splitter, training: bool) -> Kinds | None:
    """Return how the outputs depend on the rows: beside those of another number of rows."""
    rows, twin_rows = splitter.rows, splitter.rows - 1 or 2
    with in_mode(module, training), without_compiler(module):
        try:
            output = _run(module, splitter.resized(sample, rows))
            twin_output = _run(module, splitter.resized(sample, twin_rows))
        except Exception:
            return None  # The model wants as many rows, or other arguments; sizes will tell.
    return kinds_of(output, rows, twin_output, twin_rows)


@contextmanager
def without_compiler(module: nn.Module) -> Iterator[None]:
    """Run compiled modules as Python in a ``with`` block: the sample's few rows are worth no graphs of their own."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules and any(map(has_compiled_code, module.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _with_labels_by_name(sample: Arguments, splitter: Splitter) -> Arguments:
    """Return the same arguments, with the labels and what comes after them by name."""
    names = [*splitter.names(sample)]
    k = names.index("labels") if "labels" in names else len(names)
    return Arguments(sample.args[:k], {**dict(zip(names[k:], sample.args[k:])), **sample.kwargs})


def _loss_of(module: nn.Module, sample: Arguments) -> tuple[bool, bool]:
    """Return two properties of the model's own loss, which a look at the model would not tell for sure.

    Returns:
        whether the loss is divided by ``num_items_in_batch``, which many models accept and ignore; and whether it
        leaves out the first label of each row, because it compares outputs with the next labels
    """
    labels, named = sample.kwargs.get("labels"), _names_a_causal_loss(module)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_meta:
        return False, named
    plain = _loss(module, sample)
    if plain is None:
        return False, False
    of_one, of_two = (_loss(module, sample, num_items_in_batch=count) for count in (1, 2))
    divides = of_one is not None and of_two is not None and abs(of_one) > 1.5 * abs(of_two)
    if labels.dim() != 2:
        return divides, False
    # Labels of the sample in the place of others: a number of our own might be an error.
    counted = labels[labels != -100]
    exchanged = torch.where(labels == counted.min(), counted.max(), counted.min()) if counted.numel() else labels
    first_exchanged = torch.cat([exchanged[:, :1], labels[:, 1:]], dim=1)
    if torch.equal(first_exchanged, labels) or _loss(module, sample, labels=exchanged) == plain:
        return divides, named  # Nothing shows.
    return divides, _loss(module, sample, labels=first_exchanged) == plain


def _loss(module: nn.Module, sample: Arguments, **replaced: Any) -> float | None:
    torch.manual_seed(0)
    try:
        output = _run(module, sample, **replaced)
    except (TypeError, RuntimeError):
        return None  # It does not take this argument.
    loss = own_loss(output)
    return float(loss) if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _names_a_causal_loss(module: nn.Module) -> bool:
    loss: Callable[..., Any] | None = getattr(module, "loss_function", None)
    config = getattr(module, "config", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss" and not getattr(config, "is_encoder_decoder", False)

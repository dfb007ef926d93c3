"""Running the sample: what a model calls, and how its outputs depend on the rows.

What a look at the model would not tell for sure is measured. The sample runs without a graph, and leaves nothing
behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batch.inputs import Arguments, Splitter
from torchgpipe.batch.outputs import Kinds, find_kinds, find_path_of_loss
from torchgpipe.batch.rule import Rule
from torchgpipe.model.untouched import attributes, in_mode, untouched
from torchgpipe.model.values import each
from torchgpipe.spine.door import has_compiled_code
from torchgpipe.spine.spine import ChangesParameter, Trace, trace

__all__ = ["Study", "study", "without_compiler"]


@dataclass
class Study:
    """What runs of the sample have shown, if there is one; plain data, if without the traces.

    Attributes:
        traces: what the model calls; several, if times were wanted
        splitter: splits arguments as the sample is split
        kinds: how outputs depend on the rows, in evaluation and in training
        labels: the argument whose labels a loss of the model counts, and the label that it leaves out
        returns_numbers: whether the output has tensors without dimensions, such as a loss
        path_of_loss: where the output has the model's own loss, if it has one
        rules: how numbers of micro-batches are joined, by the path of the output; see `numbers`
        divides: by path, whether a number is divided by ``num_items_in_batch`` if that is given
        predicts_next: whether the loss of the model compares with the next labels, as far as its name or a run tells
        keeps_tensors: whether modules have put tensors on themselves, in evaluation or in training
        epsilon: the rounding error of the coarsest numbers in the model, relative to 1
        on_meta: whether the model is on the meta device, which has no values
    """

    traces: list[Trace]
    splitter: Splitter
    kinds: dict[bool, Kinds] = field(default_factory=lambda: {False: {}, True: {}})
    labels: tuple[str, int] = ("labels", -100)
    returns_numbers: bool = False
    path_of_loss: str = "value"
    rules: dict[str, Rule] = field(default_factory=dict)
    divides: dict[str, bool] = field(default_factory=dict)
    predicts_next: bool = False
    keeps_tensors: bool = False
    epsilon: float = 0.0
    on_meta: bool = False


def study(
    module: nn.Module, sample: Arguments, no_chunk: Collection[str], *, rounds: int, splits: bool = True
) -> Study:
    """Run the sample where the model is.

    Args:
        module: the model
        sample: the arguments of one micro-batch
        no_chunk: the names of arguments that are passed whole
        rounds: how often to trace the model
        splits: whether mini-batches are split
    """
    splitter = Splitter(module.forward, sample, no_chunk, splits=splits)
    places = [*dict.fromkeys([parameter.device for parameter in module.parameters()])] or [torch.device("cpu")]
    where = places[0]
    on_meta = splitter.on_meta = where.type == "meta"
    sample = sample.mapped(lambda tensor: tensor.detach().to(where), caches=False)
    with untouched(module), torch.no_grad():
        known = {id(tensor): tensor for _, _, tensor in attributes(module)}
        try:
            traces = [_traced(module, sample, splitter) for _ in range(1 if on_meta else rounds)]
        except BaseException as error:
            error.add_note("while the sample ran through the model, to find its spine")
            if "does not require grad" in str(error):
                error.add_note(
                    "the sample runs under torch.no_grad(): if the model differentiates in its forward, let one module "
                    "of the model do all of it, within torch.enable_grad()"
                )
            if len(places) > 1:
                move = "move the model to one device first, model.to('cpu')"
                if torch.device("meta") in places:
                    move = "give modules on the meta device memory first, child.to_empty(device='cpu'), and weights"
                error.add_note(
                    f"the parameters are on {[*map(str, places)]}, where a pipeline may have left them: {move}"
                )
            if on_meta:
                error.add_note(
                    "the sample runs on the meta device, which has no values: leave arguments out of the sample whose "
                    "values the model looks at, such as attention_mask; later batches may have them"
                )
            raise
        kinds = _kinds(module, sample, splitter)
        keeps_tensors = any([id(tensor) not in known for _, _, tensor in attributes(module)])
    return Study(
        traces,
        splitter,
        kinds,
        labels=traces[0].labels or ("labels", -100),
        returns_numbers=any([tensor.dim() == 0 for _, tensor in each(traces[0].output)]),
        path_of_loss=find_path_of_loss(traces[0].output),
        predicts_next=_names_a_causal_loss(module) or traces[0].shifts,
        keeps_tensors=keeps_tensors,
        epsilon=traces[0].epsilon,
        on_meta=on_meta,
    )


def _run(module: nn.Module, sample: Arguments) -> Any:
    args, kwargs = sample.mapped(Tensor.clone)  # which the model may change
    return module.forward(*args, **kwargs)


def _traced(module: nn.Module, sample: Arguments, splitter: Splitter, *, only_lasting: bool = False) -> Trace:
    sample = sample.mapped(Tensor.clone)
    run = lambda: module.forward(*sample.args, **sample.kwargs)  # noqa: E731
    return trace(module, run, splitter.tensors(sample), only_lasting=only_lasting)


def _kinds(module: nn.Module, sample: Arguments, splitter: Splitter) -> dict[bool, Kinds]:
    """Return how the outputs depend on the rows, in evaluation and in training."""
    modes = {mode: _kinds_in(module, sample, splitter, mode) if splitter.rows else {} for mode in (False, True)}
    # A batch norm may want more rows in training than there are.
    return {training: kinds or modes[not training] or {} for training, kinds in modes.items()}


def _kinds_in(module: nn.Module, sample: Arguments, splitter: Splitter, training: bool) -> Kinds | None:
    """Return how the outputs depend on the rows: beside those of another number of rows."""
    rows, twin_rows = splitter.rows, splitter.rows - 1 or 2
    with in_mode(module, training), without_compiler(module):
        try:
            output = _traced(module, splitter.resized(sample, rows), splitter, only_lasting=True).output
            twin_output = _run(module, splitter.resized(sample, twin_rows))
        except ChangesParameter as error:  # Which it may do in one mode only.
            error.add_note(f"in {'training' if training else 'evaluation'}")
            raise
        except Exception:
            return None  # The model wants as many rows, or other arguments; sizes will tell.
    return find_kinds(output, rows, twin_output, twin_rows)


@contextmanager
def without_compiler(module: nn.Module) -> Iterator[None]:
    """Run compiled modules as Python in a ``with`` block: the sample's few rows are worth no graphs of their own."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules and any(map(has_compiled_code, module.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _names_a_causal_loss(module: nn.Module) -> bool:
    loss: Callable[..., Any] | None = getattr(module, "loss_function", None)
    config = getattr(module, "config", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss" and not getattr(config, "is_encoder_decoder", False)

"""The proof of a pipelined model: what it computes on a sample, beside what the plain model computes.

    rows together      the plain model, all rows at once              ─┐ equal, or the rows are coupled, or
    rows apart         the plain model, micro-batch by micro-batch    ─┤ something is split or joined wrongly
    pipeline           as it stands, micro-batch by micro-batch       ─┘ equal, or the cut has lost something

Micro-batches apart are compared with the pipeline by outputs, losses, changed buffers, and the gradients of all
parameters; rows together only by outputs and losses. A layer that draws or changes its buffers, or a batch norm, makes
rows together differ from rows apart in training, so these two run once more in evaluation; the pipeline draws what the
plain model draws, and is compared as it stands.

The pipeline runs column by column: all micro-batches pass the first column before one enters the second. So state that
one column leaves on the model for a later one is always that of another micro-batch, which shows.

Nothing is left behind: gradients go to aliases, and `untouched` puts back the rest. Gradients of the plain model are
held once; those of the pipeline are compared and dropped column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import BatchNormBase, is_of_compiler
from torchgpipe.engine.aliases import Aliases
from torchgpipe.engine.gradients import sum_of
from torchgpipe.frames.cell import Export
from torchgpipe.frames.inputs import Arguments, SplitBatch
from torchgpipe.frames.loss import MicroBatchLoss, mean_or_sum
from torchgpipe.frames.outputs import join, verify_known
from torchgpipe.frames.pipeline import Pipeline
from torchgpipe.frames.sample import without_compiler
from torchgpipe.frames.settings import Settings
from torchgpipe.model.comparison import Compared, Comparison, cotangent, difference_of, largest_of
from torchgpipe.model.untouched import Buffers, in_mode, untouched
from torchgpipe.model.values import each, mapped
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import generators_in
from torchgpipe.replay.random_numbers import Draws, RandomNumbers
from torchgpipe.schedule.programs import SPLITTING

__all__ = ["Proof", "sample_of"]


class _Run(NamedTuple):
    """What the plain model has computed, micro-batch by micro-batch.

    Attributes:
        outputs: the output of each micro-batch, without a graph
        loss: the loss of a step; None without a loss function
        buffers: the buffers that have changed
        gradients: the gradient of each parameter; None if the plain model cannot be differentiated
        draws: what was drawn from
    """

    outputs: list[Any]
    loss: Tensor | None
    buffers: dict[str, Tensor]
    gradients: dict[Tensor, Tensor | None] | None
    draws: Draws


def sample_of(settings: Settings, arguments: Arguments) -> SplitBatch:
    """Return a mini-batch for a proof, made of the sample of one micro-batch.

    There are two micro-batches, of two rows at least, if the sample can be split at all.
    """
    splitter = settings.study.splitter
    if splitter.rows and settings.chunks > 1:
        arguments = splitter.resized(arguments, splitter.rows if splitter.rows >= 4 else 2 * splitter.rows)
    return splitter.micro_batches(arguments, min(2, settings.chunks))


class Proof:
    """The comparison of a pipelined model with the plain model on one mini-batch.

    Args:
        pipeline: what runs the pipelined model
        batch: the mini-batch
        target: the target of the loss function
        with_loss: whether to compute the loss function of a step
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batch: SplitBatch,
        target: Any = None,
        *,
        with_loss: bool = False,
    ) -> None:
        self._pipeline, self._module = pipeline, pipeline.module
        self._settings = pipeline.settings
        with torch.inference_mode(False):
            self._batch = batch.mapped(_copy_of)
            self._target = mapped(target, _copy_of) if with_loss else None
        self._with_loss = with_loss
        self.comparison = Comparison(pipeline.settings.study.epsilon)
        self._draws = False
        #: The outputs that may differ, and do.
        self.differing: list[str] = []

    def run(self) -> Comparison:
        """Run everything, and return the comparison.

        Raises:
            ValueError: the plain model does not take the micro-batches.
        """
        with torch.inference_mode(False), torch.enable_grad(), without_compiler(self._module):
            training, apart = self._run_apart()
            if self._settings.loss_fn is None:
                verify_known(apart.outputs[0])
            self._compare_together(training, apart)
            if self.comparison.is_equal:
                with in_mode(self._module, training):
                    self._compare_pipeline(apart)
        return self.comparison

    # ----------------------------------------------------------------------------------------------- the plain model

    def _run_apart(self) -> tuple[bool, _Run]:
        """Run the plain model on each micro-batch, in training if it is and can be, or else in evaluation."""
        modes = [False]
        if self._module.training:
            # Numbers of generators of Python cannot be repeated for a micro-batch.
            modes = [False] if self._settings.study.draws_elsewhere else [True, False]
        for training in modes:
            try:
                with in_mode(self._module, training):
                    run = self._apart(self._batch, backward=True)
            except Exception as error:
                if training is modes[-1]:
                    raise self._not_apart(error) from error
                continue
            # The numbers of a device would have to go with the micro-batch from device to device.
            if not (training and run.draws.device and len(set(self._settings.devices)) > 1):
                return training, run
        return training, run

    def _apart(self, batch: SplitBatch, *, backward: bool) -> _Run:
        """Run the plain model on each micro-batch."""
        outputs: list[Any] = []
        loss = self._loss(batch)
        with untouched(self._module, self._settings.devices), self._in_one_piece() as aliases:
            random_numbers = RandomNumbers(None)
            buffers = Buffers(self._module)
            for i, part in enumerate(batch.parts):
                with random_numbers.of(i, self._settings.devices[0]):
                    output = self._call(part)
                    aliases.verify_returned([tensor for _, tensor in each(output)], "the model")
                    roots = self._roots(i, output, loss)
                    outputs.append(mapped(output, _copy_of))
                backward = backward and _differentiated(roots)
                del output, roots
            changed = buffers.changed()
            gradients: dict[Tensor, Tensor | None] = dict(zip(aliases.trained, aliases.take()))
        total = None if loss is None else _total(loss)
        return _Run(outputs, total, changed, gradients if backward else None, random_numbers.drawn)

    def _together(self) -> tuple[Any, Tensor | None]:
        with untouched(self._module, self._settings.devices), self._in_one_piece() as aliases:
            output = self._call(self._batch.arguments)
            aliases.verify_returned([tensor for _, tensor in each(output)], "the model")
            loss = self._loss(self._batch.whole)
            if loss is None:
                return mapped(output, Tensor.detach), None
            loss.of(0, output)
            return mapped(output, Tensor.detach), _total(loss)

    def _call(self, arguments: Arguments) -> Any:
        # Clones, which the model may change.
        bring = self._pipeline.to(self._settings.devices[0])
        args, kwargs = arguments.mapped(lambda tensor: bring(tensor.clone()))
        return self._module._torchgpipe_forward(*args, **kwargs)

    def _in_one_piece(self) -> AbstractContextManager[Aliases]:
        return self._pipeline.in_one_piece(backward=True)

    def _loss(self, batch: SplitBatch) -> MicroBatchLoss | None:
        if not self._with_loss:
            return None
        bring = self._pipeline.to(self._settings.devices[-1])
        return MicroBatchLoss(self._settings, batch, self._target, bring, training=self._module.training)

    def _roots(self, i: int, output: Any, loss: MicroBatchLoss | None) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that backward of a micro-batch begins at, each with its gradient."""
        if loss is not None:
            value, weight = loss.of(i, output)
            return [(value, torch.full_like(value, weight))] if value.requires_grad else []
        return [(tensor, cotangent(path, tensor)) for path, tensor in each(output) if tensor.requires_grad]

    # ------------------------------------------------------------------------------------------------ the comparisons

    def _compare_together(self, training: bool, apart: _Run) -> None:
        """Compare rows together with rows apart."""
        sizes = self._batch.sizes
        if len(sizes) == 1:
            return
        # A layer that changes its buffers, as a spectral norm does, may compute with them.
        self._draws = any(apart.draws) or bool(generators_in(self._module.modules()))
        norms = [child for child in self._module.modules() if isinstance(child, BatchNormBase)]
        couples = self._draws or bool(apart.buffers or norms)
        training = training and not couples
        with in_mode(self._module, training):
            # With a graph, as rows together: without one, nn.TransformerEncoder computes padded positions otherwise.
            run = self._apart(self._batch, backward=False) if couples else apart
            outputs, loss = run.outputs, run.loss
            # A model that draws in evaluation, too, draws other numbers for all rows at once.
            draws = any(run.draws)
            try:
                whole, whole_loss = self._together()
            except Exception as error:
                error.add_note(
                    f"while the plain model ran on {sum(sizes)} rows, to compare the pipeline with it "
                    f"({self._decisions()})"
                )
                raise
        add = self.comparison.add
        if loss is not None and whole_loss is not None and not draws:
            fault = self._of_scalar("loss", whole_loss, [loss], loss)
            add("loss, rows together and apart", whole_loss, loss, fault, tolerance=self.comparison.loose)
        scalar = mean_or_sum(self._settings, self._batch)
        try:
            joined = dict(each(join(outputs, sizes, self._settings.study.kinds[training], scalar)))
        except (TypeError, ValueError) as error:
            if self._settings.loss_fn is None and not self._with_loss:
                self.comparison.note("outputs", f"{error} ({self._decisions()})")
            return
        numbers = [{path: tensor for path, tensor in each(output) if tensor.dim() == 0} for output in outputs]
        del run, outputs
        for path, tensor in each(whole):
            ours = joined.get(path)
            if draws and ours is not None and ours.shape == tensor.shape:
                continue
            fault = self._coupled(path, tensor, ours, [number.get(path) for number in numbers])
            if ours is not None and path in self._settings.may_differ:
                difference, largest = difference_of(tensor, ours)
                if difference > self.comparison.loose * largest:
                    self.differing.append(path)
                continue
            add(f"'{path}', rows together and apart", tensor, ours, fault, tolerance=self.comparison.loose)

    def _compare_pipeline(self, apart: _Run) -> None:
        """Compare the pipeline with rows apart."""
        pipeline, comparison = self._pipeline, self.comparison
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        loss = self._loss(self._batch)
        outputs: dict[int, Any] = {}

        def finish(i: int, output: Any, export: Callable[[Tensor], Export] | None) -> None:
            assert export is not None
            for tensor, grad in self._roots(i, output, loss):
                export(tensor).add(grad)
            outputs[i] = mapped(output, Tensor.detach)

        with (
            untouched(self._module, self._settings.devices),
            pipeline.aliased(backward=True, watches=True) as aliases,
        ):
            buffers = Buffers(self._module)
            try:
                mini_batch = pipeline.mini_batch_for_proof(self._batch, finish, aliases)
                mini_batch.run_columns_forward()
            except Exception as error:
                if _is_ours(error) or is_of_compiler(error):
                    raise
                raise ValueError(
                    f"a micro-batch fails in the pipeline ({type(error).__name__}: {error}), but not in the plain "
                    "model; perhaps the model keeps state for a later layer, which another micro-batch has changed by "
                    "then: return it instead, or give a balance that keeps both in one partition"
                ) from error
            self._compare_outputs(apart, outputs)
            if loss is not None and apart.loss is not None:
                fault = "the loss of the pipeline is not that of the plain model"
                comparison.add("loss", apart.loss, _total(loss), fault, tolerance=comparison.tight)
            forward = buffers.changed()
            if comparison.is_equal and apart.gradients is not None:
                gradients = _Gradients(comparison, aliases, apart.gradients, self._of_gradient, names)
                splits = self._settings.schedule in SPLITTING
                mini_batch.run_columns_backward(gradients.compare_column, split=splits)
                gradients.compare_rest()
            # After backward, because a layer that runs again there may change its buffers again.
            self._compare_buffers(apart.buffers, forward, buffers.changed())

    def _compare_buffers(
        self, plain: Mapping[str, Tensor], forward: Mapping[str, Tensor], backward: Mapping[str, Tensor]
    ) -> None:
        """Compare the buffers that the plain model has changed with those that the pipeline has changed by the end."""
        for name in dict.fromkeys([*plain, *backward]):
            fault = f"the buffer '{name}' is changed in another way than by the plain model; "
            if name in backward and difference_of(backward[name], forward.get(name))[0]:
                fault += (
                    "a layer has a checkpoint of its own, so it changes its buffers again at backward, where "
                    "micro-batches come in another order: switch it off, and let pipelined(checkpoint=...) "
                    "recompute the layer"
                )
            else:
                fault += _look(self._module)
            tight = self.comparison.tight
            self.comparison.add(f"buffer '{name}'", plain.get(name), backward.get(name), fault, tolerance=tight)

    def _compare_outputs(self, apart: _Run, outputs: dict[int, Any]) -> None:
        """Compare the outputs of micro-batches, and forget them."""
        last = self._settings.labels[-1]
        for i in range(len(self._batch.sizes)):
            output, ours = apart.outputs.pop(0), dict(each(outputs.pop(i)))
            for path, tensor in each(output):
                fault = (
                    f"the output '{path}' of micro-batch {i} is not that of the plain model, when it leaves {last}; "
                    f"{_look(self._module)}"
                )
                name = f"'{path}' of micro-batch {i}"
                self.comparison.add(name, tensor, ours.pop(path, None), fault, tolerance=self.comparison.tight)
            for path in ours:
                self.comparison.note(f"'{path}'", f"the plain model has no output '{path}' of micro-batch {i}")

    # -------------------------------------------------------------------------------------------------------- faults

    def _not_apart(self, error: Exception) -> Exception:
        """Return what to raise if the plain model fails on its micro-batches."""
        sizes = self._batch.sizes
        try:
            if len(sizes) == 1:
                raise error
            self._apart(self._batch.whole, backward=True)
        except Exception as alone:
            alone.add_note("while the sample ran through the plain model, to compare the pipeline with it")
            return alone
        return ValueError(
            f"the plain model does not take a mini-batch of {sum(sizes)} rows as micro-batches of "
            f"{sizes} rows ({type(error).__name__}: {error}), so it cannot be split in this way "
            f"({self._decisions()}); {self._remedy()}"
        )

    def _coupled(self, path: str, whole: Tensor, joined: Tensor | None, parts: Sequence[Tensor | None]) -> str:
        if whole.dim() == 0:
            return self._of_scalar(path, whole, [part for part in parts if part is not None], joined)
        shapes = f"of shape {tuple(whole.shape)}"
        if joined is not None and joined.shape != whole.shape:
            shapes = f"has shape {tuple(whole.shape)} for all rows together, but {tuple(joined.shape)} joined from"
            shapes += f" micro-batches of {self._batch.sizes} rows; it"
        else:
            shapes += f" for {sum(self._batch.sizes)} rows"
        return (
            f"the output '{path}' {shapes} is not what the rows apart give: the rows are coupled, as by x.mean(0), an "
            f"attention over rows or a contrastive loss, and cannot be split; or {self._remedy()} ({self._decisions()})"
            + f"; or it is random in evaluation, too: verify=['{path}'] lets it differ, with a warning"
            * self._draws
        )

    def _of_scalar(self, path: str, whole: Tensor, parts: Sequence[Tensor], joined: Tensor | None) -> str:
        rows = sum(self._batch.sizes)
        said = f"the output '{path}' of {rows} rows is {_number(whole)}, and that of the rows apart "
        said += " and ".join([_number(part) for part in parts])
        if joined is not None:
            said += f", joined {_number(joined)}"
        if parts and difference_of(whole, sum(parts, torch.zeros_like(whole)))[0] <= self._slack(whole):
            return f"{said}; it is a sum: give reduce='sum'"
        weighted = [part * (size / rows) for part, size in zip(parts, self._batch.sizes)]
        if weighted and difference_of(whole, sum(weighted, torch.zeros_like(whole)))[0] <= self._slack(whole):
            return f"{said}; it is a mean over rows: leave out reduce, or give weight=lambda arguments: rows"
        return (
            f"{said}; if it is a weighted mean, as over tokens or classes, give weight=, which returns the weight of a "
            "micro-batch; else the rows are coupled, as by a contrastive loss or the balancing of experts, and it "
            f"cannot be split; verify=['{path}'] lets it differ, with a warning"
        )

    def _of_gradient(self, j: int, name: str) -> str:
        where = self._settings.labels[j]
        return f"the gradient of '{name}' in {where} is not that of the plain model; {_look(self._module)}"

    def _slack(self, whole: Tensor) -> float:
        return self.comparison.loose * float(whole.detach().double().abs())

    def _remedy(self) -> str:
        batch = self._settings.study.splitter.batch
        first = [name for name, child in self._module.named_modules() if getattr(child, "batch_first", True) is False]
        remedy = f"dimension 0 of '{batch}' is not the batch"
        remedy += f" (batch_first=True for '{first[0]}'?)" if first else " (batch_first=True?)"
        return f"{remedy}; name in no_chunk what every micro-batch gets whole, or give chunks=1"

    def _decisions(self) -> str:
        return f"by the sample: {self._settings.study.splitter.decisions()}"


class _Gradients:
    """The comparison of the gradients of parameters, column by column; what has been compared is dropped.

    Args:
        comparison: takes the rows
        aliases: have the gradients of the pipeline
        expected: the gradients of the plain model, which are forgotten one by one
        fault: says what is wrong, given the column and the name of a parameter
        names: the names of parameters
    """

    def __init__(
        self,
        comparison: Comparison,
        aliases: Aliases,
        expected: dict[Tensor, Tensor | None],
        fault: Callable[[int, str], str],
        names: Mapping[Tensor, str],
    ) -> None:
        self._comparison, self._aliases, self._expected = comparison, aliases, expected
        self._fault, self._names = fault, names
        self._largest = largest_of(expected.values())
        #: Gradients that differed, each with its column.
        self._late: dict[Tensor, tuple[int, Tensor | None]] = {}

    def compare_column(self, j: int) -> None:
        """Compare the gradients of the parameters whose first column is ``j``."""
        for parameter, grad in self._aliases.take_of(j):
            row = self._compared(j, parameter, grad)
            # The backward of an earlier column adds the rest if a function runs layers again, as Reformer does.
            if j and row.fault:
                self._late[parameter] = j, grad
            else:
                self._comparison.rows.append(row)
                self._expected.pop(parameter, None)

    def compare_rest(self) -> None:
        """Compare the gradients that differed once more, with what has been added to them since."""
        rest = dict(zip(self._aliases.trained, self._aliases.take()))
        for parameter, (j, grad) in self._late.items():
            self._comparison.rows.append(self._compared(j, parameter, sum_of(grad, rest[parameter])))

    def _compared(self, j: int, parameter: Tensor, grad: Tensor | None) -> Compared:
        name = self._names.get(parameter, "a parameter")
        return self._comparison.compare(
            f"gradient of '{name}'",
            self._expected.get(parameter),
            grad,
            self._fault(j, name),
            tolerance=self._comparison.tight,
            floor=self._largest,
        )


def _differentiated(roots: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Differentiate from roots, and return whether that was possible: a model that only evaluates need not be able."""
    try:
        if roots:
            tensors, grads = zip(*roots)
            with Ambient().without_autocast():  # as the pipeline does
                torch.autograd.backward(tensors, grads)
    except RuntimeError:
        return False
    return True


def _is_ours(error: BaseException) -> bool:
    """Return whether an error is raised by this library, and not by a model that goes through it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__", "").startswith("torchgpipe.")


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()  # The model may change it later.


def _total(loss: MicroBatchLoss) -> Tensor:
    result = loss.result()
    total: Tensor = result[0] if isinstance(result, tuple) else result
    return total


def _number(tensor: Tensor) -> str:
    return f"{tensor.detach().item():.6g}"


def _look(module: nn.Module) -> str:
    return (
        "an operation may have taken or changed a tensor in a way that the pipeline does not see, or the model keeps "
        f"state that another micro-batch changes; print({type(module).__name__}.layout) shows the partitions: give a "
        "balance that keeps what belongs together in one, or return state from one module to the next"
    )

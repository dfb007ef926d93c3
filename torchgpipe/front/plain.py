"""The plain model of a proof: how it runs without the pipeline, on the same devices, and what it draws there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.batch.given import GIVE_THEM
from torchgpipe.batch.inputs import SplitBatch
from torchgpipe.devices.generators import state_of
from torchgpipe.devices.memory import ran_out_of_memory, return_freed
from torchgpipe.model.comparison import Comparison, cotangent
from torchgpipe.model.untouched import untouched
from torchgpipe.model.values import copy_without_graph, each, mapped
from torchgpipe.pipeline.numbers import MicroBatchLoss
from torchgpipe.pipeline.pipeline import Pipeline
from torchgpipe.pipeline.whole import Whole
from torchgpipe.proof.leaves import Leaves
from torchgpipe.proof.proof import Gradients, Roots, Run, differentiate, take_fingerprints
from torchgpipe.replay.random import generators_in
from torchgpipe.replay.random_numbers import RandomNumbers
from torchgpipe.run.visitors import unobserved

__all__ = ["Number", "PlainModel", "quote"]

#: What backward of the number of a micro-batch begins with: a half, as of two micro-batches of equal weight, so that
#: even gradients that ignore it are those of a step.
_SHARE = 0.5

#: What to do about an adapter that is no module of the model, and so was not moved with it.
_FOLLOW = "an adapter outside the model was left behind: call pipelined before it is applied, torchgpipe.follow after"


class Number(NamedTuple):
    """A number that a run has given, such as a loss.

    Attributes:
        value: the number
        gradients: its gradients; none if it has no graph
        share: its factor in the number of the mini-batch, as far as that is known
        scale: what backward has begun with: gradients that do not follow the loss show by it
    """

    value: Tensor
    gradients: Gradients
    share: float
    scale: float


class PlainModel:
    """The plain model on one mini-batch.

    Args:
        pipeline: what runs the pipelined model
        batch: the mini-batch
        target: the target of the loss function; None to compare what the model returns
        whole: the plain model over several processes
        comparison: takes what cannot be compared

    Attributes:
        pipeline, comparison: see above
        batch: the mini-batch, which is the proof's own
        sizes: the rows of each micro-batch
        with_loss: whether the loss function is compared
        outside: the leaves outside of the model
        loss: the loss of the present run
        seconds: the longest that a micro-batch has taken
        drew: whether the last run of some rows has drawn random numbers
    """

    def __init__(
        self, pipeline: Pipeline, batch: SplitBatch, target: Any, whole: Whole | None, comparison: Comparison
    ) -> None:
        self.pipeline, self._settings, self._whole, self.comparison = pipeline, pipeline.settings, whole, comparison
        self._module: Any = pipeline.module
        self._in_one_piece = (pipeline if whole is None else whole.pipeline).in_one_piece
        with torch.inference_mode(False):
            self.batch = batch.mapped(copy_without_graph)
            self._target = mapped(target, copy_without_graph)
        self.sizes = batch.sizes
        self.with_loss = target is not None and self._settings.loss_fn is not None
        self.outside, self.seconds, self.drew = Leaves(), 0.0, False
        self.loss: MicroBatchLoss | None = None
        #: The micro-batch that runs in the plain model, and what lets generators follow it.
        self._following: int | None = None
        self._generators = ExitStack()
        #: By output, the gradients of rows of the micro-batches.
        self._seeds: dict[str, list[Tensor]] = {}

    def of(self, batch: SplitBatch) -> PlainModel:
        """Return the plain model on another mini-batch, without a loss function."""
        return PlainModel(self.pipeline, batch, None, self._whole, self.comparison)

    # ------------------------------------------------------------------------------------------------------- its runs

    @contextmanager
    def running(self, rows: Any) -> Iterator[tuple[Callable[[], Gradients], Callable[[], dict[str, Tensor]]]]:
        """Let the plain model run on so many rows in a ``with`` block without a trace.

        It provides what takes gradients, and what returns the buffers that have changed.
        """
        names = self.names()

        def take() -> Gradients:
            with unobserved():
                named = zip([names[parameter] for parameter in self._aliases.trained], self._aliases.take())
                return take_fingerprints(named) | take_fingerprints(self.outside.take())

        try:
            with self.untouched() as changed, self._in_one_piece(backward=True, moved=self._draw_on) as self._aliases:
                self._random, self.loss = RandomNumbers(None), self.loss_of(self.batch)
                before = self._states_of_layers()
                yield take, changed
                self.drew = any(self._random.drawn) or self._states_of_layers() != before
        except Exception as error:
            error.add_note(
                f"while {rows} rows of the sample ran through the plain model, to compare the pipeline with it "
                f"({self.decisions()}); perhaps {_FOLLOW if 'same device' in str(error) else self.remedy()}"
            )
            raise

    def run(self, i: int | None) -> Any:
        """Run micro-batch ``i``, or all rows, and return the output."""
        # Clones, which the model may change.
        to_device = self.pipeline.to(self._settings.devices[0])
        arguments = self.batch.arguments[0] if i is None else self.batch.parts[i]
        args, kwargs = arguments.mapped(lambda tensor: to_device(tensor.clone()))
        output = self._module._torchgpipe_forward(*args, **kwargs)
        self._aliases.verify_returned((tensor for _, tensor in each(output)), "the model")
        return output

    def apart(self, *, backward: bool = True, scale: int = 1) -> Run:
        """Run each micro-batch.

        Args:
            backward: whether to differentiate it
            scale: multiplies the gradients that backward begins with
        """
        outputs: list[Any] = []
        with self.running(self.sizes) as (take, changed):
            for i in range(len(self.sizes)):
                begin = time.perf_counter()
                with self.drawing_as(i):
                    output = self.run(i)
                    self.seconds = max(self.seconds, time.perf_counter() - begin)
                    roots = self.roots(i, output) if backward else []
                    outputs.append(self.without_graph(output))
                backward = backward and self._differentiate(roots, scale=scale)
                del output, roots
            loss = self.loss.sum() if self.loss is not None and backward else None
            with unobserved():
                buffers = changed()
            gradients = take() if backward else {}
        return Run(outputs, buffers, gradients, self.drew, loss)

    def numbers_of(self, i: int | None) -> tuple[Any, dict[str, Number]]:
        """Return the output without its graph, and the numbers in it with their gradients.

        If there is no number, the gradients are those of the outputs, as a number without a name.

        Args:
            i: the micro-batch; None for all rows
        """
        numbers: dict[str, Number] = {}
        scale = 1.0 if i is None else _SHARE
        with self.running(sum(self.sizes) if i is None else self.sizes) as (take, _):
            with self.drawing_as(i or 0):
                output = self.run(i)
                found, share = self._numbers(i, output)
            take()  # What a forward differentiates itself has no part in them.
            with unobserved():
                seeds = {path: torch.full_like(value, scale) for path, value in found.items()}
                roots = {path: [(value, seeds[path])] * value.requires_grad for path, value in found.items()}
                if not roots:
                    roots, found = {"": self._roots_of_rows(i, output)}, {"": torch.zeros(())}
            for path, begin in roots.items():
                gradients = Gradients()
                # Nobody differentiates outputs in evaluation, where layers may have kernels without a backward.
                tells = bool(path) or self._module.training
                if begin and self._differentiate(begin, keep_graph=path != [*roots][-1], tells=tells):
                    gradients = take()
                numbers[path] = Number(found[path].detach(), gradients, share, scale if path else 1.0)
            output = self.without_graph(output)
        return output, numbers

    def _differentiate(self, roots: Roots, *, scale: int = 1, keep_graph: bool = False, tells: bool = True) -> bool:
        """Differentiate from roots, and return whether that was possible: a model that only evaluates may fail."""
        self.outside.note([tensor for tensor, _ in roots], self._aliases.all())
        try:
            with unobserved():
                roots = [(tensor, grad * scale) for tensor, grad in roots]
            differentiate(roots, keep_graph=keep_graph)
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            if tells:
                self.comparison.skip(f"gradients, because the plain model cannot be differentiated ({quote(error)})")
            return False
        return True

    @contextmanager
    def untouched(self) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Leave nothing of a run behind in a ``with`` block; see `model.untouched`."""
        with untouched(self._module, self._settings.devices) as changed:
            yield changed
        return_freed()

    # ------------------------------------------------------------------------------------------------ random numbers

    @contextmanager
    def drawing_as(self, i: int) -> Iterator[None]:
        """Let micro-batch ``i`` draw its random numbers in a ``with`` block."""
        self._following = i
        with self._generators:
            self._draw_on(0)
            try:
                yield
            finally:
                self._following = None

    def _draw_on(self, column: int) -> None:
        """Let the random numbers of the micro-batch go on on the device of a column."""
        if self._following is not None:  # What runs again at backward draws what it has drawn.
            self._generators.close()
            self._generators.enter_context(self._random.of(self._following, self._settings.devices[column]))

    def _states_of_layers(self) -> list[bytes]:
        """Return the states of generators that layers have of their own."""
        return [state_of(generator).numpy().tobytes() for generator in generators_in(self._module.modules())]

    # ------------------------------------------------------------------------------------------ outputs and losses

    def names(self) -> dict[Tensor, str]:
        """Return names for the parameters that are there now."""
        return {parameter: f"'{name}'" for name, parameter in self._module.named_parameters()}

    def without_graph(self, output: Any) -> Any:
        """Return an output with copies of its tensors, which the model may change later."""
        with unobserved():
            return mapped(output, copy_without_graph, caches=True)

    def loss_of(self, batch: SplitBatch) -> MicroBatchLoss | None:
        """Return the loss of a step, if the loss function is compared."""
        if not self.with_loss:
            return None
        to_device = self.pipeline.to(self._settings.devices[-1])
        return MicroBatchLoss(self._settings, batch, self._target, to_device, training=self._module.training)

    def roots(self, i: int, output: Any) -> Roots:
        """Return the tensors that backward of a micro-batch begins at, each with its gradient."""
        if self.loss is not None:
            value, share = self.loss.of(i, output)
            with unobserved():
                return [(value, torch.full_like(value, share))] if value.requires_grad else []
        with unobserved():
            return [(tensor, cotangent(path, tensor)) for path, tensor in each(output) if tensor.requires_grad]

    def _roots_of_rows(self, i: int | None, output: Any) -> Roots:
        """Return the outputs with rows, each with its gradient, which for all rows is that of the micro-batches."""
        roots: Roots = []
        kinds = self._settings.study.kinds[self._module.training]
        for path, tensor in each(output):
            dim = kinds.get(path)
            if type(dim) is not int or not tensor.requires_grad or path in self._settings.may_differ:
                continue
            if i is None:
                seed = torch.cat(self._seeds.pop(path, [tensor]), dim)
            else:
                seed = cotangent(path + "'" * i, tensor)  # Of a length of its own, which makes another one.
                self._seeds[path] = [*self._seeds.get(path, [])[:i], seed]
            if seed.shape == tensor.shape:  # Else outputs differ.
                roots.append((tensor, seed))
        return roots

    def _numbers(self, i: int | None, output: Any) -> tuple[dict[str, Tensor], float]:
        """Return the losses and other numbers of a micro-batch, or of all rows, by path, and the share of a loss."""
        if not self.with_loss:
            return {path: one for path, one in each(output) if one.dim() == 0 and one.is_floating_point()}, 1.0
        loss = self.loss_of(self.batch.whole) if i is None else self.loss
        assert loss is not None
        number, share = loss.of(i or 0, output)
        return {"loss": number}, share

    # --------------------------------------------------------------------------------------------------- for errors

    def remedy(self) -> str:
        """Say what to do if rows cannot be split."""
        batch = self._settings.study.splitter.batch
        first = [name for name, child in self._module.named_modules() if getattr(child, "batch_first", True) is False]
        remedy = f"dimension 0 of '{batch}' is not the batch (batch_first=True{f' for {first[0]!r}' if first else ''}?)"
        return f"{remedy}; name in no_chunk what every micro-batch gets whole, {GIVE_THEM}, or give chunks=1"

    def decisions(self) -> str:
        """Say what is split."""
        return f"by the sample: {self._settings.study.splitter.decisions()}"


def quote(error: BaseException) -> str:
    """Return the first line of an error."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"

"""The plain side of a proof: how the model runs without the pipeline, on the same devices, and what it draws there."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.batch.given import GIVE_THEM
from torchgpipe.batch.inputs import Arguments, SplitBatch
from torchgpipe.devices.generators import state_of
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.model.comparison import cotangent
from torchgpipe.model.values import copy_without_graph, each, mapped
from torchgpipe.pipeline.pipeline import Pipeline
from torchgpipe.pipeline.step_loss import MicroBatchLoss
from torchgpipe.pipeline.whole import Whole
from torchgpipe.proof.proof import Proof, Roots, Take
from torchgpipe.replay.random import generators_in
from torchgpipe.replay.random_numbers import RandomNumbers
from torchgpipe.run.visitors import unobserved

__all__ = ["PlainSide"]


class _AliasedGradients(Take):
    """The aliases of a run, by the names of their parameters."""

    def __init__(self, aliases: Aliases, names: Mapping[Tensor, str]) -> None:
        self.aliases, self._names = aliases, names

    def own(self) -> list[Tensor]:
        return self.aliases.all()

    def take(self) -> Iterator[tuple[str, Tensor | None]]:
        return zip([self._names[parameter] for parameter in self.aliases.trained], self.aliases.take())


class PlainSide(Proof, ABC):
    """The plain model in a comparison on one mini-batch.

    Args:
        pipeline: what runs the pipelined model
        batch: the mini-batch
        target: the target of the loss function; None to compare what the model returns
        whole: the plain model over several processes
        number: the number of the proof, in all processes

    Attributes:
        number: see above
        differing: the outputs that may differ, and do
    """

    #: A half, as of two micro-batches of equal weight: then even gradients that ignore it are those of a step.
    scale_apart = 0.5

    def __init__(
        self, pipeline: Pipeline, batch: SplitBatch, target: Any, whole: Whole | None, number: int = 0
    ) -> None:
        self.number = number
        self._whole, self._plain = whole, pipeline if whole is None else whole.pipeline
        self._pipeline, self._settings = pipeline, pipeline.settings
        self._model: Any = pipeline.module
        study, splits = self._settings.study, not batch.given
        super().__init__(self._model, self._settings.devices, batch.sizes, study.epsilon, splits=splits)
        with torch.inference_mode(False):
            self._batch = batch.mapped(copy_without_graph)
            self._target = mapped(target, copy_without_graph)
        self._with_loss = target is not None and self._settings.loss_fn is not None
        self._random: RandomNumbers | None = None
        self._drawn_before: list[bytes] = []
        #: The micro-batch that runs in the plain model, and what lets generators follow it.
        self._following: int | None = None
        self._generators = ExitStack()
        self._loss: MicroBatchLoss | None = None
        #: The factor of each micro-batch in the loss of a step.
        self._factors: dict[int, float] = {}
        self.differing: list[str] = []
        #: By output, the gradients of rows of the micro-batches.
        self._seeds: dict[str, list[Tensor]] = {}

    @contextmanager
    def running_plain(self) -> Iterator[Take]:
        names = self.names()
        with self._plain.in_one_piece(backward=True, moved=self._draw_on) as aliases:
            self._aliases, self._random = aliases, RandomNumbers(None)
            self._loss = self._loss_of(self._batch)
            self._drawn_before = self._states_of_layers()
            yield _AliasedGradients(aliases, names)

    def names(self) -> dict[Tensor, str]:
        """Return names for the parameters that are there now."""
        return {parameter: f"'{name}'" for name, parameter in self._module.named_parameters()}

    @contextmanager
    def draw_as(self, i: int) -> Iterator[None]:
        self._following = i
        with self._generators:
            self._draw_on(0)
            try:
                yield
            finally:
                self._following = None

    def _draw_on(self, column: int) -> None:
        """Let the random numbers of the micro-batch go on on the device of a column."""
        if self._following is None or self._random is None:  # What runs again at backward draws what it has drawn.
            return
        self._generators.close()
        self._generators.enter_context(self._random.of(self._following, self._devices[column]))

    def draws(self) -> bool:
        assert self._random is not None
        of_layers = self._states_of_layers() != self._drawn_before
        return any(self._random.drawn) or of_layers

    def _states_of_layers(self) -> list[bytes]:
        """Return the states of generators that layers have of their own."""
        return [state_of(generator).numpy().tobytes() for generator in generators_in(self._module.modules())]

    def run_plain(self, i: int | None) -> Any:
        return self._call(self._batch.arguments if i is None else self._batch.parts[i])

    def _call(self, arguments: Arguments) -> Any:
        # Clones, which the model may change.
        to_device = self._pipeline.to(self._devices[0])
        args, kwargs = arguments.mapped(lambda tensor: to_device(tensor.clone()))
        output = self._model._torchgpipe_forward(*args, **kwargs)
        self._aliases.verify_returned((tensor for _, tensor in each(output)), "the model")
        return output

    def tensors(self, output: Any) -> Iterator[tuple[str, Tensor]]:
        return each(output)

    def without_graph(self, output: Any) -> Any:
        with unobserved():
            return mapped(output, copy_without_graph, caches=True)

    def _loss_of(self, batch: SplitBatch) -> MicroBatchLoss | None:
        if not self._with_loss:
            return None
        to_device = self._pipeline.to(self._devices[-1])
        return MicroBatchLoss(self._settings, batch, self._target, to_device, training=self._module.training)

    def roots(self, i: int, output: Any) -> Roots:
        if self._loss is not None:
            value, share = self._loss.of(i, output)
            with unobserved():
                return [(value, torch.full_like(value, share))] if value.requires_grad else []
        with unobserved():
            return [(tensor, cotangent(path, tensor)) for path, tensor in each(output) if tensor.requires_grad]

    def roots_of_rows(self, i: int | None, output: Any) -> Roots:
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

    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        for part in self._batch.parts:
            yield from self._settings.study.splitter.tensors(part).items()

    def without_modes(self) -> AbstractContextManager[object]:
        return unobserved()

    def sum_losses(self) -> Tensor | None:
        return None if self._loss is None else self._loss.sum()

    def numbers(self, i: int | None, output: Any) -> dict[str, Tensor]:
        if not self._with_loss:
            return {path: tensor for path, tensor in each(output) if tensor.dim() == 0 and tensor.is_floating_point()}
        loss = self._loss_of(self._batch.whole) if i is None else self._loss
        assert loss is not None
        number, factor = loss.of(i or 0, output)
        if i is not None:
            self._factors[i] = factor
        return {"loss": number}

    def explain_failure(self, error: Exception, rows: Any = None) -> Exception:
        error.add_note(
            f"while {rows or self._sizes} rows of the sample ran through the plain model, to compare the pipeline with "
            f"it ({self._decisions()}); perhaps {self._remedy()}"
        )
        return error

    def _remedy(self) -> str:
        batch = self._settings.study.splitter.batch
        first = [name for name, child in self._module.named_modules() if getattr(child, "batch_first", True) is False]
        remedy = f"dimension 0 of '{batch}' is not the batch"
        remedy += f" (batch_first=True for '{first[0]}'?)" if first else " (batch_first=True?)"
        return f"{remedy}; name in no_chunk what every micro-batch gets whole, {GIVE_THEM}, or give chunks=1"

    def _decisions(self) -> str:
        return f"by the sample: {self._settings.study.splitter.decisions()}"

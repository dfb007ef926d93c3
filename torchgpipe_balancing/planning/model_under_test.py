"""The model that a plan is for: a Sequential, which becomes a GPipe, or any other module, which is pipelined in place.

A plan never runs the caller's model. It runs a copy, in pipelines of all kinds: with every layer in a partition of its
own, to measure the layers, or as the plan will have it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.batch.inputs import Arguments, arguments_of, resized
from torchgpipe.batch.microbatch import NoChunk
from torchgpipe.batch.outputs import own_loss
from torchgpipe.devices.torch_internals import pytree
from torchgpipe.front.pipelined import pipelined_apart, verify_module
from torchgpipe.gpipe import GPipe
from torchgpipe.model.values import each, mapped
from torchgpipe.schedule import Schedule
from torchgpipe.skip.tracker import SkipTracker
from torchgpipe.spine.arrange import arrange
from torchgpipe.spine.sample import Study, study
from torchgpipe.spine.settings import Settings
from torchgpipe_balancing.walk import copied, layers_of

__all__ = ["Config", "ModelUnderTest", "apply", "release_memory"]


class Config(NamedTuple):
    """How to pipeline a model.

    Attributes:
        balance: the number of layers in each partition
        devices: the device of each partition
        chunks: the number of micro-batches
        schedule: the schedule of a step
        recomputed: the positions of the layers that are recomputed
    """

    balance: Sequence[int]
    devices: Sequence[torch.device]
    chunks: int
    schedule: Schedule = "1F1B"
    recomputed: Collection[int] = ()


class ModelUnderTest:
    """A copy of the model to plan for.

    The layers of a Sequential are those of GPipe, those of any other module the parts of its spine.

    Args:
        model: the model
        sample: as for GPipe's step, or for `pipelined`
        target: the target of the loss function, with the rows of the sample
        partitions: the largest number of partitions
        options: further arguments of GPipe or `pipelined`

    Raises:
        TypeError: the model is no module.
        ValueError: the sample has no rows, or the model cannot be pipelined.

    Attributes:
        layers: for each layer, the names of the modules that it consists of
        rows: the number of rows of the sample
        loss: where the loss comes from, for people
    """

    def __init__(self, model: nn.Module, sample: Any, target: Any, partitions: int, options: Mapping[str, Any]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, but is {type(model).__name__}")
        self._target, has_own_loss = target, False
        self._sample: Any = None
        self._pipeline: Any = None
        self._studied: Study | None = None
        #: Returns the sample with so many rows.
        self._arguments: Callable[[int], Arguments]
        #: Returns the position of the layer that a parameter or buffer belongs to.
        self._layer_of: Callable[[str], int]
        if isinstance(model, nn.Sequential):
            self._model: nn.Module = _copied(model)
            tensors = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim()]
            self.rows = len(tensors[0]) if tensors else 0
            self._arguments = lambda rows: Arguments((resized(sample, self.rows, rows),), {})
        else:
            verify_module(model)
            self._model = _copied(model)
            self._sample = arguments_of(sample)
            # The sample runs once, before the partitions are on different devices.
            self._studied = study(self._model, self._sample, options.get("no_chunk", ()), rounds=1)
            has_own_loss = "loss_fn" not in options and own_loss(self._studied.traces[0].output) is not None
            self.rows = self._studied.splitter.rows
            self._arguments = partial(self._studied.splitter.resized, self._sample)
        if not self.rows:
            raise ValueError("the sample has no rows: no tensor in it has a dimension 0 to split")
        self._split(partitions, options)
        has_loss = has_own_loss or "loss_fn" in options
        self._options = {**({} if has_loss else {"loss_fn": _mean_of_all, "reduce": "mean"}), **options}
        known = "the model's own" if has_own_loss else "none: the mean of the output stands in"
        self.loss = "loss_fn" if "loss_fn" in options else known

    def _split(self, partitions: int, options: Mapping[str, Any]) -> None:
        """Find the layers."""
        if isinstance(self._model, nn.Sequential):
            names = list(layers_of(self._model))
            self.layers = [[name] for name in names]
            self._layer_of = lambda name: names.index(name.partition(".")[0])
        else:
            settings = self._each_part_apart(partitions, options)
            parts = range(len(settings.devices))
            self.layers = [[name for name, k in settings.doors.items() if k == part] for part in parts]
            self._layer_of = settings.column_of

    def with_layers_for(self, partitions: int) -> ModelUnderTest:
        """Return the same copy, with the layers that there are for so many partitions."""
        other = copy.copy(self)
        other._split(partitions, self._options)
        return other

    def _each_part_apart(self, partitions: int, options: Mapping[str, Any]) -> Settings:
        """Return the settings with which each part of the spine, as it is for so many partitions, is one of its own."""
        more: dict[str, Any] = dict.fromkeys(("loss_fn", "weight", "reduce"))
        more |= {"no_chunk": options.get("no_chunk", ()), "checkpoint": (), "chunks": 1, "schedule": "1F1B"}

        def arranged(n: int, balance: Any, *, fixed: bool) -> Settings:
            devices, apart = [torch.device("cpu")] * n, {"apart": True, "studied": self._studied, **more}
            return arrange(self._model, self._sample, devices, fixed=fixed, balance=balance, **apart)

        # A schedule with more partitions than there are parts is left out later.
        spine = arranged(partitions, "parameters", fixed=False).layout.spine
        begins = [name.split("..")[0] for name in spine]
        return arranged(len(begins), {name: j for j, name in enumerate(begins) if j}, fixed=True)

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the copy."""
        return list(self._model.parameters())

    def module(self, name: str) -> nn.Module:
        """Return a module of the copy."""
        return self._model.get_submodule(name)

    def owned(self) -> list[list[Tensor]]:
        """Return the parameters and buffers of each layer."""
        owned: list[dict[int, Tensor]] = [{} for _ in self.layers]
        # A parameter that two partitions share has a gradient in both.
        parameters = self._model.named_parameters(remove_duplicate=False)
        for name, tensor in [*parameters, *self._model.named_buffers(remove_duplicate=False)]:
            owned[self._layer_of(name)][id(tensor)] = tensor
        return [list(tensors.values()) for tensors in owned]

    def plain(self, rows: int) -> Any:
        """Run forward of the copy, without a pipeline, on so many rows, and return the loss."""
        arguments = pytree.tree_map_only(NoChunk, lambda whole: whole.tensor, self._arguments(rows))
        args, kwargs = self._beside(arguments)
        with SkipTracker():
            output = self._model(*args, **kwargs)
        loss_fn = self._options.get("loss_fn")
        if loss_fn is None:
            return own_loss(output)
        try:
            return loss_fn(output, self._beside(resized(self._target, self.rows, rows)))
        except Exception as error:
            if self._target is not None:
                raise
            raise ValueError(f"loss_fn failed without a target; give that of the sample, target= ({error})") from error

    def pipeline(self, config: Config) -> tuple[nn.Module, Callable[..., Any]]:
        """Pipeline the copy; return it, and what runs a step on so many rows."""
        sample, options = None, self._options
        if self._studied is not None:
            if self._pipeline is not None:
                self._pipeline.unpipelined()
            # Without a proof, which what is only measured needs not; `Plan.apply` has it.
            sample, options = tuple(self._sample), {**options, "verify": False}
        model = self._pipeline = apply(self._model, self.layers, config, sample, options, self._studied)

        def step(rows: int) -> Any:
            args, kwargs = self._arguments(rows)
            return model.step(*args, target=resized(self._target, self.rows, rows), **kwargs)

        return model, step

    def _beside(self, value: Any) -> Any:
        """Return a value with its tensors on the device of the model."""
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        return mapped(value, lambda tensor: tensor.to(device))


def apply(
    model: nn.Module,
    layers: Sequence[Sequence[str]],
    config: Config,
    sample: Any,
    options: Mapping[str, Any],
    studied: Study | None = None,
) -> Any:
    """Pipeline a model.

    Args:
        model: the model
        layers: for each layer, the names of its modules
        config: how to pipeline it
        sample: the sample of a model that is no Sequential
        options: further arguments of GPipe or `pipelined`
        studied: what the sample has shown of a model that is no Sequential (default: it runs)
    """
    recomputed = [name for k in sorted(config.recomputed) for name in layers[k]]
    more = dict(chunks=config.chunks, devices=config.devices, schedule=config.schedule, **options)
    if isinstance(model, nn.Sequential):
        return GPipe(model, config.balance, checkpoint=recomputed or "never", **more)
    balance = {layers[cut][0]: j for j, cut in enumerate(list(accumulate(config.balance))[:-1], 1)}
    return pipelined_apart(model, sample, studied=studied, balance=balance, checkpoint=recomputed, **more)


def release_memory(devices: Iterable[torch.device]) -> None:
    """Give back the memory of a copy that nobody refers to any more."""
    gc.collect()  # A model may be in cycles of its own.
    if any(device.type != "cpu" for device in devices):
        torch.accelerator.empty_cache()


def _mean_of_all(output: Any, _target: Any) -> Tensor:
    """Return a loss that depends on all of the output."""
    parts = [tensor.float().mean() for _, tensor in each(output) if tensor.is_floating_point()]
    if not parts:
        raise ValueError(
            f"a plan measures backward, but the output, of {type(output).__name__}, has no tensor of floating point to "
            "take for a loss; give loss_fn=, or plan for a model that returns one"
        )
    return torch.stack(parts).sum()


def _copied(model: nn.Module) -> Any:
    """Return a copy in training mode, without gradients; parts of a model in training mode keep their own modes."""
    made = copied(model)
    if not model.training:
        made.train()
    made.zero_grad(set_to_none=True)
    return made

"""Walk along the layers with a sample, with one layer at a time on the device.

A model that needs a pipeline may be too large for any one device. So only one layer is on the device at a time: it is
copied there, measured and dropped, and the next layer gets its output. Working on copies also leaves the caller's
module as it was: its parameters, gradients, buffers, mode and devices are never touched.

        sample --> copy of layer 0 --> cut --> copy of layer 1 --> cut --> ...

A cut ends the graph, so that backward of a layer does not run into the layer before. A skip is cut, too. It waits on
the host between the layer that stashes it and the layer that pops it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import pytree
from torchgpipe.skip.layout import skips_of
from torchgpipe.skip.namespace import SkipKey
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["Input", "Output", "copied", "gradients_of", "layers_of", "run", "shapes_of", "tensors_in", "walk"]

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Skips: TypeAlias = dict[SkipKey, Tensor | None]


class Input(NamedTuple):
    """The arguments of a layer, and the skips that it pops."""

    arguments: tuple[Any, ...]
    skips: Skips


class Output(NamedTuple):
    """The value that a layer returns, and the skips that it stashes."""

    value: Any
    skips: Skips


# Runs one layer, and returns its output and what was measured.
Measure: TypeAlias = Callable[[nn.Module, Input], tuple[Output, T]]


def layers_of(module: nn.Sequential) -> dict[str, nn.Module]:
    """Return the layers by name; a layer that occurs twice is there twice.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential to be partitioned, not {type(module).__name__}")
    return dict(zip(module._modules, module, strict=True))


def walk(module: nn.Sequential, sample: Any, device: torch.device, measure: Measure[T]) -> list[T]:
    """Pass the sample through copies of all layers, and return what was measured for each."""

    def visit(layer: nn.Module, value: Any) -> tuple[Any, T]:
        popped = {key: skips.pop(key) for key in skips_of(layer.modules(), "poppable_names") if key in skips}
        arguments = value if _is_several(module, layer, value, first=not measurements) else (value,)
        input = Input(arguments, _cut(_placed(popped, device)))
        output, measured = measure(copied(layer).to(device).train(), input)
        skips.update(_placed(output.skips, "cpu"))
        return _cut(output.value), measured

    value = _cut(_placed(sample, device))
    skips: Skips = {}  # on the host, to leave the device's memory to the layers in between
    measurements: list[T] = []
    for name, layer in layers_of(module).items():
        try:
            value, measured = visit(layer, value)
        except Exception as error:
            error.add_note(
                f"while profiling layer {name!r} ({type(layer).__name__}) with input {shapes_of(value)}, "
                f"from a sample of {shapes_of(sample)}, on {device}"
            )
            raise
        measurements.append(measured)
    return measurements


def run(layer: nn.Module, input: Input) -> Output:
    """Run a layer. All runs of layers go through here."""
    # Autocast caches cast parameters. The cache would keep those of copies that are gone, and hand a cast that was made
    # without a graph to a run that needs one.
    torch.clear_autocast_cache()
    tracker = SkipTracker(input.skips.items())
    with tracker:
        return Output(layer(*input.arguments), tracker.skips)


def gradients_of(output: Output) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of an output that backward starts from, and ones as the gradient of each."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    return tensors, [torch.ones_like(tensor) for tensor in tensors]


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def shapes_of(value: Any) -> str:
    """Return the shapes and types of all tensors, for messages."""
    shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value)]
    return ", ".join(shapes) or "no tensor"


def _is_several(module: nn.Sequential, layer: nn.Module, value: Any, *, first: bool) -> bool:
    """Return whether a value is several arguments of a layer of the module."""
    if not isinstance(value, tuple):
        return False
    # A plain Sequential takes one argument; a PipeSequential takes several and hands several on.
    return _takes(module, None, None) or (first and len(value) > 1 and _takes(layer, *value))


def _takes(layer: nn.Module, *arguments: Any) -> bool:
    """Return whether a layer can be called with these arguments."""
    try:
        inspect.signature(layer.forward).bind(*arguments)
    except (TypeError, ValueError):  # A ValueError says that there is no signature to look at.
        return False
    return True


class _Cut(torch.autograd.Function):
    """Give a tensor a graph of its own, in which its gradient ends.

    The tensor is not a leaf, because a layer may work on it in place. It is not a copy either: a layer's input is
    recognised by its storage as what the layer before already keeps.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _cut(value: Any) -> Any:
    """Cut all tensors off their graph; tensors that required grad still do."""
    phony = torch.empty(0, device="cpu", requires_grad=True)

    def cut(tensor: Tensor) -> Tensor:
        alone = tensor.detach()
        return _Cut.apply(phony, alone) if tensor.requires_grad else alone  # type: ignore[no-untyped-call]

    return pytree.tree_map_only(Tensor, cut, value)


def copied(model: M) -> M:
    """Return a copy of a module.

    `copy.deepcopy` alone refuses tensors that a layer has computed and keeps as attributes, as weight_norm does.
    """
    computed: dict[int, Any] = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(model, computed)


def _placed(value: Any, device: torch.device | str) -> Any:
    """Copy all tensors to the device, without their graph."""

    def placed(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, placed, value)

"""The glue of a model: operations between two modules of the spine, such as masks, residuals, and the loss.

What the operations do is told as far as function modes and names tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchgpipe.devices.torch_internals import is_of_compiler

__all__ = [
    "DIFFERENTIATES",
    "OF_A_PLACE",
    "OF_THE_ORIGINAL",
    "TO_A_DEVICE",
    "changes_in_place",
    "explain_compiler",
    "on_device",
]

#: What asks for a tensor's description, its whole gradient or its memory on the host: the tensor itself answers that.
OF_THE_ORIGINAL = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "ndim", "requires_grad", "is_leaf", "layout", "grad", "retains_grad")
} | {
    getattr(torch.Tensor, name)
    for name in (
        *("size", "dim", "numel", "__len__", "is_floating_point", "stride"),
        *("register_hook", "retain_grad", "numpy", "__array__"),
    )
}

#: What asks where a tensor is.
OF_A_PLACE = {
    torch.Tensor.get_device,
    *[getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")],
}

#: What takes a device as its second argument, where other operations may have a number or a word.
TO_A_DEVICE = {torch.Tensor.to, torch.Tensor.cuda}

DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}

_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "div", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
}

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def changes_in_place(func: Callable[..., Any]) -> bool:
    """Return whether ``func`` changes its first argument in place: its values, shape, graph or memory."""
    name = func.__name__
    return name in _IN_PLACE or func == _SET_DATA or (name.endswith("_") and not name.endswith("__"))


def on_device(
    func: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, devices: Sequence[torch.device]
) -> tuple[Any, Any]:
    """Return the arguments of an operation with ``device`` in the place of a device of another column.

    A device that the model names, or has remembered, may be that of another column. But on the host, a model may want
    to compute; what is needed elsewhere is copied then.
    """

    def is_of_a_column(value: Any) -> bool:
        if not isinstance(value, (torch.device, str, int)):
            return False
        named = torch.device(value)
        return named.type == device.type and named in devices

    if is_of_a_column(kwargs.get("device")):
        kwargs = {**kwargs, "device": device}
    if func in TO_A_DEVICE and len(args) > 1 and is_of_a_column(args[1]):
        args = (args[0], device, *args[2:])
    return args, kwargs


def explain_compiler(error: BaseException) -> None:
    """Add a note to an error of the compiler, which knows nothing of columns."""
    if is_of_compiler(error):
        error.add_note(
            "between two modules, compiled functions take tensors as they are, of any device: call them in a module "
            "that gets these as arguments; each device has graphs of its own: raise "
            "torch._dynamo.config.recompile_limit; under offload, operations are watched: leave out fullgraph=True"
        )

"""The glue of a model: operations between two modules of the spine, such as masks, residuals, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from torchgpipe.devices.torch_internals import is_of_compiler
from torchgpipe.frames.columns import Columns
from torchgpipe.frames.crossing import Crossing
from torchgpipe.frames.door import this_thread
from torchgpipe.frames.frame import Frame
from torchgpipe.frames.operations import DIFFERENTIATES, OF_THE_ORIGINAL
from torchgpipe.graph.split_backward import nodes_below
from torchgpipe.model.values import each, mapped

__all__ = ["Glue", "explain_compiler"]

#: What takes a device as its second argument, where other operations may have a number or a word.
_TO = {torch.Tensor.to, torch.Tensor.cuda}


class Glue(TorchFunctionMode):
    """Imports the arguments of operations between two modules of the spine: masks, residuals, the loss.

    Inside modules of the spine this mode is off, because their arguments are imports.

    Args:
        frame: the frame in whose thread this mode is active
        crossing: the imports of the frame
        columns: the columns
    """

    def __init__(self, frame: Frame, crossing: Crossing, columns: Columns) -> None:
        super().__init__()
        self._frame = frame
        self._crossing = crossing
        self._columns = columns
        self._devices = columns.devices
        self.is_off = False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, kwargs = self._frame, kwargs or {}
        # The compiler would keep what it finds here. `is_compiling` is true in all threads while one of them compiles.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        # A pipeline within the model has visitors of its own, and carries this mode to its threads.
        is_elsewhere = self.is_off or getattr(this_thread.visitor, "frame", None) is not frame
        if is_elsewhere or func in OF_THE_ORIGINAL:
            return func(*args, **kwargs)
        # A device that the model names, or has remembered, may be that of another column. But on the host, a model may
        # want to compute; what is needed elsewhere is copied then.
        if self._is_of_a_column(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._devices[frame.column]}
        if func in _TO and len(args) > 1 and self._is_of_a_column(args[1]):
            args = (args[0], self._devices[frame.column], *args[2:])
        if not frame.column:
            return func(*args, **kwargs)
        if func in DIFFERENTIATES:
            if func is torch.autograd.grad and self._is_of_this_column(args, kwargs):
                return func(*args, **kwargs)
            raise RuntimeError(
                "the model computes gradients in its forward, behind a boundary between partitions, where the graph is "
                "cut; give a balance that keeps what it differentiates in one partition, or let one module do all of it"
            )
        args = mapped(args, self._crossing.import_tensor)
        if kwargs:
            kwargs = mapped(kwargs, self._crossing.import_tensor)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._crossing.mark_made(result)
        return result

    def _is_of_this_column(self, args: Any, kwargs: Any) -> bool:
        """Return whether all paths that `torch.autograd.grad` looks for are in the graph of this column."""
        given = args, kwargs
        if mapped(given, self._crossing.import_tensor) is not given:
            return False
        named = {**dict(zip(("outputs", "inputs"), args)), **kwargs}
        # What has been computed here is not reached through an import; a leaf may have been used anywhere.
        has_leaves = any([tensor.grad_fn is None for _, tensor in each(named["inputs"])])
        roots = [get_gradient_edge(tensor) for _, tensor in each(named["outputs"]) if tensor.requires_grad]
        return not has_leaves or not any([type(node).__name__ == "EnterBackward" for node in nodes_below(roots)])

    def _is_of_a_column(self, value: Any) -> bool:
        if not isinstance(value, (torch.device, str, int)):
            return False
        device = torch.device(value)
        return device.type == self._devices[self._frame.column].type and device in self._devices


def explain_compiler(error: BaseException) -> None:
    """Add a note to an error of the compiler, which knows nothing of columns."""
    if is_of_compiler(error):
        error.add_note(
            "between two modules, compiled functions take tensors as they are, of any device: call them in a module "
            "that gets these as arguments; each device has graphs of its own: raise "
            "torch._dynamo.config.recompile_limit; under offload, operations are watched: leave out fullgraph=True"
        )

"""What a step that fails leaves: all as it was before, so that the same step can run again, perhaps in more chunks.

    gradients of parameters       are at aliases until the step ends; see `of_steps`
    gradients of other leaves     such as the parameters of a loss function, are set aside here
    buffers, attributes           of layers, and of modules that the loss function has: see `replay.state`
    random numbers                the generators of PyTorch, Python and NumPy, and of layers

Leaves are known where the loss function, or a forward that was put on a layer, has them as modules, attributes,
variables of a closure, or globals. Only small tensors are copied before a step. So a large one that has changed in a
step that fails stays changed, and the error says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.generators import generators_of_all, go_on_from, state_of
from torchgpipe.gradients.set_aside import SetAside
from torchgpipe.replay.random import generators_in
from torchgpipe.replay.state import State

__all__ = ["all_or_nothing"]


@contextmanager
def all_or_nothing(
    model: nn.Module, loss_fn: Callable[..., Any] | None, devices: Iterable[torch.device]
) -> Iterator[None]:
    """Put back what a ``with`` block has changed, if it raises; an optimizer that steps in backward is not undone.

    Args:
        model: the model
        loss_fn: the loss function of the step
        devices: the devices that it computes on
    """
    modules = [*model.modules()]
    forwards = [forward for module in modules if (forward := vars(module).get("forward")) is not None]
    held = [value for function in (loss_fn, *forwards) for value in _held_by(function)]
    others = {module: None for value in held if isinstance(value, nn.Module) for module in value.modules()}
    outside = [*(others.keys() - {*modules})] if others else []
    before = State([*modules, *outside], of_step=True).begin()
    leaves = [value for value in held if isinstance(value, Tensor)]
    leaves += [tensor for module in outside for tensor in module._parameters.values() if tensor is not None]
    aside = SetAside(_leaves([*leaves, *before.tensors], modules))
    states = {generator: state_of(generator) for generator in (*generators_of_all(devices), *generators_in(modules))}
    aside.begin()
    try:
        yield
        aside.end([leaf.grad for leaf in aside.parameters])
    except BaseException as error:
        aside.undo()
        for name in before.put_back():
            error.add_note(f"{name} has changed in this step, and stays so")
        for generator, state in states.items():
            go_on_from(generator, state)
        raise


def _leaves(tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the leaves among tensors that may get a gradient outside of the parameters of modules, each once."""
    leaves = {tensor: None for tensor in tensors if tensor.requires_grad and tensor.is_leaf}
    owned = {parameter for module in modules for parameter in module._parameters.values()} if leaves else {}
    return [leaf for leaf in leaves if leaf not in owned]


def _held_by(function: Any) -> Iterator[Any]:
    """Yield the modules and the tensors that a function has: bound, in its closure, or as globals."""
    pending, seen = [function], set[int]()
    for value in pending:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (nn.Module, Tensor)):
            yield value
        elif isinstance(value, partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif callable(value) and not isinstance(value, type):
            cells, known = getattr(value, "__closure__", None) or (), getattr(value, "__globals__", {})
            pending += [getattr(value, "__self__", None), *getattr(value, "__dict__", {}).values()]
            pending += [cell.cell_contents for cell in cells if cell != CellType()]
            # Not functions, which lead on to all that PyTorch has.
            names = known.keys() & value.__code__.co_names if known else ()
            pending += [known[name] for name in names if isinstance(known[name], (nn.Module, Tensor))]

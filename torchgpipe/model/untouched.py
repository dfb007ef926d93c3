"""Running a model without leaving a trace: what a run changes is put back afterwards.

Parameters are not copied: a forward that changes their numbers is refused where a spine is found (see `spine.spine`),
and whoever runs backward sees to their gradients. But what a parameter has for attributes is put back, and the memory
that it had: a layer that packs its weights may move a scale from its parameter to itself in its first run, or give the
parameter packed memory, which the attributes describe.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.torch_internals import can_move_data, storage_key
from torchgpipe.model.comparison import difference_of
from torchgpipe.model.values import dotted, each
from torchgpipe.processes.stand_in import StandIn
from torchgpipe.replay.random import restored_generators

__all__ = ["attributes", "changes_no_number", "in_mode", "untouched"]

#: What every module has, apart from what its class puts there; of this, only hooks and buffers are put back.
_OF_EVERY_MODULE = {*vars(nn.Module())} - {"training"}
_PUT_BACK = [name for name in _OF_EVERY_MODULE if "hooks" in name or "buffers" in name]


def changes_no_number(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether an operation in place would leave its first argument as it is, as a clamp to wide bounds does.

    A copy tells: a tensor that was changed could not be put back where others use it.
    """
    tensor = args[0] if args else None
    if not isinstance(tensor, Tensor):
        return False
    copy = tensor.detach().clone()
    memory = copy.data_ptr()
    func(copy, *args[1:], **kwargs)
    return copy.data_ptr() == memory and torch.equal(copy, tensor)


@contextmanager
def untouched(module: nn.Module, devices: Iterable[torch.device] = ()) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Put buffers, attributes with their values, training modes and random states back after a ``with`` block.

    It provides what returns the buffers that have changed so far, by name, as copies.

    Args:
        module: the module
        devices: where it computes, beside the devices of its parameters
    """
    found = [*module.buffers(), *[tensor for *_, tensor in attributes(module)]]
    # Each once, as layers may share them. What a module of another process keeps is a stand-in.
    values = {
        tensor: tensor.detach().clone()
        for tensor in found
        if not (isinstance(tensor, (nn.Parameter, StandIn)) or tensor.is_meta)
    }
    buffers = [
        (dotted(prefix, name), child._buffers, name, buffer)
        for prefix, child in module.named_modules()
        for name, buffer in child._buffers.items()
    ]

    def changed() -> dict[str, Tensor]:
        return {
            full: now.detach().clone()
            for full, held, name, before in buffers
            # By values: a batch norm changes its statistics without a new version.
            if (now := held.get(name)) is not None
            and (before is None or (before in values and difference_of(values[before], now)[0] != 0))
        }

    # A leaf that is no parameter has no alias, so the gradients of a run arrive at the leaf.
    grads = {tensor: tensor.grad for tensor in values if tensor.is_leaf and tensor.requires_grad}
    restore = [_restoring_parameter(parameter) for parameter in module.parameters()]
    for child in module.modules():
        # Lazy layers come into being in their first run.
        if not any([parameter is not None and is_lazy(parameter) for parameter in child._parameters.values()]):
            restore.append(_restoring_state(vars(child)))
            # A library that installs hooks in the first run notes that in an attribute, so both are put back.
            restore += [put_back for name in _PUT_BACK for put_back in _put_backs(vars(child).get(name), 0)]
    owned = {parameter.device for parameter in module.parameters() if parameter.device.type != "meta"}
    with restored_generators({*owned, *devices}, list(module.modules())):
        try:
            for leaf in grads:
                leaf.grad = None
            yield changed
        finally:
            for tensor, value in values.items():
                _put_back(tensor, value)
            for leaf, grad in grads.items():
                leaf.grad = grad
            for put_back in restore:
                put_back()


@torch.no_grad()
def _put_back(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape == value.shape and difference_of(value, tensor)[0] != 0:
        tensor.copy_(value)


def attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the tensors among the attributes of modules, which are no parameters and no buffers of theirs."""
    for child in module.modules():
        for name, value in vars(child).items():
            if name not in _OF_EVERY_MODULE and isinstance(value, (Tensor, list, tuple, dict)):
                for _, tensor in each(value):
                    yield child, name, tensor


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Let a model be in training or in evaluation for a ``with`` block; if it is, all its parts stay as they are.

    Args:
        module: the model
        training: the mode
    """
    modes = [(child, child.training) for child in module.modules()] if module.training != training else []
    try:
        for child, _ in modes:
            child.training = training
        yield
    finally:
        for child, before in modes:
            child.training = before


def _restoring_state(state: dict[str, Any]) -> Callable[[], None]:
    """Return what puts back the attributes of a module or a parameter, and what is in them."""
    before = {name: value for name, value in state.items() if _is_state(name)}
    inner = [one for value in before.values() for one in _put_backs(value, 3)]

    def put_back() -> None:
        for name in [name for name in state if _is_state(name) and name not in before]:
            del state[name]
        state.update(before)
        for one in inner:
            one()

    return put_back


def _restoring_parameter(parameter: nn.Parameter) -> Callable[[], None]:
    put_back_state, requires_grad = _restoring_state(vars(parameter)), parameter.requires_grad
    # Of a tensor that wraps others, `data` is no memory.
    memory = parameter.data if not is_lazy(parameter) and can_move_data(parameter, parameter.device) else None

    def put_back() -> None:
        put_back_state()
        if memory is not None and not _is_same_memory(parameter.data, memory):
            parameter.data = memory
        parameter.requires_grad = requires_grad

    return put_back


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    if not a.layout is b.layout is torch.strided:
        return True  # No storage tells, and nobody packs these.
    return a.shape == b.shape and a.dtype == b.dtype and storage_key(a) == storage_key(b)


def _is_state(name: str) -> bool:
    return name not in _OF_EVERY_MODULE and not name.startswith("_torchgpipe")


def _put_backs(value: Any, depth: int) -> Iterator[Callable[[], Any]]:
    """Yield what puts back containers, generators of numbers, arrays and plain objects, with what they hold."""
    numpy: Any = sys.modules.get("numpy")
    if type(value) in (list, dict, set, deque, Counter, OrderedDict, defaultdict):
        copied = copy.copy(value)
        yield partial(_refill, value, copied)
        for item in (copied.values() if isinstance(copied, dict) else copied) if depth else ():
            yield from _put_backs(item, depth - 1)
    elif type(value) is random.Random:
        yield partial(value.setstate, value.getstate())
    elif numpy is not None and type(value) is numpy.ndarray:
        if value.flags.writeable:
            yield partial(numpy.copyto, value, value.copy())
    elif numpy is not None and isinstance(value, numpy.random.RandomState):
        yield partial(value.set_state, value.get_state())
    elif numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
        of_bits = getattr(value, "bit_generator", value)
        yield partial(setattr, of_bits, "state", copy.deepcopy(of_bits.state))
    elif type(value).__module__ not in ("builtins", "torch") and not (isinstance(value, Tensor) or callable(value)):
        yield from _put_backs(getattr(value, "__dict__", None), depth)


def _refill(value: Any, copied: Any) -> None:
    if _held(value) != _held(copied):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(copied)


def _held(value: Any) -> list[int]:
    return [*map(id, value), *map(id, value.values() if isinstance(value, dict) else ())]

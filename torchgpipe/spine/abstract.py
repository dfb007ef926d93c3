"""Values without their tensors' values: what a module returns, as far as other processes need to know it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchgpipe.model.values import container, copied, each, is_cache, mapped, walk
from torchgpipe.processes.stand_in import Form, StandIn, describe, form_of
from torchgpipe.processes.wire import register, see_class

__all__ = ["Abstract", "abstracted", "described", "leaves_of", "see", "values_told", "without_devices"]

_PLAIN = (int, float, str, bool, type(None), complex, torch.dtype, torch.device, torch.Size, type(Ellipsis), slice)


@register
class _Leaf(NamedTuple):
    """A tensor in a value.

    Attributes:
        form, requires_grad: of the tensor
        argument: the number of the argument that it is, or -1
        number: the number of its first place in the value
    """

    form: Form
    requires_grad: bool
    argument: int
    number: int


@register
class Abstract(NamedTuple):
    """A value with empty tensors, and what they stand for.

    Attributes:
        value: the value with empty tensors
        leaves: the tensors, in the order of `each`
    """

    value: Any
    leaves: list[_Leaf]

    def made(self, arguments: Sequence[Tensor], column: int, device: torch.device) -> Any:
        """Return the value with stand-ins that column ``column`` owns, on a device of this process."""
        made: list[Tensor] = []
        for k, (form, requires_grad, argument, number) in enumerate(self.leaves):
            if argument >= 0:
                made.append(arguments[argument])
            else:
                made.append(made[number] if number < k else StandIn(_here(form, device), column, requires_grad))
        tensors = iter(made)
        if isinstance(self.value, Tensor):
            return next(tensors)
        # The model may add to a list that it gets, also to an empty one.
        return mapped(copied(self.value), lambda _: next(tensors), objects=True)


def _here(form: Form, device: torch.device) -> Form:
    """Return a form on a device of this process; what is on the host of the other process is on the host here."""
    return form if form.device == device or form.device.type != device.type else form._replace(device=device)


def abstracted(value: Any, arguments: Sequence[Tensor] = ()) -> Abstract:
    """Return a value without its tensors' values; those that are among ``arguments`` are known by their numbers."""
    see(value)
    tensors = [tensor for _, tensor in each(value, objects=True)]
    leaves, known = leaves_of(tensors, arguments), set(map(id, tensors))
    # What is within caches is of no use elsewhere.
    empty = mapped(
        copied(value), lambda tensor: torch.empty(0) if id(tensor) in known else None, caches=True, objects=True
    )
    return Abstract(empty, leaves)


def see(value: Any) -> None:
    """Note the classes of the containers in a value, so that other processes can tell values of these classes."""
    for _, item in walk(value, objects=True):
        if container(item, caches=True, objects=True) is not None:
            see_class(type(item))


def leaves_of(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[_Leaf]:
    """Return what tensors are known by; those that are among ``arguments`` are known by their numbers."""
    numbers = {id(tensor): k for k, tensor in enumerate(arguments)}
    first: dict[int, int] = {}
    return [
        _Leaf(form_of(tensor), tensor.requires_grad, numbers.get(id(tensor), -1), first.setdefault(id(tensor), k))
        for k, tensor in enumerate(tensors)
    ]


def values_told(value: Any, *, gather: bool) -> list[Tensor | None]:
    """Return what other processes are told of the tensors in a value: those of one number, or all if ``gather``."""
    return [tensor.detach().cpu() if gather or tensor.dim() == 0 else None for _, tensor in each(value)]


def without_devices(text: str) -> str:
    """Return a text without the numbers of devices: each process has others."""
    return re.sub(r"device\(type='(\w+)'(, index=\d+)?\)", r"\1", text)


def described(value: Any, tensors: list[Tensor]) -> Any:
    """Return what tells a value from others as far as forms go; what a cache holds, each process has some of.

    Args:
        value: a value
        tensors: gets the tensors in the value
    """

    def other(value: Any, *, objects: bool = True) -> Any:
        if isinstance(value, torch.device):
            return value.type  # Each process has others.
        if isinstance(value, _PLAIN):
            return str(value)
        name = type(value).__name__
        opened = None if is_cache(value) else container(value, objects=objects)
        if opened is None:
            return name
        # How long its sequences are is no form.
        sizes = value.batch_sizes.tolist() if isinstance(value, PackedSequence) else ()
        # Objects may refer to each other in a circle; see `mapped`, whose order this is.
        inner = partial(other, objects=objects and isinstance(value, (tuple, list, Mapping)))
        return (name, *sizes, *opened.names, *[describe(item, inner, tensors) for item in opened.items])

    return describe(value, other, tensors)

"""What processes tell each other: plain data as JSON, and behind it the elements of tensors.

    length of the text │ text │ elements of the first tensor │ of the second ...

Whoever reaches the store or a port can put something there. A pickle runs what it names; a text here can
only name what is registered, and classes of containers that this process has itself seen in its run of the sample.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchgpipe.processes.elements import ALIGNMENT, elements_of, from_elements, sent_shape, shift_of
from torchgpipe.processes.stand_in import Form

__all__ = ["pack", "register", "see_class", "unpack"]


#: The name of each class whose values can be told, and what returns simpler values that stand for one.
_told_as: dict[type, tuple[str, Callable[[Any], Any]]] = {}

#: By these names, what makes a value again.
_makers: dict[str, Callable[[Any], Any]] = {}


def register(kind: Any, told: Callable[[Any], Any] = list, made: Callable[[Any], Any] | None = None) -> Any:
    """Let processes tell each other values of a class, and return the class.

    Args:
        kind: the class
        told: returns simpler values that stand for one; the items of a named tuple, by default
        made: makes one of these again
    """
    _told_as[kind] = kind.__name__, told
    _makers[kind.__name__] = made or (lambda items: kind(*items))
    return kind


_dtypes = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

register(tuple, list, tuple)
register(dict, lambda value: [*map(list, value.items())], dict)
register(torch.Size, list, torch.Size)
register(torch.dtype, str, _dtypes.__getitem__)
register(torch.device, str, torch.device)
register(slice, lambda value: [value.start, value.stop, value.step])
register(complex, lambda value: [value.real, value.imag])
register(type(Ellipsis), lambda _: None, lambda _: Ellipsis)
register(np.ndarray, lambda value: torch.from_numpy(value.copy()), Tensor.numpy)
register(Form)


class Untold:
    """What stands for an object that only its own process has, such as a function.

    Args:
        kind: the class of the object
    """

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the model uses '{name}' of an object of {self.kind} that another process has; let modules return "
            "tensors, numbers and words, in tuples, lists and dicts"
        )


#: The classes of containers that this process has seen.
_seen: dict[str, Any] = {}


def see_class(kind: Any) -> None:
    """Let other processes tell objects of a class, as their items and attributes."""
    _seen[str(kind)] = kind


def _opened(value: Any) -> list[Any]:
    """Return the class of an object, its items, and its attributes."""
    kind, pairs = type(value), [*map(list, dict.items(value))] if isinstance(value, dict) else []
    names = vars(value) if hasattr(value, "__dict__") else getattr(kind, "__dataclass_fields__", ())
    attributes = [[name, getattr(value, name)] for name in names if not pairs or name not in value]
    return [str(kind), [*value] if isinstance(value, (tuple, list)) else pairs, attributes]


def _closed(told: list[Any]) -> Any:
    """Return an object like the one that `_opened` was given, without a call of its constructor if it is no sequence.

    Raises:
        TypeError: this process has not seen its class.
    """
    name, items, attributes = told
    if name not in _seen:
        raise TypeError(
            f"no module has returned an object of {name} here for the sample; give pipelined a sample that takes this "
            "way, or return tuples, lists and dicts"
        )
    kind = _seen[name]
    if issubclass(kind, (tuple, list)):
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    made = kind.__new__(kind)
    for key, item in items:
        made[key] = item
    for attribute, item in attributes:
        object.__setattr__(made, attribute, item)
    return made


_makers |= {"object": _closed, "Untold": Untold}


#: The length of the text.
_HEAD = struct.Struct("<q")


def pack(value: Any, lead: int = 0) -> Tensor:
    """Return a value as bytes; for what is neither plain nor a dense tensor, there will be an `Untold`.

    Args:
        value: the value
        lead: how many bytes are free in front
    """
    tensors: list[tuple[Tensor, int]] = []
    text = json.dumps(_told(value, tensors)).encode()
    end, places = _HEAD.size + len(text), []
    for flat, shift in tensors:
        places.append(_aligned(end) + shift * flat.itemsize)
        end = places[-1] + flat.nbytes
    data = torch.empty(lead + end, dtype=torch.uint8, device="cpu")
    room: Any = data[lead:].numpy()
    memoryview(room)[: _HEAD.size + len(text)] = _HEAD.pack(len(text)) + text
    for place, (flat, _) in zip(places, tensors):
        room[place : place + flat.nbytes] = flat.view(torch.uint8).numpy()
    return data


def unpack(data: Tensor, device: torch.device | None = None) -> Any:
    """Return the value that `pack` has been given.

    Args:
        data: the bytes; tensors of the host are in their memory
        device: where tensors go, if not to the host

    Raises:
        RuntimeError: these are no such bytes.
    """
    buffer: Any = data.numpy()
    begin = 0

    def take(name: str, shape: list[int], stride: list[int], shift: int) -> Tensor:
        nonlocal begin
        dtype = _dtypes[name]
        form = Form(tuple(shape), tuple(stride), dtype, device or torch.device("cpu"))
        count = math.prod(sent_shape(form))
        if not count:
            return torch.empty_strided(shape, stride, dtype=dtype, device=form.device)
        # Not a view, which would have the version counter of all.
        flat = torch.frombuffer(buffer, dtype=dtype, count=shift + count, offset=_aligned(begin))[shift:]
        begin = _aligned(begin) + (shift + count) * dtype.itemsize
        return from_elements(flat.to(form.device), form)

    try:
        begin = _HEAD.size + _HEAD.unpack_from(buffer)[0]
        return _made(json.loads(bytes(buffer[_HEAD.size : begin])), take)
    except Exception as error:
        raise RuntimeError(f"what another process has told cannot be read: {error}") from error


def _aligned(place: int) -> int:
    """Return the next place where the memory of a tensor of its own might begin."""
    return -(-place // ALIGNMENT) * ALIGNMENT


def _told(value: Any, tensors: list[tuple[Tensor, int]], within: tuple[int, ...] = ()) -> Any:
    """Return what stands for a value in JSON: lists and words for themselves, and a dict of one item for the rest."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or isinstance(value, float):
        return value
    if kind is list:
        return [_told(item, tensors, within) for item in value]
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided:
        flat, shift = elements_of(value.detach().resolve_conj().resolve_neg()).cpu(), shift_of(value)
        if value.numel():
            tensors.append((flat, shift))
        return {"Tensor": [str(value.dtype), [*value.shape], [*value.stride()], shift]}
    if kind in _told_as:
        name, told = _told_as[kind]
        return {name: _told(told(value), tensors, within)}
    if str(kind) in _seen and id(value) not in within:  # Objects may refer to each other in a circle.
        return {"object": _told(_opened(value), tensors, (*within, id(value)))}
    return {"Untold": str(kind)}


def _made(plain: Any, take: Callable[..., Tensor]) -> Any:
    """Return what `_told` was given; ``take`` returns the next tensor."""
    if isinstance(plain, list):
        return [_made(item, take) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((name, told),) = plain.items()
    return take(*told) if name == "Tensor" else _makers[name](_made(told, take))

"""What layers keep from run to run: a second run begins with what the first began with, and leaves what it finds.

A layer may keep tensors and numbers, as buffers or as plain attributes, change them in its forward, and compute with
them: the vectors of a spectral norm, a codebook, a temperature. So what a first run finds is noted before. What the run
changes of it is kept until the second run, and is in the layer, tensors as copies, for as long as that runs.

What tells that a tensor has changed is costly or unreliable: versions say nothing of ``.data``, of NumPy and of norms,
and values have to be waited for. So small tensors are copied before each first run, without a question. A large one,
such as a causal mask, is compared once, around the first run of its layer, and copied again only if that changed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.torch_internals import versions
from torchgpipe.replay.statistics import only_written

__all__ = ["Before", "State"]

#: What every module has; it is no state, or other parts look after it.
_OF_EVERY_MODULE = {*vars(nn.Module())}

#: The bytes of the largest tensor that is copied before every first run.
_SMALL = 2**16

#: By module, the large tensors that first runs have changed in place; a module that is not here has not run.
_changing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

#: Other values are not looked into.
_PLAIN = (int, float, bool, str, type(None))

_nothing: Any = object()


class _Place(NamedTuple):
    """Where a module keeps values by name: its buffers, or its attributes."""

    module: nn.Module
    values: dict[str, Any]
    only_written: tuple[str, ...]  # what it never reads in training


class _Noted(NamedTuple):
    """What is under a name."""

    place: _Place
    name: str
    value: Any


class State:
    """What modules keep.

    Args:
        modules: the modules

    Attributes:
        owners: the modules that train and have buffers, which run in one thread at a time
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[_Place] = []
        owners = []
        for module in modules:
            if module._buffers and isinstance(module._buffers, dict):  # Not those of TorchScript.
                self._places.append(_Place(module, module._buffers, only_written(module)))
                owners += [module] * module.training
            # Classes of PyTorch keep nothing else, and ours ask which run it is.
            if not type(module).__module__.startswith(("torch.", "torchgpipe.")):
                self._places.append(_Place(module, vars(module), ()))
        self.owners = frozenset(owners)

    def begin(self) -> Before:
        """Note the state before a first run."""
        return Before(self._places)


class Before:
    """The state before a first run, and then what of it the second run needs.

    Args:
        places: where it is
    """

    __slots__ = ("_copies", "_large", "_noted", "_places")

    def __init__(self, places: Sequence[_Place]) -> None:
        #: The places, each with its names.
        self._places = [(place, [*place.values]) for place in places]
        self._noted: list[_Noted] = []
        #: Copies of tensors; None for those that are only written.
        self._copies: dict[Tensor, Tensor | None] = {}
        #: Large tensors, with their versions.
        self._large: list[tuple[nn.Module, str, Tensor, list[int]]] = []
        for place in places:
            for name, value in place.values.items():
                if name not in _OF_EVERY_MODULE and _is_state(value):
                    self._noted.append(_Noted(place, name, value))
                    if isinstance(value, Tensor):
                        self._note_tensor(place, name, value)

    def _note_tensor(self, place: _Place, name: str, tensor: Tensor) -> None:
        if name in place.only_written:
            if place.module.training:
                self._copies[tensor] = None
        elif not tensor.requires_grad and not is_lazy(tensor) and tensor not in self._copies:
            known, is_small = _changing.get(place.module), _is_small(tensor)
            if is_small or known is None or name in known:
                self._copies[tensor] = _copied(tensor)
            if not is_small:
                self._large.append((place.module, name, tensor, versions([tensor])))

    def end(self) -> None:
        """Keep what the first run has changed, and forget the rest.

        Raises:
            RuntimeError: it has changed a large tensor in place that earlier runs have not changed.
        """
        for module, name, tensor, before in self._large:
            copy, known = self._copies.get(tensor), _changing.setdefault(module, set())
            if copy is not None and name not in known and torch.equal(copy, tensor):
                del self._copies[tensor]
            elif copy is not None:
                known.add(name)
            elif versions([tensor]) != before:
                known.add(name)
                raise RuntimeError(
                    f"'{name}' of a {type(module).__name__} was changed in place, which no run has done before, so no "
                    f"copy of its {tensor.nbytes} bytes was made for recomputation; run the mini-batch again: from now "
                    "on there are copies"
                )
        self._large = []
        new = [
            _Noted(place, name, _nothing)
            for place, names in self._places
            if len(place.values) != len(names)
            for name, value in place.values.items()
            if name not in names and _is_state(value)
        ]
        self._noted = [noted for noted in self._noted if self._is_needed(noted)] + new
        self._places = []

    def _is_needed(self, noted: _Noted) -> bool:
        place, name, value = noted
        if place.values.get(name, _nothing) is value:
            return isinstance(value, Tensor) and value in self._copies
        if isinstance(value, Tensor) and (
            value.grad_fn is not None or not (_is_small(value) or place.values is place.module._buffers)
        ):
            # An activation, which the layer shows, and sets anew in each run; it would stay in memory.
            self._copies.pop(value, None)
            return False
        return True

    @property
    def holds_memory(self) -> bool:
        """Whether there are copies of tensors."""
        return any([copy is not None for copy in self._copies.values()])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the modules have this state in a ``with`` block, and then what they had before."""
        fresh: dict[Tensor, Tensor] = {}

        def anew(tensor: Tensor) -> Tensor:
            if tensor not in self._copies:
                return tensor
            if tensor not in fresh:  # It may be in two places.
                copy = self._copies[tensor]
                fresh[tensor] = _copied(tensor if copy is None else copy)
            return fresh[tensor]

        found = [
            (noted.place.values, noted.name, noted.place.values.get(noted.name, _nothing)) for noted in self._noted
        ]
        try:
            for place, name, value in self._noted:
                _put(place.values, name, anew(value) if isinstance(value, Tensor) else value)
            yield
        finally:
            for values, name, value in found:
                _put(values, name, value)


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    if value is not _nothing:
        values[name] = value
    else:
        values.pop(name, None)


def _is_state(value: Any) -> bool:
    return type(value) in _PLAIN or isinstance(value, Tensor)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL


def _copied(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.clone()

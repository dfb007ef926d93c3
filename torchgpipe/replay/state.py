"""What layers keep from run to run: a second run begins with what the first began with, and leaves what it finds.

A layer may keep tensors and numbers, as buffers or as plain attributes, change them in its forward, and compute with
them: the vectors of a spectral norm, a codebook, a temperature. So what a first run finds is noted before, and kept
until the second run, also where only later micro-batches change it. It is in the layer, tensors as copies, for as long
as the second run takes.

What tells that a tensor has changed is costly or unreliable: versions say nothing of ``.data``, of NumPy and of norms,
and values have to be waited for. So small tensors are copied before each first run, without a question. A large one,
such as a causal mask, is not copied, and a change in place that its version tells is an error; another one shows where
the two runs are compared (see `outputs`).

A library that installs hooks in a first run notes that in an attribute. The second run does not find the attribute, so
it must not find the hooks: it installs its own, which are removed with the attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import forward_hooks, versions
from torchgpipe.replay.statistics import only_written

__all__ = ["Snapshot", "State"]

#: What every module has; it is no state, or other parts look after it.
_OF_EVERY_MODULE = {*vars(nn.Module())}

#: What a second run is given. Other objects, such as lists, are not looked into.
_KINDS = (int, float, str, type(None), Tensor)

#: The bytes of the largest tensor that is copied.
_SMALL = 2**16

_nothing: Any = object()


class _Namespace(NamedTuple):
    """Where a module keeps values by name: its buffers, or its attributes."""

    module: nn.Module
    values: dict[str, Any]
    only_written: tuple[str, ...]  # what it never reads in training


class State:
    """What modules keep.

    Args:
        modules: the modules
        of_step: whether the state before a step is noted, which is put back if the step fails, and not that before a
            first run

    Attributes:
        owners: the modules that train and have buffers, which run in one thread at a time
    """

    def __init__(self, modules: Iterable[nn.Module], *, of_step: bool = False) -> None:
        self._of_step = of_step
        self._places: list[_Namespace] = []
        self._hooks: list[dict[int, Any]] = []
        owners = []
        for module in modules:
            self._hooks += forward_hooks(module)
            # Classes of PyTorch keep nothing but buffers, and ours look after themselves.
            is_users = not type(module).__module__.startswith(("torch.", "torchgpipe."))
            if is_users:
                self._places.append(_Namespace(module, vars(module), ()))
            if (is_users or module._buffers) and isinstance(module._buffers, dict):  # Not those of TorchScript.
                self._places.append(_Namespace(module, module._buffers, () if of_step else only_written(module)))
                owners += [module] * bool(module.training and module._buffers)
        self.owners = frozenset(owners)

    def begin(self) -> Snapshot:
        """Note the state before a first run or a step."""
        if not self._places:
            return _EMPTY
        return Snapshot(self._places, self._hooks, of_step=self._of_step)


class Snapshot:
    """The state before a first run, and then what of it the second run needs.

    Args:
        places: where it is
        hooks: the hooks of the modules
        of_step: see `State`

    Attributes:
        tensors: those that require grad
    """

    __slots__ = ("_copies", "_found", "_hooks", "_large", "_needed", "tensors")

    def __init__(self, places: Iterable[_Namespace], hooks: Iterable[dict[int, Any]], *, of_step: bool) -> None:
        self.tensors: list[Tensor] = []
        #: Hooks, and how many there are; then those to which the first run has added.
        self._hooks = [(of_one, len(of_one)) for of_one in hooks]
        #: For each place what is there, and how many names there are.
        self._found: list[tuple[_Namespace, dict[str, Any], int]] = []
        #: Copies of tensors; None for those that are only written.
        self._copies: dict[Tensor, Tensor | None] = {}
        #: Large tensors, with their versions.
        self._large: list[tuple[nn.Module, str, Tensor, list[int]]] = []
        #: What the second run finds under names: values, or nothing.
        self._needed: list[tuple[dict[str, Any], str, Any]] = []
        for place in places:
            values = {name: value for name, value in place.values.items() if name not in _OF_EVERY_MODULE}
            self._found.append((place, values, len(place.values)))
            for name, value in values.items():
                if isinstance(value, Tensor):
                    if of_step and _is_shown(place, value):
                        values[name] = _nothing  # It would stay in memory for the step.
                    else:
                        self._note(place, name, value)

    def _note(self, place: _Namespace, name: str, tensor: Tensor) -> None:
        if name in place.only_written:
            if place.module.training:
                self._copies[tensor] = None
        elif tensor.requires_grad:
            self.tensors.append(tensor)
        elif type(tensor) is Tensor and tensor not in self._copies:
            if _is_small(tensor):
                self._copies[tensor] = tensor.clone()
            else:
                self._large.append((place.module, name, tensor, versions([tensor])))

    def end(self) -> None:
        """Keep what the first run has changed, and forget the rest.

        Raises:
            RuntimeError: it has changed a large tensor in place.
        """
        for tensor in self._changed():
            raise RuntimeError(
                f"{tensor} was changed in place, and tensors of more than 64 KiB are not copied for recomputation; run "
                "the mini-batch again if it is filled only once, or let the layer run without recomputation "
                "(checkpoint='never')"
            )
        for place, values, count in self._found:
            now = place.values
            for name, value in values.items():
                if isinstance(value, _KINDS):
                    self._need(place, name, value)
            if len(now) != count:
                new = now.keys() - values.keys() - _OF_EVERY_MODULE
                self._needed += [(now, name, _nothing) for name in new if isinstance(now[name], _KINDS)]
        self._hooks = [(hooks, count) for hooks, count in self._hooks if len(hooks) > count]
        self._found, self._large, self.tensors = [], [], []

    def _changed(self) -> list[str]:
        """Return the large tensors that have changed in place, of which there are no copies."""
        return [
            f"'{name}' of a {type(module).__name__}"
            for module, name, tensor, before in self._large
            if versions([tensor]) != before
        ]

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Put the state before a step back, and return the large tensors that have changed and have no copy."""
        for hooks, count in self._hooks:
            for key in [*hooks][count:]:
                del hooks[key]
        for place, values, _ in self._found:
            now = place.values
            for name in now.keys() - values.keys() - _OF_EVERY_MODULE:
                if isinstance(now[name], _KINDS):
                    del now[name]
            for name, value in values.items():
                if isinstance(value, _KINDS):
                    now[name] = value
        for tensor, copy in self._copies.items():
            if copy is not None and not torch.equal(copy, tensor):  # A new version may be one too many for a graph.
                tensor.copy_(copy)
        return self._changed()

    def _need(self, place: _Namespace, name: str, value: Any) -> None:
        """Keep a value for the second run."""
        if isinstance(value, Tensor):
            is_small, is_replaced = _is_small(value), place.values.get(name, _nothing) is not value
            if not is_small and (value.grad_fn is not None or (is_replaced and place.values is vars(place.module))):
                # An activation, which the layer shows, and sets anew in each run; it would stay in memory.
                self._copies.pop(value, None)
                return
            if value.grad_fn is not None:  # The graph of an earlier micro-batch, which may be differentiated already.
                value = value.detach().clone()
        self._needed.append((place.values, name, value))

    def again(self) -> AbstractContextManager[None]:
        """Let the modules have this state in a ``with`` block, and then what they had before."""
        return self._exchanged() if self._needed else nullcontext()

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        # A tensor may be in two places.
        fresh = {tensor: (tensor if copy is None else copy).clone() for tensor, copy in self._copies.items()}
        now = [(values, name, values.get(name, _nothing)) for values, name, _ in self._needed]
        hooks_now = [(hooks, [*hooks.items()]) for hooks, _ in self._hooks]
        try:
            for hooks, count in self._hooks:
                for key in [*hooks][count:]:
                    del hooks[key]
            for values, name, value in self._needed:
                _put(values, name, fresh.get(value, value) if isinstance(value, Tensor) else value)
            yield
        finally:
            for values, name, value in now:
                _put(values, name, value)
            for hooks, items in hooks_now:
                hooks.clear()
                hooks.update(items)


#: That of layers that keep nothing, as most cells have no others.
_EMPTY = Snapshot((), (), of_step=False)


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    if value is not _nothing:
        values[name] = value
    else:
        values.pop(name, None)


def _is_shown(place: _Namespace, tensor: Tensor) -> bool:
    """Return whether a tensor looks like an activation, which a layer shows, and sets anew in each run."""
    is_kept = tensor.requires_grad or place.values is place.module._buffers or _is_small(tensor)
    return tensor.grad_fn is not None or not is_kept


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL or tensor.layout is not torch.strided

"""A call of a module that keeps its arguments only, and runs again at backward.

The first run leaves a graph whose nodes have saved *slots* in the place of tensors. The second run fills the slots, and
stops when the last one is filled. So gradients go wherever the graph of the first run leads, also to what the module
has got in other ways than as arguments:

    first run     x ──► multiply ──► sin ──► y          second run    x ──► multiply ──► sin
                           │          │                                        │          │
                          slot       slot                                  tensor ──► slots ──► backward

Backward asks for what is in a slot, and so begins the second run. It needs no gradient, so it can begin earlier.

The checkpoint of PyTorch does as much, but only backward begins its second run. It repeats the random numbers and
autocast only, and for random numbers it puts the generator of the whole process back and forth, without a look at other
threads. So here the second run is that of a GPipe: see `replay.runs`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.devices.torch_internals import versions
from torchgpipe.model.values import copied, each, mapped
from torchgpipe.offload.host_copies import HostCopy, restored
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.replay.runs import Layers, Run

__all__ = ["Again", "Keep", "Recomputation"]


#: What to keep of a tensor until the second run: the tensor, or its host copy.
Keep = Callable[[Tensor], Tensor | HostCopy]

#: Takes what begins second runs, in the order of the first ones: weakly, as long as there is a graph that needs it.
Again = list[Callable[[], Callable[[], None] | None]]


class _Slot:
    """Stands in a graph for a tensor that the second run computes."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _Stop(Exception):
    """Ends a second run when all slots are filled."""


class Recomputation:
    """The first and the second run of a call.

    Args:
        module: the module
        name: its name, for errors
        call: calls it
    """

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name, self._call = module, name, call
        #: What stands for arguments that have host copies, each with its host copy.
        self._copies: dict[Tensor, Tensor | HostCopy] = {}
        #: Each slot of the first run, as long as its graph has it, with the form of its tensor.
        self._slots: list[tuple[weakref.ref[_Slot], Any]] = []
        # Outside of the hooks, which lead here: a cycle would keep the arguments alive.
        self._ambient = Ambient()

    def first(self, args: Any, kwargs: Any, keep: Keep | None = None, again: Again | None = None) -> Any:
        """Call the module, and return what it returns.

        Args:
            args: its arguments
            kwargs: its arguments with names
            keep: returns what to keep of an argument
            again: takes what begins the second run before backward does

        Raises:
            RuntimeError: the module has changed its arguments in place.
        """
        # A module may add to a list, a cache or an object of the model's, which is then not what the first run got.
        self._given = copied((args, kwargs))
        inputs, modules, name = _tensors(self._given), list(self._module.modules()), self._name
        found = next(chain(self._module.parameters(), inputs), None)
        layers = Layers(
            modules,
            # Cells that draw from one generator run one at a time, see `RandomNumbers`.
            RandomStates(torch.device("cpu") if found is None else found.device, modules, between=True),
            lambda: f"'{name}'",
            copying="let it work on a copy (input.clone())",
            otherwise="leave it out of checkpoint",
        )
        self._run = Run(layers, _tensors)
        with saved_tensors_hooks(self._slot, self._filled):
            output = self._run.first(lambda: self._call(*args, **kwargs), inputs)

        if keep is not None:
            self._given = self._exchanged(lambda tensor: self._kept(tensor, keep(tensor)))
        self._inputs = _tensors(self._given)
        self._versions = versions(self._inputs)
        if again is not None:
            again.append(weakref.WeakMethod(self.second))
        return output

    def _slot(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        self._slots.append((weakref.ref(slot), _form_of(tensor)))
        return slot

    def _filled(self, slot: _Slot) -> Tensor:
        if slot.tensor is None:
            self.second()
        tensor, slot.tensor = slot.tensor, None
        assert tensor is not None
        return tensor

    def _kept(self, tensor: Tensor, kept: Tensor | HostCopy) -> Tensor:
        if kept is tensor:
            return tensor
        stub = torch.empty(0)
        self._copies[stub] = kept
        return stub

    def _exchanged(self, change: Callable[[Tensor], Tensor]) -> Any:
        # A module may ask whether two arguments are one, as attention does.
        return mapped(copied(self._given), cache(change), caches=True, objects=True)

    def second(self) -> None:
        """Call the module again, with what the caller has set for the first run, and fill the slots.

        Raises:
            RuntimeError: the module, its arguments or what it computes are not those of the first run.
        """
        if not self._run.is_repeatable:  # A tensor of the first run is wanted while that runs.
            raise RuntimeError(
                f"'{self._name}' differentiates in its forward, so it cannot run again at backward; leave it out of "
                "checkpoint"
            )
        self._ambient.run(self._second)

    def _second(self) -> None:
        if versions(self._inputs) != self._versions:
            raise RuntimeError(
                f"'{self._name}' is not what it was at forward (an input was changed in place since), so recomputation "
                "would give other gradients; give it a copy (input.clone()), or leave it out of checkpoint"
            )
        run, missing, differs = self._run, [*reversed(self._slots)], False

        def fill(tensor: Tensor) -> Tensor:
            nonlocal differs
            if differs or not missing:
                differs |= run.is_compared
                raise _Stop
            ref, form = missing.pop()
            slot, differs = ref(), form != _form_of(tensor)
            tensor = tensor.detach()  # Or an output would hold its node, which would hold the output.
            if slot is not None:
                slot.tensor = tensor
            # A run that is to be compared goes on to its end.
            if differs or not (missing or run.is_compared):
                raise _Stop
            return tensor

        try:
            with saved_tensors_hooks(fill, lambda tensor: tensor):
                run.second(self._call_again)
        except Exception:
            # A scripted function raises an error of its own in the place of _Stop.
            if not differs and (missing or run.is_compared):
                raise
        if differs or missing:
            raise run.another("other tensors are saved for backward")

    def _call_again(self) -> Any:
        args, kwargs = self._exchanged(lambda tensor: restored(self._copies.get(tensor, tensor)))
        return self._call(*args, **kwargs)


def _form_of(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in each(value)]

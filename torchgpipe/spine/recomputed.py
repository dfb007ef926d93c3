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

__all__ = ["Again", "Keep", "SecondRun", "recomputed"]


#: What to keep of a tensor until the second run: the tensor, or its host copy.
Keep = Callable[[Tensor], Tensor | HostCopy]

#: Begins a second run, as long as there is a graph that needs it.
SecondRun = Callable[[], None]

#: Takes what begins second runs, in the order of the first ones.
Again = list[SecondRun]


def recomputed(
    module: nn.Module,
    name: str,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    keep: Keep | None = None,
    again: Again | None = None,
) -> Any:
    """Call a module, let it run again at backward, and return what it returns; see `_Runs` for the arguments.

    Args:
        again: takes what begins the second run before backward does

    Raises:
        RuntimeError: the module has changed its arguments in place.
    """
    runs = _Runs(module, name, call, args, kwargs, keep)
    output = runs.first(args, kwargs)
    if again is not None:
        again.append(_ahead(weakref.ref(runs)))
    return output


def _ahead(ref: weakref.ref[_Runs]) -> SecondRun:
    def begin() -> None:
        runs = ref()
        if runs is not None:  # Else nothing of its graph is left.
            runs.second()

    return begin


class _Slot:
    """Stands in a graph for a tensor that the second run computes."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _Stop(Exception):
    """Ends a second run when all slots are filled."""


class _Runs:
    """The first and the second run of a call.

    Args:
        module: the module
        name: its name, for errors
        call: calls it
        args: its arguments
        kwargs: its arguments with names
        keep: returns what to keep of an argument
    """

    def __init__(
        self, module: nn.Module, name: str, call: Callable[..., Any], args: Any, kwargs: Any, keep: Keep | None
    ) -> None:
        modules = list(module.modules())
        self._name, self._call, self._keep = name, call, keep
        #: What stands for arguments that have host copies, each with its host copy.
        self._copies: dict[Tensor, Tensor | HostCopy] = {}
        #: Each slot of the first run, as long as its graph has it, with the form of its tensor.
        self._slots: list[tuple[weakref.ref[_Slot], Any]] = []
        # A module may add to a list, a cache or an object of the model's, which is then not what the first run got.
        self._args, self._kwargs = copied(args), copied(kwargs)
        # Outside of the hooks, which lead here: a cycle would keep the arguments alive.
        self._ambient = Ambient()
        self._inputs = _tensors((args, kwargs))
        found = next(chain(module.parameters(), self._inputs), None)
        device = torch.device("cpu") if found is None else found.device
        # Cells that draw from one generator run one at a time, see `RandomNumbers`.
        random = RandomStates(device, modules, between=True)
        layers = Layers(
            modules,
            random,
            lambda: f"'{name}'",
            copying="let it work on a copy (input.clone())",
            otherwise="leave it out of checkpoint",
        )
        self._run = Run(layers, self._inputs)

    def first(self, args: Any, kwargs: Any) -> Any:
        """Call the module with its arguments, and return what it returns; see `recomputed`."""
        run = self._run
        with saved_tensors_hooks(self._slot, self._filled):
            output = run.first(lambda: self._call(*args, **kwargs))
        if run.is_compared:
            run.note(_tensors(output))
        if self._keep is not None:
            self._args, self._kwargs = self._exchanged(self._kept)
            self._keep = None  # It leads to the frame.
            self._inputs = _tensors((self._args, self._kwargs))
        self._versions = versions(self._inputs)
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

    def _kept(self, tensor: Tensor) -> Tensor:
        assert self._keep is not None
        kept = self._keep(tensor)
        if kept is tensor:
            return tensor
        stub = torch.empty(0)
        self._copies[stub] = kept
        return stub

    def _restored(self, tensor: Tensor) -> Tensor:
        return restored(self._copies.get(tensor, tensor))

    def _exchanged(self, change: Callable[[Tensor], Tensor]) -> Any:
        # A module may ask whether two arguments are one, as attention does.
        changed: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        return mapped((copied(self._args), copied(self._kwargs)), once, caches=True, objects=True)

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
        run, slots, count, differs = self._run, self._slots, 0, False

        def fill(tensor: Tensor) -> Tensor:
            nonlocal count, differs
            if differs or count == len(slots):
                differs |= run.is_compared
                raise _Stop
            ref, form = slots[count]
            slot, differs, count = ref(), form != _form_of(tensor), count + 1
            tensor = tensor.detach()  # Or an output would hold its node, which would hold the output.
            if slot is not None:
                slot.tensor = tensor
            # A run that is to be compared goes on to its end.
            if differs or (count == len(slots) and not run.is_compared):
                raise _Stop
            return tensor

        try:
            with saved_tensors_hooks(fill, lambda tensor: tensor):
                output = run.second(self._call_again)
            if run.is_compared and count == len(slots):
                run.compare(_tensors(output))
        except Exception:
            # A scripted function raises an error of its own in the place of _Stop.
            if not differs and (count < len(slots) or run.is_compared):
                raise
        if differs or count < len(slots):
            raise run.another("other tensors are saved for backward")

    def _call_again(self) -> Any:
        if self._copies:
            args, kwargs = self._exchanged(self._restored)
        else:
            args, kwargs = copied(self._args), copied(self._kwargs)
        return self._call(*args, **kwargs)


def _form_of(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in each(value)]

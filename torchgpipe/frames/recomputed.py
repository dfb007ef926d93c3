"""A call of a module that keeps its arguments only, and runs again at backward.

The first run leaves a graph whose nodes have not saved their tensors, by the hooks of `torch.utils.checkpoint`. When
backward comes to the first of these nodes, the second run computes what they would have saved, and stops. So gradients
go wherever the graph of the first run leads, also to what the module has got in other ways than as arguments.

PyTorch only repeats the random numbers and autocast, and for random numbers it puts the generator of the whole process
back and forth, without a look at other threads. So here the second run is that of a GPipe: see `replay.runs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

from torchgpipe.devices.torch_internals import saved_tensors_hooks_in_use, versions
from torchgpipe.model.values import copied, each, mapped
from torchgpipe.offload.host_copies import HostCopy, restored
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.replay.runs import Layers, Run

__all__ = ["Keep", "recomputed"]


#: What to keep of a tensor until the second run: the tensor, or its host copy.
Keep = Callable[[Tensor], Tensor | HostCopy]


def recomputed(
    module: nn.Module, name: str, call: Callable[..., Any], args: Any, kwargs: Any, keep: Keep | None = None
) -> Any:
    """Call a module, let it run again at backward, and return what it returns; see `_Runs` for the arguments.

    Raises:
        RuntimeError: the module has changed its arguments in place.
    """
    runs = _Runs(module, name, call, args, kwargs, keep)
    try:
        # A second run that is to be compared goes on to its end.
        return checkpoint(runs, use_reentrant=False, preserve_rng_state=False, early_stop=not runs.are_compared)
    except BaseException as error:
        _end_checkpoint(error)
        raise


def _end_checkpoint(error: BaseException) -> None:
    """Take the hooks of a checkpoint off this thread, after an error of what it has run.

    Before PyTorch 2.13 they are taken off when the error is forgotten, perhaps in another thread, where PyTorch fails.
    """
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code is _CHECKPOINT:
            frames.tb_frame.clear()
        frames = frames.tb_next


_CHECKPOINT = inspect.unwrap(checkpoint).__code__


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
        self._first: tuple[Any, Any] | None = (args, kwargs)
        # A module may add to a list, a cache or an object of the model's, which is then not what the first run got.
        self._args, self._kwargs = copied(args), copied(kwargs)
        # Outside of the hooks of `checkpoint`, which lead here: a cycle would keep the arguments alive.
        self._ambient = Ambient()
        self._inputs = _tensors((args, kwargs))
        found = next(chain(module.parameters(), self._inputs), None)
        device = torch.device("cpu") if found is None else found.device
        # Cells that draw from one generator run one at a time, see `RandomNumbers`.
        random = RandomStates(device, modules, beside=False, between=True)
        layers = Layers(
            modules,
            random,
            lambda: f"'{name}'",
            copying="let it work on a copy (input.clone())",
            otherwise="leave it out of checkpoint",
        )
        self._run = Run(layers, self._inputs)

    @property
    def are_compared(self) -> bool:
        """Whether what the two runs return is to be compared."""
        return self._run.is_compared

    def __call__(self) -> Any:
        if self._first is not None:
            return self._first_run()
        if not self._run.is_repeatable:  # A tensor of the first run is wanted while that runs.
            raise RuntimeError(
                f"'{self._name}' differentiates in its forward, so it cannot run again at backward; leave it out of "
                "checkpoint"
            )
        # What the caller has set is set again, but tensors are saved where PyTorch's checkpoint wants them.
        return self._ambient.run(self._second_run, saved_tensors_hooks_in_use())

    def _first_run(self) -> Any:
        assert self._first is not None
        (args, kwargs), self._first = self._first, None
        output = self._run.first(lambda: self._call(*args, **kwargs))
        if self._run.is_compared:
            self._run.note(_tensors(output))
        if self._keep is not None:
            self._args, self._kwargs = self._exchanged(self._kept)
            self._keep = None  # It leads to the frame.
            self._inputs = _tensors((self._args, self._kwargs))
        self._versions = versions(self._inputs)
        return output

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

    def _second_run(self, hooks: Any) -> None:
        if versions(self._inputs) != self._versions:
            raise RuntimeError(
                f"'{self._name}' is not what it was at forward (an input was changed in place since), so recomputation "
                "would give other gradients; give it a copy (input.clone()), or leave it out of checkpoint"
            )
        pack, unpack = hooks
        errors: list[Exception] = []

        def noted(tensor: Tensor) -> Any:
            try:
                return pack(tensor)
            except Exception as error:
                errors.append(error)
                raise

        with saved_tensors_hooks(noted, unpack):
            try:
                output = self._run.second(self._call_again)
            except Exception as error:
                if errors and isinstance(errors[0], CheckpointError):
                    raise self._run.another("other tensors are saved for backward") from error
                if errors and errors[0] is not error:
                    # A scripted function raises an error of its own in place of that by which the checkpoint stops.
                    raise errors[0] from None
                raise
            finally:
                errors.clear()  # Their tracebacks hold this frame, and with it the mini-batch.
            if self._run.is_compared:
                self._run.compare(_tensors(output))

    def _call_again(self) -> Any:
        if self._copies:
            args, kwargs = self._exchanged(self._restored)
        else:
            args, kwargs = copied(self._args), copied(self._kwargs)
        return self._call(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in each(value)]

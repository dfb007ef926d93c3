"""What a module of another process returns here: stand-ins, whose forms follow from those of the arguments.

The first time, the module runs on the stand-ins, as far as that needs no values; a module whose forward looks at
values, as one that routes tokens to experts, is known by what its owner has published. After that, the forms are
looked up.
"""

from __future__ import annotations

import pickle
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import has_call_hooks, plain_call, versions
from torchgpipe.frames.abstract import Abstract, abstracted, described
from torchgpipe.frames.door import Door
from torchgpipe.frames.settings import Settings
from torchgpipe.model.values import copied, each, is_cache, walk
from torchgpipe.processes.processes import Processes

__all__ = ["RemoteDoors"]


class _Noted(NamedTuple):
    """A call of a module of this process: its key, and the tensors among its arguments."""

    key: Any
    given: list[Tensor]


class RemoteDoors:
    """The calls of modules whose columns are in several processes.

    Args:
        processes: the processes
        settings: the settings of the model
    """

    def __init__(self, processes: Processes, settings: Settings) -> None:
        self._processes, self._settings = processes, settings
        self._modes = 0
        self._known: dict[Any, Abstract] = {}
        #: Of modules of this process, what they have returned, as others may have been told.
        self._published: dict[Any, Abstract] = {}

    def use(self, modes: int) -> None:
        """Begin a mini-batch; ``modes`` stands for the modes of all modules, and for which parameters are trained."""
        self._modes = modes

    def _key(self, door: Door, args: Any, kwargs: Any) -> Any:
        casts = {column.type for column in self._settings.devices}
        cast = tuple([torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in casts])
        flags = door.name, self._modes, torch.is_grad_enabled(), *cast
        return (*flags, described(args, door.layers), described(kwargs, door.layers))

    # ------------------------------------------------------------------------------------------------- of this process

    def begin(self, door: Door, args: Any, kwargs: Any) -> _Noted:
        """Note a call of a module of this process."""
        return _Noted(self._key(door, args, kwargs), [tensor for _, tensor in each((args, kwargs))])

    def end(self, door: Door, noted: _Noted, output: Any) -> None:
        """Publish the forms that a module has returned, the first time.

        Raises:
            RuntimeError: the module has returned other forms for the same arguments before.
        """
        forms = abstracted(output, noted.given)
        before = self._published.get(noted.key)
        if before is None:
            self._published[noted.key] = forms
            self._processes.publish(_word_of(noted.key), pickle.dumps(forms))
        elif before.leaves != forms.leaves:
            shapes = [tuple(tensor.shape) for _, tensor in each(output)]
            raise RuntimeError(
                f"'{door.name}' returns tensors of shapes {shapes}, and other shapes before, for arguments of the same "
                "shapes: other processes cannot know them; let the shapes depend on those of the arguments alone, or "
                "give a balance that keeps the module and all that use it in one process"
            )

    # ----------------------------------------------------------------------------------------------- of other processes

    def call(self, door: Door, args: Any, kwargs: Any, column: int) -> Any:
        """Return stand-ins for what a module of another process returns."""
        key = self._key(door, args, kwargs)
        known = self._known.get(key)
        given = [tensor for _, tensor in each((args, kwargs))]
        if known is None or any(map(has_call_hooks, door.module.modules())):
            known, is_lasting = self._found(door, key, args, kwargs, given)
            if is_lasting:
                self._known[key] = known
        return known.made(given, column, self._settings.devices[column])

    def _found(self, door: Door, key: Any, args: Any, kwargs: Any, given: list[Tensor]) -> tuple[Abstract, bool]:
        """Return the forms that a module returns, and whether it always does, and does nothing else."""
        before, held = versions(given), _held((args, kwargs))
        try:
            output = self.run(door, args, kwargs)
        except Exception as error:
            what = f"the shapes that '{door.name}' returns, which does not run without values ({error})"
            found: Abstract = pickle.loads(self._processes.look_up(_word_of(key), what))
            return found, True
        forms = abstracted(output, given)
        if not forms.is_plain:
            forms = Abstract(output, forms.leaves, False)
        return forms, forms.is_plain and versions(given) == before and _held((args, kwargs)) == held

    @staticmethod
    def run(door: Door, args: Any, kwargs: Any) -> Any:
        """Run a module of another process on stand-ins."""
        # A cache is filled where its values are.
        own_args, own_kwargs = _with_own_caches(args), _with_own_caches(kwargs)
        with torch.random.fork_rng(devices=[]):
            return plain_call(door.module)(*own_args, **own_kwargs)


def _held(value: Any) -> list[int]:
    """Return the identities of all that containers hold, which a call may change."""
    return [id(item) for _, item in walk(value, objects=True) if not is_cache(item)]


def _with_own_caches(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) if is_cache(item) else item for key, item in value.items()}
    return tuple([copied(item) if is_cache(item) else item for item in value])


def _word_of(key: Any) -> str:
    """Return a key as a word that is the same in all processes, whose devices have other numbers."""
    return re.sub(r"device\(type='(\w+)'(, index=\d+)?\)", r"\1", repr(key))

"""What a module of another process returns here: stand-ins, whose forms follow from those of the arguments.

The first time, the module runs on the stand-ins, as far as that needs no values; a module whose forward looks at
values, as one that routes tokens to experts, is known by what its owner has published. After that, the forms are
looked up.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import call_hooks, plain_call, versions
from torchgpipe.frames.abstract import Abstract, abstracted, described, leaves_of
from torchgpipe.frames.door import Door
from torchgpipe.frames.settings import Settings
from torchgpipe.model.values import copied, is_cache, walk
from torchgpipe.processes.processes import Processes

__all__ = ["RemoteDoors"]


class _Call(NamedTuple):
    """A call of a module: what tells it from others as far as forms go, and the tensors among its arguments."""

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
        self._kinds = sorted({device.type for device in settings.devices})
        self._modes = 0
        self._known: dict[Any, Abstract] = {}
        #: Of modules of this process, the tensors that they have returned, as others may have been told.
        self._published: dict[Any, Sequence[Any]] = {}
        #: The dicts of the hooks in the modules behind doors, which stay the same during a mini-batch.
        self._hooks: dict[Door, list[dict[int, Any]]] = {}

    def use(self, modes: int) -> None:
        """Begin a mini-batch; ``modes`` stands for the modes of all modules, and for which parameters are trained."""
        self._modes, self._hooks = modes, {}

    def note(self, door: Door, args: Any, kwargs: Any) -> _Call:
        """Note a call of a module: now, as the module may change its arguments."""
        given: list[Tensor] = []
        casts = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in self._kinds]
        flags = door.name, self._modes, torch.is_grad_enabled(), *casts
        return _Call((flags, described(args, given, door.layers), described(kwargs, given, door.layers)), given)

    # ------------------------------------------------------------------------------------------------- of this process

    def end(self, door: Door, call: _Call, output: Any, tensors: Sequence[Tensor]) -> None:
        """Publish the forms of the tensors in what a module of this process has returned, the first time.

        Raises:
            RuntimeError: the module has returned other forms for the same arguments before.
        """
        before = self._published.get(call.key)
        if before is None:
            forms = abstracted(output, call.given)
            self._published[call.key] = forms.leaves
            self._processes.publish(_word_of(call.key), pickle.dumps(forms))
        elif before != leaves_of(tensors, call.given):
            raise RuntimeError(
                f"'{door.name}' returns tensors of shapes {[tuple(tensor.shape) for tensor in tensors]}, and other "
                "shapes before, for arguments of the same shapes: other processes cannot know them; let the shapes "
                "depend on those of the arguments alone, or give a balance that keeps the module and all that use it "
                "in one process"
            )

    # ----------------------------------------------------------------------------------------------- of other processes

    def call(self, door: Door, args: Any, kwargs: Any, column: int) -> Any:
        """Return stand-ins for what a module of another process returns."""
        key, given = self.note(door, args, kwargs)
        known = self._known.get(key)
        if known is None or self._has_hooks(door):
            known, is_lasting = self._found(door, key, args, kwargs, given)
            if is_lasting:
                self._known[key] = known
        return known.made(given, column, self._settings.devices[column])

    def _has_hooks(self, door: Door) -> bool:
        """Return whether modules have hooks now, which may see what they return."""
        hooks = self._hooks.get(door)
        if hooks is None:  # Walking through the modules takes as long as all of the rest.
            hooks = self._hooks[door] = [kind for child in door.module.modules() for kind in call_hooks(child)]
        return any(hooks)

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
    return [id(item) for path, item in walk(value, objects=True) if path and not is_cache(item)]


def _with_own_caches(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) if is_cache(item) else item for key, item in value.items()}
    return tuple([copied(item) if is_cache(item) else item for item in value])


def _word_of(key: Any) -> str:
    """Return a key as a word that is the same in all processes, whose devices have other numbers."""
    return re.sub(r"device\(type='(\w+)'(, index=\d+)?\)", r"\1", repr(key))
